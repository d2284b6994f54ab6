"""Proves that a schedule cannot go wrong, in whatever order its streams get ahead of each other.

A schedule fixes a partial order: a task runs after those before it in its stream and after those it names. What is
proved is proved of that order, so of every run: it ends, it reads nothing before it is written, and it never reuses
memory that is still read. See Note [two of each] in the schedule for the memory.
"""

from collections import defaultdict
from types import MappingProxyType
from typing import Dict, Iterator, List, Mapping, NamedTuple, Sequence, Tuple

from mobius_ds.schedule.neighbours import GIVES, giver_of
from mobius_ds.schedule.plan import Plan
from mobius_ds.schedule.schedule import Schedule
from mobius_ds.schedule.tasks import DEPTH, Key, Kind, Stream, Task


class InvalidSchedule(ValueError):
    """A schedule that could deadlock, or read or overwrite memory at the wrong time. The message names the tasks."""


def _invalid(schedule: Schedule, says: str, *about: Key) -> InvalidSchedule:
    """The error, with the schedule's rows around the tasks that it is about."""
    return InvalidSchedule("\n".join([f"{schedule.name} schedule: {says}", *schedule.table(about)]))


class Rule(NamedTuple):
    """``earlier`` must have ended before ``later`` begins, because ..."""

    earlier: Key
    later: Key
    reason: str


def check_schedule(schedule: Schedule, plan: Plan, shared: Mapping[int, Sequence[int]] = MappingProxyType({}),
                   updates: Mapping[int, Sequence[int]] = MappingProxyType({})) -> None:
    """Checks a sweep of Mobius.

    Args:
        shared: for each stage, the later stages that use some of its parameters.
        updates: for each stage whose parameters are updated within the sweep, the stages that give their gradients.

    Raises:
        InvalidSchedule: a task is named twice, runs on a GPU that is not its stage's, waits for one that does not
            exist, for itself in a circle, or not for one it must wait for.
    """
    known = _known(schedule, plan)
    before = _everything_before(schedule, known)
    position = {key: number for number, key in enumerate(known)}
    for rule in rules(schedule, plan, shared, updates):
        if not before[rule.later] >> position[rule.earlier] & 1:
            raise _invalid(schedule, f"{rule.later} on GPU {known[rule.later].gpu} may run before {rule.earlier} on GPU "
                           f"{known[rule.earlier].gpu} has ended: {rule.reason}", rule.later, rule.earlier)


def rules(schedule: Schedule, plan: Plan, shared: Mapping[int, Sequence[int]],
          updates: Mapping[int, Sequence[int]]) -> Iterator[Rule]:
    """All that a sweep's tasks must wait for, by what they do. Only tasks that exist are named."""
    existing = schedule.gpu_of()
    for rule in [*_reads(schedule, plan), *_buffers(schedule), *_sums(shared, updates)]:
        if rule.earlier in existing and rule.later in existing:
            yield rule


_UNREAD = {Kind.INPUTS: "it reads inputs that their owner has not given yet"}


def _reads(schedule: Schedule, plan: Plan) -> Iterator[Rule]:
    """What a task reads has been written. What no task of the sweep writes lies in DRAM since an earlier one."""
    first_on = {task.gpu: task.key.stage for task in reversed(schedule.tasks) if task.key.kind is Kind.WEIGHTS}
    for task in schedule.tasks:
        kind, stage, m = task.key
        giver = giver_of(task.key, plan.stages)
        if giver is not None:
            yield Rule(giver, task.key, _UNREAD.get(kind, f"it reads {kind.name.lower()} that are not in DRAM yet"))
        elif kind in GIVES:
            yield Rule(Key(Kind.WEIGHTS, stage), task.key, "it computes with weights that have not arrived")
            yield Rule(Key(Kind.INPUTS, first_on.get(task.gpu), m), task.key, "it computes with inputs that have not arrived")
            yield Rule(Key(Kind.ACTIVATIONS, stage, m), task.key, "it computes with activations that have not arrived")
            yield Rule(Key(Kind.GRADIENTS, stage, m), task.key, "it computes with gradients that have not arrived")
            yield Rule(task.key, Key(GIVES[kind], stage, m), "it hands over what has not been computed")
            yield Rule(task.key, Key(Kind.WEIGHT_GRADIENTS, stage), "it copies weight gradients out that still grow")


def _sums(shared: Mapping[int, Sequence[int]], updates: Mapping[int, Sequence[int]]) -> Iterator[Rule]:
    """Gradients of shared parameters add up in one order, and are complete when the optimizer takes them."""
    for stage, laters in shared.items():
        for later in laters:
            yield Rule(Key(Kind.WEIGHT_GRADIENTS, later), Key(Kind.WEIGHT_GRADIENTS, stage),
                       "both add to the same gradients")
    for stage, sources in updates.items():
        for source in sources:
            yield Rule(Key(Kind.WEIGHT_GRADIENTS, source), Key(Kind.UPDATE, stage), "it updates by gradients that still grow")
            yield Rule(Key(Kind.WEIGHTS, source), Key(Kind.UPDATE, stage), "it overwrites weights that are still copied in")


def _buffers(schedule: Schedule) -> Iterator[Rule]:
    """Memory is filled again only after its last use: there are ``DEPTH`` of each kind."""
    computed = _in_order(schedule, Stream.COMPUTE)
    for gpu in range(schedule.gpus):
        stages = [task.key.stage for task in schedule.of(gpu) if task.key.kind is Kind.WEIGHTS]
        for stage, reuser in zip(stages, stages[DEPTH:]):
            for key in computed[stage]:
                yield Rule(key, Key(Kind.WEIGHTS, reuser), "the slot still holds weights that are computed with")
            for key in computed[reuser][:1]:
                yield Rule(Key(Kind.WEIGHT_GRADIENTS, stage), key, "the buffer still holds weight gradients")
    for stage, keys in computed.items():
        for old, new in zip(keys, keys[DEPTH:]):
            for fills in (Kind.ACTIVATIONS, Kind.GRADIENTS):
                yield Rule(old, Key(fills, stage, new.microbatch), "the buffer still holds what is computed with")
            for empties in (Kind.GIVE_ACTIVATIONS, Kind.GIVE_GRADIENTS):
                yield Rule(Key(empties, stage, old.microbatch), new, "the buffer still holds what is to be handed over")


def _in_order(schedule: Schedule, stream: Stream) -> Dict[int, List[Key]]:
    """The tasks of one stream by stage, in their order."""
    by_stage: Dict[int, List[Key]] = defaultdict(list)
    for task in schedule.tasks:
        if task.stream is stream:
            by_stage[task.key.stage].append(task.key)
    return by_stage


def _known(schedule: Schedule, plan: Plan) -> Dict[Key, Task]:
    known: Dict[Key, Task] = {}
    for task in schedule.tasks:
        if task.key in known:
            raise _invalid(schedule, f"{task.key} is there twice", task.key)
        known[task.key] = task
        if task.gpu not in range(plan.gpus):
            raise _invalid(schedule, f"{task.key} is on GPU {task.gpu}, and there are {plan.gpus}", task.key)
        if task.key.stage is not None and plan.gpu_of_stage[task.key.stage] != task.gpu:
            raise _invalid(schedule, f"{task.key} is on GPU {task.gpu}, but its stage is on GPU "
                           f"{plan.gpu_of_stage[task.key.stage]}", task.key)
    for task in schedule.tasks:
        for key in task.after:
            if key not in known:
                raise _invalid(schedule, f"{task.key} waits for {key}, which is never run", task.key)
    return known


def _everything_before(schedule: Schedule, known: Dict[Key, Task]) -> Dict[Key, int]:
    """For each task the set of those that end before it begins, as bits in the order of ``known``."""
    position = {key: number for number, key in enumerate(known)}
    waits: Dict[Key, List[Key]] = {}
    ahead: Dict[Tuple[int, Stream], Key] = {}
    for task in schedule.tasks:
        queue = (task.gpu, task.stream)
        waits[task.key] = [*task.after, *([ahead[queue]] if queue in ahead else [])]
        ahead[queue] = task.key
    followers: Dict[Key, List[Key]] = defaultdict(list)
    for key, earlier in waits.items():
        for other in earlier:
            followers[other].append(key)
    missing = {key: len(earlier) for key, earlier in waits.items()}
    ready = [key for key, count in missing.items() if count == 0]
    before: Dict[Key, int] = {}
    while ready:
        key = ready.pop()
        before[key] = 0
        for other in waits[key]:
            before[key] |= before[other] | 1 << position[other]
        for follower in followers[key]:
            missing[follower] -= 1
            if missing[follower] == 0:
                ready.append(follower)
    if len(before) < len(known):
        circle = _circle(waits, before)
        raise _invalid(schedule, "tasks wait for each other in a circle: " + " waits for ".join(map(str, circle)), *circle)
    return before


def _circle(waits: Dict[Key, List[Key]], before: Dict[Key, int]) -> List[Key]:
    path = [next(key for key in waits if key not in before)]
    while True:
        path.append(next(key for key in waits[path[-1]] if key not in before))
        if path[-1] in path[:-1]:
            return path[path.index(path[-1]):]

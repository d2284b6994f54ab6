"""Where a step's time goes: what GPUs wait for when they do not compute, and how fast bytes move.

The figures are the same for simulated and for measured steps, so that the two can be held side by side.

Note [exposed or nothing to do]. A GPU that does not compute lacks something that its next compute needs. While all it
lacks is made, and some of it is being copied, these transfers are *exposed*: faster links would end the wait. The time is
put down to the one that arrives last. As long as something it lacks is not even made, there is nothing to do, and links
are not to blame. And where all is made but nothing of it is being copied, or all is there, the runtime is: its threads
and messages come in between. What a copy waits for is followed back to the last compute among it: from there on all is
made, and only copies follow.
"""

from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from itertools import chain, pairwise
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from mobius_ds.schedule.tasks import Key, Kind, Stream, Task
from mobius_ds.simulation.simulator import Link, Played, Timeline
from mobius_ds.simulation.steps import Step


class Idle(str, Enum):
    """Why a GPU does not compute."""

    WEIGHTS = "weights"
    """Its next stage's weights are on their way."""
    ACTIVATIONS = "activations"
    """Boundary activations, their gradients, or outputs are."""
    INPUTS = "inputs"
    """A microbatch's inputs are."""
    OUTGOING = "outgoing"
    """Copies out are, which the next compute needs the memory of, or which are all that is left to do."""
    RUNTIME = "runtime"
    """All is made, but nothing is being copied and compute has not begun."""
    NOTHING = "nothing to do"
    """What it needs is not made yet, or it has no more to do."""


ROUNDING = 1e-9
"""Of shares that are added up."""

EXPOSED = (Idle.WEIGHTS, Idle.ACTIVATIONS, Idle.INPUTS, Idle.OUTGOING)
"""The causes that are transfers."""

_IDLE_FOR = {"parameters_in": Idle.WEIGHTS, "activations_in": Idle.ACTIVATIONS, "other": Idle.INPUTS,
             "gradients_out": Idle.OUTGOING, "activations_out": Idle.OUTGOING}


class Gap(NamedTuple):
    """A time in which a GPU does not compute within a sweep."""

    gpu: int
    before: Optional[Task]
    """The compute that ends it; None after the GPU's last one."""
    seconds: Dict[Idle, float]
    """What it is made of."""


class _Awaited(NamedTuple):
    """Something a compute needs."""

    cause: Idle
    made: float
    """When the last compute before it was over, if that was within the gap."""
    copies: List[Tuple[float, float]]
    """The copies from there on, from when to when."""
    until: float


def gaps(timeline: Timeline, gpus: int) -> List[Gap]:
    """The gaps of a sweep, each GPU's in order; see Note [exposed or nothing to do]."""
    known = {played.task.key: played for played in timeline.played}
    released = _released_by(timeline, known)
    found = []
    for gpu in range(gpus):
        free = 0.0
        for played in timeline.of(gpu, Stream.COMPUTE):
            if played.start > free:
                needs = [_awaited(known[key], gpu, free, released) for key in played.task.after if key in known]
                found.append(Gap(gpu, played.task, _shares(free, played.start, needs, Idle.RUNTIME)))
            free = max(free, played.end)
        if timeline.makespan > free:
            left = [_awaited(played, gpu, free, released) for played in timeline.played
                    if played.task.gpu == gpu and played.task.category]
            found.append(Gap(gpu, None, _shares(free, timeline.makespan, left, Idle.NOTHING)))
    return found


def _released_by(timeline: Timeline, known: Dict[Key, Played]) -> Dict[Key, Played]:
    """For each task, what it waited for last: the task before it on its stream, or one it comes after."""
    released: Dict[Key, Played] = {}
    before: Dict[Tuple[int, Stream], Played] = {}
    for played in timeline.played:
        task = played.task
        waited_for = [known[key] for key in task.after if key in known]
        if (task.gpu, task.stream) in before:
            waited_for.append(before[task.gpu, task.stream])
        if waited_for:
            released[task.key] = max(waited_for, key=lambda earlier: earlier.end)
        before[task.gpu, task.stream] = played
    return released


def _awaited(needed: Played, gpu: int, begin: float, released: Dict[Key, Played]) -> _Awaited:
    """What a compute needs, followed back to where it was made, or to the beginning of the gap."""
    copies, made, played = [], needed.end, needed
    while played.task.category:
        copies.append((played.start, played.end))
        made = played.start
        if made <= begin or played.task.key not in released:
            break
        played = released[played.task.key]
        made = played.end
    cause = _IDLE_FOR.get(needed.task.category, Idle.NOTHING) if needed.task.gpu == gpu else Idle.ACTIVATIONS
    return _Awaited(cause, made, copies, needed.end)


def _shares(begin: float, end: float, awaited: Sequence[_Awaited], otherwise: Idle) -> Dict[Idle, float]:
    """A gap's seconds by cause; ``otherwise`` is that of the time in which nothing is lacking."""
    shares: Dict[Idle, float] = defaultdict(float)
    turns = {turn for one in awaited for turn in (one.made, one.until, *chain.from_iterable(one.copies))}
    for start, stop in pairwise(sorted({begin, end, *(turn for turn in turns if begin < turn < end)})):
        shares[_cause(start, [one for one in awaited if one.until > start], otherwise)] += stop - start
    return dict(shares)


def _cause(now: float, lacking: Sequence[_Awaited], otherwise: Idle) -> Idle:
    if not lacking:
        return otherwise
    if any(one.made > now for one in lacking):
        return Idle.NOTHING
    copied = [one for one in lacking if any(start <= now < end for start, end in one.copies)]
    return max(copied, key=lambda one: one.until).cause if copied else Idle.RUNTIME


class StageExposure(NamedTuple):
    """How much of the copies of a stage's weights its GPU waited for, in one step; seconds."""

    stage: int
    gpu: int
    forward: float
    backward: float


Distribution = List[Tuple[float, float]]
"""(bytes/s, the share of all bytes that moved at this rate or less), by rate."""


@dataclass(frozen=True)
class Figures:
    """Of one step. Tuples over GPUs are indexed by GPU; times are seconds."""

    step_seconds: float
    sweep_seconds: float
    """Of its sweeps, added up."""
    compute_seconds: Tuple[float, ...]
    idle_seconds: Dict[Idle, Tuple[float, ...]]
    """Within the sweeps; with ``compute_seconds`` it adds up to ``sweep_seconds`` on every GPU."""
    bytes_by_category: Dict[str, int]
    bandwidth: Dict[str, Distribution]
    """Of each link, by ``link_name``: at which rates its bytes crossed it."""
    stages: Tuple[StageExposure, ...]

    @property
    def exposed_seconds(self) -> Tuple[float, ...]:
        """Time in which transfers kept each GPU from computing."""
        return tuple(map(sum, zip(*(self.idle_seconds[cause] for cause in EXPOSED))))

    @property
    def bubble(self) -> float:
        """The share of all GPUs' time in the sweeps in which they do not compute."""
        return 1 - sum(self.compute_seconds) / (len(self.compute_seconds) * self.sweep_seconds)

    def as_json(self) -> Dict[str, Any]:
        """Plain data."""
        return {"step_seconds": self.step_seconds, "sweep_seconds": self.sweep_seconds,
                "compute_seconds": list(self.compute_seconds), "bubble": self.bubble,
                "exposed_seconds": list(self.exposed_seconds),
                "idle_seconds": {cause.value: list(seconds) for cause, seconds in self.idle_seconds.items()},
                "bytes": self.bytes_by_category,
                "bandwidth": {link: [list(point) for point in points] for link, points in self.bandwidth.items()},
                "stages": [{"stage": stage, "gpu": gpu, "forward_exposed_s": forward, "backward_exposed_s": backward}
                           for stage, gpu, forward, backward in self.stages]}


def figures(step: Step, gpus: int, root_of: Optional[Sequence[int]] = None) -> Figures:
    """The figures of a step.

    Args:
        root_of: the root complex of each GPU, where they are known.
    """
    timelines = [part.timeline for part in step.parts]
    found = [gap for timeline in timelines for gap in gaps(timeline, gpus)]
    idle = {cause: [0.0] * gpus for cause in Idle}
    for gap in found:
        for cause, seconds in gap.seconds.items():
            idle[cause][gap.gpu] += seconds
    moved: Dict[str, int] = defaultdict(int)
    for played in _transfers(timelines):
        moved[played.task.category] += played.task.nbytes
    return Figures(
        step.seconds, sum(timeline.makespan for timeline in timelines),
        tuple(sum(timeline.compute_seconds(gpu) for timeline in timelines) for gpu in range(gpus)),
        {cause: tuple(seconds) for cause, seconds in idle.items()}, dict(moved),
        _bandwidth(timelines, root_of), exposed_prefetches(timelines, found))


def exposed_prefetches(timelines: Iterable[Timeline], found: Iterable[Gap]) -> Tuple[StageExposure, ...]:
    """How long each stage's weights kept its GPU waiting in some sweeps; zero where their copy was hidden.

    Args:
        found: the gaps of these sweeps.
    """
    places = {(played.task.key.stage, played.task.gpu) for timeline in timelines for played in timeline.played
              if played.task.stream is Stream.COMPUTE}
    exposed = {place: [0.0, 0.0] for place in places}
    for gap in found:
        if gap.before is not None:
            is_backward = gap.before.key.kind is not Kind.FORWARD
            exposed[gap.before.key.stage, gap.gpu][is_backward] += gap.seconds.get(Idle.WEIGHTS, 0.0)
    return tuple(StageExposure(stage, gpu, *exposed[stage, gpu]) for stage, gpu in sorted(places))


def distribution(timelines: Iterable[Timeline], categories: Sequence[str]) -> Distribution:
    """At which rates the bytes of some categories moved, over all links."""
    return cumulative((played.task.nbytes / played.seconds, played.task.nbytes) for played in _transfers(timelines)
                       if played.seconds > 0 and played.task.category in categories)


def _transfers(timelines: Iterable[Timeline]) -> Iterable[Played]:
    return (played for timeline in timelines for played in timeline.played if played.task.category and played.task.nbytes)


def _bandwidth(timelines: Sequence[Timeline], root_of: Optional[Sequence[int]]) -> Dict[str, Distribution]:
    by_link: Dict[Link, List[Tuple[float, int]]] = defaultdict(list)
    for played in _transfers(timelines):
        if played.seconds > 0:
            for link in _links(played.task, root_of):
                by_link[link].append((played.task.nbytes / played.seconds, played.task.nbytes))
    return {link_name(link): cumulative(by_link[link]) for link in sorted(by_link)}


def _links(task: Task, root_of: Optional[Sequence[int]]) -> List[Link]:
    way = "out" if task.is_outward else "in"
    return [(way, task.gpu)] + ([(f"root {way}", root_of[task.gpu])] if root_of else [])


def link_name(link: Link) -> str:
    """A link as ``costs`` names it, such as ``in 0`` or ``root out 1``."""
    return " ".join(map(str, link))


def quartiles(moved: Distribution) -> List[float]:
    """Bytes/s below which a quarter, half and three quarters of the bytes move; empty without any."""
    return [next(rate for rate, share in moved if share >= quarter / 4 - ROUNDING)
            for quarter in (1, 2, 3) if moved]


def cumulative(moved: Iterable[Tuple[float, int]]) -> Distribution:
    """Of transfers, each with its bytes/s and bytes."""
    ordered = sorted(moved)
    total, passed, points = sum(nbytes for _, nbytes in ordered), 0, []
    for rate, nbytes in ordered:
        passed += nbytes
        points.append((rate, passed / total))
    return points

"""The checker accepts every schedule that the builders make, and notices every wait that is taken out of one."""

import random
from collections import defaultdict
from dataclasses import replace
from typing import Any, Dict, List, Set

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mobius_ds.schedule.mobius import backward_schedule, forward_schedule
from mobius_ds.schedule.plan import make_plan
from mobius_ds.schedule.proof import InvalidSchedule, check_schedule
from mobius_ds.schedule.schedule import Schedule
from mobius_ds.schedule.tasks import Key, Kind, Task
from tests.schedule.test_schedule import cases, equal_volumes, schedules

UNTIMED = settings(deadline=None, max_examples=300)


@UNTIMED
@given(cases())
def test_what_the_builders_make_is_right(case):
    for schedule in schedules(case):
        check_schedule(schedule, case.plan, case.shared)


def without(schedule: Schedule, number: int, key: Key) -> Schedule:
    """The schedule without one wait."""
    tasks = list(schedule.tasks)
    tasks[number] = tasks[number]._replace(after=tuple(other for other in tasks[number].after if other != key))
    return replace(schedule, tasks=tuple(tasks))


@pytest.mark.parametrize("stages, gpus, microbatches", [(2, 2, 2), (6, 2, 4), (8, 4, 4), (5, 1, 3)])
def test_a_wait_is_either_noticed_missing_or_follows_from_the_others(stages, gpus, microbatches):
    """Taking out one wait either breaks a rule, or it was implied: then no order of execution changes."""
    plan, volumes = make_plan(stages, gpus, stages), equal_volumes(stages, microbatches)
    home = [m % gpus for m in range(microbatches)]
    shared, updates = {0: [stages - 1]}, {stage: [stage, stages - 1] for stage in range(stages)}
    noticed = 0
    for schedule in (forward_schedule(plan, home, volumes),
                     backward_schedule(plan, home, volumes, shared, updates)):
        for number, task in enumerate(schedule.tasks):
            for key in task.after:
                broken = without(schedule, number, key)
                try:
                    check_schedule(broken, plan, shared, updates)
                except InvalidSchedule as error:
                    noticed += 1
                    assert str(task.key) in str(error)
                else:
                    assert key in _always_before(broken, task.key), f"{task.key} does not wait for {key} any more"
    assert noticed > stages * microbatches


def _always_before(schedule: Schedule, key: Key) -> Set[Key]:
    """Tasks that have run before ``key``, even when it runs as early as it can."""
    lanes: Dict[Any, List[Task]] = defaultdict(list)
    ahead = {}
    for task in schedule.tasks:
        lane = lanes[task.gpu, task.stream]
        ahead[task.key] = [*task.after, *(other.key for other in lane[-1:])]
        lane.append(task)
    seen, open_ends = set(), [key]
    while open_ends:
        new = [other for other in ahead[open_ends.pop()] if other not in seen]
        seen.update(new)
        open_ends += new
    return seen


def forward() -> Schedule:
    return forward_schedule(make_plan(4, 2, 4), [0, 1], equal_volumes(4, 2))


def faults():
    """A wrong schedule of each kind, and what is said of it."""
    schedule = forward()
    tasks = {task.key: task for task in schedule.tasks}

    def changed(key: Key, **changes) -> Schedule:
        return replace(schedule, tasks=tuple(task._replace(**changes) if task.key == key else task for task in schedule.tasks))

    first = Key(Kind.FORWARD, 0, 0)
    yield replace(schedule, tasks=schedule.tasks + schedule.tasks[:1]), "P0 is there twice"
    yield changed(first, gpu=1), "0F0 is on GPU 1, but its stage is on GPU 0"
    yield changed(Key(Kind.GIVE_INPUTS, None, 1), gpu=7), "P1 is on GPU 7, and there are 2"
    yield changed(first, after=tasks[first].after + (Key(Kind.FORWARD, 9, 9), )), "0F0 waits for 9F9, which is never run"
    yield changed(first, after=tasks[first].after + (Key(Kind.GIVE_ACTIVATIONS, 0, 0), )), \
        "wait for each other in a circle"
    yield changed(Key(Kind.ACTIVATIONS, 1, 0), after=()), "1A0 on GPU 1 may run before 0S0 on GPU 0 has ended"
    yield replace(schedule, tasks=schedule.tasks[::-1]), "circle"


@pytest.mark.parametrize("schedule, said", list(faults()))
def test_each_fault_is_named(schedule, said):
    with pytest.raises(InvalidSchedule, match=said):
        check_schedule(schedule, make_plan(4, 2, 4))


@UNTIMED
@given(cases(), st.integers(0, 10**6))
def test_a_wait_taken_out_at_random_is_noticed_or_implied(case, seed):
    generator = random.Random(seed)
    schedule = generator.choice(schedules(case))
    waits = [(number, key) for number, task in enumerate(schedule.tasks) for key in task.after]
    if not waits:
        return
    number, key = generator.choice(waits)
    broken = without(schedule, number, key)
    try:
        check_schedule(broken, case.plan, case.shared)
    except InvalidSchedule:
        return
    assert key in _always_before(broken, schedule.tasks[number].key)

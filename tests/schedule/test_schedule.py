"""Schedules as data: what they say of two small cases, and what holds for any plan."""

import random
from collections import defaultdict
from dataclasses import replace
from typing import Callable, Dict, List, NamedTuple, Set, Tuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mobius_ds.schedule.mobius import Volumes, backward_schedule, forward_schedule, outputs_schedule
from mobius_ds.schedule.plan import Plan, make_plan
from mobius_ds.schedule.schedule import Schedule
from mobius_ds.schedule.tasks import CATEGORIES, DEPTH, Key, Kind, Stream, Task


UNTIMED = settings(deadline=None)  # a busy machine is no failure


def equal_volumes(stages: int, microbatches: int, nbytes: int = 8) -> Volumes:
    table = [[nbytes] * microbatches for _ in range(stages)]
    return Volumes([nbytes] * stages, [nbytes] * stages, [nbytes] * microbatches, table, table, table, table)


def test_a_forward_schedule_prints():
    schedule = forward_schedule(make_plan(2, 2), [0, 1], equal_volumes(2, 2))
    assert str(schedule) == """\
forward on 2 GPUs
gpu 0 compute  |    |     | 0F0 | 0F1 |     |     |     |     |
gpu 0 prefetch | 0W |     |     |     |     |     |     |     |
gpu 0 load     |    | 0I0 | 0I1 |     |     |     |     | R0  |
gpu 0 store    | P0 |     |     | 0S0 | 0S1 |     |     |     |
gpu 1 compute  |    |     |     |     |     | 1F0 | 1F1 |     |
gpu 1 prefetch | 1W |     |     |     |     |     |     |     |
gpu 1 load     |    | 1I0 | 1I1 |     | 1A0 | 1A1 |     |     | R1
gpu 1 store    | P1 |     |     |     |     |     | 1S0 | 1S1 |

0F0 after 0W,0I0
0F1 after 0W,0I1
0W 8B
0I0 8B after P0
0I1 8B after P1
R0 8B after 1S0
P0 8B
0S0 8B after 0F0
0S1 8B after 0F1
1F0 after 1W,1I0,1A0
1F1 after 1W,1I1,1A1
1W 8B
1I0 8B after P0
1I1 8B after P1
1A0 8B after 0S0
1A1 8B after 0S1
R1 8B after 1S1
P1 8B
1S0 8B after 1F0
1S1 8B after 1F1"""


def test_a_backward_schedule_prints():
    schedule = backward_schedule(make_plan(2, 2), [0, 1], equal_volumes(2, 2), {0: [1]})
    table, details = str(schedule).split("\n\n")
    assert table == """\
backward on 2 GPUs
gpu 0 compute  |     |     |     |     |     |     |     | 0B0 |     | 0B1 |
gpu 0 prefetch | 0W  |     |     |     |     |     |     |     |     |     |
gpu 0 load     | 0I0 | 0I1 |     |     |     |     | 0G0 |     | 0G1 |     |
gpu 0 store    | X0  |     |     |     |     |     |     |     | 0T0 |     | 0T1
gpu 0 offload  |     |     |     |     |     |     |     |     |     |     | 0D
gpu 1 compute  |     |     |     |     | 1B0 |     | 1B1 |     |     |     |
gpu 1 prefetch | 1W  |     |     |     |     |     |     |     |     |     |
gpu 1 load     | 1I0 | 1I1 | 1A0 | 1G0 | 1A1 | 1G1 |     |     |     |     |
gpu 1 store    | X1  |     |     |     |     | 1T0 |     | 1T1 |     |     |
gpu 1 offload  |     |     |     |     |     |     |     | 1D  |     |     |"""
    assert {"0D 8B after 0B1,1D", "1G0 8B after X0", "0G0 8B after 1T0", "1I0 8B"} < set(details.split("\n"))


def test_keys_print_as_stage_kind_microbatch():
    assert [str(key) for key in (Key(Kind.FORWARD, 2, 0), Key(Kind.WEIGHTS, 2), Key(Kind.GIVE_INPUTS, None, 3))] \
        == ["2F0", "2W", "P3"]


class Case(NamedTuple):
    plan: Plan
    home: List[int]
    volumes: Volumes
    shared: Dict[int, List[int]]


@st.composite
def cases(draw) -> Case:
    """Any partition and mapping, ranks with several microbatches, frozen stages, shared parameters, uneven bytes."""
    gpus, stages = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    plan = Plan(gpus, (1, ) * stages, tuple(draw(st.lists(st.integers(0, gpus - 1), min_size=stages, max_size=stages))))
    home = list(range(gpus)) * draw(st.integers(1, 3))
    nbytes = st.integers(1, 99)

    def table() -> List[List[int]]:
        return [[draw(nbytes) for _ in home] for _ in range(stages)]

    # Where training starts: below it no weight and no boundary has a gradient.
    first_trained = draw(st.integers(0, stages - 1))
    weight_gradients = [draw(st.sampled_from([0, 8])) if stage > first_trained else 8 * (stage == first_trained)
                        for stage in range(stages)]
    received, made, crossing = table(), table(), table()
    received[0] = [0] * len(home)
    given = [draw(st.booleans()) * 4 for _ in home]  # microbatches whose outputs got a gradient at all
    made_gradients = [[crossing[stage][m] * (stage > first_trained) for m in range(len(home))] for stage in range(stages)]
    received_gradients = [made_gradients[stage + 1] for stage in range(stages - 1)] + [given]
    shared = {stage: [later for later in range(stage + 1, stages)
                      if weight_gradients[stage] and weight_gradients[later] and draw(st.booleans())]
              for stage in range(stages)}
    return Case(plan, home, Volumes([draw(nbytes) for _ in range(stages)], weight_gradients, [draw(nbytes) for _ in home],
                                    received, made, received_gradients, made_gradients), shared)


def schedules(case: Case) -> List[Schedule]:
    plan, home, volumes, shared = case
    return [forward_schedule(plan, home, volumes), outputs_schedule(plan, home, volumes),
            backward_schedule(plan, home, volumes, shared)]


def play(schedule: Schedule, choose: Callable[[List[Task]], Task], done: Callable[[Task], None] = lambda task: None) -> None:
    """Runs tasks one at a time, each stream in its order, each task after those it waits for."""
    queues: Dict[Tuple[int, Stream], List[Task]] = defaultdict(list)
    for task in schedule.tasks:
        queues[task.gpu, task.stream].append(task)
    finished: Set[Key] = set()
    while any(queues.values()):
        ready = [queue[0] for queue in queues.values() if queue and finished.issuperset(queue[0].after)]
        assert ready, "deadlock:\n" + "\n".join(str(queue[0]) for queue in queues.values() if queue)
        task = choose(ready)
        queues[task.gpu, task.stream].pop(0)
        finished.add(task.key)
        done(task)


@UNTIMED
@given(cases())
def test_every_task_has_one_key_one_gpu_and_waits_for_tasks_that_exist(case):
    for schedule in schedules(case):
        gpu_of = schedule.gpu_of()
        assert len(gpu_of) == len(schedule.tasks)
        for task in schedule.tasks:
            assert all(key in gpu_of for key in task.after)
            assert task.gpu in range(case.plan.gpus)
            if task.key.stage is not None:
                assert task.gpu == case.plan.gpu_of_stage[task.key.stage]
            assert (task.category is None) == (task.stream is Stream.COMPUTE) and (task.category or not task.nbytes)
        assert sum(len(schedule.of(gpu)) for gpu in range(case.plan.gpus)) == len(schedule.tasks)


@UNTIMED
@given(cases(), st.integers())
def test_no_order_of_execution_ends_in_a_deadlock(case, seed):
    """Streams only ever wait for tasks named in ``after``, so one order finishes exactly if every order does."""
    for schedule in schedules(case):
        play(schedule, random.Random(seed).choice)


def eager(first: Set[Stream], last: Set[Kind], seed: int) -> Callable[[List[Task]], Task]:
    """An order that runs some streams as early as it can and some kinds as late as it can."""
    generator = random.Random(seed)
    return lambda ready: max(ready, key=lambda task: (task.stream in first, task.key.kind not in last, generator.random()))


@settings(UNTIMED, max_examples=60)
@given(cases(), st.integers())
def test_a_gpu_never_needs_more_than_two_stages_weights(case, seed):
    """Even where copies run as far ahead as they may: a slot is taken by the copy in and given up by the last compute."""
    for schedule in schedules(case):
        last_use = {}
        for task in schedule.tasks:
            if task.stream is Stream.COMPUTE:
                last_use[task.key.stage] = task.key
        held: Dict[int, Set[int]] = defaultdict(set)

        def done(task: Task) -> None:
            if task.key.kind is Kind.WEIGHTS:
                held[task.gpu].add(task.key.stage)
                assert len(held[task.gpu]) <= DEPTH
            elif task.stream is Stream.COMPUTE:
                assert task.key.stage in held[task.gpu], "computed without its weights"
                if task.key == last_use[task.key.stage]:
                    held[task.gpu].remove(task.key.stage)

        play(schedule, eager({Stream.PREFETCH}, set(), seed), done)
        assert not any(held.values())


BUFFERS = {  # task that fills a buffer: task of the same stage and microbatch that empties it
    "forward": [(Kind.ACTIVATIONS, Kind.FORWARD), (Kind.FORWARD, Kind.GIVE_ACTIVATIONS)],
    "outputs": [(Kind.ACTIVATIONS, Kind.FORWARD), (Kind.FORWARD, Kind.GIVE_ACTIVATIONS)],
    "backward": [(Kind.ACTIVATIONS, Kind.BACKWARD), (Kind.GRADIENTS, Kind.BACKWARD), (Kind.BACKWARD, Kind.GIVE_GRADIENTS)],
}


@settings(UNTIMED, max_examples=60)
@given(cases(), st.integers())
def test_a_stage_has_two_microbatches_activations_each_way(case, seed):
    for schedule in schedules(case):
        existing = schedule.gpu_of()
        for fills, empties in BUFFERS[schedule.name]:
            full: Dict[int, int] = defaultdict(int)

            def done(task: Task) -> None:
                other = Key(empties, *task.key[1:])
                if task.key.kind is fills and other in existing:
                    full[task.key.stage] += 1
                    assert full[task.key.stage] <= DEPTH, (fills, task.key)
                elif task.key.kind is empties and Key(fills, *task.key[1:]) in existing:
                    full[task.key.stage] -= 1

            play(schedule, eager({STREAM for STREAM in Stream if STREAM is not Stream.PREFETCH}, {empties}, seed), done)


@settings(UNTIMED, max_examples=60)
@given(cases(), st.integers())
def test_a_gpu_has_two_stages_weight_gradients(case, seed):
    schedule = backward_schedule(*case)
    existing = schedule.gpu_of()
    held: Dict[int, Set[int]] = defaultdict(set)

    def done(task: Task) -> None:
        stage = task.key.stage
        if task.key.kind is Kind.BACKWARD and Key(Kind.WEIGHT_GRADIENTS, stage) in existing:
            held[task.gpu].add(stage)
            assert len(held[task.gpu]) <= DEPTH
        elif task.key.kind is Kind.WEIGHT_GRADIENTS:
            held[task.gpu].remove(stage)

    play(schedule, eager({Stream.COMPUTE}, {Kind.WEIGHT_GRADIENTS}, seed), done)
    assert not any(held.values())


@UNTIMED
@given(cases(), st.integers())
def test_nothing_is_read_before_it_is_made(case, seed):
    """What a task reads was written by the stage before (forward) or after (backward), whatever the order."""
    for schedule in schedules(case):
        written: Set[Key] = set()
        existing = schedule.gpu_of()

        def done(task: Task) -> None:
            kind, stage, m = task.key
            source = {Kind.INPUTS: Key(Kind.GIVE_INPUTS, None, m),
                      Kind.OUTPUTS: Key(Kind.GIVE_ACTIVATIONS, case.plan.stages - 1, m),
                      Kind.ACTIVATIONS: Key(Kind.GIVE_ACTIVATIONS, stage and stage - 1, m),
                      Kind.GRADIENTS: Key(Kind.GIVE_OUTPUT_GRADIENTS, None, m) if stage == case.plan.stages - 1
                      else Key(Kind.GIVE_GRADIENTS, stage + 1 if stage is not None else None, m)}.get(kind)
            # Of a sweep that starts in the middle, what comes first lies in DRAM already.
            assert source is None or source not in existing or source in written
            written.add(task.key)

        play(schedule, random.Random(seed).choice, done)


@UNTIMED
@given(cases(), st.integers())
def test_shared_gradients_add_up_last_stage_first(case, seed):
    order: List[int] = []
    schedule = backward_schedule(*case)
    play(schedule, random.Random(seed).choice,
         lambda task: order.append(task.key.stage) if task.key.kind is Kind.WEIGHT_GRADIENTS else None)
    for stage, laters in case.shared.items():
        for later in laters:
            if stage in order and later in order:
                assert order.index(later) < order.index(stage)


@UNTIMED
@given(cases())
def test_bytes_of_a_forward_are_the_closed_form(case):
    plan, home, volumes, _ = case
    total = forward_schedule(plan, home, volumes).bytes_by_category()
    gpus_that_run = len(set(plan.gpu_of_stage))
    assert total["parameters_in"] == sum(volumes.weights)
    assert total.get("activations_in", 0) == sum(map(sum, volumes.received[1:])) + sum(volumes.made[-1])
    assert total["activations_out"] == sum(map(sum, volumes.made))
    assert total["other"] == sum(volumes.inputs) * (1 + gpus_that_run), "given once, taken once by every GPU that computes"
    assert "gradients_out" not in total


@UNTIMED
@given(cases())
def test_bytes_of_a_backward_are_the_closed_form(case):
    plan, home, volumes, _ = case
    schedule = backward_schedule(*case)
    total = defaultdict(int, schedule.bytes_by_category())
    runs = {(stage, m) for stage in range(plan.stages) for m in range(len(home)) if volumes.received_gradients[stage][m]
            and (volumes.weight_gradients[stage] or volumes.made_gradients[stage][m])}
    stages = {stage for stage, _ in runs}
    assert {task.key[1:] for task in schedule.tasks if task.key.kind is Kind.BACKWARD} == runs
    assert total["parameters_in"] == sum(volumes.weights[stage] for stage in stages)
    assert total["gradients_out"] == sum(volumes.weight_gradients[stage] for stage in stages)
    assert total["activations_in"] == sum(volumes.received[stage][m] * (stage > 0) + volumes.received_gradients[stage][m]
                                          for stage, m in runs)
    outputs = sum(volumes.received_gradients[-1][m] for stage, m in runs if stage == plan.stages - 1)
    assert total["activations_out"] == sum(volumes.made_gradients[stage][m] for stage, m in runs) + outputs
    assert total["other"] == sum(volumes.inputs) * len({plan.gpu_of_stage[stage] for stage in stages})


@UNTIMED
@given(cases())
def test_bytes_of_reading_outputs_are_the_last_stages(case):
    plan, home, volumes, _ = case
    total = defaultdict(int, outputs_schedule(plan, home, volumes).bytes_by_category())
    assert total["parameters_in"] == volumes.weights[-1]
    assert total["activations_in"] == sum(volumes.received[-1]) * (plan.stages > 1) + sum(volumes.made[-1])
    assert total["activations_out"] == sum(volumes.made[-1])


@UNTIMED
@given(cases())
def test_a_gpus_bytes_add_up_to_the_whole(case):
    for schedule in schedules(case):
        parts = [schedule.bytes_by_category(gpu) for gpu in range(case.plan.gpus)]
        for category, nbytes in schedule.bytes_by_category().items():
            assert sum(part.get(category, 0) for part in parts) == nbytes


@pytest.mark.parametrize("first_trained", range(4))
def test_stages_below_which_nothing_is_trained_have_no_backward(first_trained):
    table = [[8 * (stage > first_trained)] * 2 for stage in range(4)]
    volumes = replace(equal_volumes(4, 2), weight_gradients=[8 * (stage >= first_trained) for stage in range(4)],
                      made_gradients=table, received_gradients=[*table[1:], [8, 8]])
    schedule = backward_schedule(make_plan(4, 2), [0, 1], volumes, {})
    assert {task.key.stage for task in schedule.tasks} - {None} == set(range(first_trained, 4))
    assert not any(task.key.kind is Kind.GIVE_GRADIENTS and task.key.stage == first_trained for task in schedule.tasks)


def test_every_transfer_has_a_category():
    computes = {Kind.FORWARD, Kind.BACKWARD, Kind.RECOMPUTE, Kind.UPDATE}
    assert {kind for kind in Kind if kind.category is None} == computes
    assert {kind.category for kind in Kind} == {None, *CATEGORIES}


def test_updates_run_in_the_order_in_which_their_gradients_are_complete():
    """A stream takes its work in order: the lowest stage, whose gradients come last, would hold up all others."""
    plan = make_plan(6, 2, stages=6)
    shared = {stage: [] for stage in range(6)}
    # Stage 4's parameters are also used by stage 0, as an embedding's are by a head: they are complete with stage 0.
    schedule = backward_schedule(plan, [0, 1], equal_volumes(6, 2), shared, {**{stage: [stage] for stage in range(6)}, 4: [0, 4]})
    updates = {gpu: [task.key.stage for task in schedule.of(gpu) if task.key.kind is Kind.UPDATE] for gpu in range(2)}
    assert updates[1] == [5, 3, 1]
    assert updates[0][0] == 2 and set(updates[0][1:]) == {0, 4}

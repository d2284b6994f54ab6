"""The simulator keeps its promises on random schedules: links, order, bytes, and more bandwidth never hurts."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mobius_ds.schedule.schedule import Schedule
from mobius_ds.schedule.tasks import Key, Kind, Task
from mobius_ds.simulation.simulator import Cost, SimulationError, simulate

LINKS = ["a", "b", "c"]
KINDS = [Kind.FORWARD, Kind.WEIGHTS, Kind.ACTIVATIONS, Kind.GIVE_ACTIVATIONS]


@st.composite
def jobs(draw):
    """A schedule of up to 12 tasks on 2 GPUs, each after some earlier ones; their costs; the links' bandwidths."""
    tasks, costs = [], {}
    for number in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(KINDS))
        key = Key(kind, number, None)
        after = draw(st.lists(st.sampled_from([task.key for task in tasks]), max_size=3, unique=True)) if tasks else []
        tasks.append(Task(key, draw(st.integers(0, 1)), 0, tuple(after)))
        if kind is Kind.FORWARD:
            costs[key] = Cost(draw(st.integers(0, 5)) / 2)
        else:
            crossed = draw(st.lists(st.sampled_from(LINKS), min_size=1, max_size=2, unique=True))
            nbytes = draw(st.integers(0, 20))
            costs[key] = Cost(draw(st.sampled_from([0.0, 0.25])), tuple((link, float(nbytes)) for link in crossed))
    bandwidth = {link: float(draw(st.integers(1, 8))) for link in LINKS}
    return Schedule("random", 2, tuple(tasks)), costs, bandwidth


def play(job, factor=1.0):
    schedule, costs, bandwidth = job
    return simulate(schedule, lambda task: costs[task.key], {link: rate * factor for link, rate in bandwidth.items()})


@given(jobs())
@settings(max_examples=150, deadline=None)
def test_every_task_runs_once_after_what_it_waits_for_and_in_its_streams_order(job):
    schedule, costs, _ = job
    timeline = play(job)
    ended = {played.task.key: played for played in timeline.played}
    assert set(ended) == {task.key for task in schedule.tasks} and len(timeline.played) == len(schedule.tasks)
    last = {}
    for task in schedule.tasks:
        played = ended[task.key]
        assert played.seconds >= costs[task.key].seconds - 1e-9
        assert all(ended[key].end <= played.start + 1e-9 for key in task.after)
        place = (task.gpu, task.stream)
        assert place not in last or last[place] <= played.start + 1e-9
        last[place] = played.end
    assert timeline.makespan == max(played.end for played in timeline.played)


@given(jobs())
@settings(max_examples=150, deadline=None)
def test_no_link_carries_more_than_its_bandwidth_and_no_byte_is_lost(job):
    schedule, costs, bandwidth = job
    timeline = play(job)
    for link, rate in timeline.peak_rate.items():
        assert rate <= bandwidth[link] * (1 + 1e-9)
    carried = defaultdict(float)
    for task in schedule.tasks:
        for link, nbytes in costs[task.key].crossing:
            carried[link] += nbytes
    for link, nbytes in carried.items():
        assert nbytes <= bandwidth[link] * timeline.makespan * (1 + 1e-9)


@given(jobs())
@settings(max_examples=100, deadline=None)
def test_scaling_all_bandwidths_scales_a_job_of_transfers(job):
    schedule, costs, bandwidth = job
    transfers = {key: Cost(0.0, cost.crossing) for key, cost in costs.items()}
    slow = play((schedule, transfers, bandwidth))
    fast = play((schedule, transfers, bandwidth), factor=2.0)
    assert fast.makespan == pytest.approx(slow.makespan / 2, rel=1e-6, abs=1e-9)


@st.composite
def chains(draw):
    """Independent transfers, one per stream, over one shared link: nothing but sharing decides."""
    sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=8))
    tasks = [Task(Key(Kind.WEIGHTS, number), number, 0, ()) for number in range(len(sizes))]
    return Schedule("shared", len(sizes), tuple(tasks)), sizes


@given(chains(), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_transfers_over_one_link_share_it_equally(chain, bandwidth):
    schedule, sizes = chain
    timeline = simulate(schedule, lambda task: Cost(0.0, (("link", float(sizes[task.key.stage])),)),
                        {"link": float(bandwidth)})
    assert timeline.makespan == pytest.approx(sum(sizes) / bandwidth)
    ends = {played.task.key.stage: played.end for played in timeline.played}
    # With equal shares the smaller of two is done first, after as many bytes of every other as it has itself.
    for number, size in enumerate(sizes):
        assert ends[number] == pytest.approx(sum(min(size, other) for other in sizes) / bandwidth)


def test_a_wider_link_never_slows_a_pipeline():
    from mobius_ds.simulation.costs import bandwidths, mobius_costs
    from mobius_ds.schedule.plan import make_plan
    from mobius_ds.inputs.topology import preset
    from tests.planner.models import even_model, step_seconds
    profile, topology = even_model(layers=16), preset("3090ti-4-2+2")
    plan = make_plan(16, 4, stages=8)
    costs, before = mobius_costs(profile, topology, plan), float("inf")
    for factor in (0.5, 1.0, 1.5, 2.0, 4.0):
        links = {link: rate * factor for link, rate in bandwidths(topology).items()}
        seconds = step_seconds(profile, plan, microbatches=4, costs=costs, links=links)
        assert seconds <= before * (1 + 1e-9)
        before = seconds


def test_tasks_that_wait_in_a_circle_are_named():
    first, second = Key(Kind.FORWARD, 0, 0), Key(Kind.WEIGHTS, 0)
    schedule = Schedule("circle", 1, (Task(first, 0, 0, (second,)), Task(second, 0, 0, (first,))))
    with pytest.raises(SimulationError, match="circle: .*0F0"):
        simulate(schedule, lambda task: Cost(1.0), {})


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_link_without_bandwidth_is_refused(rate):
    with pytest.raises(SimulationError, match="must be positive"):
        simulate(Schedule("empty", 1, ()), lambda task: Cost(), {"link": rate})

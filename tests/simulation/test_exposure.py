"""Where the time of a step goes: by hand on a small schedule, and on random ones."""

import json

import pytest
from hypothesis import given, settings

from mobius_ds.inputs.topology import preset
from mobius_ds.prediction.mobius import predict_mobius
from mobius_ds.prediction.zero import predict_zero3_offload
from mobius_ds.schedule.plan import make_plan
from mobius_ds.schedule.tasks import Key, Kind, Stream, Task
from mobius_ds.simulation.chrome_trace import naming_lines, read_task, step_lines, task_line
from mobius_ds.simulation.costs import bandwidths, mobius_costs
from mobius_ds.simulation.exposure import Idle, figures, gaps, quartiles
from mobius_ds.simulation.simulator import Played, Timeline
from mobius_ds.simulation.steps import Spans, in_turn, measured_step, without_waiting
from tests.planner.models import even_model
from tests.simulation.test_simulator import jobs, play

FOUR = preset("3090ti-4-2+2")


def timeline(*played):
    """From (key, gpu, bytes, after, start, end)."""
    done = [Played(Task(Key.parse(key), gpu, nbytes, tuple(map(Key.parse, after.split()))), start, end)
            for key, gpu, nbytes, after, start, end in played]
    return Timeline(tuple(sorted(done, key=lambda one: one.end)), max(one.end for one in done), {})


BY_HAND = timeline(
    ("P0", 0, 4, "", 0.0, 1.0), ("0I0", 0, 4, "P0", 1.0, 2.0), ("0W", 0, 100, "", 0.0, 5.0),
    ("0F0", 0, 0, "0W 0I0", 5.0, 7.0), ("0S0", 0, 10, "0F0", 7.0, 8.0),
    ("1W", 1, 100, "", 0.0, 2.0), ("1A0", 1, 10, "0S0", 8.5, 10.0), ("1F0", 1, 0, "1W 1A0", 10.5, 12.0),
    ("1S0", 1, 10, "1F0", 12.0, 13.0), ("R0", 0, 10, "1S0", 13.0, 14.0))


def test_a_gap_is_exposed_only_while_all_that_is_lacking_is_being_copied():
    first, after_last, waits, tail = gaps(BY_HAND, 2)
    assert first == (0, Task(Key(Kind.FORWARD, 0, 0), 0, 0, (Key(Kind.WEIGHTS, 0), Key(Kind.INPUTS, 0, 0))),
                     {Idle.WEIGHTS: 5.0})
    # GPU 0 has computed all it had to at 7. Its copy out delays nobody: it waits for what is not made until 12.
    assert after_last.before is None and after_last.seconds == {Idle.NOTHING: 5.0, Idle.ACTIVATIONS: 2.0}
    # GPU 1's activation is made at 7, copied from 7 to 8 and from 8.5 to 10, and computed with at 10.5.
    assert waits.seconds == {Idle.NOTHING: 7.0, Idle.ACTIVATIONS: 2.5, Idle.RUNTIME: 1.0}
    assert tail.seconds == {Idle.OUTGOING: 1.0, Idle.NOTHING: 1.0}


def test_the_figures_of_a_step_by_hand():
    found = figures(in_turn([("forward", BY_HAND), ("forward", BY_HAND)], update_seconds=2.0), 2, root_of=[0, 0])
    assert (found.step_seconds, found.sweep_seconds, found.compute_seconds) == (30.0, 28.0, (4.0, 3.0))
    assert found.bubble == 1 - 7 / 56 and found.exposed_seconds == (14.0, 7.0)
    assert found.stages == ((0, 0, 10.0, 0.0), (1, 1, 0.0, 0.0))
    assert found.bytes_by_category == {"other": 16, "parameters_in": 400, "activations_out": 40, "activations_in": 40}
    rates, shares = zip(*found.bandwidth["in 1"])
    assert rates == pytest.approx((10 / 1.5, 10 / 1.5, 50, 50)) and shares == pytest.approx((1 / 22, 2 / 22, 12 / 22, 1))
    assert set(found.bandwidth) == {"in 0", "in 1", "out 0", "out 1", "root in 0", "root out 0"}
    assert quartiles(found.bandwidth["root in 0"]) == [20.0, 20.0, 50.0] and quartiles([]) == []
    assert found.as_json()["idle_seconds"]["nothing to do"] == [10.0, 16.0]


@given(jobs())
@settings(max_examples=100, deadline=None)
def test_every_moment_of_a_gpu_is_accounted_for_and_the_simulator_loses_none(job):
    played = play(job)
    if played.makespan:
        found = figures(in_turn([("random", played)]), 2)
        for gpu in range(2):
            told = found.compute_seconds[gpu] + sum(seconds[gpu] for seconds in found.idle_seconds.values())
            assert told == pytest.approx(played.makespan)
        assert sum(found.idle_seconds[Idle.RUNTIME]) == pytest.approx(0, abs=1e-9)
        assert found.bubble == pytest.approx(played.bubble(2))


def test_without_bytes_nothing_is_exposed_and_faster_links_expose_less():
    profile, plan = even_model(layers=12), make_plan(12, 4, layers_per_stage=1)
    slow = predict_mobius(profile, FOUR, plan).figures
    fast = figures(predict_mobius(profile, preset("4090-4-2+2"), plan).step, 4)
    free = predict_mobius(even_model(layers=12, weight_bytes=0, boundary_bytes=0), FOUR, plan)
    assert sum(fast.exposed_seconds) < sum(slow.exposed_seconds)
    assert max(free.figures.exposed_seconds) == 0 and free.bubble == free.figures.bubble > 0
    assert slow.idle_seconds[Idle.WEIGHTS] != (0,) * 4 and any(stage.forward for stage in slow.stages)
    # Where every GPU waits for the same links at the same time, nearly all the idle time is exposed.
    zero3 = predict_zero3_offload(profile, FOUR).figures
    assert sum(zero3.exposed_seconds) == pytest.approx(4 * zero3.sweep_seconds - sum(zero3.compute_seconds), rel=0.05)


def test_a_step_that_never_waited_is_the_same_without_waiting():
    profile, plan = even_model(layers=8), make_plan(8, 4, layers_per_stage=1)
    step = predict_mobius(profile, FOUR, plan).step
    again = without_waiting(step)
    assert again.seconds == pytest.approx(step.seconds)
    late = step._replace(parts=tuple(part._replace(timeline=Timeline(tuple(
        Played(task, 2 * start, 2 * start + (end - start)) for task, start, end in part.timeline.played), 0.0, {}))
        for part in step.parts))
    assert [part.timeline.makespan for part in without_waiting(late).parts] == \
        pytest.approx([part.timeline.makespan for part in step.parts])


def test_lines_of_a_step_are_read_back():
    step = predict_mobius(even_model(layers=8), FOUR, make_plan(8, 4, layers_per_stage=1)).step
    events = [json.loads(line) for line in [*naming_lines(4, "simulated: x", True), *step_lines(step, 5.0, 3)]]
    tasks = [read_task(event) for event in events if event["ph"] == "X" and event["cat"] != "step"]
    [whole] = [event for event in events if event.get("cat") == "step"]
    end = (whole["ts"] + whole["dur"]) / 1e6
    back = measured_step((Spans(name, number, [played]) for number, name, played in tasks), end)
    assert back.begin == pytest.approx(5.0) and back.seconds == pytest.approx(step.seconds)
    for was, is_ in zip(step.parts, back.parts):
        assert (is_.name, is_.begin) == (was.name, pytest.approx(was.begin))
        before, after = ({played.task: (played.start, played.end) for played in part.timeline.played} for part in (was, is_))
        assert set(before) == set(after) and all(after[task] == pytest.approx(before[task], abs=2e-9) for task in before)
    for event in (whole, {"name": "forward 0F0", "args": {}}, {"name": None, "args": {}}):
        with pytest.raises(ValueError, match="no task's"):
            read_task(event)
    assert '"bytes_per_s": null' in task_line(step.parts[0].timeline.played[-1].task, 1.0, 1.0, "forward", 1, None)


def test_bandwidth_of_the_plan_is_that_of_the_links():
    profile, plan = even_model(layers=8), make_plan(8, 4, layers_per_stage=1)
    found = figures(predict_mobius(profile, FOUR, plan).step, 4, FOUR.root_of)
    limits = bandwidths(FOUR)
    for (kind, number), limit in limits.items():
        points = found.bandwidth[f"{kind} {number}"]
        assert points[-1][1] == pytest.approx(1.0) and points[-1][0] <= limit * (1 + 1e-9)
        assert points == sorted(points)


def test_names_of_tasks_parse_back_and_ways_are_those_of_the_links():
    profile, plan = even_model(layers=8), make_plan(8, 4, layers_per_stage=1)
    cost = mobius_costs(profile, FOUR, plan)
    for _, played in predict_mobius(profile, FOUR, plan).sweeps:
        for task, *_ in played.played:
            assert Key.parse(str(task.key)) == task.key
            if task.stream is not Stream.COMPUTE:
                assert {link[0].split()[-1] for link, _ in cost(task).crossing} == {"out" if task.is_outward else "in"}
    for text in ("", "2", "F0F", "2Z0", "-1F0"):
        with pytest.raises(ValueError, match="no task's name"):
            Key.parse(text)

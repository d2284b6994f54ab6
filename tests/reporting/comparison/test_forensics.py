"""What is read from a trace, put into a report, and printed."""

import json
from dataclasses import asdict

import pytest

from mobius_ds import cli
from mobius_ds.inputs.topology import preset
from mobius_ds.names import TRACE_FILE
from mobius_ds.planner.plan_files import write
from mobius_ds.planner.planner import Request, make_best_plan
from mobius_ds.prediction.mobius import predict_mobius
from mobius_ds.reporting.comparison.arms import MOBIUS
from mobius_ds.reporting.comparison.forensics import SIMULATED_ARM, add_to_report
from mobius_ds.runtime.record.recorded_trace import Trace
from mobius_ds.runtime.record.trace import Description, HostClock, Recorder
from mobius_ds.runtime.record.trace_file import open_trace
from mobius_ds.schedule.plan import make_plan
from mobius_ds.schedule.tasks import CATEGORIES, Stream
from mobius_ds.simulation.chrome_trace import naming_lines, plan_line, step_lines, task_line, whole_step_line
from mobius_ds.simulation.steps import AGAIN
from tests.planner.models import even_model

FOUR = preset("3090ti-4-2+2")
LAYERS = 8
PLAN = make_plan(LAYERS, 4, layers_per_stage=1)
SIMULATED = predict_mobius(even_model(LAYERS), FOUR, PLAN).step
STRETCHES = (9.0, 1.5, 1.1, 1.2)
"""How many times as long as the simulated step each measured one takes, by waits between its tasks."""
DESCRIBED = {"layers": [f"blocks.{number}" for number in range(LAYERS)], "how": "by hand", "root_of": FOUR.root_of}


def lines_of(stretches, emulated, predicted):
    """What a job with these steps writes."""
    yield from naming_lines(4, "emulated" if emulated else "", simulated=False)
    yield plan_line({**asdict(PLAN), **DESCRIBED, "slowdown": 10.0 if emulated else None})
    if predicted:
        yield from naming_lines(4, f"simulated: {FOUR.name}", simulated=True)
        yield from step_lines(SIMULATED, 0.0, 1)
    begin = 0.0
    for step, stretch in enumerate(stretches, start=1):
        for number, part in enumerate(SIMULATED.parts):
            for task, start, end in part.timeline.played:
                begun = begin + stretch * (part.begin + start)
                yield task_line(task, begun, begun + end - start, part.name, 2 * step + number, step)
        for gpu in range(4):
            yield whole_step_line(step, begin + 0.001 * gpu, begin + stretch * SIMULATED.seconds, gpu)
        begin += stretch * SIMULATED.seconds


def recorded(path, stretches=STRETCHES, emulated=False, predicted=False):
    path.write_text("[\n" + ",\n".join(lines_of(stretches, emulated, predicted)))
    return path


def test_the_report_gets_the_median_step_the_simulated_one_and_the_plan(tmp_path):
    recorded(tmp_path / TRACE_FILE)
    report = {"timelines": {"zero3": "another's"}}
    add_to_report(report, tmp_path)
    assert json.loads(json.dumps(report)) == report
    assert report["plan"] == {**json.loads(json.dumps(asdict(PLAN))), "layers": DESCRIBED["layers"], "how": "by hand"}
    assert list(report["timelines"]) == ["zero3", MOBIUS, SIMULATED_ARM]
    assert list(report["figures"]) == [MOBIUS, SIMULATED_ARM]
    measured, simulated = (report["timelines"][arm] for arm in (MOBIUS, SIMULATED_ARM))
    assert measured["step"] == simulated["step"] == 4 and simulated["says"] == AGAIN and measured["says"] is None
    assert measured["seconds"] == pytest.approx(1.2 * SIMULATED.seconds, rel=1e-6)
    assert simulated["seconds"] == pytest.approx(measured["seconds"] - 0.2 * sum(
        part.timeline.makespan for part in SIMULATED.parts), rel=0.02)
    tasks = [played for part in SIMULATED.parts for played in part.timeline.played]
    assert len(measured["tasks"]) == len(simulated["tasks"]) == len(tasks)
    for gpu, stream, name, category, stage, microbatch, nbytes, start, end, sweep in measured["tasks"]:
        assert Stream(stream) and category in ("compute", *CATEGORIES)
        assert 0 <= start <= end <= measured["seconds"] + 1e-6 and sweep in ("forward", "backward")
    assert {(task[0], task[2], task[4], task[5], task[6]) for task in measured["tasks"]} == {
        (task.gpu, f"{task.key.kind.name.lower()} {task.key}", task.key.stage, task.key.microbatch, task.nbytes)
        for task, *_ in tasks}
    ours, ideal = (report["figures"][arm] for arm in (MOBIUS, SIMULATED_ARM))
    assert set(ours) >= {"step_seconds", "compute_seconds", "bubble", "exposed_seconds", "bandwidth", "stages"}
    assert ours["compute_seconds"] == pytest.approx(ideal["compute_seconds"]) and ours["bubble"] > ideal["bubble"] > 0
    assert sum(ours["idle_seconds"]["runtime"]) > 0.1 * ours["sweep_seconds"]
    assert sum(ideal["idle_seconds"]["runtime"]) == pytest.approx(0, abs=1e-6)
    assert {(stage["stage"], stage["gpu"]) for stage in ours["stages"]} == set(enumerate(PLAN.gpu_of_stage))
    assert ours["bandwidth"]["root in 1"][-1][1] == pytest.approx(1)


def test_a_predicted_step_is_taken_where_there_is_one_and_what_is_emulated_says_so(tmp_path, capsys):
    path = recorded(tmp_path / TRACE_FILE, emulated=True, predicted=True)
    report = {}
    add_to_report(report, tmp_path)
    assert report["timelines"][SIMULATED_ARM]["says"] == FOUR.name and report["timelines"][MOBIUS]["emulated"]
    assert report["timelines"][SIMULATED_ARM]["seconds"] == pytest.approx(SIMULATED.seconds)
    assert '"GPU 3 (emulated)"' in path.read_text()
    assert cli.main(["trace", str(path)]) == 0
    assert "step 4, emulated: " in capsys.readouterr().out


def test_a_step_simulated_for_a_slowed_down_server_is_written_on_its_clock(tmp_path, capsys):
    path = tmp_path / TRACE_FILE
    about = Description(4, PLAN.layers_per_stage, PLAN.gpu_of_stage, DESCRIBED["layers"], "by hand", FOUR.root_of, 100.0)
    recorder = Recorder(0, HostClock(), open_trace(str(path), 0, 1, lambda call, content: [content]), figures=False)
    recorder.describe(about, SIMULATED, FOUR.name)
    recorder.close()
    trace = Trace(path)
    simulated, says = trace.simulated(None)
    assert simulated.seconds == pytest.approx(100 * SIMULATED.seconds) and says == f"{FOUR.name}, 100 times slower"
    assert max(part.begin + part.timeline.makespan for part in simulated.parts) > 50 * SIMULATED.seconds
    assert trace.emulated
    assert cli.main(["trace", str(path)]) == 0
    assert f"slower): {100 * SIMULATED.seconds:.3f} s" in capsys.readouterr().out


def test_a_step_another_rank_has_not_finished_does_not_count(tmp_path):
    path = recorded(tmp_path / "trace.json")
    lines = path.read_text().splitlines()
    assert Trace(path).numbers == [1, 2, 3, 4]
    path.write_text("\n".join(lines[:-1]))
    assert Trace(path).numbers == [1, 2, 3] and Trace(path).representative == 3
    path.write_text("\n".join(lines[:-1])[:-40])
    assert Trace(path).numbers == [1, 2, 3]
    assert Trace(recorded(path, stretches=(2.0,))).representative == 1


def test_the_command_prints_where_the_time_went_and_draws_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    path, png = recorded(tmp_path / "trace.json"), tmp_path / "step.png"
    assert cli.main(["trace", str(path), "--step", "2", "--png", str(png)]) == 0
    told = capsys.readouterr().out
    figures = Trace(path).figures(Trace(path).step(2))
    assert f"step 2: {figures.step_seconds:.3f} s" in told and f"simulated ({AGAIN}): " in told
    assert f"bubble {figures.bubble:.0%}".replace("%", " %") in told and "│nothing│" in told.replace("┃", "│")
    rows = [line.split("│")[1:-1] for line in told.splitlines() if line.startswith(("│     3│", "│3 sim.│"))]
    assert [float(compute) for _, compute, *_ in rows] == pytest.approx([1e3 * figures.compute_seconds[3]] * 2, abs=0.1)
    assert [float(exposed) for *_, exposed in rows][0] == pytest.approx(1e3 * figures.exposed_seconds[3], abs=0.1)
    assert "more │" in told and "hidden" in told and "root out 1" in told  # stages whose weights nobody waited for
    assert png.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["trace", str(path), "--step", "5"]) == 1
    assert "step 5 is not in" in capsys.readouterr().out


def test_a_simulated_trace_is_read_as_well(tmp_path, capsys):
    plan, path = tmp_path / "plan.json", tmp_path / "trace.json"
    planned = make_best_plan(Request(even_model(LAYERS), FOUR, 4, "even"))
    write(planned, plan)
    assert cli.main(["simulate", str(plan), "--trace", str(path)]) == 0
    json.loads(path.read_text())
    assert cli.main(["trace", str(path)]) == 0
    assert f"simulated ({FOUR.name}): {planned.prediction().step_seconds:.3f} s" in capsys.readouterr().out
    assert cli.main(["trace", str(path), "--step", "1"]) == 1
    assert "it has a simulated one only" in capsys.readouterr().out.replace("\n", " ")

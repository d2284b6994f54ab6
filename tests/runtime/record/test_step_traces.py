"""What a traced job writes: every task of every rank and step, readable at any moment; and what it tells the monitors."""

import contextlib
import csv
import io
import itertools
import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
import torch
from deepspeed.utils import logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mobius_ds.names import CACHE_VARIABLE
from mobius_ds.runtime.record import trace, trace_file
from mobius_ds.runtime.record.recorded_trace import Trace
from mobius_ds.runtime.record.trace import LONGEST_EVALUATION, DeviceClock, HostClock, Recorder
from mobius_ds.runtime.record.trace_file import TraceFile, open_trace
from mobius_ds.schedule.tasks import Key, Kind, Task
from mobius_ds.simulation.chrome_trace import SIMULATED
from mobius_ds.simulation.steps import AGAIN
from tests.ranks import outcomes_of_ranks, run_ranks
from tests.runtime.jobs import config, endless, initialize, language_model, mine

MONITORS = ("bubble", "bytes_moved", "bytes_over_model_size", "compute_seconds", "exposed_seconds", "sweep_seconds")
STEPS = 4


def traced(path: Path, accumulation: int = 1, topology: Optional[str] = None, **sections: Any):
    settings = config(accumulation=accumulation, **sections)
    settings["mobius"].update(trace=str(path), topology=topology)
    return initialize(language_model(), settings)


def train(engine, steps: int) -> List[Dict[str, int]]:
    """Bytes that this rank moved in each step."""
    moved = []
    for step in range(steps):
        engine.backward(engine(*mine(step)).loss)
        engine.step()
        moved.append(engine.take_traffic())
    return moved


def several_engines(folder: Path) -> Dict[str, Any]:
    trace.LONGEST_EVALUATION = 3
    monitors = {name: {"enabled": True, "output_path": str(folder), "job_name": name}
                for name in ("csv_monitor", "tensorboard")}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        engine = traced(folder / "trace.json", wall_clock_breakdown=True, steps_per_print=2, **monitors)
        moved = train(engine, STEPS)
        engine.eval()
        with torch.no_grad():
            for number in range(5):
                engine(*mine(number))
        engine.destroy()
    batches = traced(folder / "trace.json", accumulation=2)
    batches.train_batch(endless())
    batches.train_batch(endless())
    batches.destroy()
    planned = traced(folder / "planned" / "trace.json", topology="3090ti-4-2+2")
    train(planned, 2)
    planned.destroy()
    return {"moved": moved, "printed": printed.getvalue()}


def events_of(path: Path) -> List[Dict[str, Any]]:
    """As the format says: a JSON array whose closing bracket may be missing."""
    return json.loads(path.read_text() + "]")


def check_format(events: List[Dict[str, Any]]) -> None:
    """What Perfetto needs of every event, and that the tasks of one thread come one after the other."""
    threads = defaultdict(list)
    named = set()
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["args"], dict)
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event.get("tid")))
        else:
            assert event["ph"] == "X" and event["dur"] >= 0 and event["ts"] >= 0 and isinstance(event["cat"], str)
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for (process, thread), spans in threads.items():
        assert ("process_name", process, None) in named and ("thread_name", process, thread) in named
        for (_, end), (start, _) in itertools.pairwise(sorted(spans)):
            assert start >= end - 0.002, f"two events of thread {thread} of process {process} overlap"  # rounded to ns


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    (folder / "trace.json").write_text("of an earlier job")
    return folder, run_ranks(2, several_engines, folder, env={CACHE_VARIABLE: str(folder / "plans")})


def test_every_task_of_every_rank_and_step_is_in_the_file_with_the_bytes_that_were_moved(job):
    folder, ranks = job
    events = events_of(folder / "trace.json")
    check_format(events)
    moved = defaultdict(int)
    evaluated, again, ends = 0, set(), {}
    for event in events:
        if event["ph"] == "X" and event["cat"] != "step":
            about = event["args"]
            if event["pid"] >= SIMULATED:
                again.add((event["name"], about["sweep"]))
                continue
            key = event["name"].split()[-1]
            ends[about["number"], key] = event["ts"] + event["dur"]
            evaluated += about["step"] is None and about["sweep"] == "evaluation"
            if event["cat"] != "compute" and about["step"] is not None:
                moved[event["pid"], about["step"], event["cat"]] += about["bytes"]
    for event in events:  # across ranks as well: one clock
        for key in event["args"].get("after", ()) if event["pid"] < SIMULATED else ():
            assert ends[event["args"]["number"], key] <= event["ts"] + 1
    for rank, result in enumerate(ranks):
        for step, by_category in enumerate(result["moved"], start=1):
            assert {category: moved[rank, step, category] for category in by_category} == by_category
    assert evaluated > 5 * 2 * 4
    trace_ = Trace(folder / "trace.json")
    assert trace_.numbers == [1, 2, 3, 4] and trace_.representative in (2, 3, 4) and not trace_.emulated
    assert trace_.simulated_says == AGAIN
    step = trace_.step(2)
    assert again == {(f"{played.task.key.kind.name.lower()} {played.task.key}", part.name)
                     for part in step.parts for played in part.timeline.played}
    assert trace_.plan["gpus"] == 2 and trace_.plan["layers"] == ["tokens", *(f"blocks.{n}" for n in range(4)), "norm"]
    assert sum(trace_.plan["layers_per_stage"]) == 6 and "even partition" in trace_.plan["how"]


def test_a_later_engine_of_the_process_has_a_file_of_its_own(job):
    folder, _ = job
    trace_ = Trace(folder / "trace-2.json")
    check_format(events_of(folder / "trace-2.json"))
    assert trace_.numbers == [1, 2] and sorted(path.name for path in folder.glob("*.json")) == ["trace-2.json", "trace.json"]
    forward, backward = ([played.task.key for played in part.timeline.played] for part in trace_.step(1).parts)
    assert {key.microbatch for key in forward} == {None, 0, 1, 2, 3} and any(key.kind is Kind.UPDATE for key in backward)


def test_a_planned_jobs_file_has_the_predicted_step_beside_the_measured_ones(job):
    folder, _ = job
    trace_ = Trace(folder / "planned" / "trace.json")
    check_format(events_of(folder / "planned" / "trace.json"))
    predicted, says = trace_.simulated(trace_.step(2))
    measured = trace_.figures(trace_.step(2))
    assert says == trace_.simulated_says == "3090ti-4-2+2 [0,1]" and trace_.plan["root_of"] == [0, 0]
    assert trace_.figures(predicted).bytes_by_category["parameters_in"] == measured.bytes_by_category["parameters_in"]
    assert predicted.seconds < trace_.step(2).seconds and {"root in 0", "root out 0"} < set(measured.bandwidth)


def test_monitors_and_the_log_get_the_same_figures(job):
    folder, ranks = job
    trace_ = Trace(folder / "trace.json")
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    columns = {}
    for name in MONITORS:
        rows = list(csv.reader((folder / "csv_monitor" / f"Train_Mobius_{name}.csv").open()))
        columns[name] = {int(samples): float(value) for samples, value in rows[1:]}
        assert columns[name] == {scalar.step: pytest.approx(scalar.value, rel=1e-5)
                                 for scalar in board.Scalars(f"Train/Mobius/{name}")}
    learning_rates = list(csv.reader((folder / "csv_monitor" / "Train_Samples_lr.csv").open()))[1:]
    assert list(columns["bubble"]) == [int(samples) for samples, _ in learning_rates] == [4 * n for n in range(1, STEPS + 1)]
    for step in trace_.numbers:
        figures = trace_.figures(trace_.step(step))
        assert columns["bytes_moved"][4 * step] == sum(sum(result["moved"][step - 1].values()) for result in ranks)
        assert columns["bubble"][4 * step] == pytest.approx(figures.bubble, abs=1e-3)
        assert columns["exposed_seconds"][4 * step] == pytest.approx(max(figures.exposed_seconds), abs=1e-5)
    told = [line for line in ranks[0]["printed"].splitlines() if "Mobius: step=" in line]
    assert [line.split("step=")[1].split(",")[0] for line in told] == ["2", "4"]
    assert "times the model size (parameters_in 42.50 KiB, gradients_out 21.25 KiB" in told[0] and "bubble" in told[0]
    assert "Mobius: step=" not in ranks[1]["printed"]


def run_full_then_die(folder: Path) -> None:
    told: List[str] = []
    logger.warning = told.append
    trace_file.LARGEST_FILE = 60_000  # some three steps
    engine = traced(folder / "full.json")
    train(engine, 8)
    engine.destroy()
    (folder / f"told{engine.global_rank}").write_text("\n".join(told))
    trace_file.LARGEST_FILE = 10**9
    engine = traced(folder / "killed.json")
    train(engine, 3)
    if engine.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    train(engine, 1)


def test_a_full_file_ends_with_one_word_and_a_killed_ranks_file_can_be_read(tmp_path):
    outcomes = outcomes_of_ranks(2, run_full_then_die, tmp_path)
    assert outcomes[1].exit_code == -signal.SIGKILL and "PeerLost" in outcomes[0].error
    assert (tmp_path / "full.json").stat().st_size < 60_000 + 5_000
    numbers = Trace(tmp_path / "full.json").numbers
    assert numbers == list(range(1, len(numbers) + 1)) and 1 <= len(numbers) < 8
    check_format(events_of(tmp_path / "full.json"))
    words = [(tmp_path / f"told{rank}").read_text() for rank in range(2)]
    assert words[0].count("is full (58.59 KiB)") == 1 and "training goes on" in words[0] and "is full" not in words[1]
    check_format(events_of(tmp_path / "killed.json"))
    assert Trace(tmp_path / "killed.json").numbers == [1, 2, 3]
    with (tmp_path / "killed.json").open("a") as file:
        file.write(',\n{"name": "forward 0F0", "cat": "comp')
    assert Trace(tmp_path / "killed.json").numbers == [1, 2, 3]
    with (tmp_path / "killed.json").open("a") as file:
        file.write(',\n{"name": "x", "ph": "M", "pid": 0, "args": {}}')
    assert Trace(tmp_path / "killed.json").step(3).gpus == 2


# The recorder alone.


def tasks(count: int) -> List[Task]:
    return [Task(Key(Kind.BACKWARD, stage, m), 0, 0, (Key(Kind.WEIGHTS, stage), Key(Kind.ACTIVATIONS, stage, m)))
            for stage in range(count // 4) for m in range(4)]


def test_a_task_costs_some_microseconds(tmp_path, record_property):
    """As measured in the processor time of a known piece of work that takes a tenth of a millisecond."""
    file = open_trace(str(tmp_path / "trace.json"), 0, 1, lambda call, content: [content])
    recorder, some = Recorder(0, HostClock(), file, figures=False), tasks(400)

    def step() -> float:
        begun = time.process_time()
        spans = recorder.begin("backward", 0)
        for task in some:
            start = recorder.mark()
            spans.append((task, start, recorder.mark()))
        recorder.end_step()
        return (time.process_time() - begun) / len(some)

    def known_work() -> float:
        begun = time.process_time()
        for _ in range(100):
            sum(number * number for number in range(2000))
        return (time.process_time() - begun) / 100

    seconds, unit = min((step(), known_work()) for _ in range(20))
    record_property("microseconds_a_task", seconds * 1e6)
    assert seconds < 0.2 * unit, f"{seconds * 1e6:.1f} microseconds a task"  # 100 tasks a rank in a step of 0.2 s: 1 %
    recorder.close()
    assert len(Trace(tmp_path / "trace.json").step(3).parts[0].timeline.played) == 400


def test_a_disk_without_room_ends_the_trace_and_not_the_training(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(logger, "warning", told.append)
    recorder = Recorder(1, HostClock(), TraceFile(Path("/dev/full"), 0.0, 10**6, 2), figures=True)
    for _ in range(2):
        recorder.begin("backward", 0).append((tasks(4)[0], 1.0, 2.0))
        ended = recorder.end_step()
    recorder.take([ended])
    recorder.close()
    assert recorder.last_step.parts[0].timeline.makespan == 1.0
    assert told == ["Mobius: the trace /dev/full cannot be written any more by rank 1 (No space left on device) and ends "
                    "before step 1; training goes on."]


def test_events_of_a_device_are_read_in_the_hosts_time(monkeypatch):
    class Event:
        """A device's clock runs in milliseconds from a time of its own."""
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            self.at = time.perf_counter() * 1e3 - 12345.0

        def synchronize(self) -> None:
            assert self.at is not None

        def elapsed_time(self, other: "Event") -> float:
            return other.at - self.at

    monkeypatch.setattr(trace, "get_accelerator", lambda: type("Accelerator", (), {"Event": Event}))
    clock = DeviceClock()
    for _ in range(2):
        before, mark, after = time.perf_counter(), clock.mark(), time.perf_counter()
        assert before - 1e-3 < clock.seconds(mark) < after + 1e-3
        clock.restart()
    recorder = Recorder(0, clock, None, figures=True)
    spans = recorder.begin("backward", 0)
    spans.append((tasks(4)[0], recorder.mark(), recorder.mark()))
    now = time.perf_counter()
    [(name, _, [played])] = recorder.end_step().sweeps
    recorder.close()
    assert name == "backward" and abs(played.start - now) < 0.1 and played.end >= played.start


def test_a_forward_without_a_backward_is_evaluation_and_is_not_kept():
    """Scripts evaluate with gradients on, thousands of times between two steps."""
    recorder = Recorder(0, HostClock(), None, figures=True)
    for number in range(3 * LONGEST_EVALUATION):
        recorder.begin("forward", number).append((tasks(4)[0], 1.0, 2.0))
    assert len(recorder._notes) <= LONGEST_EVALUATION
    for name in ("forward", "backward"):
        recorder.begin(name, 1000).append((tasks(4)[0], 3.0, 4.0))
    assert [sweep.name for sweep in recorder.end_step().sweeps] == ["forward", "backward"]
    recorder.close()


def test_a_line_that_the_disk_does_not_hold_whole_is_an_error(tmp_path, monkeypatch):
    file = open_trace(str(tmp_path / "trace.json"), 0, 1, lambda call, content: [content])
    monkeypatch.setattr(os, "write", lambda descriptor, written: len(written) // 2)
    with pytest.raises(OSError, match="No space left"):
        file.append(["{}"])
    file.close()

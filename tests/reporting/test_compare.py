"""``mobius-ds compare``: what it runs, and that nothing is left when it ends."""

import argparse
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from mobius_ds.reporting import compare
from mobius_ds.reporting.comparison import job, job_failure, series
from mobius_ds.reporting.comparison.arms import Failure
from mobius_ds.reporting.comparison.job import JobFailed
from mobius_ds.reporting.interruption import INTERRUPTED
from tests.reporting.comparison.test_report import record, traffic

CHECKOUT = Path(__file__).parents[2]
DS_CONFIGS = CHECKOUT / "ds_configs"

FAILING = "import sys; print('about to fail', flush=True); raise RuntimeError('the reason')"
SLEEPING = """
import os, pathlib, time
pathlib.Path({folder!r}, "pid" + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(300)
"""


def parse(*arguments):
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    return parser.parse_args([str(a) for a in arguments])


@pytest.mark.parametrize("arguments, reason", [
    (["--arms", "zero3,moebius"], "unknown arm 'moebius'"),
    (["--script", "nowhere.py"], "nowhere.py does not exist"),
    (["--script", DS_CONFIGS], "ds_configs is not a file"),
    (["--config", "nowhere.json"], "nowhere.json does not exist"),
    (["--ranks", "0"], "--ranks must be positive and finite, got 0"),
    (["--micro-batch", "-1"], "--micro-batch must be positive and finite, got -1"),
    (["--device-memory-gb", "nan"], "--device-memory-gb must be positive and finite, got nan"),
    (["--sweep", "ranks=1,64", "--wires", "4090-2", "--slowdown", "9"], "--wires 4090-2: cannot select GPUs"),
    (["--wires", "4090-2", "--slowdown", "inf"], "--slowdown must be positive and finite, got inf"),
    (["--wires", "4090-2"], "--wires and --slowdown go together"),
    (["--wires", "detect", "--slowdown", "9"], "links of a server that is not here: name a preset"),
    (["--wires", "dgx-9", "--slowdown", "9"], "--wires dgx-9: unknown topology"),
])
def test_wrong_arguments_are_named(arguments, reason, capsys):
    assert compare.main(parse(*arguments)) == 1
    assert reason in " ".join(capsys.readouterr().out.split())


def test_a_failing_script_shows_its_last_lines(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    status = compare.main(parse("--script", script, "--arms", "zero3", "--ranks", 2, "--out", tmp_path / "out"))
    output = capsys.readouterr().out
    assert status == 1
    said = " ".join(output.split())
    assert "the zero3 arm failed: RuntimeError: the reason. Logs are in" in said and "ended first, with exitcode 1" in said
    assert "about to fail" in output and "RuntimeError: the reason" in output
    assert "ChildFailedError" not in output
    assert processes_running(script) == []


def test_the_launcher_binds_a_port_itself(tmp_path):
    """One that is chosen before it starts may be another's when it does."""
    (arm, ), jobs = compare.comparison_of(parse("--arms", "zero3"), tmp_path)
    options = job._command(arm, jobs, tmp_path)
    assert "--standalone" in options and "--master_port" not in options
    assert options[options.index("--local-addr") + 1] == "127.0.0.1"  # also where this machine's name cannot be resolved


LAUNCHER = "Root Cause (first observed failure):\n rank : 0 (local)\n exitcode : {} (pid: 7)"


class Raised(NamedTuple):
    """An error that ended a rank, as its launcher records it."""

    error: str


def failed_job(folder, *ends, exitcode=1):
    """The folder of a job whose ranks raised errors or wrote words, and whose rank 0 ended first."""
    for rank, end in enumerate(ends):
        log = folder / "logs" / "run" / "attempt_0" / str(rank) / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"out of memory in passing\n{end}\na warning at exit")
        if isinstance(end, Raised):
            log.with_name("error.json").write_text(json.dumps({"message": {"message": f"{end.error}\nof two lines"}}))
    (folder / "launcher.log").write_text(LAUNCHER.format(exitcode))
    return folder


@pytest.mark.parametrize("error, because", [
    ("PeerLost: rank 1 is gone (ValueError: bad data) while rank 0 waited", "it lost rank 1"),
    ("PeerOutOfMemory: rank 1 is gone (it needs more)", "it lost rank 1"),
    ("PeerTimeout: rank 0 waited 9 s for stage 1 from rank 2; rank 1 is alive and waits for nobody: it is at x.py:7",
     "it waited too long for rank 1"),
    ("PeerTimeout: rank 0 waited 9 s for stage 1 from rank 1; rank 1 does not answer: its process is stopped",
     "it waited too long for rank 1"),
])
def test_the_rank_to_blame_is_shown_rather_than_the_one_that_heard_of_it(tmp_path, error, because):
    failed_job(tmp_path, Raised(error), "ValueError: bad data, in line 7")
    said = job_failure.failure_of(tmp_path)
    assert "rank 0 ended first" in said and error in said
    assert because in said.lower() and "bad data, in line 7" in said


@pytest.mark.parametrize("words, exitcode, expected", [
    ([Raised("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")], 1,
     ("OOM", "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")),
    ([Raised("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried")], 1,
     ("OOM", "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried")),
    ([Raised("RuntimeError: connection closed by peer"), Raised("DeviceOutOfMemory: rank 1: needs 3 GiB")], 1,
     ("OOM", "DeviceOutOfMemory: rank 1: needs 3 GiB")),
    ([Raised("PeerOutOfMemory: rank 1 is gone"), Raised("DeviceOutOfMemory: rank 1: needs 3 GiB")], 1,
     ("OOM", "DeviceOutOfMemory: rank 1: needs 3 GiB")),
    ([Raised("AssertionError: ZeRO-2 and ZeRO-3 are incompatible"), "out of memory? no"], 1,
     ("failed", "AssertionError: ZeRO-2 and ZeRO-3 are incompatible")),
    (["killed without a word"], -9,
     ("failed", "rank 0 was killed, as a system does with processes when its memory is used up")),
    (["usage: s.py [-h]\ns.py: error: --width 64 cannot be cut into 6 heads"], 2,
     ("failed", "s.py: error: --width 64 cannot be cut into 6 heads")),
    (["gone without a word"], 3, ("failed", "rank 0 ended with exitcode 3 (pid: 7)")),
])
def test_the_reason_is_one_sentence(tmp_path, words, exitcode, expected):
    assert job_failure.reason_of(failed_job(tmp_path, *words, exitcode=exitcode)) == expected


def test_a_killed_rank_is_named(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)")
    assert compare.main(parse("--script", script, "--arms", "zero3", "--ranks", 2, "--out", tmp_path / "out")) == 1
    assert "rank 1 ended first, with exitcode -9" in " ".join(capsys.readouterr().out.split())
    assert processes_running(script) == []


def test_a_script_that_trains_nothing_is_told_so(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("pass")
    assert compare.main(parse("--script", script, "--arms", "zero3", "--ranks", 1, "--out", tmp_path / "out")) == 1
    assert "no record of rank 0" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_leaves_no_process(tmp_path, number):
    script = tmp_path / "script.py"
    script.write_text(SLEEPING.format(folder=str(tmp_path)))
    job = subprocess.Popen(
        [sys.executable, "-m", "mobius_ds.cli", "compare", "--script", script, "--arms", "zero3", "--ranks", "2",
         "--out", tmp_path / "out"],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, stdout=subprocess.DEVNULL,
        # Tests started in the background inherit an ignored interrupt; a command at a terminal does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # yapf: disable
    try:
        pids = [wait_for_pid(tmp_path / f"pid{rank}") for rank in range(2)]
        job.send_signal(number)
        assert job.wait(timeout=30) == INTERRUPTED
    finally:
        job.kill()
    assert not any(map(psutil.pid_exists, pids))
    assert processes_running(script) == []


def test_script_arguments_pass_through():
    assert parse("--steps", 3, "--", "--layers", 2).script_args == ["--layers", "2"]


def test_the_small_gpt_names_a_width_that_its_heads_do_not_divide(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--width", "64"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(compare.DEFAULT_SCRIPT), run_name="__main__")
    assert "train_gpt.py: error: --width 64 cannot be cut into 6 heads; give a multiple" in capsys.readouterr().err


def hand_made(failures=(), memory=()):
    """Stands in for ``job.run``: records as in ``test_report``; some arms fail, some for want of memory."""
    def run(arm, jobs, console):
        started.append((arm.name, jobs.ranks, arm.steps, jobs.folder.name))
        if arm.name in (*failures, *memory):
            raise JobFailed(f"the {arm.name} arm failed", Failure("OOM" if arm.name in memory else "failed", "so it is"))
        bytes_moved = [traffic(4000, 2000, 5000)] * arm.steps
        predicted = bytes_moved if arm.name == "mobius" else None
        ranks = [record(rank, [1.0] * arm.steps, bytes_moved, [6000] * arm.steps, predicted) for rank in range(jobs.ranks)]
        return [{**rank, "step_seconds": [1.0] * arm.steps} for rank in ranks]

    started = run.started = []
    return run


def test_a_sweep_runs_all_arms_at_each_value(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(job, "run", hand_made(failures=["ddp"], memory=["zero2"]))
    arguments = ["--arms", "zero3,mobius,zero2,ddp", "--ranks", 2, "--steps", 9, "--sweep", "ranks=1,2,4", "--out", tmp_path]
    assert compare.main(parse(*arguments)) == 0
    arms = ["zero3", "mobius", "zero2", "ddp"]
    assert job.run.started == [*((name, 2, 9, "runs") for name in arms), *((name, 1, 4, "ranks-1") for name in arms),
                               *((name, 4, 4, "ranks-4") for name in arms)]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["failed"] == {"zero2": {"what": "OOM", "why": "so it is"}, "ddp": {"what": "failed", "why": "so it is"}}
    assert [point["value"] for point in report["sweep"]["points"]] == [1, 2, 4]
    assert [point["arms"]["zero3"]["delivered_bytes"] for point in report["sweep"]["points"]] == [6000, 12000, 24000]
    assert all(point["arms"]["zero2"] == {"why": "OOM: so it is"} for point in report["sweep"]["points"])
    assert str(tmp_path / "report.html") == capsys.readouterr().out.splitlines()[-1]


def test_an_emulated_server_has_a_rank_for_each_gpu_and_its_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(job, "run", hand_made())
    arguments = parse("--arms", "zero3,mobius", "--wires", "4090-4-2+2", "--slowdown", 9, "--out", tmp_path, "--steps", 1)
    assert compare.main(arguments) == 0
    assert {ranks for _, ranks, *_ in job.run.started} == {4}
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["emulated"]["topology"], report["emulated"]["slowdown"]) == ("4090-4-2+2", 9)
    assert "step time, s (emulated)" in capsys.readouterr().out

    arms, jobs = compare.comparison_of(arguments, tmp_path)
    assert jobs.server.topology.size == 4 and all(arm.config["mobius"]["topology"] == "4090-4-2+2" for arm in arms)


@pytest.mark.parametrize("failing, why", [({"memory": ["zero3"]}, "OOM: so it is"),
                                          ({"failures": ["zero3"]}, "failed: so it is")])
def test_only_in_a_point_of_a_sweep_may_zero3_fail(tmp_path, monkeypatch, capsys, failing, why):
    monkeypatch.setattr(job, "run", hand_made(**failing))
    arguments = parse("--arms", "zero3,mobius", "--steps", 1, "--sweep", "micro_batch=64", "--out", tmp_path)
    assert compare.main(arguments) == 1
    assert "the zero3 arm failed" in capsys.readouterr().out

    monkeypatch.setattr(job, "run", in_turn(hand_made(), hand_made(**failing)))
    assert compare.main(arguments) == 0
    (point, ) = json.loads((tmp_path / "report.json").read_text())["sweep"]["points"]
    assert point["arms"]["zero3"] == {"why": why} and point["arms"]["mobius"]["step_seconds"] == 1.0


def test_a_sweep_that_is_interrupted_leaves_the_comparison(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        os.kill(os.getpid(), signal.SIGTERM)  # as a job scheduler does

    monkeypatch.setattr(job, "run", in_turn(hand_made(), interrupted))
    arguments = parse("--arms", "zero3,mobius", "--steps", 1, "--sweep", "micro_batch=64", "--out", tmp_path)
    assert compare.main(arguments) == INTERRUPTED
    assert str(tmp_path / "report.html") in capsys.readouterr().out and (tmp_path / "report.html").stat().st_size
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["arms"]) == ["zero3", "mobius"] and "sweep" not in report


def test_a_sweep_over_ranks_keeps_what_each_rank_trains_on(tmp_path):
    config = {"zero_optimization": {"stage": 3}, "train_batch_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--config", tmp_path / "config.json", "--arms", "zero3", "--ranks", 4, "--out", tmp_path]
    points = compare._points(parse(*arguments, "--sweep", "ranks=1,2"), ranks=4)
    for there in points.values():
        assert there.arms[0].config == {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 4,
                                        "gradient_accumulation_steps": 1}


def in_turn(at_start, in_sweep):
    """Stands in for ``job.run``: one function for the comparison, one for its sweep's points."""
    return lambda arm, jobs, console: (at_start if jobs.folder.name == "runs" else in_sweep)(arm, jobs, console)


def test_all_arms_end_to_end(tmp_path, capsys):
    """In fp32, where losses have to be equal; ZeRO-2 in small buckets, so that only DDP needs too much memory."""
    config = json.loads((DS_CONFIGS / "gpt_offload.json").read_text())
    config["zero_optimization"]["reduce_bucket_size"] = 1_000_000
    config["gradient_accumulation_steps"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    arguments = ["--arms", "zero3,mobius,pipeline,zero2,ddp", "--config", tmp_path / "config.json", "--out", out]
    assert compare.main(parse(*arguments, "--device-memory-gb", 0.07, *SMALL_GPT)) == 0
    report = json.loads((out / "report.json").read_text())
    arms = report["arms"]
    assert list(arms) == ["zero3", "mobius", "pipeline", "zero2"]
    assert all(len(arm["losses"]) == report["steps"] == 2 for arm in arms.values())

    differences = report["comparison"]["loss_differences"]
    # The pipeline too, for Adam's first update takes no notice of how gradients are clipped.
    assert max(differences[name] for name in ("mobius", "pipeline", "zero2")) <= 1e-5

    assert [arms[name]["sweeps"] for name in ("zero3", "mobius", "pipeline")] == [2, 2, 1]
    report["sweep"] = {"over": "ranks", "points": [series.point(report["ranks"], arms, report["failed"])]}
    by_formula = {name: times for name, (times, ) in series.closed_forms(report).items()}
    # The parameters that a backward pass ends with are still there when the next microbatch begins with them.
    assert arms["zero3"]["traffic"]["delivered_over_model_size"] == pytest.approx(by_formula["zero3"], rel=0.08)
    assert arms["mobius"]["traffic"]["per_step_bytes"] == arms["mobius"]["predicted_traffic"]
    weights = sum(arms["mobius"]["traffic"]["per_step_bytes"][c] for c in ("parameters_in", "gradients_out"))
    assert weights == by_formula["mobius"] * report["model"]["model_size_bytes"]
    assert arms["pipeline"]["traffic"]["per_step_bytes"]["parameters_in"] == 0

    assert report["failed"]["ddp"]["what"] == "OOM" and "device_memory_gb" in report["failed"]["ddp"]["why"]
    assert report["plan"]["gpus"] == 2 and set(report["timelines"]) >= {"mobius", "mobius (simulated)"}
    for name in ("report.md", "report.html", "loss.png", "bytes.png", "step_time.png"):
        assert (out / name).stat().st_size > 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out / "report.html")


# Large enough that DeepSpeed's thresholds of the shipped config make it behave as a big model does.
SMALL_GPT = ["--ranks", "2", "--steps", "2", "--dtype", "fp32", "--", "--layers", "6", "--width", "256", "--heads", "4"]


def wait_for_pid(path):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.1)
    raise TimeoutError(f"{path.name} was not written in 60 s")


def processes_running(script):
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and str(script) in (process.info["cmdline"] or []):
            found.append(process.pid)
    return found

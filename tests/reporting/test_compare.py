"""``mobius-ds compare``: what it runs, and that nothing is left when it ends."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mobius_ds.reporting import compare

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


def test_default_arms_differ_as_promised():
    arms = {arm.name: arm for arm in compare.choose_arms(parse())}
    assert list(arms) == ["zero3", "mobius", "zero3-defaults"]
    original = json.loads((DS_CONFIGS / "gpt_offload.json").read_text())
    assert arms["zero3"].config == arms["mobius"].config == original
    assert (arms["zero3"].flag, arms["mobius"].flag, arms["zero3-defaults"].flag) == ("0", "1", "0")
    removed = set(original["zero_optimization"]) - set(arms["zero3-defaults"].config["zero_optimization"])
    assert removed == set(compare.SIZE_SETTINGS)
    assert arms["zero3"].steps == 20 and arms["zero3-defaults"].steps == 5


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_dtype_changes_nothing_else(dtype):
    (arm,) = compare.choose_arms(parse("--arms", "zero3", "--dtype", dtype))
    assert arm.config["bf16"] == {"enabled": dtype == "bf16"}
    original = json.loads((DS_CONFIGS / "gpt_offload.json").read_text())
    assert {**arm.config, "bf16": None} == {**original, "bf16": None}


def test_a_config_at_defaults_has_no_extra_arm(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    assert [arm.name for arm in compare.choose_arms(parse("--config", config))] == ["zero3", "mobius"]


@pytest.mark.parametrize("arguments, reason", [
    (["--arms", "zero3,moebius"], "unknown arm 'moebius'"),
    (["--script", "nowhere.py"], "nowhere.py does not exist"),
    (["--ranks", "0"], "must be positive"),
])
def test_wrong_arguments_are_named(arguments, reason, capsys):
    assert compare.main(parse(*arguments)) == 1
    assert reason in " ".join(capsys.readouterr().out.split())


def test_other_zero_stages_are_refused(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    with pytest.raises(compare.CompareError, match="only stage 3"):
        compare.choose_arms(parse("--config", config))


def test_a_failing_script_shows_its_last_lines(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    status = compare.main(parse("--script", script, "--arms", "zero3", "--ranks", 2, "--out", tmp_path / "out"))
    output = capsys.readouterr().out
    assert status == 1
    assert "ended first, with exitcode 1" in " ".join(output.split())
    assert "about to fail" in output and "RuntimeError: the reason" in output
    assert "ChildFailedError" not in output
    assert processes_running(script) == []


def test_the_rank_that_failed_is_shown_rather_than_the_one_that_heard_of_it(tmp_path):
    for rank, words in enumerate(("PeerLost: rank 1 is gone (ValueError: bad data)", "ValueError: bad data, in line 7")):
        log = tmp_path / "logs" / "run" / "attempt_0" / str(rank) / "stderr.log"
        log.parent.mkdir(parents=True)
        log.write_text(words)
    (tmp_path / "launcher.log").write_text("Root Cause (first observed failure):\n rank : 0 (local)\n exitcode : 1 (pid: 7)")
    said = compare.failure_of(tmp_path)
    assert "rank 0 ended first" in said and "lost rank 1" in said and "bad data, in line 7" in said


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
        assert job.wait(timeout=30) == compare.INTERRUPTED
    finally:
        job.kill()
    assert not any(map(psutil.pid_exists, pids))
    assert processes_running(script) == []


def test_broken_json_is_named(tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{")
    with pytest.raises(compare.CompareError, match="not valid JSON"):
        compare.choose_arms(parse("--config", config))


def test_script_arguments_pass_through():
    assert parse("--steps", 3, "--", "--layers", 2).script_args == ["--layers", "2"]


def test_both_arms_end_to_end(tmp_path):
    out = tmp_path / "out"
    assert compare.main(parse("--arms", "zero3,mobius", "--out", out, *SMALL_GPT)) == 0
    report = json.loads((out / "report.json").read_text())
    zero3, mobius = report["arms"]["zero3"], report["arms"]["mobius"]
    assert len(zero3["losses"]) == len(mobius["losses"]) == report["steps"] == 3
    assert report["comparison"]["max_loss_difference"] <= 1e-5
    # In fp32 weights and gradients are twice as wide as the model size reckons with.
    assert zero3["traffic"]["delivered_over_model_size"] == pytest.approx(2 * 1.5 * report["ranks"], rel=0.05)
    assert mobius["traffic"]["per_step_bytes"] == mobius["predicted_traffic"]
    weights = sum(mobius["traffic"]["per_step_bytes"][c] for c in ("parameters_in", "gradients_out"))
    assert weights == 2 * 1.5 * report["model"]["model_size_bytes"]
    for name in ("report.md", "loss.png", "bytes.png", "step_time.png"):
        assert (out / name).stat().st_size > 0


# Large enough that DeepSpeed's thresholds of the shipped config make it behave as a big model does.
SMALL_GPT = ["--ranks", "2", "--steps", "3", "--dtype", "fp32", "--", "--layers", "6", "--width", "256", "--heads", "4"]


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

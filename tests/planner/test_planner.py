"""Planning as a whole: plan files, the cache, predictions, and what cannot be planned."""

import contextlib
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from mobius_ds import cli
from mobius_ds.inputs.topology import preset
from mobius_ds.planner.plan_files import cached_plan, from_json, to_json, write
from mobius_ds.planner.planner import Request, make_best_plan
from mobius_ds.prediction.mobius import predict_mobius
from mobius_ds.prediction.pipelines import predict_gpipe
from mobius_ds.prediction.zero import predict_zero3_offload
from mobius_ds.reporting import script_profile
from mobius_ds.schedule.plan import InfeasiblePlan
from tests.planner.models import even_model

FOUR = preset("3090ti-4-2+2")


def request(**changes) -> Request:
    return dataclasses.replace(Request(even_model(layers=12, weight_bytes=2 * 10**8), FOUR, 4), **changes)


@pytest.mark.parametrize("strategy", ["mip", "max", "min", "even"])
def test_a_plan_file_holds_the_whole_plan(tmp_path, strategy):
    planned = make_best_plan(request(strategy=strategy))
    path = tmp_path / "plan.json"
    write(planned, path)
    again = from_json(path)
    assert again == planned
    data = json.loads(path.read_text())
    assert data["hash"] == again.request.content_hash()
    assert data["predicted"]["step_seconds"] == again.prediction().step_seconds
    assert sum(data["plan"]["layers_per_stage"]) == 12
    assert (data["gap"] is not None) == (strategy == "mip")


def test_the_mip_is_never_worse_than_the_rules():
    best = make_best_plan(request())
    assert all(best.prediction().sweep_seconds <= rule.seconds * 1.02 for rule in best.heuristics)
    assert 0 <= best.gap <= 0.01


def test_the_same_question_is_answered_once(tmp_path):
    asked = []

    def ask() -> Request:
        asked.append(request())
        return asked[-1]

    planned, read = cached_plan("question", ask, tmp_path)
    again, read_again = cached_plan("question", ask, tmp_path)
    assert (read, read_again) == (False, True) and again == planned and len(asked) == 1
    other, read = cached_plan("another", lambda: request(microbatches=8), tmp_path)
    assert not read and len(list(tmp_path.iterdir())) == 2
    (tmp_path / "question.json").write_text("{")
    repaired, read = cached_plan("question", ask, tmp_path)
    assert not read and repaired.plan == planned.plan and len(asked) == 2


@pytest.mark.parametrize("change, what", [
    (lambda data: data.update(format=0), "format 0"),
    (lambda data: data["plan"].update(layers_per_stage=[5, 5]), "10 in all, but the model has 12"),
    (lambda data: data["plan"].update(gpus=3), "there are 4 GPUs"),
    (lambda data: data.pop("request"), "not a plan file"),
])
def test_a_plan_file_that_does_not_fit_is_refused(change, what):
    data = to_json(make_best_plan(request(strategy="even")))
    change(data)
    with pytest.raises(ValueError, match=what):
        from_json(data)


def test_a_model_larger_than_dram_is_refused_with_what_is_missing():
    small = dataclasses.replace(FOUR, dram_bytes=10**9)
    with pytest.raises(InfeasiblePlan, match=r"needs 20.12 GiB of DRAM .* has 953.67 MiB: 19.19 GiB are missing"):
        make_best_plan(request(topology=small))


@pytest.mark.parametrize("strategy", ["mip", "max", "min", "even"])
def test_a_gpu_that_cannot_hold_one_layer_is_refused_with_what_is_missing(strategy):
    tiny = dataclasses.replace(FOUR, gpus=tuple(dataclasses.replace(gpu, memory_bytes=10**8) for gpu in FOUR.gpus))
    with pytest.raises(InfeasiblePlan, match=r"short|missing"):
        make_best_plan(request(topology=tiny, strategy=strategy))


def test_mobius_moves_one_and_a_half_times_the_model_and_zero3_one_and_a_half_times_n():
    profile = even_model(layers=12, boundary_bytes=1000)
    plan = make_best_plan(request(profile=profile, strategy="even")).plan
    moved = predict_mobius(profile, FOUR, plan).bytes_by_category
    assert moved["parameters_in"] + moved["gradients_out"] == 1.5 * profile.model_bytes
    assert sum(predict_zero3_offload(profile, FOUR).bytes_by_category.values()) == 1.5 * 4 * profile.model_bytes


def test_gpipe_is_out_of_memory_where_mobius_is_not():
    profile = even_model(layers=48, weight_bytes=4 * 10**8)  # 9.6 billion parameters
    gpipe = predict_gpipe(profile, FOUR)
    assert not gpipe.fits and gpipe.missing_bytes > 0
    assert predict_mobius(profile, FOUR, make_best_plan(request(profile=profile, strategy="even")).plan).fits


def test_plan_and_simulate_as_commands(tmp_path, capsys):
    path, trace, png = tmp_path / "plan.json", tmp_path / "trace.json", tmp_path / "step.png"
    assert cli.main(["plan", "--model", "gpt-3b", "--topology", "3090ti-4", "--strategy", "even", "--out", str(path)]) == 0
    told = capsys.readouterr().out
    assert "gpt-3b: 3.13 B parameters" in told and "zero3-offload" in told and "gpipe" in told and "contention" in told
    assert cli.main(["simulate", str(path), "--trace", str(trace), "--png", str(png)]) == 0
    events = json.loads(trace.read_text())
    computed = [event for event in events if event["ph"] == "X" and event["cat"] == "compute"]
    stages = from_json(path).plan.stages
    assert len(computed) == 2 * stages * 4 and all(event["dur"] >= 0 for event in computed)
    assert png.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()


def test_a_script_is_planned_by_its_own_first_forward(tmp_path, capsys, monkeypatch):
    with tempfile.TemporaryDirectory() as temporary:  # a short name, as sockets lie there
        monkeypatch.setenv("TMPDIR", temporary)
        plan_script(tmp_path, capsys)
        assert not list(Path(temporary).glob("torchelastic*"))


def plan_script(tmp_path, capsys):
    root, path = Path(__file__).parents[2], tmp_path / "plan.json"
    script, config = root / "comparisons" / "train_gpt.py", root / "ds_configs" / "gpt_offload.json"
    assert cli.main(["plan", "--script", str(script), "--config", str(config), "--topology", "3090-2", "--strategy", "even",
                     "--out", str(path), "--", "--layers", "3", "--width", "32", "--heads", "2"]) == 0
    profile = from_json(path).request.profile
    assert len(profile.layers) == 5 and all(layer.name.startswith("Block") for layer in profile.layers[1:-1])
    assert profile.layers[1].weight_bytes == 2 * (12 * 32 * 32 + 13 * 32)  # bf16, as the config says
    empty = tmp_path / "empty.py"
    empty.write_text("print('nothing to see')")
    capsys.readouterr()
    assert cli.main(["plan", "--script", str(empty), "--config", str(config), "--topology", "3090-2"]) == 1
    assert "without a forward that could be profiled" in capsys.readouterr().out


def test_a_script_that_does_not_come_to_its_first_forward_is_stopped_with_its_ranks(tmp_path, monkeypatch):
    launcher = tmp_path / "python"  # with a rank that does not heed a request to end
    launcher.write_text(f"#!/bin/sh\n(trap '' TERM; sleep 60) & echo $! > {tmp_path}/rank; echo loading; wait\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    monkeypatch.setattr(script_profile, "LIMIT_SECONDS", 3.0)
    monkeypatch.setattr(script_profile, "GRACE_SECONDS", 0.5)
    with pytest.raises(ValueError, match="was stopped after 3 s without a forward that could be profiled:\nloading"):
        script_profile.profile_of_script(tmp_path / "script.py", tmp_path / "config.json", [])
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int((tmp_path / "rank").read_text())).status() == psutil.STATUS_ZOMBIE


def test_what_cannot_be_planned_is_one_error(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    trace.write_text("[]")
    assert cli.main(["plan", "--model", "gpt-9b", "--topology", "3090ti-4"]) == 1
    assert cli.main(["plan", "--model", "gpt-8b", "--topology", "3090ti-5"]) == 1
    assert cli.main(["simulate", str(trace)]) == 1
    told = capsys.readouterr().out
    assert "gpt-8b" in told and "unknown topology '3090ti-5'" in told and "not a plan file" in told

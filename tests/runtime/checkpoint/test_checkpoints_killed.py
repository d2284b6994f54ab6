"""Saves that are killed or fail, and checkpoints that are damaged: the previous one loads, and errors say what is wrong."""

import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch

from mobius_ds.runtime.checkpoint import checkpoint_files
from tests.features import refused, works
from tests.ranks import outcomes_of_ranks, run_ranks
from tests.runtime.checkpoint.checkpoint_jobs import ADAMW, model_of, scrambled, start, train
from tests.runtime.jobs import config, failure, initialize, rank_and_size, weights

CALLS = ("fsync", "rename", "replace", "mkdir")
"""Between any two of these a save can be killed."""


def killed_at(point: int, function: Callable[[], Any]) -> int:
    """Runs a function in a fork that dies, by SIGKILL, at its ``point``-th call to the disk. Returns the wait status."""
    child = os.fork()
    if child == 0:
        left = [point]

        def counted(original):
            def call(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)
            return call

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def every_kill(folder: str, tags: List[str], exchange: bool) -> Dict[str, Any]:
    """Kills a save at every point. What is the latest afterwards must be whole: the old one or the new one.

    Args:
        tags: of the save before and of the one that is killed.
        exchange: whether the file system swaps folders at once.
    """
    if not exchange:
        checkpoint_files._exchange = lambda first, second: False
    engine = initialize(model_of(blocks=1, frozen=1), config(optimizer=ADAMW))
    engine.save_checkpoint(folder, tags[0], client_state={"number": 0})
    old = weights(engine.module)
    train(engine, 0, 1)
    new = weights(engine.module)
    seen, wrong, point = [], [], 0
    while True:
        status = killed_at(point, lambda: engine.save_checkpoint(folder, tags[1], client_state={"number": 1}))
        left = [path.name for path in Path(folder).iterdir() if path.name.startswith(".")]
        for parameter in engine.module.parameters():
            parameter.data.zero_()
        _, client = engine.load_checkpoint(folder)
        seen.append(client["number"])
        expected = new if client["number"] else old
        wrong += [point for name, tensor in weights(engine.module).items() if not torch.equal(tensor, expected[name])]
        if status == 0:
            break
        assert os.WIFSIGNALED(status), status
        # The next save starts from what the kill has left; put the model and the old checkpoint back.
        for name, parameter in engine.module.named_parameters():
            parameter.data.copy_(new[name])
        if client["number"]:
            for name, parameter in engine.module.named_parameters():
                parameter.data.copy_(old[name])
            engine.save_checkpoint(folder, tags[0], client_state={"number": 0})
            for name, parameter in engine.module.named_parameters():
                parameter.data.copy_(new[name])
            if tags[0] != tags[1]:
                shutil.rmtree(Path(folder) / tags[1])
        point += 1
    engine.destroy()
    return {"points": point, "wrong": wrong, "last": seen[-1], "first": seen[0], "left": left,
            "folders": sorted(path.name for path in Path(folder).iterdir())}


@works("Checkpoints", "a save killed at any moment: the previous checkpoint loads")
@pytest.mark.parametrize("tags,exchange", [(["first", "second"], True), (["same", "same"], True), (["same", "same"], False)])
def test_a_save_killed_at_any_point_leaves_a_whole_checkpoint(tags, exchange, tmp_path):
    [result] = run_ranks(1, every_kill, str(tmp_path), tags, exchange, timeout=200)
    assert result["points"] > 30 and result["wrong"] == []
    assert result["first"] == 0 and result["last"] == 1 and result["left"] == []
    assert result["folders"] == sorted({*tags, "latest", "latest_universal", "zero_to_fp32.py"})


def rank_killed(folder: str, victims: List[int], point: int) -> None:
    """A job of which some ranks are killed in the middle of writing their part."""
    engine = start(True, model_of())
    train(engine, 0, 1)
    engine.save_checkpoint(folder, client_state={"number": 1})
    train(engine, 1, 1)
    write, left = checkpoint_files.write_tensors, [point]

    def write_or_die(path, content):
        left[0] -= 1
        if left[0] < 0 and rank_and_size()[0] in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, content)

    checkpoint_files.write_tensors = write_or_die
    engine.save_checkpoint(folder, client_state={"number": 2})


def resumed(folder: str) -> Dict[str, Any]:
    engine = start(True, scrambled(model_of()))
    _, client = engine.load_checkpoint(folder)
    losses = train(engine, 1, 1)
    engine.save_checkpoint(folder)
    engine.destroy()
    return {"number": client["number"], "losses": losses}


@pytest.mark.parametrize("victims", [[1], [0], [0, 1]])
def test_ranks_killed_while_they_write_leave_the_previous_checkpoint(victims, tmp_path):
    outcomes = outcomes_of_ranks(2, rank_killed, str(tmp_path), victims, 7)
    for rank, outcome in enumerate(outcomes):
        if rank in victims:
            assert outcome.exit_code == -signal.SIGKILL
        else:
            assert "PeerLost" in outcome.error and f"rank {victims[0]} is gone" in outcome.error
    assert any(path.name.startswith(".mobius-saving-") for path in tmp_path.iterdir())
    results = run_ranks(2, resumed, str(tmp_path))
    assert all(result["number"] == 1 for result in results)
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


def unwritable(folder: str) -> Dict[str, Any]:
    """One rank's disk is full, or the folder cannot be made; the job goes on."""
    engine = start(True, model_of())
    train(engine, 0, 1)
    engine.save_checkpoint(folder, "good")
    before = {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}
    train(engine, 1, 1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank_and_size()[0] == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    errors = {"full": failure(lambda: engine.save_checkpoint(folder, "good"))}
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    engine.pipeline.step("both are here", None)
    after = {path: path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}
    engine.pipeline.step("both have looked", None)
    Path(folder, "a file").touch()
    errors["no folder"] = failure(lambda: engine.save_checkpoint(f"{folder}/a file"))
    errors["cannot be pickled"] = failure(lambda: engine.save_checkpoint(folder, "good", {"open": open(os.devnull)}))
    for tag in ("", "..", "."):
        errors[f"tag {tag!r}"] = failure(lambda: engine.save_checkpoint(folder, tag))
    errors["tags"] = failure(lambda: engine.save_checkpoint(folder, f"of rank {rank_and_size()[0]}"))
    engine.pipeline.step("both are here again", None)
    left = sorted(path.name for path in Path(folder).iterdir())
    losses = train(engine, 2, 1)
    engine.destroy()
    straight = start(True, model_of())
    expected = train(straight, 0, 3)[-1:]
    straight.destroy()
    return {"errors": errors, "untouched": before == after, "left": left, "same": losses == expected}


def test_a_rank_that_cannot_write_is_everyones_error_and_changes_nothing(tmp_path):
    results = run_ranks(2, unwritable, str(tmp_path))
    for result in results:
        assert result["untouched"] and result["same"]
        assert result["left"] == ["a file", "good", "latest", "latest_universal", "of rank 0", "zero_to_fp32.py"]
        errors = result["errors"]
        assert errors == {**results[0]["errors"], "tags": errors["tags"]}
        assert errors["full"].startswith("CheckpointError: save_checkpoint failed on rank 1: OSError: [Errno 27]")
        assert "save_checkpoint failed on rank 0: FileExistsError" in errors["no folder"]
        assert "cannot pickle" in errors["cannot be pickled"]
        assert all("names no folder inside" in errors[f"tag {tag!r}"] for tag in ("", "..", "."))
        assert errors["tags"] == "nothing was raised"  # a warning, as in DeepSpeed


def without(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def not_loaded(folder: str) -> Dict[str, str]:
    """What loading a damaged checkpoint, or one of another model, raises; and whether the model was left alone."""
    base = Path(folder) / "base"
    engine = start(True, model_of())
    train(engine, 0, 1)
    engine.save_checkpoint(str(base))
    engine.destroy()
    results = {}

    def attempt(case: str, damage: Callable[[Path], Any], model: Callable[[], Any] = model_of, **options: Any) -> None:
        here = Path(folder) / case
        engine = start(True, model())
        if rank_and_size()[0] == 0:
            shutil.copytree(base, here)
            damage(here / "global_step1")
        engine.pipeline.step("damaged", None)
        before = weights(engine.module)
        error = failure(lambda: engine.load_checkpoint(str(here), **options))
        same = all(torch.equal(tensor, before[name]) for name, tensor in weights(engine.module).items())
        engine.pipeline.step("compared", None)
        engine.destroy()
        results[case] = error + ("" if same else " AND THE MODEL WAS CHANGED")

    weight = "zero/blocks.2.up.weight"
    attempt("missing weight", lambda at: without(at / weight / "fp32.pt"))
    attempt("missing moment", lambda at: without(at / weight / "exp_avg_sq.pt"))
    attempt("cut moment", lambda at: cut(at / weight / "exp_avg.pt"))
    attempt("cut states", lambda at: [cut(path) for path in at.glob("*model_states.pt")])
    attempt("cut mark", lambda at: cut(at / "mobius.json"))
    attempt("no optimizer", lambda at: without(at / "zero" / "optimizer_state.pt"))
    attempt("later format", lambda at: (at / "mobius.json").write_text('{"format": 9}'))
    attempt("more layers", lambda at: None, lambda: model_of(blocks=5))
    attempt("fewer layers", lambda at: None, lambda: model_of(blocks=3))
    attempt("empty", lambda at: [shutil.rmtree(at), at.mkdir()])
    attempt("gone", lambda at: shutil.rmtree(at))
    attempt("custom", lambda at: None, custom_load_fn=print)
    attempt("replaced", lambda at: torch.save({"param": torch.zeros(3, 3)}, at / weight / "fp32.pt"))
    return results


@refused("Checkpoints", "a damaged checkpoint, or one of another model", "does not fit the model")
@refused("Checkpoints", "custom_load_fn", "custom_load_fn is not supported under Mobius")
def test_what_cannot_be_loaded_is_named_on_every_rank_before_the_model_changes(tmp_path):
    results = run_ranks(2, not_loaded, str(tmp_path), timeout=200)
    assert results[0] == results[1]
    for case, words in {
        "missing weight": "it lacks 'blocks.2.up.weight'",
        "missing moment": "zero/blocks.2.up.weight/exp_avg_sq.pt is missing: the checkpoint is not complete",
        "cut moment": "zero/blocks.2.up.weight/exp_avg.pt cannot be read", "cut states": "model_states.pt cannot be read",
        "cut mark": "mobius.json cannot be read", "no optimizer": "optimizer_state.pt is missing",
        "later format": "is of format 9, and this mobius_ds reads format 1",
        "more layers": "it lacks 'blocks.4.", "fewer layers": "it has 'blocks.3.down.bias', which the model lacks",
        "empty": "is neither a Universal Checkpoint nor one of ZeRO-3", "gone": "there is no checkpoint",
        "custom": "custom_load_fn is not supported under Mobius",
        "replaced": "its checksum is not the one in mobius.json",
    }.items():
        assert words in results[0][case], (case, results[0][case])
        assert "AND THE MODEL" not in results[0][case], case
        assert "failed on rank" in results[0][case] or case == "custom"

"""Checkpoints that are damaged, incomplete or another job's, and places where none can be."""

import os
import resource
import shutil
import signal
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple

import torch

from tests.bad_input.cases import Case, check
from tests.features import survives
from tests.ranks import run_ranks
from tests.runtime.checkpoint.checkpoint_jobs import model_of, scrambled, start, train
from tests.runtime.jobs import failure, mine, rank_and_size, weights

SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
STEP = "global_step1"
WEIGHT = f"{STEP}/zero/blocks.2.up.weight"
MARK = f"{STEP}/mobius.json"


class Damage(NamedTuple):
    """Something done to a copy of a checkpoint."""

    do: Callable[[Path], Any]
    source: str = "mobius"
    sections: Dict[str, Any] = {}
    """Of the job that loads it."""


def flipped(pattern: str) -> Damage:
    """One bit in the middle of files."""
    def flip(folder: Path) -> None:
        for path in folder.glob(pattern):
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    return Damage(flip)


def cut(pattern: str, source: str = "mobius") -> Damage:
    return Damage(lambda folder: [path.write_bytes(path.read_bytes()[:-500]) for path in folder.glob(pattern)], source)


def gone(pattern: str, source: str = "mobius") -> Damage:
    return Damage(lambda folder: [path.unlink() for path in folder.glob(pattern)], source)


def written(path: str, content: bytes) -> Damage:
    return Damage(lambda folder: (folder / path).write_bytes(content))


def empty_shard(folder: Path) -> None:
    torch.save({}, next(folder.glob(f"{STEP}/zero_pp_rank_1_*optim_states.pt")))


def nothing(folder: Path) -> None:
    """The checkpoint is whole."""


CHECKSUM = "its checksum is not the one in mobius.json. It was damaged or replaced after it was saved"
INCOMPLETE = "is missing: the checkpoint is not complete. Load another one"
DAMAGED = [
    Case("latest names nothing", written("latest", b"global_step9"), "global_step9; "),
    Case("latest is empty", written("latest", b""), "latest is empty: it was cut short. Pass the tag"),
    Case("latest is no text", written("latest", b"\xff\xfe"), "Pass the tag of one that is there"),
    Case("a bit of a weight", flipped(f"{WEIGHT}/fp32.pt"), f"fp32.pt cannot be read: {CHECKSUM}"),
    Case("a bit of a moment", flipped(f"{WEIGHT}/exp_avg.pt"), f"exp_avg.pt cannot be read: {CHECKSUM}"),
    Case("a bit of a step", flipped(f"{WEIGHT}/step.pt"), f"step.pt cannot be read: {CHECKSUM}"),
    Case("a bit of the optimizer", flipped(f"{STEP}/zero/optimizer_state.pt"),
         f"optimizer_state.pt cannot be read: {CHECKSUM}"),
    Case("a bit of the model states", flipped(f"{STEP}/*model_states.pt"), f"model_states.pt cannot be read: {CHECKSUM}"),
    Case("a moment in place of the other", Damage(lambda folder: shutil.copy(folder / WEIGHT / "exp_avg.pt",
                                                                             folder / WEIGHT / "exp_avg_sq.pt")), CHECKSUM),
    Case("a weight cut short", cut(f"{WEIGHT}/fp32.pt"), "fp32.pt cannot be read"),
    Case("a weight that is none", written(f"{WEIGHT}/fp32.pt", b"hello"), "fp32.pt cannot be read"),
    Case("a moment gone", gone(f"{WEIGHT}/exp_avg_sq.pt"), f"exp_avg_sq.pt {INCOMPLETE}"),
    Case("a weight gone", gone(f"{WEIGHT}/fp32.pt"), "it lacks 'blocks.2.up.weight'"),
    Case("all model states gone", gone(f"{STEP}/*model_states.pt"), f"model_states.pt {INCOMPLETE}"),
    Case("a rank's file gone", gone(f"{STEP}/zero_pp_rank_1_*"), f"zero_pp_rank_1_mp_rank_00_model_states.pt {INCOMPLETE}"),
    Case("a mark that is no JSON", written(MARK, b"{"), "mobius.json cannot be read"),
    Case("a mark that is a list", written(MARK, b"[]"), "mobius.json cannot be read"),
    Case("a mark with nothing in it", written(MARK, b'{"format": 1}'), "mobius.json cannot be read"),
    Case("of a later format", written(MARK, b'{"format": 9}'), "is of format 9, and this mobius_ds reads format 1"),
    Case("of another optimizer", Damage(nothing, "sgd"), "is momentum_buffer, and AdamW goes on from exp_avg, exp_avg_sq"),
    Case("of Adam for SGD", Damage(nothing, "mobius", {"optimizer": SGD}), "and SGD goes on from momentum_buffer"),
    Case("of a deeper model", Damage(nothing, "deeper"), "it has 'blocks.4.down.bias', which the model lacks"),
    Case("of a wider model", Damage(nothing, "wider"), "is of shape (40,"),
    Case("a shard of ZeRO-3 gone", gone(f"{STEP}/zero_pp_rank_1_*optim_states.pt", "zero3"),
         "was written by 2 ranks, and the shards of ranks [1] are missing"),
    Case("a shard of ZeRO-3 cut short", cut(f"{STEP}/zero_pp_rank_1_*optim_states.pt", "zero3"),
         "optim_states.pt cannot be read"),
    Case("a shard of ZeRO-3 with nothing in it", Damage(empty_shard, "zero3"), "does not hold what DeepSpeed or Mobius"),
    Case("no shards of ZeRO-3", gone(f"{STEP}/*optim_states.pt", "zero3"),
         "is neither a Universal Checkpoint nor one of ZeRO-3"),
]
"""Of checkpoints; the words come with the rank that met it."""


AS_IT_WAS = "The checkpoint that 'latest' names is as it was. Mend the cause, or name another save_dir, and save again."
CALLS = [
    Case("a tag that is not there", lambda engine, at: engine.load_checkpoint(f"{at}/mobius", "nope"),
         "mobius has global_step1"),
    Case("a folder that is a file", lambda engine, at: engine.load_checkpoint(f"{at}/mobius/latest", "a"),
         "latest has none"),
    Case("no folder to load", lambda engine, at: engine.load_checkpoint(None),
         "load_dir must be a non-empty string, got None"),
    Case("no folder to save", lambda engine, at: engine.save_checkpoint(""),
         "save_dir must be a non-empty string, got ''"),
    Case("a read-only place", lambda engine, at: engine.save_checkpoint("/proc/nothing"), AS_IT_WAS),
    Case("a place under a file", lambda engine, at: engine.save_checkpoint(f"{at}/mobius/latest/x"), AS_IT_WAS),
    Case("a tag outside", lambda engine, at: engine.save_checkpoint(f"{at}/new", "../x"), "names no folder inside"),
    Case("a tag from the root", lambda engine, at: engine.save_checkpoint(f"{at}/new", "/x"), "names no folder inside"),
    Case("a tag too long", lambda engine, at: engine.save_checkpoint(f"{at}/new", "a" * 300), "File name too long"),
    Case("a state that cannot be saved",
         lambda engine, at: engine.save_checkpoint(f"{at}/new", "a", {"file": open(os.devnull)}), AS_IT_WAS),
    Case("a full disk", lambda engine, at: on_a_full_disk(lambda: engine.save_checkpoint(f"{at}/mobius", STEP)),
         "save_checkpoint failed on rank 1: OSError: [Errno 27] File too large"),
]
"""Of an engine, given the folder of the checkpoints."""


def on_a_full_disk(function: Callable[[], Any]) -> None:
    """One rank can write no file of more than a thousand bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank_and_size()[0] == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        function()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def wider_model() -> torch.nn.Module:
    model = model_of()
    model.blocks[1].up, model.blocks[1].down = torch.nn.Linear(16, 40), torch.nn.Linear(40, 16)
    return model


def every_checkpoint(folder: str) -> Dict[str, Any]:
    """What loading and saving say, what they have changed, and whether the job can go on."""
    at = Path(folder)
    jobs = {"mobius": (True, model_of, {}), "zero3": (False, model_of, {}), "sgd": (True, model_of, {"optimizer": SGD}),
            "deeper": (True, lambda: model_of(blocks=5), {}), "wider": (True, wider_model, {})}
    for name, (mobius, model, sections) in jobs.items():
        engine = start(mobius, model(), **sections)
        train(engine, 0, 1)
        engine.save_checkpoint(str(at / name))
        engine.destroy()
    said, changed = {}, []
    for number, case in enumerate(DAMAGED):
        engine = start(True, model_of(), **case.input.sections)
        if engine.global_rank == 0:
            shutil.copytree(at / case.input.source, at / str(number))
            case.input.do(at / str(number))
        engine.pipeline.step("damaged", None)
        before = weights(engine.module)
        said[case.what] = failure(lambda: engine.load_checkpoint(str(at / str(number))))
        engine.pipeline.step("loaded", None)
        changed += [case.what for name, tensor in weights(engine.module).items() if not torch.equal(tensor, before[name])]
        engine.pipeline.step("compared", None)
        engine.destroy()
    engine = start(True, model_of())
    engine.load_checkpoint(str(at / "mobius"))
    before = contents(at)
    for case in CALLS:
        said[case.what] = failure(lambda: case.input(engine, folder))
        engine.pipeline.step("called", None)
    same = contents(at) == before
    losses = train(engine, 1, 1)
    engine.destroy()
    return {"said": said, "changed": changed, "files are as they were": same, "losses": losses}


def contents(folder: Path) -> Dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@survives("Bad input", "a checkpoint with a flipped bit, a file cut short, gone or in another's place",
          "refused by the name of the file, on every rank, before the model changes: mobius.json has each file's checksum")
@survives("Bad input", "a checkpoint of another model, another optimizer or a later format",
          "refused on every rank before the model changes")
@survives("Bad input", "a disk that is full or read-only, or a tag that is no name",
          "one error on every rank; no half checkpoint is left, the one before is untouched, and the job goes on")
def test_checkpoints(tmp_path):
    results = run_ranks(2, every_checkpoint, str(tmp_path), timeout=200)
    check(DAMAGED + CALLS, [result["said"] for result in results])
    for result in results:
        assert result["changed"] == [] and result["files are as they were"]
        assert result["losses"] == results[0]["losses"]
    for case in DAMAGED:
        assert results[0]["said"][case.what].startswith("CheckpointError: "), case.what


def saved_between(folder: str) -> Dict[str, Any]:
    """A checkpoint made between the micro-batches of a step, and the job that goes on from it."""
    engine = start(True, model_of())
    train(engine, 0, 1)
    engine.backward(engine(*mine(40)).loss)
    engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()
    resumed = start(True, scrambled(model_of()))
    resumed.load_checkpoint(folder)
    counted = (resumed.global_steps, resumed.micro_steps, resumed.gradient_accumulation_steps())
    losses = train(resumed, 1, 2)
    resumed.destroy()
    straight = start(True, model_of())
    expected = train(straight, 0, 3)[1:]
    straight.destroy()
    return {"counted": counted, "losses": losses, "expected": expected}


@survives("Bad input", "a save between the micro-batches of a step",
          "as under DeepSpeed it holds the last whole step, from which the job goes on")
def test_a_save_between_micro_batches_holds_the_last_whole_step(tmp_path):
    for result in run_ranks(2, saved_between, str(tmp_path)):
        assert result["counted"] == (1, 2, 2)
        assert result["losses"] == result["expected"]

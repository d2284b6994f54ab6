"""Saving and loading a job: what goes into a checkpoint, and where it goes when it comes back.

A checkpoint is one of DeepSpeed's Universal Checkpoints, which ZeRO loads too. Each rank writes the parameters it
updates, one at a time from the shared store. Loading, each rank reads an even share of the parameters into the
store; optimizer state goes into a region that all ranks map, since who will update what is planned later.
"""

import json
import os
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from deepspeed import __version__ as deepspeed_version
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger

from mobius_ds.names import CHECKPOINT_MARK
from mobius_ds.runtime.checkpoint import checkpoint_files as files, export_script
from mobius_ds.runtime.checkpoint.saved_model import FORMAT, Pieces, SavedParameter, UniversalCheckpoint
from mobius_ds.runtime.checkpoint.zero3_checkpoint import PATTERN, Zero3Checkpoint
from mobius_ds.runtime.dram.shared_memory import Region, aligned
from mobius_ds.runtime.optimizer.optimizer_state import needed_state
from mobius_ds.runtime.ranks.errors import CheckpointError
from mobius_ds.runtime.sweeps.pipeline import Pipeline

SavedModel = Union[UniversalCheckpoint, Zero3Checkpoint]


def _together(pipeline: Pipeline, call: str, part: Callable[[], Any],
              tell: Callable[[Any], Any] = lambda result: None) -> Tuple[Any, List[Any]]:
    """Does this rank's part of something. If one rank fails, all raise the same error, and may go on from there.

    Args:
        tell: what the other ranks are told of the part's result.

    Returns:
        The result, and what every rank told.
    """
    result = told = failure = cause = None
    with pipeline.mailbox.told():
        try:
            result = part()
            told = tell(result)
        except Exception as error:  # the script's own objects can raise anything when they are written or read
            cause = error
            failure = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    outcomes = pipeline.step(call, (told, failure))
    for rank, (_, failure) in enumerate(outcomes):
        if failure is not None:
            raise CheckpointError(f"{call} failed on rank {rank}: {failure}") from cause
    return result, [told for told, _ in outcomes]


# Saving.

def save(engine: DeepSpeedEngine, save_dir: str, tag: Optional[str], client_state: Dict[str, Any], save_latest: bool,
         exclude_frozen_parameters: bool) -> bool:
    """``engine.save_checkpoint``.

    Raises:
        CheckpointError: a rank could not write; what was there before is untouched.
    """
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
    pipeline, call = engine.pipeline, "save_checkpoint"
    tag = _agreed_tag(engine, f"global_step{engine.global_steps}" if tag is None else str(tag))
    place = files.place_of(save_dir, tag)
    first, folder = engine.global_rank == 0, None
    try:
        folder = _together(pipeline, call, lambda: files.begin(place) if first else None, lambda folder: folder)[1][0]
        _, parts = _together(pipeline, call, lambda: _write_part(engine, folder, client_state, exclude_frozen_parameters),
                             lambda part: part)
        _together(pipeline, call, lambda: _finish(engine, folder, place, parts) if first else None)
        _together(pipeline, call, lambda: _point_to(Path(save_dir), tag, save_latest) if first else None)
    except CheckpointError as error:
        if first and folder is not None:
            files.discard(folder)
        raise CheckpointError(f"{error}. The checkpoint that 'latest' names is as it was. Mend the cause, or name another "
                              "save_dir, and save again.") from error
    return True


def _agreed_tag(engine: DeepSpeedEngine, tag: str) -> str:
    """The first rank's tag, once the others' are compared with it as the config says."""
    tags = engine.pipeline.step("save_checkpoint", tag)
    if engine.checkpoint_tag_validation_enabled() and len(set(tags)) > 1:
        message = (f"[rank={engine.global_rank}] The checkpoint tag name '{tag}' is not consistent across all ranks. "
                   "Including rank unique information in checkpoint tag could cause issues when restoring with different "
                   "world sizes.")
        assert not engine.checkpoint_tag_validation_fail(), message
        logger.warning(message)
    return tags[0]


class _Part(NamedTuple):
    """What one rank wrote."""

    keys: Dict[str, List[str]]
    """Of each parameter's optimizer state."""
    step: Any
    """The optimizer's count of steps, of the first parameter that has one."""
    checksums: Dict[str, int]
    """Of each file, by its path in the checkpoint."""


def _write_part(engine: DeepSpeedEngine, folder: Path, client_state: Dict[str, Any], exclude_frozen: bool) -> _Part:
    """Writes this rank's part."""
    pipeline, optimizer = engine.pipeline, engine.optimizer
    store, rank = pipeline.store, engine.global_rank
    keys: Dict[str, List[str]] = {}
    steps, checksums = [], {}

    def write(path: str, content: Any) -> None:
        checksums[path] = files.write_tensors(folder / path, content)

    for name in pipeline.owned():
        content = {"fp32": store.master(name), **(optimizer.state_of(name) if optimizer else {})}
        for key, value in content.items():
            # A copy, one at a time: the masters are views of one region, of which torch.save would write all.
            value = value.detach().clone() if isinstance(value, torch.Tensor) else value
            write(f"zero/{name}/{key}.pt", value if key == "step" else {"param": value, "cat_dim": 0})
        keys[name] = sorted(set(content) - {"fp32"})
        steps += [content["step"]] if "step" in content else []
    frozen = [name for name, entry in store.layout.entries.items() if not entry.trainable]
    for name in frozen[rank::engine.world_size] if not exclude_frozen else ():
        write(f"zero/{name}/frozen.pt", {"param": store.weight(name).detach()})
        keys[name] = []
    state = _model_state(engine, client_state, [] if exclude_frozen else frozen)
    write(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", state)
    if rank == 0:
        write("mp_rank_00_model_states.pt", state)
    return _Part(keys, next(iter(steps), None), checksums)


def _model_state(engine: DeepSpeedEngine, client_state: Dict[str, Any], frozen: List[str]) -> Dict[str, Any]:
    """What DeepSpeed keeps in its model states: everything but parameters and optimizer state."""
    names = engine._get_buffer_names()
    buffers = {name: buffer.detach().cpu().clone() for name, buffer in engine.module.named_buffers() if name in names}
    state = engine._common_checkpoint_state(buffers, True, False)
    shapes = {name: torch.Size(engine.pipeline.store.layout.entries[name].shape) for name in frozen}
    state.update(frozen_param_shapes=shapes, shared_params=_tied_names(engine.module))
    state.update(client_state)
    return state


def _tied_names(module: torch.nn.Module) -> Dict[str, str]:
    """Further names of tied parameters, and the first name of each."""
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)
            if first[id(parameter)] != name}


def _finish(engine: DeepSpeedEngine, folder: Path, place: Path, parts: List[_Part]) -> None:
    """Writes what describes all parts, and moves the folder to its place."""
    groups = engine.optimizer.hyperparameters() if engine.optimizer else []
    step = next((part.step for part in parts if part.step is not None), None)
    common = "zero/optimizer_state.pt"
    checksum = files.write_tensors(folder / common, {
        "ds_version": deepspeed_version, "zero_stage": 3, "param_groups": groups,
        **(engine.optimizer.scaling() if engine.optimizer else {}),
        "optimizer_state_dict": {"state": {0: {} if step is None else {"step": step}}, "param_groups": groups}})
    files.write_text(folder / CHECKPOINT_MARK, json.dumps({
        "format": FORMAT, "seed": engine.pipeline.seed,
        "parameters": {name: keys for part in parts for name, keys in part.keys.items()},
        "checksums": {common: checksum, **{path: value for part in parts for path, value in part.checksums.items()}}},
        indent=1))
    files.publish(folder, place)


def _point_to(save_dir: Path, tag: str, save_latest: bool) -> None:
    """Says which checkpoint is the latest, last of all."""
    script = save_dir / "zero_to_fp32.py"
    files.write_text(script, Path(export_script.__file__).read_text())
    script.chmod(script.stat().st_mode | 0o100)
    if save_latest:
        files.write_text(save_dir / "latest_universal", tag)
        files.write_text(save_dir / "latest", tag)


# Loading.

class _Choice(NamedTuple):
    """What of a checkpoint is loaded: the arguments of ``engine.load_checkpoint``."""

    strict: bool
    optimizer: bool
    scheduler: bool
    counters: bool


def load(engine: DeepSpeedEngine, load_dir: str, tag: Optional[str], load_module_strict: bool,
         load_optimizer_states: bool, load_lr_scheduler_states: bool,
         load_module_only: bool) -> Tuple[Optional[str], Optional[Dict[str, Any]]]:
    """``engine.load_checkpoint``.

    Raises:
        CheckpointError: it is damaged, incomplete or of another model. Except for errors of reading the disk itself
            nothing has been changed then.
    """
    if not load_dir:
        raise ValueError(f"load_dir must be a non-empty string, got {load_dir!r}")
    pipeline, call, first = engine.pipeline, "load_checkpoint", engine.global_rank == 0
    choice = _Choice(load_module_strict, load_optimizer_states and not load_module_only and engine.optimizer is not None,
                     load_lr_scheduler_states and not load_module_only and engine.lr_scheduler is not None,
                     not load_module_only)
    _, places = _together(pipeline, call, lambda: _place_to_load(engine, load_dir, tag) if first else None,
                          lambda place: place)
    if places[0] is None:
        return None, None
    (saved, share), described = _together(pipeline, call, lambda: _examine(engine, places[0], choice), _describe)
    states = {name: state for part in described for name, state in part.items()}
    _check_state(engine, places[0], states)
    made, handles = _together(pipeline, call, lambda: Region.create("optimizer state", _room(states)[0]) if first else None,
                              lambda region: region and region.handle)
    room, _ = _together(pipeline, call, lambda: made or Region.open(handles[0]))
    state, _ = _together(pipeline, call, lambda: _fill(engine, share, states, room, choice))
    room.close()
    _together(pipeline, call, lambda: _restore(engine, saved, state, choice))
    model_state = saved.model_state(engine.global_rank)
    known = ["module"] + ["skipped_steps", "global_steps", "dp_world_size", "mp_world_size", "data_sampler",
                          "random_ltd"] * choice.counters
    known += ["lr_scheduler"] * load_lr_scheduler_states + ["optimizer"] * load_optimizer_states
    return (str(saved.model_state_path(engine.global_rank)),
            {key: value for key, value in model_state.items() if key not in known})


def _place_to_load(engine: DeepSpeedEngine, load_dir: str, tag: Optional[str]) -> Optional[Path]:
    """The checkpoint's folder; None, with DeepSpeed's warning, where nothing says which is the latest."""
    if tag is None:
        latest = Path(load_dir) / ("latest_universal" if engine.load_universal_checkpoint() else "latest")
        if not latest.is_file():
            if engine.load_universal_checkpoint():
                raise CheckpointError(f"Invalid for universal checkpoint: {latest} does not exist")
            logger.warning(f"Unable to find latest file at {latest}, if trying to load latest checkpoint please ensure "
                           "this file exists or pass an explicit checkpoint tag when loading a checkpoint.")
            return None
        tag = latest.read_text(errors="replace").strip()
        if not tag:
            raise CheckpointError(f"{latest} is empty: it was cut short. Pass the tag of a checkpoint that is there.")
    place = Path(os.path.abspath(os.path.join(load_dir, str(tag))))
    files.recover(place)
    if not place.is_dir():
        there = sorted(path.name for path in Path(load_dir).glob("[!.]*") if path.is_dir())
        raise CheckpointError(f"there is no checkpoint {place}; {load_dir} has {', '.join(there) or 'none'}. Pass the tag "
                              "of one that is there.")
    return place


def _check_state(engine: DeepSpeedEngine, place: Path, states: "_Described") -> None:
    """Raises CheckpointError if optimizer state is of another kind of optimizer than the job's."""
    kinds = {key for state in states.values() for key in state}
    needed = needed_state(engine.optimizer.optimizer) if kinds else frozenset()
    if not needed <= kinds:
        raise CheckpointError(f"the optimizer state in {place} is {', '.join(sorted(kinds))}, and "
                              f"{type(engine.optimizer.optimizer).__name__} goes on from {', '.join(sorted(needed))}: it is "
                              "of another optimizer. Use that one, or pass load_optimizer_states=False.")


def _open(place: Path) -> SavedModel:
    if (place / "zero").is_dir():
        return UniversalCheckpoint(place)
    if any(place.glob(PATTERN)):
        return Zero3Checkpoint(place)
    raise CheckpointError(f"{place} is neither a Universal Checkpoint nor one of ZeRO-3: it has no folder 'zero' and no "
                          "files *_optim_states.pt. Load weights alone with engine.module.load_state_dict().")


def _read_share(engine: DeepSpeedEngine, place: Path) -> Tuple[SavedModel, Dict[str, Optional[SavedParameter]]]:
    """Opens a checkpoint, and in it what this rank reads; None for what it lacks."""
    entries = engine.pipeline.store.layout.entries
    try:
        saved = _open(place)
        saved.model_state(engine.global_rank)
        return saved, {name: saved.parameter(name, entries[name].trainable)
                       for name in list(entries)[engine.global_rank::engine.world_size]}
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"{place} does not hold what DeepSpeed or Mobius writes ({type(error).__name__}: {error}): it "
                              "is damaged or of a release that is not known. Load another checkpoint.") from error


def _examine(engine: DeepSpeedEngine, place: Path, choice: _Choice) -> Tuple[SavedModel, Dict[str, SavedParameter]]:
    """Opens a checkpoint and this rank's share of its parameters, and compares them with the model's."""
    saved, read = _read_share(engine, place)
    entries = engine.pipeline.store.layout.entries
    share, faults = {}, []
    for name, found in read.items():
        if found is None:
            if choice.strict and torch.Size(entries[name].shape).numel():
                faults.append(f"it lacks {name!r}")
            continue
        value = found.value.shaped(entries[name].shape)
        if value.shape != entries[name].shape:
            faults.append(f"{name!r} is of shape {value.shape} there and {entries[name].shape} here")
        wanted = choice.optimizer and name in engine.optimizer.trains
        share[name] = SavedParameter(value, found.state if wanted else {})
    if engine.global_rank == 0:
        faults += _faults_of_the_whole(engine, saved, choice)
    if faults:
        raise CheckpointError(f"{place} does not fit the model: " + "; ".join(faults[:5])
                              + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
                              + ". Load the checkpoint of this model, or pass load_module_strict=False to leave alone what "
                              "it lacks.")
    return saved, share


def _faults_of_the_whole(engine: DeepSpeedEngine, saved: SavedModel, choice: _Choice) -> List[str]:
    """What does not fit, apart from single parameters."""
    faults = []
    buffers = dict(engine.module.named_buffers())
    if choice.strict:
        known = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)} | set(buffers)
        faults += [f"it has {name!r}, which the model lacks" for name in sorted(saved.names() - known)]
        faults += [f"it lacks the buffer {name!r}" for name in engine._get_buffer_names() if name not in saved.buffers]
    faults += [f"the buffer {name!r} is of shape {tuple(buffer.shape)} there and {tuple(buffers[name].shape)} here"
               for name, buffer in saved.buffers.items() if name in buffers and buffer.shape != buffers[name].shape]
    if choice.optimizer and len(saved.groups) != len(engine.optimizer.param_groups):
        faults.append(f"its optimizer has {len(saved.groups)} parameter groups and this one has "
                      f"{len(engine.optimizer.param_groups)} (load_optimizer_states=False loads without)")
    if choice.scheduler and not saved.model_state(0).get("lr_scheduler"):
        faults.append("it has no state of a learning rate scheduler (load_lr_scheduler_states=False loads without)")
    return faults


_Described = Dict[str, Dict[str, Any]]
"""Optimizer state of some parameters: (shape, dtype) of what has dimensions, the value of what has none."""


def _describe(examined: Tuple[SavedModel, Dict[str, SavedParameter]]) -> _Described:
    return {name: {key: (value.shape, value.dtype) if isinstance(value, Pieces) else value
                   for key, value in parameter.state.items()}
            for name, parameter in examined[1].items() if parameter.state}


def _room(states: _Described) -> Tuple[int, Dict[Tuple[str, str], int]]:
    """Bytes of a region for optimizer state, and where each piece starts in it. The same on every rank."""
    end, starts = 0, {}
    for name, state in states.items():
        for key, value in sorted(state.items()):
            if isinstance(value, tuple):
                shape, dtype = value
                starts[name, key] = end
                end += aligned(torch.Size(shape).numel() * dtype.itemsize)
    return end, starts


@torch.no_grad()
def _fill(engine: DeepSpeedEngine, share: Dict[str, SavedParameter], states: _Described, room: Region,
          choice: _Choice) -> Dict[str, Dict[str, Any]]:
    """Copies this rank's share into the shared memory. Returns everyone's optimizer state, as views of it."""
    store = engine.pipeline.store
    if choice.optimizer:
        engine.optimizer.state.clear()  # before as much again is taken
    memory, starts = room.memory(), _room(states)[1]
    views = {name: {key: _view(memory, starts[name, key], *value) if isinstance(value, tuple) else value
                    for key, value in state.items()} for name, state in states.items()}
    for name, parameter in share.items():
        if store.layout.entries[name].trainable:
            parameter.value.copy_to(store.master(name))
            store.weight(name).copy_(store.master(name))
        else:
            parameter.value.copy_to(store.weight(name))
        for key, value in parameter.state.items():
            if isinstance(value, Pieces):
                value.copy_to(views[name][key])
    return views


def _view(memory: Any, start: int, shape: Tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # A storage of its own for each, as the weights have.
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=start).view(shape)


@torch.no_grad()
def _restore(engine: DeepSpeedEngine, saved: SavedModel, state: Dict[str, Dict[str, Any]], choice: _Choice) -> None:
    """Takes over what every rank keeps for itself."""
    model_state = saved.model_state(engine.global_rank)
    buffers = dict(engine.module.named_buffers())
    for name, buffer in saved.buffers.items():
        if name in buffers:
            buffers[name].copy_(buffer)
    engine.pipeline.accept_buffers()
    engine.pipeline.start_accumulation()
    if choice.optimizer:
        engine.optimizer.restore(saved.groups, state, saved.loss_scaler)
    if choice.scheduler:
        engine.lr_scheduler.load_state_dict(model_state["lr_scheduler"])
    engine.loaded_checkpoint_dp_world_size = model_state["dp_world_size"]
    if not choice.counters:
        return
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled() and "data_sampler" in model_state:
        engine.training_dataloader.data_sampler.load_state_dict(model_state["data_sampler"])
    engine.loaded_checkpoint_mp_world_size = model_state["mp_world_size"]
    engine.global_steps = model_state["global_steps"]
    engine.global_samples = model_state.get("global_samples", engine.global_steps * engine.train_batch_size())
    engine.skipped_steps = model_state["skipped_steps"]
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()  # as after a step, which it is
    engine._forwards_step = -1  # of another step than the next one, even if its number is the same
    if saved.seed is not None:
        engine.pipeline.seed = saved.seed

"""Loading a job: where what is in a checkpoint goes.

Each rank reads an even share of the parameters into the store; optimizer state goes into a region that all ranks map,
since who will update what is planned later.
"""

import os
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger

from mobius_ds.runtime.checkpoint import checkpoint_files as files
from mobius_ds.runtime.checkpoint.saved_model import Pieces, SavedParameter, UniversalCheckpoint
from mobius_ds.runtime.checkpoint.together import together
from mobius_ds.runtime.checkpoint.zero3_checkpoint import PATTERN, Zero3Checkpoint
from mobius_ds.runtime.dram.shared_memory import Region, aligned
from mobius_ds.runtime.optimizer.optimizer_state import needed_state
from mobius_ds.runtime.ranks.errors import CheckpointError

SavedModel = Union[UniversalCheckpoint, Zero3Checkpoint]


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
    _, places = together(pipeline, call, lambda: _place_to_load(engine, load_dir, tag) if first else None,
                          lambda place: place)
    if places[0] is None:
        return None, None
    (saved, share), described = together(pipeline, call, lambda: _examine(engine, places[0], choice), _describe)
    states = {name: state for part in described for name, state in part.items()}
    _check_state(engine, places[0], states)
    made, handles = together(pipeline, call, lambda: Region.create("optimizer state", _room(states)[0]) if first else None,
                              lambda region: region and region.handle)
    room, _ = together(pipeline, call, lambda: made or Region.open(handles[0]))
    state, _ = together(pipeline, call, lambda: _fill(engine, share, states, room, choice))
    room.close()
    together(pipeline, call, lambda: _restore(engine, saved, state, choice))
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

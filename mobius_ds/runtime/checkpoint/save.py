"""Saving a job: what goes into a checkpoint.

A checkpoint is one of DeepSpeed's Universal Checkpoints, which ZeRO loads too. Each rank writes the parameters it
updates, one at a time from the shared store.
"""

import json
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import torch
from deepspeed import __version__ as deepspeed_version
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger

from mobius_ds.names import CHECKPOINT_MARK
from mobius_ds.runtime.checkpoint import checkpoint_files as files, export_script
from mobius_ds.runtime.checkpoint.saved_model import FORMAT
from mobius_ds.runtime.checkpoint.together import together
from mobius_ds.runtime.ranks.errors import CheckpointError


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
        folder = together(pipeline, call, lambda: files.begin(place) if first else None, lambda folder: folder)[1][0]
        _, parts = together(pipeline, call, lambda: _write_part(engine, folder, client_state, exclude_frozen_parameters),
                             lambda part: part)
        together(pipeline, call, lambda: _finish(engine, folder, place, parts) if first else None)
        together(pipeline, call, lambda: _point_to(Path(save_dir), tag, save_latest) if first else None)
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


class _WrittenPart(NamedTuple):
    """What one rank wrote."""

    keys: Dict[str, List[str]]
    """Of each parameter's optimizer state."""
    step: Any
    """The optimizer's count of steps, of the first parameter that has one."""
    checksums: Dict[str, int]
    """Of each file, by its path in the checkpoint."""


def _write_part(engine: DeepSpeedEngine, folder: Path, client_state: Dict[str, Any], exclude_frozen: bool) -> _WrittenPart:
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
    return _WrittenPart(keys, next(iter(steps), None), checksums)


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


def _finish(engine: DeepSpeedEngine, folder: Path, place: Path, parts: List[_WrittenPart]) -> None:
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

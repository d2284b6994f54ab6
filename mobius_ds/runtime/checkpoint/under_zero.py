"""A job that goes back to ZeRO loads what it saved under Mobius, with no change but the flag.

What Mobius saves is a Universal Checkpoint, which ZeRO loads when its config says so. This says so for a folder
that Mobius has written, and for no other, and restores what ZeRO-3 leaves out: hyperparameters of any group but the
first, a count of steps for each sub-group, frozen parameters and buffers. DeepSpeed's functions that make an
ordinary state dict of a checkpoint read those folders as well.
"""

import functools
import inspect
import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

from mobius_ds.names import CHECKPOINT_MARK

ADAM = {"exp_avg", "exp_avg_sq", "step"}
"""The only optimizer state that a Universal Checkpoint carries to ZeRO-3."""


def load_checkpoints_of_mobius(engine_class: type) -> None:
    """Patches ``load_checkpoint`` of DeepSpeed's engine."""
    original = engine_class.load_checkpoint
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        tag = _tag(self, call.arguments["load_dir"], call.arguments["tag"])
        if tag is None or not self.zero_optimization() or not Path(call.arguments["load_dir"], tag, CHECKPOINT_MARK).is_file():
            return original(self, *args, **kwargs)
        call.arguments["tag"] = tag
        return _load(self, original, call)

    engine_class.load_checkpoint = load_checkpoint


def replace_checkpoints_of_mobius(engine_class: type) -> None:
    """Patches ``save_checkpoint`` of DeepSpeed's engine: what it saves under the tag of a checkpoint of Mobius takes its
    place, or the older one, which is still marked, would be loaded next time."""
    original = engine_class.save_checkpoint
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_checkpoint(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        tag = call.arguments["tag"]
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        place = Path(call.arguments["save_dir"], tag)
        if self.global_rank == 0 and (place / CHECKPOINT_MARK).is_file():  # the others wait for the first rank before they write
            shutil.rmtree(place)
        return original(self, *args, **kwargs)

    engine_class.save_checkpoint = save_checkpoint


def export_checkpoints_of_mobius(zero_to_fp32: Any) -> None:
    """Patches what all functions of ``deepspeed.utils.zero_to_fp32`` read a checkpoint by."""
    original = zero_to_fp32._get_fp32_state_dict_from_zero_checkpoint

    @functools.wraps(original)
    def _get_fp32_state_dict_from_zero_checkpoint(ds_checkpoint_dir, exclude_frozen_parameters):
        if not Path(ds_checkpoint_dir, CHECKPOINT_MARK).is_file():
            return original(ds_checkpoint_dir, exclude_frozen_parameters)
        from mobius_ds.runtime.checkpoint import export_script
        return export_script.fp32(export_script.saved_tensors(Path(ds_checkpoint_dir), exclude_frozen_parameters))

    zero_to_fp32._get_fp32_state_dict_from_zero_checkpoint = _get_fp32_state_dict_from_zero_checkpoint


def _tag(engine: Any, load_dir: str, tag: Optional[str]) -> Optional[str]:
    """Which checkpoint DeepSpeed would load."""
    if tag is not None:
        return str(tag)
    latest = Path(load_dir) / ("latest_universal" if engine.load_universal_checkpoint() else "latest")
    return latest.read_text().strip() if latest.is_file() else None


def _load(engine: Any, original: Callable, call: inspect.BoundArguments) -> Tuple[Optional[str], Optional[Dict[str, Any]]]:
    arguments = call.arguments
    place = Path(arguments["load_dir"], arguments["tag"])
    with_state = arguments["load_optimizer_states"] and not arguments["load_module_only"] and engine.optimizer is not None
    groups = _read(place / "zero" / "optimizer_state.pt")["param_groups"]
    if with_state:
        has_any = _check_optimizer(engine, place, groups)
        arguments["load_optimizer_states"] = has_any  # without any, ZeRO would miss Adam's
    steps = _steps(engine)
    with _universal(engine):
        path, client_state = original(*call.args, **call.kwargs)
    if with_state:
        for group, saved in zip(engine.optimizer.param_groups, groups):
            group.update({key: value for key, value in saved.items() if key != "params"})
        _separate_steps(engine, steps)
    _load_frozen(engine, place, arguments["load_module_strict"])
    _load_buffers(engine, place)
    own = place / f"zero_pp_rank_{engine.global_rank}_mp_rank_00_model_states.pt"
    if own.is_file():  # DeepSpeed hands out the first rank's
        state = _read(own)
        client_state = {key: state.get(key, value) for key, value in client_state.items()}
    return path, client_state


def _read(path: Path) -> Any:
    from mobius_ds.runtime.checkpoint.checkpoint_files import read_tensors  # here: most processes with the hooks never load any

    return read_tensors(path)


def _check_optimizer(engine: Any, place: Path, groups: Any) -> bool:
    """Whether a checkpoint has any optimizer state; an error if ZeRO cannot load it."""
    if len(groups) != len(engine.optimizer.param_groups):
        raise ValueError(f"the optimizer of {place} has {len(groups)} parameter groups and this one has "
                         f"{len(engine.optimizer.param_groups)}. Make it with the same groups, or pass "
                         "load_optimizer_states=False.")
    kinds = set().union(*json.loads((place / CHECKPOINT_MARK).read_text())["parameters"].values())
    if kinds - ADAM or (kinds and ADAM - kinds):
        raise ValueError(f"the optimizer state in {place} is {', '.join(sorted(kinds))}; ZeRO loads Adam's only from a "
                         "Universal Checkpoint. Pass load_optimizer_states=False, or go on under Mobius.")
    return bool(kinds)


@contextmanager
def _universal(engine: Any) -> Iterator[None]:
    """Lets an engine load a Universal Checkpoint, weights alone included, for which it would look for ZeRO's shards."""
    from deepspeed.runtime import engine as engine_module

    config, consolidate = engine._config, engine_module.get_fp32_state_dict_from_zero_checkpoint
    before = config.load_universal_checkpoint
    config.load_universal_checkpoint = True
    engine_module.get_fp32_state_dict_from_zero_checkpoint = lambda *args, **kwargs: {}
    try:
        yield
    finally:
        config.load_universal_checkpoint = before
        engine_module.get_fp32_state_dict_from_zero_checkpoint = consolidate


def _steps(engine: Any) -> Dict[Any, Any]:
    """The optimizer's counts of steps, by what it steps."""
    inner = getattr(engine.optimizer, "optimizer", None)
    return {} if inner is None else {key: state["step"] for key, state in inner.state.items() if "step" in state}


def _separate_steps(engine: Any, before: Dict[Any, Any]) -> None:
    """Gives each its own count, of the kind it was: ZeRO-3 gives all of them one object, which all would count up."""
    import torch

    for key, step in _steps(engine).items():
        kind = before.get(key, step)
        engine.optimizer.optimizer.state[key]["step"] = \
            torch.full_like(kind, float(step)) if isinstance(kind, torch.Tensor) else int(step)


def _load_frozen(engine: Any, place: Path, strict: bool) -> None:
    import deepspeed
    import torch
    from deepspeed.runtime.utils import is_optimized_parameter

    for name, parameter in engine.module.named_parameters():
        if is_optimized_parameter(parameter):
            continue
        paths = [path for path in (place / "zero" / name / "frozen.pt", place / "zero" / name / "fp32.pt") if path.is_file()]
        if paths:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                if engine.global_rank == 0 or not hasattr(parameter, "ds_id"):
                    parameter.copy_(_read(paths[0])["param"])
        elif strict:
            raise ValueError(f"{place} lacks the frozen parameter {name!r}. Pass load_module_strict=False to leave it.")


def _load_buffers(engine: Any, place: Path) -> None:
    import torch

    saved = _read(place / "mp_rank_00_model_states.pt")["module"]
    with torch.no_grad():
        for name, buffer in engine.module.named_buffers():
            if name in saved:
                buffer.copy_(saved[name])

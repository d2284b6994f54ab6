"""A DeepSpeed config as it is written: how the file is read, and how many samples a step has by it."""

from pathlib import Path
from typing import Any, Dict, Mapping, NamedTuple, Optional

import hjson

BATCH, MICRO_BATCH, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"

_SECTIONS = (("zero_optimization", ), ("zero_optimization", "offload_optimizer"), ("mobius", ), ("bf16", ), ("fp16", ),
             ("optimizer", ), ("optimizer", "params"))


class BatchSizes(NamedTuple):
    """What one rank trains on in a step."""

    micro_batch: Optional[int]
    """Samples; None where the script decides."""
    accumulation: int
    """Micro-batches in a step; 1 where the script decides."""


def read_config_file(path: Path) -> Dict[str, Any]:
    """Reads a config as DeepSpeed does: JSON, comments allowed. A null counts as left out.

    Raises:
        ValueError: it cannot be read, or it or one of its sections is not an object.
    """
    try:
        config = hjson.loads(path.read_text(), object_pairs_hook=dict)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as a DeepSpeed config: it is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, where a DeepSpeed config is an object")
    config = _without(None, config)
    for keys in _SECTIONS:
        section = config
        for key in keys:
            section = section.get(key, {})
        if not isinstance(section, dict):
            raise ValueError(f"{'.'.join(keys)} in {path} is {section!r}; it must be an object, such as {{}}")
    return config


def without_auto(config: Mapping[str, Any]) -> Dict[str, Any]:
    """The config without what a training script fills in."""
    return _without("auto", config)


def _without(value: Optional[str], section: Mapping[str, Any]) -> Dict[str, Any]:
    return {key: _without(value, part) if isinstance(part, Mapping) else part
            for key, part in section.items() if part is not value and part != value}


def batch_of(config: Mapping[str, Any], ranks: int) -> BatchSizes:
    """What a config says of a step: any two of DeepSpeed's three numbers give the third, "auto" is none of them.

    Args:
        ranks: that share ``train_batch_size``.

    Raises:
        ValueError: one of them is neither a number from 1 on nor "auto".
    """
    numbers = {key: value for key in (BATCH, MICRO_BATCH, ACCUMULATION)
               if (value := config.get(key, "auto")) != "auto"}
    for key, value in numbers.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{key} of the DeepSpeed config is {value!r}; it must be a number from 1 on")
    batch, micro_batch, accumulation = map(numbers.get, (BATCH, MICRO_BATCH, ACCUMULATION))
    if batch and micro_batch and not accumulation:
        accumulation = max(1, batch // (micro_batch * ranks))
    if batch and not micro_batch:
        micro_batch = max(1, batch // (ranks * (accumulation or 1)))
    return BatchSizes(micro_batch, accumulation or 1)

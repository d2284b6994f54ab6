"""What a DeepSpeed config says about a step: micro-batch, accumulation, where the model lies, and what Mobius refuses."""

from pathlib import Path
from typing import Any, List, Mapping, NamedTuple, Optional, Tuple

from deepspeed.runtime.config import DeepSpeedConfig

from mobius_ds.config import mobius_config
from mobius_ds.planner.advice import DDP, MOBIUS, ZERO2, ZERO3, ZERO3_OFFLOAD
from mobius_ds.reporting.comparison.config_file import (ACCUMULATION, BATCH, MICRO_BATCH, batch_of, read_config_file,
                                                        without_auto)
from mobius_ds.runtime.engine.refusals import refused_settings

_ON_GPU = {0: DDP, 2: ZERO2, 3: ZERO3}


class TrainingConfig(NamedTuple):
    """A config, as far as advice needs it."""

    micro_batch: Optional[int]
    """Samples; None if it does not say."""
    accumulation: int
    """Micro-batches of each rank in a step."""
    runs: Optional[str]
    """What it trains with, by the names of ``planning.advice``; None for something else."""
    runs_in_words: str
    warnings: Tuple[str, ...]


def read_training_config(path: Path, ranks: int) -> TrainingConfig:
    """Reads a DeepSpeed config. Values of "auto", which a training script fills in, count as left out.

    Args:
        ranks: that will share ``train_batch_size``.

    Raises:
        ValueError: it is no config, or one that DeepSpeed or Mobius does not accept.
    """
    given = read_config_file(path)
    mobius = mobius_config(given)
    micro_batch, accumulation = batch_of(given, ranks)
    settled = {key: value for key, value in without_auto(given).items() if key != BATCH}
    try:
        config = DeepSpeedConfig({**settled, MICRO_BATCH: micro_batch or 1, ACCUMULATION: accumulation})
    except Exception as error:  # of the many kinds by which DeepSpeed says that a value is not one for a key
        raise ValueError(f"DeepSpeed does not accept {path} ({type(error).__name__}: {error}). Correct it") from None
    warnings = [f"Mobius does not run {refusal.what}: {refusal.why}. {refusal.way_out}."
                for refusal in refused_settings(config)]
    runs, in_words = (MOBIUS, "Mobius") if mobius.enabled else _zero(config)
    return TrainingConfig(micro_batch, accumulation, runs, in_words, (*warnings, *_precision(given, config)))


def _zero(config: DeepSpeedConfig) -> Tuple[Optional[str], str]:
    zero = config.zero_config
    offloaded = [what for what in ("offload_param", "offload_optimizer") if _device(getattr(zero, what)) not in ("", "none")]
    words = f"ZeRO-{int(zero.stage)}" + (f" with {' and '.join(offloaded)}" if offloaded else " without offload")
    if zero.stage == 3 and len(offloaded) == 2:
        return ZERO3_OFFLOAD, words
    return (None if offloaded else _ON_GPU.get(int(zero.stage))), words


def _device(section: Any) -> str:
    return "" if section is None else str(getattr(section.device, "value", section.device))


def _precision(given: Mapping[str, Any], config: DeepSpeedConfig) -> List[str]:
    """A warning if the config does not train in 16 bits, as predictions assume."""
    left_open = any(isinstance(given.get(key), Mapping) and given[key].get("enabled") == "auto" for key in ("fp16", "bf16"))
    if left_open or config.float16_config.enabled or config.bfloat16_config.enabled:
        return []
    return ["The config trains in fp32, but figures here are of 16-bit training: in fp32 every byte counts twice and GPUs "
            'compute several times slower. Set "bf16": {"enabled": true} if the model allows it.']

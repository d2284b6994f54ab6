"""The arms of a comparison: what each one trains with, made from one DeepSpeed config, and whether a script can run it.

All arms train the same model on the same data with the same global batch, number of steps and precision. An arm differs
from the others by its config, by the flag ``MOBIUS_DS``, and in one case by an option of the script.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from mobius_ds.reporting.comparison.config_file import ACCUMULATION, BATCH, MICRO_BATCH, batch_of, read_config_file

ZERO3, MOBIUS, ZERO3_DEFAULTS, PIPELINE, ZERO2, DDP = "zero3", "mobius", "zero3-defaults", "pipeline", "zero2", "ddp"
REQUIRED = (ZERO3, MOBIUS)
"""Arms without which there is nothing to compare: one that fails ends the comparison."""
PEERS = (ZERO3_DEFAULTS, PIPELINE, ZERO2, DDP)
"""Arms that may fail, or not suit the script: the report says why."""
ARMS = (*REQUIRED, *PEERS)

DESCRIPTIONS = {
    ZERO3: "the config as it is, ZeRO-3 with what it offloads",
    MOBIUS: "the config as a Mobius pipeline",
    ZERO3_DEFAULTS: "ZeRO-3 at DeepSpeed's default sizes",
    PIPELINE: "DeepSpeed's PipelineEngine, a stage per rank, everything in device memory",
    ZERO2: "ZeRO-2, the optimizer offloaded to the CPU",
    DDP: "ZeRO stage 0: plain data parallelism, everything in device memory",
}

KNOWN_DIFFERENCES = {
    PIPELINE: "In fp32 DeepSpeed's PipelineEngine clips by the gradient norm of its first stage alone; with 16-bit weights "
              "it adds up the microbatches' gradients in 16 bits",
    DDP: "With 16-bit weights DeepSpeed's stage 0 begins with a step of zero gradients, which Adam counts, so that its "
         "first updates are smaller",
}
"""Why an arm's losses may differ from ZeRO-3's beyond the rounding of sums in another order."""

# Left out, DeepSpeed chooses values that fit big models: a small one is then gathered once a step and never released,
# and its gradients are reduced all at once when backward is over.
SIZE_SETTINGS = ("stage3_max_reuse_distance", "stage3_max_live_parameters", "stage3_prefetch_bucket_size",
                 "stage3_param_persistence_threshold", "reduce_bucket_size")

DEFAULTS_ARM_STEPS = 5  # enough to see the bytes of a step; the arm is there for nothing else

PIPELINE_OPTION = "--pipeline"

Config = Dict[str, Any]


class CompareError(Exception):
    """A comparison that cannot be made; the message says why and what to do."""


class Failure(NamedTuple):
    """Why an arm has no numbers."""

    what: str
    """``OOM``, ``failed`` or ``not run``."""
    why: str
    """A sentence or two."""


@dataclass(frozen=True)
class Arm:
    """One run: a name and how it differs from the others."""

    name: str
    steps: int
    config: Config
    options: Tuple[str, ...] = ()
    """What the script is told in addition."""
    unsuitable: Optional[str] = None
    """Why this script and config cannot run as this arm."""

    @property
    def flag(self) -> str:
        """The value of ``MOBIUS_DS``."""
        return "1" if self.name == MOBIUS else "0"

    @property
    def required(self) -> bool:
        """Whether the comparison ends if this arm fails."""
        return self.name in REQUIRED


def choose_arms(names: Optional[str], config: Config, script: Path, ranks: int, steps: int) -> List[Arm]:
    """The arms to run, each with its effective DeepSpeed config.

    Args:
        names: separated by commas. Default: ZeRO-3 and Mobius, and ZeRO-3 at default sizes where that is another run.
        config: of ZeRO stage 3.
        script, ranks, steps: what is run, on how many ranks, for how many optimizer steps.

    Raises:
        CompareError: an unknown arm.
    """
    if names:
        chosen = list(dict.fromkeys(names.split(",")))
    else:
        sized = any(setting in config["zero_optimization"] for setting in SIZE_SETTINGS)
        chosen = [ZERO3, MOBIUS] + [ZERO3_DEFAULTS] * sized
    unknown = [name for name in chosen if name not in ARMS]
    if unknown:
        raise CompareError(f"unknown arm {unknown[0]!r} in --arms; choose from {', '.join(ARMS)}")
    return [_arm(name, config, script, ranks, steps) for name in chosen]


def _arm(name: str, config: Config, script: Path, ranks: int, steps: int) -> Arm:
    config = copy.deepcopy(config)
    if name == ZERO3_DEFAULTS:
        for setting in SIZE_SETTINGS:
            config["zero_optimization"].pop(setting, None)
        return Arm(name, min(steps, DEFAULTS_ARM_STEPS), config)
    if name == ZERO2:
        return Arm(name, steps, _zero2(config))
    if name == DDP:
        return Arm(name, steps, _on_device(config))
    if name == PIPELINE:
        return _pipeline(config, script, ranks, steps)
    return Arm(name, steps, config)


def _zero2(config: Config) -> Config:
    zero = {key: value for key, value in config["zero_optimization"].items()
            if not key.startswith(("stage3_", "zero_")) and key not in ("sub_group_size", "offload_param")}
    offloaded = {**zero.get("offload_optimizer", {}), "device": "cpu"}
    return {**config, "zero_optimization": {**zero, "stage": 2, "offload_optimizer": offloaded}}


def _on_device(config: Config) -> Config:
    config = {**config, "zero_optimization": {"stage": 0}}
    optimizer = config.get("optimizer", {})
    if str(optimizer.get("type")).lower() in ("adam", "adamw"):
        # DeepSpeed's own Adam for devices is compiled for each; torch's is there, and computes the same.
        config["optimizer"] = {**optimizer, "params": {**optimizer.get("params", {}), "torch_adam": True}}
    return config


def _pipeline(config: Config, script: Path, ranks: int, steps: int) -> Arm:
    if PIPELINE_OPTION not in script.read_text(errors="replace"):
        return Arm(PIPELINE, steps, config, unsuitable=(
            f"{script.name} trains with engine(batch), backward and step, which DeepSpeed's PipelineEngine refuses; a "
            f"script that can express its model as a PipelineModule says so with an option {PIPELINE_OPTION}"))
    # One replica of the model trains on what all ranks together would have drawn.
    config[ACCUMULATION] = ranks * batch_of(config, ranks).accumulation
    return Arm(PIPELINE, steps, _on_device(config), options=(PIPELINE_OPTION, ))


def read_config(path: Path) -> Config:
    """A DeepSpeed config that ZeRO-3 and Mobius can both run.

    Raises:
        CompareError: the file cannot be read, is no such config, or is of another ZeRO stage.
    """
    try:
        config = read_config_file(path)
        batch_of(config, ranks=1)  # whatever the number of ranks, its numbers are ones or not
    except ValueError as error:
        raise CompareError(str(error)) from None
    stage = config.get("zero_optimization", {}).get("stage")
    if stage != 3:
        raise CompareError(f"{path} sets zero_optimization.stage to {stage}; only stage 3 is compared with Mobius")
    return config


def with_dtype(config: Config, dtype: Optional[str]) -> Config:
    """The config in another precision: ``bf16``, ``fp16`` or ``fp32``; None leaves it as it is."""
    if dtype is None:
        return config
    sections = {section: {**config.get(section, {}), "enabled": section == dtype}
                for section in ("bf16", "fp16") if section in config or section == dtype}
    return {**config, **sections}


def with_micro_batch(config: Config, samples: Optional[int], ranks: int) -> Config:
    """The config with another micro-batch per rank, as many of them in a step as before; None leaves it as it is.

    Raises:
        CompareError: the script decides the micro-batch ("auto").
    """
    if samples is None:
        return config
    if config.get(MICRO_BATCH) == "auto":
        raise CompareError(f'{MICRO_BATCH} is "auto" in the config, so the script decides it: pass the script\'s own '
                           "option after --")
    return _with_batch(config, samples, batch_of(config, ranks).accumulation)


def with_batch_per_rank(config: Config, ranks: int) -> Config:
    """The config whose ranks keep on other numbers of ranks what ``train_batch_size`` gives each of ``ranks`` ranks.

    Raises:
        CompareError: it does not say how many samples that is.
    """
    if config.get(BATCH, "auto") == "auto":
        return config  # a rank's micro-batch and accumulation are told apart from the number of ranks
    micro_batch, accumulation = batch_of(config, ranks)
    if "auto" in (config.get(MICRO_BATCH), config.get(ACCUMULATION)):
        raise CompareError(f'{BATCH} is set while the script decides what is "auto": with other numbers of ranks the two '
                           f"would not fit. Set {MICRO_BATCH} and {ACCUMULATION} instead, or make all three \"auto\"")
    if micro_batch * accumulation * ranks != config[BATCH]:
        raise CompareError(f"{BATCH} {config[BATCH]} cannot be dealt out to {ranks} ranks alike; set {MICRO_BATCH}")
    return _with_batch(config, micro_batch, accumulation)


def _with_batch(config: Config, micro_batch: int, accumulation: int) -> Config:
    return {**{key: value for key, value in config.items() if key != BATCH},
            MICRO_BATCH: micro_batch, ACCUMULATION: accumulation}


def with_mobius(config: Config, **settings: Any) -> Config:
    """The config with other settings in its ``mobius`` section; those that are None stay as they are."""
    given = {key: value for key, value in settings.items() if value is not None}
    return {**config, "mobius": {**config.get("mobius", {}), **given}} if given else config


def device_memory(config: Mapping[str, Any]) -> Optional[float]:
    """The config's limit of device memory per rank in GiB."""
    return config.get("mobius", {}).get("device_memory_gb")


def explained(names: Sequence[str]) -> str:
    """What the named arms are, in a sentence each."""
    return " ".join(f"{name}: {DESCRIPTIONS[name]}." for name in names)

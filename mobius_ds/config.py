"""The ``"mobius"`` section of a DeepSpeed config: typed, validated, and off by default."""

import difflib
import os
import threading
from typing import Any, List, Mapping, Optional, Union

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from mobius_ds.names import FLAG_VARIABLE

SECTION = "mobius"


class MobiusConfig(DeepSpeedConfigModel):
    """Settings of one Mobius run. A key that is left out is chosen automatically."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)  # "2" and true are no numbers

    enabled: bool = False
    """Run this job as a Mobius pipeline instead of ZeRO-3 CPU offload."""

    stages: Optional[int] = Field(None, ge=1)
    """How many stages the model is cut into. Default: planned; without a topology two per rank, at most one per layer."""

    layers_per_stage: Optional[Union[int, List[int]]] = None
    """Layers in each stage: one number for all stages, or a list with one number per stage."""

    plan: Optional[str] = Field(None, min_length=1)
    """A plan file of ``mobius-ds plan`` to run, instead of planning at the start."""

    topology: Optional[str] = Field(None, min_length=1)
    """What to plan for: a preset's name or a JSON file. Default: the GPUs of this machine; without any, stages are even."""

    layers: Optional[List[str]] = Field(None, min_length=1)
    """Names of the modules to cut between (shell patterns on the names in ``named_modules()``).
    Default: the entries of the model's outermost ``nn.ModuleList``s and ``nn.Sequential``s."""

    device_memory_gb: Optional[float] = Field(None, gt=0)
    """Device memory one rank may use, in GiB. Default: what the device has; unlimited on CPU."""

    timeout_seconds: float = Field(1800.0, gt=0, le=threading.TIMEOUT_MAX)
    """How long a rank waits for another one before it gives up with an error that names it."""

    trace: Optional[str] = Field(None, min_length=1)
    """A file to record in when each task of each rank ran: a Chrome trace, from the working directory. Default: none."""

    @field_validator("layers_per_stage", mode="before")
    @classmethod
    def _positive_layers(cls, value):
        counts = value if isinstance(value, list) else [value]
        if value is not None and not (counts and all(type(count) is int and count > 0 for count in counts)):
            raise ValueError("Input should be a positive number, or a list of them with one for each stage")
        return value

    @model_validator(mode="after")
    def _one_partition(self):
        if self.stages and isinstance(self.layers_per_stage, list) and len(self.layers_per_stage) != self.stages:
            raise ValueError(f"layers_per_stage lists {len(self.layers_per_stage)} stages, but stages is {self.stages}; "
                             "leave one of the two out")
        if self.plan and (self.stages or self.layers_per_stage):
            raise ValueError("plan fixes the stages; leave stages and layers_per_stage out")
        if self.stages and isinstance(self.layers_per_stage, int):
            raise ValueError("stages and layers_per_stage both fix the number of stages; leave one of the two out")
        return self


def mobius_config(ds_config: Mapping[str, Any]) -> MobiusConfig:
    """Reads the ``mobius`` section of a DeepSpeed config dictionary.

    The environment variable ``MOBIUS_DS`` (``0`` or ``1``) overrides ``enabled``, so that one
    unchanged config file can be run both ways.

    Raises:
        ValueError: the section is no dictionary, holds an unknown key or a value of the wrong kind,
            or the variable is neither ``0`` nor ``1``.
    """
    section = ds_config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise ValueError(f"the {SECTION!r} section must be a dictionary such as {{\"enabled\": true}}, got {section!r}")
    _check_keys(section)
    try:
        config = MobiusConfig(**section)
    except ValidationError as error:
        faults = "".join(f"\n  {_fault(fault)}" for fault in error.errors())
        raise ValueError(f'the "{SECTION}" section of the DeepSpeed config is not valid:{faults}') from None
    override = os.environ.get(FLAG_VARIABLE)
    if override is None:
        return config
    if override not in ("0", "1"):
        raise ValueError(f"{FLAG_VARIABLE} must be 0 or 1, got {override!r}")
    config.enabled = override == "1"
    return config


def _fault(fault: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    return f"{key}: {message}, got {fault['input']!r}" if key else message


def _check_keys(section: Mapping[str, Any]) -> None:
    for key, value in section.items():
        if key not in MobiusConfig.model_fields:
            near = difflib.get_close_matches(key, MobiusConfig.model_fields, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"valid keys are {', '.join(MobiusConfig.model_fields)}"
            raise ValueError(f"unknown key {key!r} in the {SECTION!r} section: {hint}")
        if value == "auto":  # DeepSpeed's base class would drop it without a word
            raise ValueError(f"{key!r} in the {SECTION!r} section is \"auto\": leave the key out to have it chosen")

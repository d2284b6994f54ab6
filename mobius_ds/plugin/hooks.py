"""Where DeepSpeed meets Mobius: three small patches that do nothing unless a config enables Mobius.

DeepSpeed has no plugin mechanism. Rebinding ``deepspeed.initialize`` would miss every script that imported the
function before, so the patches sit on the classes it uses: ``DeepSpeedEngine.__new__`` and ``zero.Init.__init__``.
"""

import functools
import inspect
import logging
import os
from typing import TYPE_CHECKING, Any, Mapping, Union

if TYPE_CHECKING:
    from mobius_ds.plugin.config import MobiusConfig

__all__ = ["RANDOM_STATE", "RECORD_VARIABLE", "install"]

RECORD_VARIABLE = "MOBIUS_DS_RECORD"
"""Environment variable that makes every engine of the process record its steps for ``mobius-ds compare``."""

RANDOM_STATE = "_mobius_random_state"
"""Attribute of a ``PipelineModule``: the state of torch's generator when its layers were built."""

KNOWN_DEEPSPEED = "0.19."


def install() -> None:
    """Makes ``deepspeed.initialize`` build a ``MobiusEngine`` for a config that enables Mobius. Idempotent.

    Works for scripts that imported ``initialize`` earlier. An engine or a ``zero.Init`` whose config does not
    enable Mobius is built exactly as before.
    """
    import deepspeed

    if hasattr(deepspeed.DeepSpeedEngine.__new__, "mobius_ds"):
        return
    _choose_engine_by_config(deepspeed.DeepSpeedEngine, deepspeed.PipelineEngine)
    _remember_random_state(deepspeed.pipe.PipelineModule)
    _keep_parameters_whole(deepspeed.zero.Init)
    if os.environ.get(RECORD_VARIABLE):
        from mobius_ds.reporting import recorder

        recorder.install()


def _choose_engine_by_config(engine_class: type, pipeline_engine_class: type) -> None:
    def __new__(cls, *args, **kwargs):
        # deepspeed.initialize passes the config by keyword; copying and unpickling come without one.
        config = kwargs.get("config")
        if config is None or not _read(config).enabled:
            return object.__new__(cls)
        from mobius_ds.runtime.engine import MobiusEngine
        from mobius_ds.runtime.pipeline_engine import MobiusPipelineEngine

        if issubclass(cls, MobiusEngine):
            return object.__new__(cls)
        stand_ins = {engine_class: MobiusEngine, pipeline_engine_class: MobiusPipelineEngine}
        if cls not in stand_ins:
            raise ValueError(f'"mobius" is enabled, but Mobius cannot stand in for {cls.__name__}, only for '
                             f'{" and ".join(known.__name__ for known in stand_ins)}. Remove from the DeepSpeed '
                             'config what asks for it (such as "hybrid_engine"), or set "mobius": {"enabled": false}.')
        _warn_of_unknown_deepspeed()
        engine = object.__new__(stand_ins[cls])
        if not isinstance(engine, cls):
            # Python initializes what __new__ returns only if it is an instance of the class that was called,
            # and a MobiusPipelineEngine is no PipelineEngine.
            engine.__init__(*args, **kwargs)
        return engine

    __new__.mobius_ds = True
    engine_class.__new__ = staticmethod(__new__)


def _remember_random_state(module_class: type) -> None:
    """Makes a ``PipelineModule`` note where its layers' random numbers begin: Mobius builds those of other ranks later."""
    original = module_class._build

    @functools.wraps(original)
    def _build(self):
        import torch

        self.__dict__.setdefault(RANDOM_STATE, torch.get_rng_state())
        original(self)

    module_class._build = _build


def _keep_parameters_whole(init_class: type) -> None:
    """Turns ``zero.Init`` off for a config that enables Mobius, which needs whole parameters to cut into stages."""
    original = init_class.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs)
        config = call.arguments.get("config") or call.arguments.get("config_dict_or_path") or {}
        if _read(config).enabled:
            # A module that is passed in is partitioned even when the context is disabled.
            call.arguments.update(enabled=False, module=None)
        original(*call.args, **call.kwargs)

    init_class.__init__ = __init__


def _read(config: Union[str, os.PathLike, Mapping[str, Any]]) -> "MobiusConfig":
    """The validated ``mobius`` section of a DeepSpeed config, which is a dictionary, a path or base64 text."""
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
    from pydantic import ValidationError

    from mobius_ds.plugin.config import SECTION, mobius_config

    try:
        return mobius_config(config if isinstance(config, Mapping) else load_ds_config(os.fspath(config)))
    except ValidationError as error:
        faults = "".join(f"\n  {_place(fault)}{fault['msg'].removeprefix('Value error, ')}" for fault in error.errors())
        raise ValueError(f'the "{SECTION}" section of the DeepSpeed config is not valid:{faults}') from None


def _place(fault: Mapping[str, Any]) -> str:
    keys = ".".join(str(key) for key in fault["loc"])
    return f"{keys}: " if keys else ""


def _warn_of_unknown_deepspeed() -> None:
    import deepspeed
    from deepspeed.utils import log_dist_once

    if not deepspeed.__version__.startswith(KNOWN_DEEPSPEED):
        log_dist_once(
            f"mobius_ds is tested with DeepSpeed {KNOWN_DEEPSPEED}x, and this is {deepspeed.__version__}: "
            "if training fails or losses differ from ZeRO-3, install a tested release",
            ranks=[0],
            level=logging.WARNING)

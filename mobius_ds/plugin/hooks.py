"""Where DeepSpeed meets Mobius: a few small patches that do nothing unless a config enables Mobius.

DeepSpeed has no plugin mechanism. Rebinding ``deepspeed.initialize`` would miss every script that imported the
function before, so the patches sit on the classes it uses, mostly on their ``__new__``.
"""

import contextlib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, Mapping, Optional, Sequence, Union

from mobius_ds.names import ADOPTED, KNOWN_DEEPSPEED, RANDOM_STATE, RECORD_VARIABLE

if TYPE_CHECKING:
    from mobius_ds.config import MobiusConfig

__all__ = ["install"]


def install() -> None:
    """Makes ``deepspeed.initialize`` build a ``MobiusEngine`` for a config that enables Mobius. Idempotent.

    Works for scripts that imported ``initialize`` earlier. An engine or a ``zero.Init`` whose config does not
    enable Mobius is built exactly as before.
    """
    import deepspeed

    from mobius_ds.runtime.checkpoint import under_zero

    if hasattr(deepspeed.DeepSpeedEngine.__new__, "mobius_ds"):
        return
    _choose_engine_by_config(deepspeed.DeepSpeedEngine, deepspeed.PipelineEngine)
    _remember_random_state(deepspeed.pipe.PipelineModule)
    _choose_init_by_config(deepspeed.zero.Init)
    _let_one_rank_write(deepspeed.zero.GatheredParameters)
    under_zero.load_checkpoints_of_mobius(deepspeed.DeepSpeedEngine)
    under_zero.replace_checkpoints_of_mobius(deepspeed.DeepSpeedEngine)
    under_zero.export_checkpoints_of_mobius(deepspeed.utils.zero_to_fp32)
    if os.environ.get(RECORD_VARIABLE):
        _record_into(Path(os.environ[RECORD_VARIABLE]))


def _record_into(folder: Path) -> None:
    from mobius_ds.observation import recorder
    from mobius_ds.observation.records import told_in

    emulated, links = told_in(folder).emulated, None
    if emulated is not None:
        # Emulation hangs on this line and on ``compare --wires``: every other job goes without.
        from mobius_ds.emulation.server import EmulatedServer

        links = EmulatedServer.from_json(emulated)
    recorder.install(folder, links)


def _choose_engine_by_config(engine_class: type, pipeline_engine_class: type) -> None:
    def __new__(cls, *args, **kwargs):
        # deepspeed.initialize passes the config by keyword; copying and unpickling come without one.
        config = kwargs.get("config")
        if config is None or not _read(config).enabled:
            return object.__new__(cls)
        from mobius_ds.runtime.engine.engine import MobiusEngine
        from mobius_ds.runtime.engine.pipeline_engine import MobiusPipelineEngine

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


def _choose_init_by_config(init_class: type) -> None:
    """Makes ``zero.Init`` build models in shared memory for a config that enables Mobius."""
    signature = inspect.signature(init_class.__init__)

    def __new__(cls, *args, **kwargs):
        given = signature.bind_partial(None, *args, **kwargs).arguments
        if not _read(given.get("config") or given.get("config_dict_or_path") or {}).enabled:
            return object.__new__(cls)
        from mobius_ds.runtime.dram.loading import SharedInit

        if cls not in (init_class, SharedInit):
            raise ValueError(f'"mobius" is enabled, but Mobius cannot stand in for {cls.__name__}, only for zero.Init '
                             'itself. Use deepspeed.zero.Init, or set "mobius": {"enabled": false}.')
        return object.__new__(SharedInit)

    init_class.__new__ = staticmethod(__new__)


def _let_one_rank_write(context_class: type) -> None:
    """Makes ``GatheredParameters(..., modifier_rank=r)`` mean for Mobius' parameters what it means for ZeRO-3's."""
    original, enter, leave = context_class.__init__, context_class.__enter__, context_class.__exit__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def __init__(self, *args, **kwargs):
        call = signature.bind(self, *args, **kwargs)
        call.apply_defaults()
        given = call.arguments["params"]
        if hasattr(given, "data_ptr") or not isinstance(given, Iterable):
            given = [given]
        call.arguments["params"] = list(given)  # an iterator is there only once
        original(*call.args, **call.kwargs)
        parameters = call.arguments["params"] if call.arguments["enabled"] else []
        self._mobius = _gathered(parameters, call.arguments["modifier_rank"])

    def __enter__(self):
        enter(self)
        self._mobius.__enter__()

    def __exit__(self, *raised):
        self._mobius.__exit__(*raised)
        return leave(self, *raised)

    context_class.__init__, context_class.__enter__, context_class.__exit__ = __init__, __enter__, __exit__


@contextlib.contextmanager
def _gathered(parameters: Sequence[Any], modifier_rank: Optional[int]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        adopted = [parameter for parameter in parameters if hasattr(parameter, ADOPTED)]
        if adopted and modifier_rank is not None:
            from mobius_ds.runtime.engine.parameters import written_by

            stack.enter_context(written_by(modifier_rank, adopted))
        loading = sys.modules.get("mobius_ds.runtime.dram.loading")  # imported for the first model built under Mobius
        if loading is not None:
            stack.enter_context(loading.gathered(parameters, modifier_rank))
        yield


def _read(config: Union[str, os.PathLike, Mapping[str, Any]]) -> "MobiusConfig":
    """The validated ``mobius`` section of a DeepSpeed config, which is a dictionary, a path or base64 text."""
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    from mobius_ds.config import mobius_config

    return mobius_config(config if isinstance(config, Mapping) else load_ds_config(os.fspath(config)))


def _warn_of_unknown_deepspeed() -> None:
    import deepspeed
    from deepspeed.utils import log_dist_once

    if not deepspeed.__version__.startswith(KNOWN_DEEPSPEED):
        log_dist_once(
            f"mobius_ds is tested with DeepSpeed {KNOWN_DEEPSPEED}x, and this is {deepspeed.__version__}: "
            "if training fails or losses differ from ZeRO-3, install a tested release",
            ranks=[0],
            level=logging.WARNING)

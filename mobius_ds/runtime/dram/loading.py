"""``deepspeed.zero.Init`` under Mobius: parameters are made straight in the node's shared memory, once.

Under ZeRO-3 each rank keeps a part of every parameter; here all ranks keep all of them, in the one region that the
store will take over. Until ``deepspeed.initialize`` the first rank writes it. What another rank writes is seen by itself
alone, a private copy of the pages it touches, and is dropped at the end of the block: as under ZeRO-3 every rank sees
the first rank's values after a ``zero.Init`` block and inside of ``zero.GatheredParameters``, and the modifier's after it.
"""

import ctypes
import inspect
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Optional, Sequence

import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import (DEFAULT_TENSOR_OVERRIDES, DeepSpeedTensorOverride, Init,
                                                         InsertPostInitMethodToModuleSubClasses)
from deepspeed.utils import logger
from torch import distributed, nn

from mobius_ds.inputs.units import readable
from mobius_ds.machine.host_memory import available_dram
from mobius_ds.runtime.dram.shared_memory import Extent
from mobius_ds.runtime.dram.weights import WeightsRegion, Window, is_loading, piece_of, publish, revert
from mobius_ds.runtime.ranks.errors import OutOfMemory
from mobius_ds.runtime.ranks.exchange import exchange

WINDOW_BYTES = 2**30
"""The region is mapped in windows of this size, or of one parameter's where that is more."""

_SIGNATURE = inspect.signature(Init.__init__)


class SharedInit(Init):
    """What ``deepspeed.zero.Init`` is for a config that enables Mobius; its arguments are documented there.

    Parameters get the dtype that they have under ZeRO-3 and stay ordinary parameters, on the CPU.

    Raises:
        OutOfMemory: the weights alone exceed the node's DRAM; on all ranks, when the block has built that much.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        arguments = _SIGNATURE.bind(None, *args, **kwargs).arguments
        del arguments["self"]
        module = arguments.pop("module", None)
        # Nothing goes to a device before its stage does, and no parameter is partitioned.
        overrides = arguments.get("tensor_overrides", DEFAULT_TENSOR_OVERRIDES) or []
        arguments["tensor_overrides"] = [kind for kind in overrides if kind is not DeepSpeedTensorOverride.device]
        super().__init__(**arguments)
        self.mem_efficient_linear = False
        self.module = module
        self._first = distributed.get_rank() == 0
        self._region: Optional[WeightsRegion] = None
        if module is not None:
            self._open()
            for parameter in module.parameters():
                self._place(parameter)
            self._keep_in_fp32(module)
            self._close(True)

    def __enter__(self) -> None:
        if self.enabled and partition_parameters.zero_init_context == 0:
            self._open()
        super().__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Optional[bool]:
        done = super().__exit__(kind, error, trace)
        if self.enabled and partition_parameters.zero_init_context == 0:
            self._close(kind is None)
        return done

    def _post_init_method(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            InsertPostInitMethodToModuleSubClasses.num_module_parameters += 1
            InsertPostInitMethodToModuleSubClasses.num_module_elements += parameter.numel()
            self._place(parameter)
        self._keep_in_fp32(module)

    def patch_init_and_builtins(self) -> None:
        """As DeepSpeed's; besides, what ``module.apply`` writes on another rank than the first is dropped at once."""
        super().patch_init_and_builtins()
        self._module_apply = nn.Module.apply
        if not self._first:
            nn.Module.apply = _reverting(self._module_apply)

    def unpatch_init_and_builtins(self) -> None:
        """Undoes it."""
        if self.patched:
            nn.Module.apply = self._module_apply
        super().unpatch_init_and_builtins()

    def _open(self) -> None:
        """Makes the first rank's region known to all. All ranks call it."""
        region = WeightsRegion.sparse() if self._first else None
        offer = (region.handle, available_dram()) if region else None
        handle, self._available = exchange(offer)[0]
        failure = None
        try:
            self._region = region or WeightsRegion.open(handle)
        except Exception as error:  # everyone's error, not this rank's alone
            failure = error
        for failure in filter(None, exchange(failure)):
            raise failure
        self._window: Optional[Window] = None
        self._training_bytes = 0

    def _close(self, finished: bool) -> None:
        """Leaves the region to its parameters."""
        if finished and self._first and self._training_bytes > self._available:
            logger.warning(f"Mobius: training all weights of this model needs {readable(self._training_bytes)} of DRAM "
                           f"with fp32 masters, gradients and Adam's moments, but only {readable(self._available)} are "
                           "available. deepspeed.initialize will refuse it unless parameters are frozen before.")
        if finished:
            distributed.barrier()
        for window, extent in self._region.pieces():
            window.revert(extent)
        self._region = self._window = None
        _trim()

    def _place(self, parameter: nn.Parameter) -> None:
        """Moves a parameter into the region, unless it lies in one or has no data of its own."""
        data = parameter.data
        if type(data) is not torch.Tensor or data.is_meta or data.layout is not torch.strided or not data.numel() \
                or piece_of(data):
            return
        dtype = self.dtype if data.is_floating_point() else data.dtype
        extent = self._region.reserve(data.numel() * dtype.itemsize)
        self._check_dram(extent)
        self._training_bytes += extent.nbytes + data.numel() * (12 if dtype == torch.float32 else 16)
        if self._window is None or extent.stop > self._window.stop:
            self._window = self._region.window(Extent(extent.start, max(extent.stop, extent.start + WINDOW_BYTES)),
                                               private=not self._first)
            self._window.loading = True
        placed = self._window.tensor(extent, data.shape, dtype)
        # Zeros, which memory not yet written also reads as, are there already, and cost no page until they are others.
        if self._first and data.reshape(-1).view(torch.uint8).any():
            placed.copy_(data)
        parameter.data = placed

    def _check_dram(self, new: Extent) -> None:
        if new.stop > self._available:
            need = new.nbytes + sum(extent.nbytes for extent in self._region.used())
            if need > self._available:
                raise OutOfMemory(f"the weights of this model alone need at least {readable(need)} of DRAM, but only "
                                  f"{readable(self._available)} are available. Use a machine with more DRAM, a smaller "
                                  "model, or bf16 instead of fp32.")


@contextmanager
def gathered(parameters: Sequence[nn.Parameter], modifier_rank: Optional[int]) -> Iterator[None]:
    """What ``deepspeed.zero.GatheredParameters`` does for parameters that are being loaded; it leaves others alone.

    All ranks begin and end the block together, so that each sees what was written before.
    """
    parameters = [parameter for parameter in parameters if is_loading(parameter)]
    if not parameters:
        yield
        return
    distributed.barrier()
    revert(parameters)
    yield
    if modifier_rank:  # what the first rank writes is everybody's anyway
        distributed.barrier()
        if modifier_rank == distributed.get_rank():
            publish(parameters)
    distributed.barrier()
    revert(parameters)


def _trim() -> None:
    # Each parameter was made in malloc's heap first. What was freed there lies between what was not, and malloc keeps it.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def _reverting(apply: Callable) -> Callable:
    def apply_and_revert(module: nn.Module, function: Callable) -> nn.Module:
        applied = apply(module, function)
        revert(module.parameters(recurse=False))
        return applied

    return apply_and_revert

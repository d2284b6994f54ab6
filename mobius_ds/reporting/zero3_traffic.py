"""Counts the bytes a ZeRO-3 job with CPU offload moves, by observing an unmodified DeepSpeed engine.

Two figures, per rank and step:

``delivered``
    What the paper counts: parameter bytes arriving at a GPU plus gradient bytes leaving it. Every gather
    delivers the whole parameter to each of the N ranks, and every microbatch takes a whole gradient off each
    rank, so with 16-bit weights and one microbatch a step moves (2 + 2 + 2)·N bytes a parameter, 1.5·N
    times the model at 4 bytes a parameter.
``link``
    Every byte over a GPU's host link in both directions, on a server without peer-to-peer, where whatever
    one GPU sends to another leaves through its own link and arrives through the other's. To the above it
    adds what a ring collective makes each rank forward, (N-1)/N of the full size, and the copies of the
    gradient shards that DeepSpeed makes between host and device beyond the first.

The categories of the ledger are disjoint and add up to ``link``; ``delivered`` is all of them but ``other``:

    parameters_in   the rank's own shard copied from host memory, and the other shards received in gathers
    gradients_out   what reduce-scatter sends, and the rank's reduced shard copied to host memory
    other           shards sent in gathers, partial sums received in reduce-scatter, repeated copies of the
                    gradient shard, all-reduces of the gradient norm and the overflow flag

On the CPU accelerator host and device are the same memory, so the offload copies are no copies at all and no
profiler sees them. They are therefore counted where DeepSpeed asks for them, which is the same on every
accelerator (names and behaviour as of DeepSpeed 0.19):

- ``PartitionedParameterCoordinator.__all_gather_params_`` fetches for a submodule, ``Init._all_gather`` for
  everything else (persistent parameters after each step, ``GatheredParameters``). Both copy the shards of
  parameters that are not available to the device first; with one rank that copy is all there is.
- ``partition_grads`` receives the reduced shards. With an offloaded optimizer it copies each one to the host
  buffer and back to the device (microbatch 0), or the buffer to the device and back (later microbatches),
  and at the accumulation boundary once more to the host, in the master precision.
- Collectives are counted at the methods of ``torch.distributed.ProcessGroup``, which all of DeepSpeed's
  wrappers end in, at no cost per tensor operation.

Parameters live on the host after the optimizer step when they are offloaded too, so the update itself crosses
nothing; with only the optimizer offloaded the new 16-bit shard is copied in. Not counted: a microbatch's
inputs (the script moves them, not DeepSpeed), scalars, NVMe, zenflow, partial (``ratio``) offload and
``"managed_gradient_accumulation": false``.
"""

import functools
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterable, List, Tuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from mobius_ds.runtime.ledger import Bytes, Ledger

DELIVERED_CATEGORIES = ("parameters_in", "gradients_out", "activations_in", "activations_out")

# Method of ProcessGroup: (position of the argument that holds the full-size data, passes around the ring).
# torch 2.13 calls the *_single methods, earlier versions the underscored ones.
_COLLECTIVES: Dict[str, Tuple[int, int]] = {
    "allgather": (0, 1),
    "allgather_coalesced": (0, 1),
    "allgather_into_tensor_coalesced": (0, 1),
    "_allgather_base": (0, 1),
    "all_gather_single": (0, 1),
    "all_gather_single_coalesced": (0, 1),
    "reduce_scatter": (1, 1),
    "reduce_scatter_tensor_coalesced": (1, 1),
    "_reduce_scatter_base": (1, 1),
    "reduce_scatter_single": (1, 1),
    "reduce_scatter_single_coalesced": (1, 1),
    "allreduce": (0, 2),
    "allreduce_coalesced": (0, 2),
    "reduce": (0, 1),
    "broadcast": (0, 1),
    "alltoall": (1, 1),
    "alltoall_base": (1, 1),
    "all_to_all_single": (1, 1),
}

# What a collective carries decides the category of the bytes it makes a rank send and receive.
_PARAMETERS = ("other", "parameters_in")
_GRADIENTS = ("gradients_out", "other")
_ANYTHING = ("other", "other")


def delivered_bytes(traffic: Bytes) -> int:
    """The paper's count of a ZeRO-3 step, in bytes, from the bytes by category."""
    return sum(traffic[category] for category in DELIVERED_CATEGORIES)


class Zero3Traffic:
    """Counts this rank's ZeRO-3 bytes from ``start()`` to ``stop()``. One at a time in a process."""

    def __init__(self, engine):
        """Observes ``engine``, a ``DeepSpeedEngine`` of ZeRO stage 3.

        Raises:
            ValueError: the engine's optimizer is not ZeRO-3's.
        """
        if not isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
            raise ValueError(f"cannot count ZeRO-3 traffic of a {type(engine).__name__} whose optimizer is "
                             f"{type(engine.optimizer).__name__}: set zero_optimization.stage to 3")
        self._ledger = Ledger()
        self._parameters_on_host = engine.optimizer.offload_param
        self._purpose = threading.local()
        self._originals: List[Tuple[type, str, Any]] = []
        self._live: Dict[int, int] = {
            p.ds_id: p.ds_numel * p.ds_tensor.element_size()
            for p in engine.module.parameters() if p.ds_status == ZeroParamStatus.AVAILABLE
        }
        self._live_bytes = self._peak_live = sum(self._live.values())

    def start(self) -> "Zero3Traffic":
        """Puts the observers in place."""
        coordinator, optimizer = PartitionedParameterCoordinator, DeepSpeedZeroOptimizer_Stage3
        self._wrap(coordinator, "_PartitionedParameterCoordinator__all_gather_params_", self._observe_gather)
        self._wrap(Init, "_all_gather", self._observe_gather)
        self._wrap(Init, "_partition_param", self._observe_release)
        self._wrap(optimizer, "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads", self._observe_reduction)
        self._wrap(optimizer, "partition_grads", self._observe_gradient_shards)
        self._wrap(optimizer, "_reassign_or_swap_out_partitioned_parameters", self._observe_update)
        for name in _COLLECTIVES:
            if hasattr(torch.distributed.ProcessGroup, name):
                self._wrap(torch.distributed.ProcessGroup, name, functools.partial(self._observe_collective, name))
        return self

    def stop(self) -> None:
        """Takes the observers away again; DeepSpeed and torch are as they were."""
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def take(self) -> Bytes:
        """This rank's bytes by category since the last call. Their sum is ``link``."""
        return self._ledger.take()

    def peak_gathered_bytes(self) -> int:
        """The most bytes of whole, gathered parameters this rank held at once.

        A lower bound of ZeRO-3's device memory: activations, gradients and reduction buckets are not in it.
        """
        return self._peak_live

    # Each observer gets the observed method bound to its object as ``call``, and its arguments.

    def _wrap(self, owner: type, name: str, observer: Callable) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def observed(instance, *args, **kwargs):
            return observer(functools.partial(original, instance), instance, *args, **kwargs)

        # Restored as it lies in the class: what getattr returns for a C++ method would not bind to an object again.
        self._originals.append((owner, name, vars(owner)[name]))
        setattr(owner, name, observed)

    def _observe_gather(self, call, _, params: Iterable[torch.nn.Parameter], *args, **kwargs):
        for param in params:
            if param.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                shard = param.ds_tensor
                if self._fetched_from_host(shard):
                    self._ledger.add("parameters_in", shard.ds_numel * shard.element_size())
                self._live[param.ds_id] = param.ds_numel * shard.element_size()
                self._live_bytes += self._live[param.ds_id]
        self._peak_live = max(self._peak_live, self._live_bytes)
        with self._carrying(_PARAMETERS):
            return call(params, *args, **kwargs)

    def _observe_release(self, call, _, param: torch.nn.Parameter, *args, **kwargs):
        if param.ds_status == ZeroParamStatus.AVAILABLE:
            self._live_bytes -= self._live.pop(param.ds_id, 0)
        return call(param, *args, **kwargs)

    def _observe_reduction(self, call, _, *args, **kwargs):
        with self._carrying(_GRADIENTS):
            return call(*args, **kwargs)

    def _observe_gradient_shards(self, call, optimizer, params, shards: List[torch.Tensor], *args, **kwargs):
        if optimizer.offload_optimizer:
            # The last ranks' shards are shorter or empty when a parameter does not divide evenly.
            numel = sum(shard.numel() for shard in shards)
            accumulated = numel * optimizer.gradient_accumulation_dtype.itemsize
            self._ledger.add("gradients_out", accumulated)
            self._ledger.add("other", accumulated)  # back to the device, to accumulate or to take the norm
            if optimizer.is_gradient_accumulation_boundary():
                self._ledger.add("other", numel * optimizer.master_weights_and_grads_dtype.itemsize)
        return call(params, shards, *args, **kwargs)

    def _observe_update(self, call, optimizer, sub_group: int, *args, **kwargs):
        shard = optimizer.fp16_partitioned_groups_flat[sub_group]
        if optimizer.offload_optimizer and not optimizer.offload_param:
            self._ledger.add("parameters_in", shard.numel() * shard.element_size())
        return call(sub_group, *args, **kwargs)

    def _observe_collective(self, name: str, call, group, *args, **kwargs):
        position, passes = _COLLECTIVES[name]
        ranks = group.size()
        full_size = _device_bytes((*args, *kwargs.values())[position])
        each_way = full_size * passes * (ranks - 1) // ranks
        sent, received = getattr(self._purpose, "now", _ANYTHING)
        self._ledger.add(sent, each_way)
        self._ledger.add(received, each_way)
        return call(*args, **kwargs)

    @contextmanager
    def _carrying(self, purpose: Tuple[str, str]):
        before = getattr(self._purpose, "now", _ANYTHING)
        self._purpose.now = purpose
        try:
            yield
        finally:
            self._purpose.now = before

    def _fetched_from_host(self, shard: torch.Tensor) -> bool:
        return self._parameters_on_host and shard.device.type == "cpu"


def _device_bytes(data: Any) -> int:
    """Bytes of the device tensors in nested lists; messages between hosts cross no GPU's link."""
    if isinstance(data, torch.Tensor):
        on_device = get_accelerator().on_accelerator(data)
        return data.numel() * data.element_size() if on_device else 0
    return sum(_device_bytes(part) for part in data)

"""Counts the bytes a ZeRO-3 job with CPU offload moves, by observing an unmodified DeepSpeed engine.

Two figures, per rank and step:

``delivered``
    What the paper counts: parameter bytes arriving at a GPU plus gradient bytes leaving it. Every gather
    delivers the whole parameter to each of the N ranks, and every microbatch takes a whole gradient off each
    rank, so with 16-bit weights and one microbatch a step moves (2 + 2 + 2)·N bytes a parameter, 1.5·N
    times the model at 4 bytes a parameter.
``link``
    Every byte over a GPU's host link in both directions (``collectives``). To the above it adds what a ring
    makes each rank forward, (N-1)/N of the full size, and the copies of the gradient shards that DeepSpeed makes
    between host and device beyond the first.

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

Parameters live on the host after the optimizer step when they are offloaded too, so the update itself crosses
nothing; with only the optimizer offloaded the new 16-bit shard is copied in. Not counted: a microbatch's
inputs (the script moves them, not DeepSpeed), scalars, NVMe, zenflow, partial (``ratio``) offload and
``"managed_gradient_accumulation": false``.
"""

from typing import Dict, Iterable, List, Optional

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from mobius_ds.observation.collectives import GRADIENTS, PARAMETERS, ObservedTraffic
from mobius_ds.observation.transfers import Transfers


class Zero3Traffic(ObservedTraffic):
    """Counts this rank's ZeRO-3 bytes. See ``ObservedTraffic``."""

    def __init__(self, engine, transfers: Optional[Transfers] = None):
        """Observes ``engine``, a ``DeepSpeedEngine`` of ZeRO stage 3.

        Raises:
            ValueError: the engine's optimizer is not ZeRO-3's.
        """
        if not isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
            raise ValueError(f"cannot count ZeRO-3 traffic of a {type(engine).__name__} whose optimizer is "
                             f"{type(engine.optimizer).__name__}: set zero_optimization.stage to 3")
        super().__init__(transfers)
        self._parameters_on_host = engine.optimizer.offload_param
        self._live: Dict[int, int] = {
            p.ds_id: p.ds_numel * p.ds_tensor.element_size()
            for p in engine.module.parameters() if p.ds_status == ZeroParamStatus.AVAILABLE
        }
        self._live_bytes = self._peak_live = sum(self._live.values())

    def peak_gathered_bytes(self) -> int:
        """The most bytes of whole, gathered parameters this rank held at once.

        A lower bound of ZeRO-3's device memory: activations, gradients and reduction buckets are not in it.
        """
        return self._peak_live

    def _observe(self) -> None:
        coordinator, optimizer = PartitionedParameterCoordinator, DeepSpeedZeroOptimizer_Stage3
        self.wrap(coordinator, "_PartitionedParameterCoordinator__all_gather_params_", self._observe_fetch)
        self.wrap(Init, "_all_gather", self._observe_gather)
        self.wrap(Init, "_partition_param", self._observe_release)
        self.wrap(optimizer, "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads", self.carrying_all(GRADIENTS))
        self.wrap(optimizer, "partition_grads", self._observe_gradient_shards)
        self.wrap(optimizer, "_reassign_or_swap_out_partitioned_parameters", self._observe_update)

    def _observe_fetch(self, call, coordinator, params: Iterable[torch.nn.Parameter], *args, **kwargs):
        # It goes there by itself, but only when the shards are already on their way.
        with get_accelerator().stream(coordinator._PartitionedParameterCoordinator__allgather_stream):
            return self._observe_gather(call, coordinator, params, *args, **kwargs)

    def _observe_gather(self, call, owner, params: Iterable[torch.nn.Parameter], *args, **kwargs):
        for param in params:
            if param.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                shard = param.ds_tensor
                if self._fetched_from_host(shard):
                    self.copied_to_device("parameters_in", shard.ds_numel * shard.element_size())
                self._live[param.ds_id] = param.ds_numel * shard.element_size()
                self._live_bytes += self._live[param.ds_id]
        self._peak_live = max(self._peak_live, self._live_bytes)
        with self.carrying(PARAMETERS):
            return call(owner, params, *args, **kwargs)

    def _observe_release(self, call, owner, param: torch.nn.Parameter, *args, **kwargs):
        if param.ds_status == ZeroParamStatus.AVAILABLE:
            self._live_bytes -= self._live.pop(param.ds_id, 0)
        return call(owner, param, *args, **kwargs)

    def _observe_gradient_shards(self, call, optimizer, params, shards: List[torch.Tensor], *args, **kwargs):
        if optimizer.offload_optimizer:
            # The last ranks' shards are shorter or empty when a parameter does not divide evenly.
            numel = sum(shard.numel() for shard in shards)
            accumulated = numel * optimizer.gradient_accumulation_dtype.itemsize
            self.copied_to_host("gradients_out", accumulated)
            self.copied_to_device("other", accumulated)  # to accumulate or to take the norm
            if optimizer.is_gradient_accumulation_boundary():
                self.copied_to_host("other", numel * optimizer.master_weights_and_grads_dtype.itemsize)
        return call(optimizer, params, shards, *args, **kwargs)

    def _observe_update(self, call, optimizer, sub_group: int, *args, **kwargs):
        shard = optimizer.fp16_partitioned_groups_flat[sub_group]
        if optimizer.offload_optimizer and not optimizer.offload_param:
            self.copied_to_device("parameters_in", shard.numel() * shard.element_size())
        return call(optimizer, sub_group, *args, **kwargs)

    def _fetched_from_host(self, shard: torch.Tensor) -> bool:
        return self._parameters_on_host and shard.device.type == "cpu"

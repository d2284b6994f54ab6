"""Counts the bytes of DeepSpeed's engines that keep the whole model on every device: ZeRO stages 0, 1 and 2.

What crosses a GPU's host link, per rank and step, with D bytes of gradients, N ranks (names and behaviour as of
DeepSpeed 0.19), and in which category:

stage 0, plain data parallel
    Gradients are all-reduced at the accumulation boundary (``DeepSpeedEngine.allreduce_bucket``). The first pass of the
    ring, a reduce-scatter, takes (N-1)/N · D of gradients off each GPU: ``gradients_out``. What it brings in, and the
    second pass, which hands the sums around, is ``other``. No parameter moves.
stage 2, and stage 1 at the accumulation boundary
    Gradients are all-reduced by buckets as they come (``reduce_ipg_grads``), although each rank keeps only its part: by
    default DeepSpeed sums buckets with several owners whole. With ``use_multi_rank_bucket_allreduce`` off each part is
    reduced to its owner. After the update the 16-bit parameters are gathered (``all_gather_dp_groups``).
with the optimizer on the host (``copy_grads_in_partition``, and ``step``)
    The rank's part of the gradients is copied to the host, in the master precision: ``gradients_out``. The updated
    16-bit part is copied back: ``parameters_in``. With accumulation in the parameters' own precision every
    microbatch copies the gradients of all parameters that the rank owns a part of, whole, to the host (``gradients_out``),
    and every one but the first copies the sum so far to the device before (``other``); the copy at the boundary is then
    a repetition (``other``). With accumulation in fp32 the sums stay on the device.

Other collectives (gradient norm, overflow flag, losses) are ``other``. Not counted: a microbatch's inputs, zenflow,
Muon's exchanges and ``"managed_gradient_accumulation": false``.
"""

import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from mobius_ds.observation.collectives import GRADIENTS, PARAMETERS, ObservedTraffic


class DataParallelTraffic(ObservedTraffic):
    """Counts this rank's bytes under ZeRO stages 0, 1 and 2. See ``ObservedTraffic``."""

    def _observe(self) -> None:
        self.wrap(DeepSpeedEngine, "allreduce_bucket", self.carrying_all(GRADIENTS))
        self.wrap(DeepSpeedZeroOptimizer, "reduce_ipg_grads", self.carrying_all(GRADIENTS))
        for module in (stage_1_and_2, bf16_optimizer):
            self.wrap(module, "all_gather_dp_groups", self.carrying_all(PARAMETERS))
        self.wrap(DeepSpeedZeroOptimizer, "copy_grads_in_partition", self._observe_gradient_part)
        self.wrap(DeepSpeedZeroOptimizer, "_optimizer_step", self._observe_update)

    def _observe_gradient_part(self, call, optimizer, param: torch.nn.Parameter, group: int):
        if optimizer.cpu_offload:
            at_boundary = optimizer.is_gradient_accumulation_boundary()
            summed_on_host = not optimizer._use_compact_grad_partition_buffer(group) and \
                (optimizer.micro_step_id > 0 or not at_boundary)
            if summed_on_host:
                self._observe_sum_on_host(optimizer, param)
            if at_boundary:
                *_, elements = optimizer.grad_position[optimizer.get_param_id(param)]
                self.copied_to_host("other" if summed_on_host else "gradients_out",
                                    elements * optimizer.master_weights_and_grads_dtype.itemsize)
        return call(optimizer, param, group)

    def _observe_sum_on_host(self, optimizer, param: torch.nn.Parameter) -> None:
        *_, elements = optimizer.grad_position[optimizer.get_param_id(param)]
        copied = elements if optimizer.low_precision_master_weights_and_grads else param.numel()
        if optimizer.micro_step_id > 0:
            self.copied_to_device("other", copied * param.element_size())
        self.copied_to_host("gradients_out", copied * param.element_size())

    def _observe_update(self, call, optimizer, group: int):
        call(optimizer, group)
        if optimizer.cpu_offload:
            updated = optimizer.param_buffer_of_bit16_for_cpu_offload_groups[group]
            self.copied_to_device("parameters_in", updated.numel() * updated.element_size())

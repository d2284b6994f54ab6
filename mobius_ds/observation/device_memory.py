"""What an engine of DeepSpeed keeps on the device, and whether a device with less memory would have held it.

On an accelerator its own count is the better answer to the first question. On CPU nobody counts, so the tensors that
the engine refers to are added up: the model, the optimizer with its masters and moments, and room for gradients.
What lives only while a step runs, activations above all, is not among them.
"""

from typing import Any, Iterable, Iterator, NamedTuple

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from mobius_ds.inputs.units import readable
from mobius_ds.runtime.ranks.errors import DeviceOutOfMemory

MEASURE = "parameters, gradients and optimizer state kept there, without activations"

_DEPTH = 4  # optimizers keep tensors in lists of groups of lists


class HeldOnDevice(NamedTuple):
    """Bytes that one rank keeps on its device from step to step."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def held_by(engine) -> HeldOnDevice:
    """What an engine of ZeRO stage 0, 1 or 2, or a ``PipelineEngine``, keeps on the device now.

    Gradients count as if they were there, which they are at the end of every backward. An optimizer's moments
    appear in its first step.
    """
    parameters = list(engine.module.parameters())
    model = list(_storages((*parameters, *engine.module.buffers())))
    counted = {storage.data_ptr() for storage in (*model, *_storages(p.grad for p in parameters if p.grad is not None))}
    offloaded = getattr(engine.optimizer, "cpu_offload", False)
    optimizer = () if offloaded or engine.optimizer is None else _storages(_tensors(vars(engine.optimizer), _DEPTH))
    return HeldOnDevice(sum(storage.nbytes() for storage in model), _gradient_bytes(engine),
                sum(storage.nbytes() for storage in optimizer if storage.data_ptr() not in counted))


def _gradient_bytes(engine) -> int:
    optimizer = engine.optimizer
    partitioned = isinstance(optimizer, DeepSpeedZeroOptimizer) and optimizer.partition_gradients
    whole = 0 if partitioned else sum(p.numel() * p.element_size() for p in engine.module.parameters() if p.requires_grad)
    return whole + (_reduction_bytes(optimizer) if isinstance(optimizer, DeepSpeedZeroOptimizer) else 0)


def _reduction_bytes(optimizer: DeepSpeedZeroOptimizer) -> int:
    """What stages 1 and 2 keep to reduce gradients, and the rank's own part of the sums."""
    kept = 0
    if optimizer.contiguous_gradients:
        buckets = len(optimizer.ipg_buckets) * (2 if optimizer.overlap_comm else 1)  # one is filled, one is reduced
        kept += buckets * int(optimizer.reduce_bucket_size) * optimizer._gradient_reduction_buffer_dtype().itemsize
    if optimizer.cpu_offload:
        kept += optimizer.temp_grad_buffer_for_gpu_offload.nbytes
    for group, elements in enumerate(optimizer.partition_size):
        if not optimizer.cpu_offload or optimizer._use_compact_grad_partition_buffer(group):
            kept += int(elements) * optimizer.gradient_accumulation_dtype.itemsize
    return kept


def check(engine, budget: int) -> None:
    """Fails as the engine would on a device of ``budget`` bytes, if what it keeps there does not fit.

    Raises:
        DeviceOutOfMemory: need and have are in the message.
    """
    held = held_by(engine)
    if held.total > budget:
        raise DeviceOutOfMemory(
            f"rank {engine.global_rank}: {type(engine).__name__} at ZeRO stage {engine.zero_optimization_stage()} keeps "
            f"{readable(held.total)} on the device ({readable(held.parameters)} of parameters, {readable(held.gradients)} "
            f"for gradients, {readable(held.optimizer)} of optimizer state, activations not counted), but has "
            f"{readable(budget)} (device_memory_gb): {readable(held.total - budget)} are missing")


def check_gathered(engine, gathered: int, budget: int) -> None:
    """Fails as ZeRO-3 would on a device of ``budget`` bytes, if the ``gathered`` bytes of whole parameters do not fit.

    Raises:
        DeviceOutOfMemory: need and have are in the message.
    """
    if gathered > budget:
        raise DeviceOutOfMemory(
            f"rank {engine.global_rank}: {type(engine).__name__} at ZeRO stage 3 gathered {readable(gathered)} of "
            f"parameters at once, activations and gradients not counted, but has {readable(budget)} (device_memory_gb): "
            f"{readable(gathered - budget)} are missing. Lower stage3_max_live_parameters or stage3_prefetch_bucket_size")


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif isinstance(value, torch.optim.Optimizer):
        yield from _tensors([value.param_groups, list(value.state.values())], depth)
    elif isinstance(value, (dict, list, tuple)) and depth:
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part, depth - 1)


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    """The memory of the tensors, each piece once."""
    seen = set()
    for storage in (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided):
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage

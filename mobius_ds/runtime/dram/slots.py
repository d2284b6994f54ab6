"""Slots: the device memory that holds the weights of one stage, and the gradients it accumulates.

A device has two, used in turn; see Note [two of each] in the schedule.
"""

from typing import AbstractSet, Dict, List, NamedTuple, Sequence, Tuple

import torch

from mobius_ds.runtime.device.device import Device
from mobius_ds.runtime.dram.shared_memory import aligned
from mobius_ds.runtime.dram.store import Layout, ParameterStore, offset_in
from mobius_ds.schedule.tasks import DEPTH


class GradientGroup(NamedTuple):
    """The trained parameters of one stage that share a dtype: accumulated in fp32, sent in that dtype."""

    dtype: torch.dtype
    offsets: Tuple[Tuple[str, int], ...]
    """Each parameter's first element in the flat buffer."""
    elements: int

    @property
    def wire_bytes(self) -> int:
        """Bytes of the whole buffer on the wire."""
        return self.elements * self.dtype.itemsize


def gradient_groups(layout: Layout, names: Sequence[str]) -> Tuple[GradientGroup, ...]:
    """Lays out the gradients of a stage's trained parameters, one flat buffer per dtype."""
    by_dtype: Dict[torch.dtype, List[str]] = {}
    for name in layout.trained(names):
        by_dtype.setdefault(layout.entries[name].dtype, []).append(name)
    groups = []
    for dtype, members in by_dtype.items():
        offsets, end = [], 0
        for name in members:
            offsets.append((name, end))
            end += aligned(layout.entries[name].weight.nbytes) // dtype.itemsize
        groups.append(GradientGroup(dtype, tuple(offsets), end))
    return tuple(groups)


class StageMemory:
    """One stage in its slot: parameters to compute with, and where their gradients add up."""

    def __init__(self, parameters: Dict[str, torch.Tensor], groups: Sequence[GradientGroup],
                 accumulators: Sequence[torch.Tensor]):
        self.parameters = parameters
        self.groups = groups
        self.accumulators = accumulators
        self._accumulating = False

    def accumulate(self) -> None:
        """Before its first backward: zeroes the accumulators, and adds to them what autograd produces from then on."""
        if self._accumulating:
            return
        self._accumulating = True
        for group, flat in zip(self.groups, self.accumulators):
            flat.zero_()
            for name, start in group.offsets:
                parameter = self.parameters[name]
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(
                        _adds_to(flat[start:start + parameter.numel()].view(parameter.shape)))

    def wire(self, replicas: int) -> List[torch.Tensor]:
        """The accumulated gradients as they travel, one flat device tensor per group: the mean over replicas.

        The mean is taken here and not of the loss, so that in fp16 a backward sees the numbers, and overflows where, it
        does under ZeRO-3.
        """
        return [flat.div_(replicas).to(group.dtype) for group, flat in zip(self.groups, self.accumulators)]


def _adds_to(accumulator: torch.Tensor):
    def hook(parameter: torch.Tensor) -> None:
        # Freed at once: a stage never holds a second set of gradients.
        accumulator.add_(parameter.grad)
        parameter.grad = None

    return hook


class Slots:
    """The slots of one device."""

    def __init__(self, device: Device, store: ParameterStore):
        self._device = device
        self._store = store
        self._weights: List[torch.Tensor] = []
        self._gradients: List[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all slots and gradient buffers."""
        return sum(buffer.nbytes for buffer in (*self._weights, *self._gradients))

    def reserve(self, weight_bytes: int, gradient_bytes: int) -> None:
        """Makes every slot large enough for any stage of this GPU.

        Args:
            weight_bytes, gradient_bytes: needs of its largest stage.

        Raises:
            OutOfMemory: the device's budget does not allow it.
        """
        self._weights = self._grown(self._weights, weight_bytes, "the weights of two stages")
        self._gradients = self._grown(self._gradients, gradient_bytes, "the gradients of two stages")

    def weights(self, number: int, names: Sequence[str], category: str,
                frozen: AbstractSet[str] = frozenset()) -> Dict[str, torch.Tensor]:
        """Copies parameters from DRAM into slot ``number mod 2`` and returns them as leaves of a new graph.

        Args:
            frozen: those that require no gradient this time, besides those that are never trained.
        """
        layout, buffer = self._store.layout, self._weights[number % DEPTH]
        packing = layout.weights(names)
        start = 0
        for extent in packing.extents:
            self._device.upload(self._store.wire_weights[extent.start:extent.stop], category,
                                into=buffer[start:start + extent.nbytes])
            start += aligned(extent.nbytes)
        parameters = {}
        for name in names:
            entry = layout.entries[name]
            offset = offset_in(packing, entry.weight.start)
            flat = buffer[offset:offset + entry.weight.nbytes].view(entry.dtype)
            parameters[name] = flat.view(entry.shape).detach().requires_grad_(entry.trainable and name not in frozen)
        return parameters

    def accumulators(self, number: int, groups: Sequence[GradientGroup]) -> List[torch.Tensor]:
        """Views of gradient buffer ``number mod 2``, fp32, one per group."""
        flat, start, views = self._gradients[number % DEPTH].view(torch.float32), 0, []
        for group in groups:
            views.append(flat[start:start + group.elements])
            start += group.elements
        return views

    def _grown(self, buffers: List[torch.Tensor], nbytes: int, what: str) -> List[torch.Tensor]:
        present = buffers[0].numel() if buffers else 0
        if buffers and nbytes <= present:
            return buffers
        self._device.hold(DEPTH * (nbytes - present), what)
        buffers.clear()  # before the larger ones are made, so that both never exist at once
        return [torch.empty(nbytes, dtype=torch.uint8, device=self._device.memory_device) for _ in range(DEPTH)]

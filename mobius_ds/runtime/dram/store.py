"""The model's home in DRAM: one copy per node of weights, fp32 masters and gradients, mapped by every rank.

The layout follows the order of the model's parameters, layers in order, so the parameters of a stage are a
few contiguous pieces (*extents*), usually one, and are copied as such. Parameters that were built in shared memory
stay where they are.
"""

import ctypes
import ctypes.util
import mmap
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, Iterator, Mapping, NamedTuple, Optional, Tuple

import torch
from torch import nn

from mobius_ds.runtime.dram.shared_memory import Extent, Handle, Region, aligned, merged
from mobius_ds.runtime.dram.weights import WeightsRegion


class Packing(NamedTuple):
    """Where a set of parameters lies in a region and in a buffer that holds just them."""

    extents: Tuple[Extent, ...]
    """Pieces of the region, in the buffer one after another."""
    nbytes: int
    """Size of the buffer."""
    moved: int
    """Bytes that a copy of all the extents moves."""


def packed(pieces: Iterable[Extent]) -> Packing:
    """Lays pieces of a region into one buffer, each extent aligned."""
    extents = merged(pieces)
    return Packing(extents, sum(aligned(extent.nbytes) for extent in extents), sum(extent.nbytes for extent in extents))


def offset_in(packing: Packing, position: int) -> int:
    """Where a region's byte ``position`` lies in the packing's buffer."""
    start = 0
    for extent in packing.extents:
        if extent.start <= position <= extent.stop:  # at its very end lies what has no elements
            return start + position - extent.start
        start += aligned(extent.nbytes)
    raise KeyError(position)


@dataclass(frozen=True)
class StoredParameter:
    """Where one parameter lies."""

    shape: Tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    weight: Extent
    """Its piece of the weights, in its own dtype."""
    full: Extent
    """Its piece of the fp32 regions (masters, gradients); empty when frozen."""


class Layout:
    """Where every parameter of a model lies.

    Args:
        parameters: by name, in the model's order.
        placed: where some of them lie already in the region of the weights.
        end: where the room for the others begins there.
    """

    def __init__(self, parameters: Iterable[Tuple[str, nn.Parameter]], placed: Mapping[str, Extent] = {}, end: int = 0):
        parameters = list(parameters)
        pieces, full, end = [], 0, aligned(end)
        for name, parameter in parameters:
            nbytes = parameter.numel() * parameter.dtype.itemsize
            pieces.append(placed.get(name, Extent(end, end + nbytes)))
            end += 0 if name in placed else aligned(nbytes)
        self.span = Extent(min((piece.start for piece in pieces), default=0), end).pages()
        """The pages of the region from the first to the last of the weights; entries count from its start."""
        self.entries: Dict[str, StoredParameter] = {}
        for (name, parameter), piece in zip(parameters, pieces):
            trained = parameter.numel() * 4 if parameter.requires_grad else 0
            self.entries[name] = StoredParameter(tuple(parameter.shape), parameter.dtype, parameter.requires_grad,
                                       Extent(piece.start - self.span.start, piece.stop - self.span.start),
                                       Extent(full, full + trained))
            full += aligned(trained)
        self.weight_bytes = sum(aligned(piece.nbytes) for piece in pieces)
        self.placed_bytes = sum(aligned(piece.nbytes) for piece in placed.values())
        self.full_bytes = full
        self.needs_masters = any(entry.trainable and entry.dtype != torch.float32 for entry in self.entries.values())

    @property
    def host_bytes(self) -> int:
        """DRAM for weights, masters and gradients."""
        return self.weight_bytes + self.full_bytes * (2 if self.needs_masters else 1)

    def weights(self, names: Iterable[str]) -> Packing:
        """The weights of some parameters."""
        return packed(self.entries[name].weight for name in names)

    def trained(self, names: Iterable[str]) -> Tuple[str, ...]:
        """Those of some parameters that are trained."""
        return tuple(name for name in names if self.entries[name].trainable)


class ParameterStore:
    """The shared regions of one model.

    Args:
        layout: the same on every rank.
        handles: the regions made by the first rank, or None on the first rank itself.
        on_map: called with each piece of memory that copies to the device read, to register it.
        home: on the first rank, the region that the layout's placed parameters lie in; a new one by default.
    """

    def __init__(self, layout: Layout, handles: Optional[Dict[str, Handle]] = None,
                 on_map: Callable[[torch.Tensor], Any] = lambda tensor: None, home: Optional[WeightsRegion] = None):
        self.layout = layout
        self.home = WeightsRegion.open(handles["weights"]) if handles else home or WeightsRegion.sparse()
        self.home.end = max(self.home.end, layout.span.stop)
        sizes = {"gradients": layout.full_bytes, **({"masters": layout.full_bytes} if layout.needs_masters else {})}
        self._regions = {name: Region.open(handles[name]) if handles else Region.create(name, size)
                         for name, size in sizes.items()}
        # The weights are mapped twice: once for the module's parameters and once for copies to the device. On
        # a GPU nothing computes from the first, and on CPU a test can take its pages away to prove the same.
        self._module_memory = self.home.window(layout.span)
        self._weights = {name: self._module_tensor(entry) for name, entry in layout.entries.items()}
        self.wire_weights = torch.frombuffer(self.home.window(layout.span), dtype=torch.uint8)
        self._gradients = self._regions["gradients"].map()
        self._masters = self._regions["masters"].map() if layout.needs_masters else None
        for pages in merged(entry.weight.pages() for entry in layout.entries.values() if entry.weight.nbytes):
            on_map(self.wire_weights[pages.start:pages.stop])

    def _module_tensor(self, entry: StoredParameter) -> torch.Tensor:
        if not entry.weight.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        start = self.layout.span.start
        return self._module_memory.tensor(Extent(start + entry.weight.start, start + entry.weight.stop), entry.shape,
                                          entry.dtype)

    @property
    def handles(self) -> Dict[str, Handle]:
        """How other ranks open the same regions."""
        return {"weights": self.home.handle, **{name: region.handle for name, region in self._regions.items()}}

    @property
    def nbytes(self) -> int:
        """DRAM of all regions, once per node."""
        return self.layout.host_bytes

    @property
    def present(self) -> Dict[str, int]:
        """The part of it that is in memory by now: pages are taken when they are first written."""
        written = {name: region.resident for name, region in self._regions.items()}
        return {"weights": self.layout.weight_bytes, "fp32 masters": written.get("masters", 0),
                "gradients": written["gradients"]}

    def weight(self, name: str) -> torch.Tensor:
        """A parameter's weights in its own dtype."""
        return self._weights[name]

    def master(self, name: str) -> torch.Tensor:
        """A trained parameter's fp32 values; the weights themselves when they are fp32."""
        if self.layout.entries[name].dtype == torch.float32:
            return self.weight(name)
        return self._view(self._masters, self.layout.entries[name].full, name, torch.float32)

    def gradient(self, name: str) -> torch.Tensor:
        """A trained parameter's accumulated fp32 gradient."""
        return self._view(self._gradients, self.layout.entries[name].full, name, torch.float32)

    def _view(self, region: torch.Tensor, extent: Extent, name: str, dtype: torch.dtype) -> torch.Tensor:
        return region[extent.start:extent.stop].view(dtype).view(self.layout.entries[name].shape)

    @contextmanager
    def unreadable_weights(self) -> Iterator[None]:
        """Makes any touch of the module's own parameters a segmentation fault while the block runs.

        For tests: on CPU a device tensor and a DRAM tensor look alike, so code that would mix devices on a
        GPU goes unnoticed otherwise.
        """
        _protect(self._module_memory, 0)
        try:
            yield
        finally:
            _protect(self._module_memory, mmap.PROT_READ | mmap.PROT_WRITE)

    def close(self) -> None:
        """Gives up the files; the module's parameters keep their mapping, and with it that of the weights.

        The ranks still share what they only read. What one writes from now on is its own: as after any training, each
        may merge or cast its module.
        """
        self._module_memory.make_private()
        for region in self._regions.values():
            region.close()
        self._weights = {}
        self._module_memory = self.wire_weights = self._gradients = self._masters = None


def _protect(memory: mmap.mmap, protection: int) -> None:
    mapping = torch.frombuffer(memory, dtype=torch.uint8)
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    if libc.mprotect(ctypes.c_void_p(mapping.data_ptr()), ctypes.c_size_t(mapping.numel()), protection) != 0:
        raise OSError(ctypes.get_errno(), "mprotect failed")

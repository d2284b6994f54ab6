"""The region in which weights live, from the moment a model is built.

A file in memory that grows at its end and takes pages only where something is written. Each process knows which
pieces of it its own tensors use, and finds a tensor's piece by its address: so a model is adopted where it lies.
"""

import ctypes
import ctypes.util
import mmap
import os
import weakref
from typing import Any, Dict, Iterable, Iterator, Mapping, NamedTuple, Optional, Tuple

import torch

from mobius_ds.runtime.dram.shared_memory import Extent, Handle, Region, aligned, merged
from mobius_ds.runtime.ranks.process import PIECES, REGIONS

SPARSE_BYTES = 2**44
"""More than a node has of DRAM: offsets are never used twice, and only written pages count."""

MAP_NORESERVE, MAP_FIXED = 0x4000, 0x10
"""Linux' flags, which Python's mmap module does not name before 3.13."""


class WeightsRegion(Region):
    """A region that grows. It lives as long as a mapping of it does, in any process."""

    def __init__(self, fd: int, nbytes: int, handle: Handle):
        super().__init__(fd, nbytes, handle)
        self.end = 0
        """Bytes given out so far, the same on all ranks that build the same models."""
        weakref.finalize(self, os.close, fd).atexit = False
        REGIONS[_inode(fd)] = self

    @classmethod
    def sparse(cls) -> "WeightsRegion":
        """Makes an empty one."""
        return cls.create("weights", SPARSE_BYTES)

    @classmethod
    def open(cls, handle: Handle) -> "WeightsRegion":
        """Opens the region of another process; the one this process has already, if it has.

        Raises:
            PipelineError: the other process cannot be reached through /proc.
        """
        opened = Region.open(handle)
        known = REGIONS.get(_inode(opened._fd))
        if known is None:
            return cls(opened._fd, opened.nbytes, handle)
        opened.close()
        return known

    def reserve(self, nbytes: int) -> Extent:
        """Room for ``nbytes`` at the end."""
        extent = Extent(self.end, self.end + nbytes)
        self.end += aligned(nbytes)
        return extent

    def window(self, span: Extent, private: bool = False) -> "Window":
        """Maps a part of the region, from the beginning of a page.

        Args:
            private: what this process writes is seen by itself alone.
        """
        start = span.pages().start
        # Without a reservation: what is written to a private mapping is little, and its size says nothing.
        window = Window(self._fd, span.stop - start, offset=start,
                        flags=mmap.MAP_PRIVATE | MAP_NORESERVE if private else mmap.MAP_SHARED)
        window.region, window.start, window.private = self, start, private
        return window

    def pieces(self) -> Iterator[Tuple["Window", Extent]]:
        """What tensors of this process use, and through which mapping."""
        for piece in list(PIECES.values()):
            window = piece.window()
            if window is not None and window.region is self:
                yield window, piece.extent

    def used(self) -> Tuple[Extent, ...]:
        """What tensors of this process use."""
        return merged(extent for _, extent in self.pieces())

    def release(self, kept: Iterable[Extent]) -> None:
        """Gives back the pages before the end that hold nothing of ``kept``, in all processes."""
        window = self.window(Extent(0, self.end)) if self.end else None
        position = 0
        for extent in (*merged(kept), Extent(self.end, self.end)):
            hole = Extent(Extent(position, position).pages().stop, extent.pages().start)
            if hole.nbytes > 0:
                window.madvise(mmap.MADV_REMOVE, hole.start, hole.nbytes)
            position = max(position, extent.stop)

    def close(self) -> None:
        """Nothing: the last of its mappings closes the file."""


class Window(mmap.mmap):
    """A mapping of a part of a region, which its tensors keep."""

    region: WeightsRegion
    start: int
    """Where in the region it begins."""
    private: bool
    """Whether what this process writes is seen by itself alone."""
    loading: bool = False
    """Whether its parameters belong to no engine yet: what the first rank writes counts."""

    @property
    def stop(self) -> int:
        """Where in the region it ends."""
        return self.start + len(self)

    def tensor(self, extent: Extent, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """The tensor that lies at ``extent`` of the region.

        It has a storage of its own: torch.save writes whole storages, and Hugging Face takes tensors of one storage
        for tied.
        """
        piece = memoryview(self)[extent.start - self.start:extent.stop - self.start]
        tensor = torch.frombuffer(piece, dtype=dtype).view(tuple(shape))
        address, entry = tensor.data_ptr(), _Piece(weakref.ref(self), extent)
        PIECES[address] = entry
        weakref.finalize(piece, _forget, address, entry).atexit = False
        return tensor

    def make_private(self) -> None:
        """Maps the same memory again, at the same address: what this process writes from now on is seen by itself alone."""
        place = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        mapped = libc.mmap(ctypes.c_void_p(place), ctypes.c_size_t(len(self)), mmap.PROT_READ | mmap.PROT_WRITE,
                           mmap.MAP_PRIVATE | MAP_NORESERVE | MAP_FIXED, self.region._fd, ctypes.c_int64(self.start))
        if mapped != place:
            raise OSError(ctypes.get_errno(), "mmap failed")
        self.private = True

    def revert(self, extent: Extent) -> None:
        """Drops what this process alone has written to the pages of ``extent``; nothing where it writes for all."""
        pages = Extent(max(extent.pages().start, self.start), min(extent.pages().stop, self.stop))
        if self.private:
            self.madvise(mmap.MADV_DONTNEED, pages.start - self.start, pages.nbytes)


class _Piece(NamedTuple):
    window: "weakref.ref[Window]"
    extent: Extent


def piece_of(tensor: torch.Tensor) -> Optional[_Piece]:
    """The piece that a tensor fills, if it lies in a region's mapping."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    piece = PIECES.get(tensor.data_ptr())
    return piece if piece and piece.extent.nbytes == tensor.numel() * tensor.dtype.itemsize else None


def lying(parameters: Mapping[str, torch.Tensor]) -> Tuple[Optional[WeightsRegion], Dict[str, Extent]]:
    """The region in which most bytes of some parameters lie, and which of them lie in it, where.

    A piece counts once: parameters that share memory without being one parameter are told apart by the first name.
    """
    places: Dict[WeightsRegion, Dict[Extent, str]] = {}
    for name, parameter in parameters.items():
        piece = piece_of(parameter.data)
        if piece:
            places.setdefault(piece.window().region, {}).setdefault(piece.extent, name)
    if not places:
        return None, {}
    region = max(places, key=lambda region: sum(extent.nbytes for extent in places[region]))
    return region, {name: extent for extent, name in places[region].items()}


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether what this process writes into a tensor that lies in a region is written for all."""
    piece = piece_of(tensor)
    return piece is not None and not piece.window().private


def is_loading(tensor: Any) -> bool:
    """Whether this is a parameter that lies in a region and belongs to no engine yet."""
    piece = piece_of(tensor.data) if isinstance(tensor, torch.Tensor) else None
    return piece is not None and piece.window().loading


def revert(parameters: Iterable[torch.Tensor]) -> None:
    """Drops what this process alone has written to parameters that it maps privately."""
    for parameter in parameters:
        piece = piece_of(parameter.data)
        if piece:
            piece.window().revert(piece.extent)


def publish(parameters: Iterable[torch.Tensor]) -> None:
    """Writes this process's values of parameters that it maps privately for all."""
    for parameter in parameters:
        piece = piece_of(parameter.data)
        if piece:
            shared = piece.window().region.window(piece.extent)
            shared.tensor(piece.extent, parameter.shape, parameter.dtype).copy_(parameter.data)


def _forget(address: int, entry: _Piece) -> None:
    if PIECES.get(address) is entry:  # another tensor may lie there by now
        del PIECES[address]


def _inode(fd: int) -> Tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino

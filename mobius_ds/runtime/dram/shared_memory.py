"""Memory that all ranks of a node map: anonymous files, of which nothing is left when their processes end."""

import errno
import mmap
import os
from typing import Dict, Iterable, List, NamedTuple, Tuple

import torch

from mobius_ds.runtime.ranks.errors import PeerLost, PipelineError

ALIGNMENT = 64
"""Bytes. Every tensor starts on a cache line, which is also what vectorised copies want."""


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Extent(NamedTuple):
    """A contiguous piece ``[start, stop)`` of a region, in bytes."""

    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.stop - self.start

    def pages(self) -> "Extent":
        """The pages it touches."""
        return Extent(self.start // mmap.PAGESIZE * mmap.PAGESIZE, -(-self.stop // mmap.PAGESIZE) * mmap.PAGESIZE)


def merged(pieces: Iterable[Extent]) -> Tuple[Extent, ...]:
    """Joins pieces that touch; what lies between two is only alignment when it is shorter than that."""
    extents: List[Extent] = []
    for piece in sorted(pieces):
        if extents and piece.start - extents[-1].stop < ALIGNMENT:
            extents[-1] = Extent(extents[-1].start, max(extents[-1].stop, piece.stop))
        else:
            extents.append(piece)
    return tuple(extents)


class Handle(NamedTuple):
    """How another process of the node finds a region."""

    pid: int
    fd: int
    nbytes: int
    inode: int
    """Of the file: a process that has closed it may use the number ``fd`` for another one."""


class Region:
    """One anonymous shared file, mapped.

    A file in memory (memfd) rather than a name under /dev/shm, which containers often cap, and which would
    stay behind when a process is killed. Its pages are taken from DRAM when they are first written.
    """

    def __init__(self, fd: int, nbytes: int, handle: Handle):
        self._fd = fd
        self.nbytes = nbytes
        self.handle = handle

    @classmethod
    def create(cls, name: str, nbytes: int) -> "Region":
        """Makes a region of ``nbytes`` zeros. ``name`` shows in /proc/<pid>/maps.

        Raises:
            PipelineError: a limit of the process forbids it.
        """
        fd = os.memfd_create(f"mobius_ds:{name}", os.MFD_CLOEXEC)
        nbytes = max(nbytes, mmap.PAGESIZE)
        try:
            os.ftruncate(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise PipelineError(f"cannot make a shared memory of {nbytes} bytes for {name} ({error}). If there is a limit "
                                "on file sizes, it counts for this as well: raise it (ulimit -f unlimited).") from None
        return cls(fd, nbytes, Handle(os.getpid(), fd, nbytes, os.fstat(fd).st_ino))

    @classmethod
    def open(cls, handle: Handle) -> "Region":
        """Opens a region of another process of this node and user.

        Raises:
            PipelineError: the other process cannot be reached through /proc, or has closed it.
        """
        path = f"/proc/{handle.pid}/fd/{handle.fd}"
        try:
            region = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), handle.nbytes, handle)
            if os.fstat(region._fd).st_ino != handle.inode:
                region.close()
                raise OSError(errno.ESTALE, "closed since")
            return region
        except OSError as error:
            raise PipelineError(f"cannot open the shared memory of process {handle.pid} ({path}: {error}). All ranks "
                                "must run as one user on one node, in one process namespace.") from error

    @property
    def resident(self) -> int:
        """Bytes of DRAM it takes: the pages that have been written."""
        return os.fstat(self._fd).st_blocks * 512

    def map(self) -> torch.Tensor:
        """Maps the region: bytes, shape ``[nbytes]``. Each call is a mapping of its own."""
        return torch.frombuffer(self.memory(), dtype=torch.uint8)

    def memory(self) -> mmap.mmap:
        """Maps the region, as a buffer that tensors can be made of."""
        return mmap.mmap(self._fd, self.nbytes)

    def close(self) -> None:
        """Gives up the file; mappings stay valid until their tensors are gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Block(NamedTuple):
    """A piece of a rank's arena, addressable from every rank."""

    rank: int
    segment: int
    offset: int
    nbytes: int


SEGMENT_BYTES = 64 * 2**20


class Arena:
    """One rank's part of the activation store: a growing list of regions with a free list.

    Only the owner allocates and frees. Freed neighbours are joined: with sequences of many lengths hardly any
    size comes twice, and what one sweep leaves must serve the next.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self._segments: List[Region] = []
        self._reached: List[int] = []
        self._free: List[Block] = []

    @property
    def nbytes(self) -> int:
        """Bytes of DRAM touched so far, freed ones included."""
        return sum(self._reached)

    def allocate(self, nbytes: int) -> Block:
        """A block of at least ``nbytes`` bytes, aligned."""
        size = aligned(max(nbytes, 1))
        fitting = [piece for piece in self._free if piece.nbytes >= size]
        if not fitting:
            self._segments.append(Region.create(f"activations of rank {self._rank}", max(size, SEGMENT_BYTES)))
            self._reached.append(0)
            fitting = [Block(self._rank, len(self._segments) - 1, 0, self._segments[-1].nbytes)]
            self._free += fitting
        # The smallest piece that fits: large ones stay whole, and memory never touched is touched last.
        piece = min(fitting, key=lambda piece: (piece.nbytes, piece))
        self._free.remove(piece)
        if piece.nbytes > size:
            self._free.append(piece._replace(offset=piece.offset + size, nbytes=piece.nbytes - size))
        self._reached[piece.segment] = max(self._reached[piece.segment], piece.offset + size)
        return piece._replace(nbytes=nbytes)

    def free(self, block: Block) -> None:
        """Takes a block back."""
        start, stop = block.offset, block.offset + aligned(max(block.nbytes, 1))
        for piece in [piece for piece in self._free if piece.segment == block.segment]:
            if piece.offset == stop or piece.offset + piece.nbytes == start:
                self._free.remove(piece)
                start, stop = min(start, piece.offset), max(stop, piece.offset + piece.nbytes)
        self._free.append(block._replace(offset=start, nbytes=stop - start))

    def handle(self, segment: int) -> Handle:
        """How other ranks open one of the segments."""
        return self._segments[segment].handle

    def region(self, segment: int) -> Region:
        """One of the segments."""
        return self._segments[segment]

    def close(self) -> None:
        """Gives up all files."""
        for region in self._segments:
            region.close()


class Placed(NamedTuple):
    """A tensor in an arena: where it lies and what it is. Travels between ranks in a message."""

    block: Block
    handle: Handle
    shape: Tuple[int, ...]
    stride: Tuple[int, ...]
    dtype: torch.dtype


class ActivationStore:
    """Boundary activations and whatever else ranks hand each other, in DRAM."""

    def __init__(self, rank: int, on_map=lambda tensor: None):
        """``on_map`` is called with every newly mapped segment, to register it with the device."""
        self._rank = rank
        self._arena = Arena(rank)
        self._mapped: Dict[Tuple[int, int], torch.Tensor] = {}
        self._on_map = on_map

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's arena."""
        return self._arena.nbytes

    def place(self, tensor: torch.Tensor) -> Placed:
        """Room for a tensor like ``tensor``; its elements are copied by whoever moves them."""
        stride = _dense_stride(tensor)
        block = self._arena.allocate(tensor.numel() * tensor.dtype.itemsize)
        return Placed(block, self._arena.handle(block.segment), tuple(tensor.shape), stride, tensor.dtype)

    def view(self, placed: Placed) -> torch.Tensor:
        """The placed tensor itself, in DRAM, from any rank.

        Raises:
            PeerLost: the rank that placed it has ended since.
        """
        block = placed.block
        key = (block.rank, block.segment)
        if key not in self._mapped:
            region = self._arena.region(block.segment) if block.rank == self._rank else _region_of(placed)
            self._mapped[key] = region.map()
            self._on_map(self._mapped[key])
            if block.rank != self._rank:
                region.close()
        flat = self._mapped[key][block.offset:block.offset + block.nbytes].view(placed.dtype)
        return flat.as_strided(placed.shape, placed.stride, flat.storage_offset())

    def free(self, placed: Placed) -> None:
        """Takes the room back; only on the rank that placed it."""
        self._arena.free(placed.block)

    def close(self) -> None:
        """Gives up this rank's files and its mappings."""
        self._mapped.clear()
        self._arena.close()


def _region_of(placed: Placed) -> Region:
    try:
        return Region.open(placed.handle)
    except PipelineError as error:  # all ranks could open each other's memory when they met
        rank = placed.block.rank
        raise PeerLost(f"rank {rank} is gone (its activations are); the first error in the output of rank {rank} says why. "
                       "Start the job again.", rank, "its activations are gone") from error


def _dense_stride(tensor: torch.Tensor) -> Tuple[int, ...]:
    """The strides of a dense copy that keeps the order of dimensions, so that kernels see the same layout."""
    return tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()

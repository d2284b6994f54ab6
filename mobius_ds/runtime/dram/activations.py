"""Activations in DRAM: each rank's arena, where its stages place tensors for others to read."""

from typing import Dict, List, NamedTuple, Tuple

import torch

from mobius_ds.runtime.dram.shared_memory import Handle, Region, aligned
from mobius_ds.runtime.ranks.errors import PeerLost, PipelineError


class ArenaBlock(NamedTuple):
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
        self._free: List[ArenaBlock] = []

    @property
    def nbytes(self) -> int:
        """Bytes of DRAM touched so far, freed ones included."""
        return sum(self._reached)

    def allocate(self, nbytes: int) -> ArenaBlock:
        """A block of at least ``nbytes`` bytes, aligned."""
        size = aligned(max(nbytes, 1))
        fitting = [piece for piece in self._free if piece.nbytes >= size]
        if not fitting:
            self._segments.append(Region.create(f"activations of rank {self._rank}", max(size, SEGMENT_BYTES)))
            self._reached.append(0)
            fitting = [ArenaBlock(self._rank, len(self._segments) - 1, 0, self._segments[-1].nbytes)]
            self._free += fitting
        # The smallest piece that fits: large ones stay whole, and memory never touched is touched last.
        piece = min(fitting, key=lambda piece: (piece.nbytes, piece))
        self._free.remove(piece)
        if piece.nbytes > size:
            self._free.append(piece._replace(offset=piece.offset + size, nbytes=piece.nbytes - size))
        self._reached[piece.segment] = max(self._reached[piece.segment], piece.offset + size)
        return piece._replace(nbytes=nbytes)

    def free(self, block: ArenaBlock) -> None:
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

    block: ArenaBlock
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

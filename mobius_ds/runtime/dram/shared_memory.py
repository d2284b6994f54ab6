"""Memory that all ranks of a node map: anonymous files, of which nothing is left when their processes end."""

import errno
import mmap
import os
from typing import Iterable, List, NamedTuple, Tuple

import torch

from mobius_ds.runtime.ranks.errors import PipelineError

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

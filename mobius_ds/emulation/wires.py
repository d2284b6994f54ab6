"""Emulated wires: links with a bandwidth, shared by the processes of a machine that does not have them.

Each link is a token bucket, kept as the time until which the link is booked. A transfer is cut into chunks of equal
size. Every chunk books its share of time on each link it crosses and sleeps until the last of them is done with it.
Transfers that cross one link at the same time so take turns on it, and each gets its fair share.

Note [a late sleeper loses nothing]. A chunk starts where the one before was planned to end, not where its sleeper woke
up. No link is booked twice for the same time, so nothing crosses faster than it may, but what a sleeper misses is made
up for, as a copying engine goes on without its host.
"""

import fcntl
import hashlib
import math
import mmap
import os
import struct
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from mobius_ds.inputs.topology import Topology
from mobius_ds.simulation.costs import to_dram, to_gpu
from mobius_ds.simulation.simulator import Link

CHUNK_SECONDS = 4e-3
"""What the narrowest link takes for a chunk: long against the lateness of a sleeper, short against a transfer."""
DOUBLE = struct.calcsize("d")


class Wires:
    """The links of one emulated machine, shared by all ranks of a job.

    Args:
        path: a file that all ranks map. Whoever comes first makes it; whoever chose the path removes it.
        bandwidth: bytes/s of every link. The same on every rank.
        slowdown: how many times slower than that the links are.

    Raises:
        ValueError: a figure is not positive, or the file was made for other links.
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, bandwidth: Mapping[Link, float], slowdown: float = 1.0):
        for what, value in [("a slowdown", slowdown), *((f"bandwidth of {link}", rate) for link, rate in bandwidth.items())]:
            if not 0 < value < math.inf:
                raise ValueError(f"{what} of {value} cannot be emulated; it must be positive and finite")
        links = sorted(bandwidth, key=repr)
        self.path, self.slowdown = path, slowdown
        self._rate: Dict[Link, float] = {link: bandwidth[link] / slowdown for link in links}
        self._place: Dict[Link, int] = {link: number + 1 for number, link in enumerate(links)}
        self._chunk_bytes = CHUNK_SECONDS * min(self._rate.values())
        self._threads = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._memory, self._numbers = self._mapped()
        except BaseException:
            os.close(self._file)
            raise

    def carry(self, crossing: Sequence[Tuple[Link, float]], begun: Optional[float] = None) -> float:
        """Blocks until bytes have crossed links.

        Args:
            crossing: links and the bytes that cross each, at the same time.
            begun: when they set out, by ``time.perf_counter``; now by default.

        Returns:
            The seconds it took.

        Raises:
            KeyError: there is no such link.
        """
        begun = end = time.perf_counter() if begun is None else begun
        chunks = math.ceil(max((nbytes for _, nbytes in crossing), default=0.0) / self._chunk_bytes)
        pieces = [(self._place[link], nbytes / chunks / self._rate[link]) for link, nbytes in crossing if nbytes > 0]
        self._count(pieces, 1)
        try:
            for _ in range(chunks):
                end = self._book(pieces, end)
                time.sleep(max(0.0, end - time.perf_counter()))
        finally:
            self._count(pieces, -1)
        return time.perf_counter() - begun

    def close(self) -> None:
        """Gives up the mapping and the file."""
        self._numbers.release()
        self._memory.close()
        os.close(self._file)

    # How.

    def _count(self, pieces: List[Tuple[int, float]], change: int) -> None:
        """Counts the transfers that are under way on each link."""
        with self._alone():
            for place, _ in pieces:
                self._numbers[len(self._rate) + place] += change

    def _book(self, pieces: List[Tuple[int, float]], start: float) -> float:
        """Books a chunk on its links.

        Args:
            pieces: where each link's time is kept, and the seconds that the chunk takes of it.

        Returns:
            When the chunk has crossed all of them.
        """
        end = start
        with self._alone():
            since = max(0.0, time.perf_counter() - start)
            for place, seconds in pieces:
                waiting = max(0.0, self._numbers[place] - start)
                others = self._numbers[len(self._rate) + place] - 1
                # What is over cannot be gone ahead of. Of each transfer under way it waits for as much as it has itself, as
                # if turns were taken by the byte: among equals that is all that is booked. What it goes ahead of waits for
                # it in turn.
                over = min(waiting, since)
                end = max(end, start + seconds + over + min(waiting - over, others * seconds))
                self._numbers[place] = start + waiting + seconds
        return end

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps out this process's other threads, and by the file's lock, which ends with its process, the others."""
        with self._threads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _mapped(self) -> Tuple[mmap.mmap, memoryview]:
        """Maps the file, doubles all of them: which links it is made for; until when each link is booked, in seconds of
        the machine's clock; and how many transfers are under way on each."""
        made_for = hashlib.sha256(repr(list(self._rate.items())).encode()).digest()[:DOUBLE]
        size = DOUBLE * (1 + 2 * len(self._rate))
        with self._alone():
            if os.fstat(self._file).st_size == 0:
                os.ftruncate(self._file, size)
                os.pwrite(self._file, made_for, 0)
            elif os.fstat(self._file).st_size != size or os.pread(self._file, DOUBLE, 0) != made_for:
                raise ValueError(f"{self.path} was made for other links or another slowdown; all ranks must name the same")
        memory = mmap.mmap(self._file, size)
        return memory, memoryview(memory).cast("d")


class WiredLink:
    """One GPU's way to DRAM and back, over wires: what a ``Device`` needs of a link.

    Args:
        topology: of the emulated machine.
        gpu: one of its.
    """

    def __init__(self, wires: Wires, topology: Topology, gpu: int):
        self.wires, self.slowdown = wires, wires.slowdown
        self._topology, self._gpu = topology, gpu

    def to_gpu(self, nbytes: int, begun: float) -> None:
        """Blocks until so many bytes, which set out at ``begun``, have come from DRAM."""
        self.wires.carry(to_gpu(self._topology, self._gpu, nbytes), begun)

    def to_dram(self, nbytes: int, begun: float) -> None:
        """Blocks until they have come to DRAM."""
        self.wires.carry(to_dram(self._topology, self._gpu, nbytes), begun)

    def crossing(self, received: int, sent: int) -> Sequence[Tuple[Link, float]]:
        """The links that bytes cross which come to the GPU while others leave it, each with its bytes."""
        return (*to_gpu(self._topology, self._gpu, received), *to_dram(self._topology, self._gpu, sent))

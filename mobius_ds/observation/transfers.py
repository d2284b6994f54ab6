"""When an observed engine's transfers run and when compute waits for them; on an emulated server, how long they take.

``Transfers`` only looks on: a collective lasts from the call to the moment somebody has waited for it. Copies between host
and device are none on CPU and take no time.

``EmulatedTransfers`` also makes each transfer cross the rank's emulated links, as a commodity server would:

- A copy is issued to the stream that is current where DeepSpeed asks for it, and crosses the way to or from DRAM.
  Host memory counts as pinned, so copies hold up nobody but what waits for their stream.
- A collective runs in a stream of its process group, as NCCL's do: in the order of the calls, after what its own
  current stream was issued before, and not before every rank of the group has called. What it brings comes in while
  what it hands on goes out, on each GPU through its own link and its root complex. ``wait()`` of its handle holds up
  the stream that is current there, so compute only when it is DeepSpeed's compute stream that waits.
- A send goes out from its call on, and comes in from when both ends have called and the receiver waits. It is over for
  the sender when it is out.

The transfer of the data itself, which gloo does at once, runs at the same time and counts as no time of its own,
unless it takes longer than the links.
"""

import mmap
import os
import struct
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from deepspeed.accelerator import get_accelerator

from mobius_ds.emulation.server import EmulatedServer, shared_files
from mobius_ds.emulation.streams import SideStream, emulated_streams
from mobius_ds.names import WIRES_VARIABLE
from mobius_ds.simulation.simulator import Link

DOUBLE = struct.calcsize("d")
CALLS_REMEMBERED = 4096
"""More than any rank can be ahead of another in calls of one group's collectives."""


def transfers_of(engine, folder: Path) -> "Optional[Transfers]":
    """What takes the transfers of an engine that is about to be built; None for one that takes its own.

    Args:
        folder: of the job's records.

    Raises:
        ValueError: links are to be emulated under an accelerator, which has its own.
    """
    server = EmulatedServer.from_environment()
    device = get_accelerator().device_name()
    if server is not None and device != "cpu":
        raise ValueError(f"the links of {server.topology.name} cannot be emulated under {device}, whose copies run over its "
                         f"own: unset {WIRES_VARIABLE}, or run on CPU (DS_ACCELERATOR=cpu)")
    if hasattr(engine, "take_traffic") or device != "cpu":
        return None
    return Transfers() if server is None else EmulatedTransfers(server, torch.distributed.get_rank(), folder)


class Call(NamedTuple):
    """A call of a collective, a send or a receive, or a copy."""

    name: str
    group: Any
    """Its process group; None for a copy between host and device."""
    category: str
    """The ledger's, of what it is for."""
    received: int
    sent: int
    """Bytes, of this rank."""

    @property
    def is_point_to_point(self) -> bool:
        """Whether it does not need all ranks of the group."""
        return self.name in ("send", "recv")


class Transfer(NamedTuple):
    """A transfer that ran, in seconds of ``time.perf_counter``, which all ranks of a node share."""

    name: str
    category: str
    """The ledger's, of what it is for."""
    received: int
    sent: int
    """Bytes, of this rank."""
    begin: float
    end: float
    crossing: Sequence[Tuple[Link, float]] = ()
    """The emulated links that it crossed, each with its bytes."""


class Notes:
    """What ran and what compute waited for, since they were last taken. Threads of one rank may add at the same time."""

    def __init__(self):
        self._lock = threading.Lock()
        self._transfers: List[Transfer] = []
        self._waits: List[Tuple[float, float]] = []
        self._spans: List[Tuple[str, float, float]] = []

    def moved(self, *transfer: Any) -> None:
        """Notes a transfer; the arguments are those of ``Transfer``."""
        with self._lock:
            self._transfers.append(Transfer(*transfer))

    def waited(self, begin: float, end: float) -> None:
        """Notes that compute stood still."""
        with self._lock:
            self._waits.append((begin, end))

    def ran(self, name: str, begin: float, end: float) -> None:
        """Notes that compute was busy with forward or backward, waits within included."""
        with self._lock:
            self._spans.append((name, begin, end))

    def take(self) -> Dict[str, List[Sequence[Any]]]:
        """Transfers, waits and spans of compute since the last call, as plain data."""
        with self._lock:
            taken = {"transfers": self._transfers, "waits": self._waits, "spans": self._spans}
            self._transfers, self._waits, self._spans = [], [], []
        return taken


class Transfers:
    """Looks on. See the module."""

    def __init__(self):
        self.notes = Notes()

    def copy(self, category: str, nbytes: int, inward: bool) -> None:
        """Takes a copy between host and device, which DeepSpeed asks for now."""

    def collective(self, call: Call, issue: Callable[[], Any]) -> Any:
        """Calls a collective.

        Returns:
            What stands for torch's handle of it.
        """
        begin = time.perf_counter()
        work = issue()
        return work and _Handle(work, lambda: self._wait(call, work, begin))

    def _wait(self, call: Call, work: Any, issued: float) -> None:
        begin = time.perf_counter()
        work.wait()
        end = time.perf_counter()
        self.notes.waited(begin, end)
        self.notes.moved(call.name, call.category, call.received, call.sent, issued, end)

    def close(self) -> None:
        """Nothing was put in place."""


class EmulatedTransfers(Transfers):
    """Makes transfers take the time of an emulated server. See the module.

    To be there before the engine is built, which makes its streams then.

    Args:
        rank: this process's, and its GPU's number.
        folder: of the job's records.
    """

    def __init__(self, server: EmulatedServer, rank: int, folder: Path):
        super().__init__()
        self._link = server.link_of(rank, folder)
        self._peer: Optional[Link] = None if server.topology.peer_bandwidth is None else ("peer", rank)
        self._folder = folder
        self._in_place = ExitStack()
        self._in_place.callback(self._link.wires.close)
        self._accelerator = self._in_place.enter_context(emulated_streams(self.notes.waited))
        self._lanes: Dict[str, SideStream] = {}
        self._calls: Dict[str, "CallTimes"] = {}

    def copy(self, category: str, nbytes: int, inward: bool) -> None:
        call = Call("copy", None, category, *((nbytes, 0) if inward else (0, nbytes)))
        self._accelerator.current_stream().submit(lambda begin: self._carry(call, begin))

    def collective(self, call: Call, issue: Callable[[], Any]) -> Any:
        before, lane = self._accelerator.current_stream().last, self._lane(call)
        if call.is_point_to_point:
            return self._point_to_point(call, issue(), before, lane)
        called = self._times(call.group).called()
        work = issue()

        def cross(begin: float) -> float:
            work.wait()
            return self._carry(call, max(begin, before.result(), called()))

        end = lane.submit(cross)
        return self._handle(work, lambda: end)

    def _point_to_point(self, call: Call, work: Any, before: Future, lane: SideStream) -> Any:

        def cross() -> Future:
            return lane.submit(lambda begin: self._carry(call, max(begin, before.result())))

        if call.name == "recv":  # gloo's handle can be waited for only once here: the lane must not wait for the sender
            return self._handle(work, cross)
        end = cross()
        return self._handle(work, lambda: end)

    def _handle(self, work: Any, transfer: Callable[[], Future]) -> Any:
        """A handle whose ``wait()`` waits for ``work``, and then for the end that ``transfer`` returns."""

        def wait() -> None:
            begin = time.perf_counter()
            work.wait()
            self.notes.waited(begin, time.perf_counter())
            self._accelerator.current_stream().wait(transfer())

        return _Handle(work, wait)

    def close(self) -> None:
        """Takes the emulation away."""
        self._in_place.close()

    def _carry(self, call: Call, begin: float) -> float:
        if self._peer is not None and call.group is not None:
            crossing = ((self._peer, max(call.sent, call.received)),)
        else:
            crossing = (*self._link.to_gpu(call.received), *self._link.to_dram(call.sent))
        end = begin + self._link.wires.carry(crossing, begin)
        self.notes.moved(call.name, call.category, call.received, call.sent, begin, end, crossing)
        return end

    def _lane(self, call: Call) -> SideStream:
        name = f"{call.group.group_name} {call.name if call.is_point_to_point else ''}"
        if name not in self._lanes:
            self._lanes[name] = self._accelerator.new_stream(name)
        return self._lanes[name]

    def _times(self, group: Any) -> "CallTimes":
        name = group.group_name
        if name not in self._calls:
            self._calls[name] = CallTimes(shared_files(self._folder) / f"calls-{name}", group.rank(), group.size())
            self._in_place.callback(self._calls[name].close)
        return self._calls[name]


class CallTimes:
    """When each rank of a process group called its collectives, in a file that all of them map.

    Args:
        path: of the file, the same on every rank; whoever comes first makes it.
        rank: this one's in the group.
        ranks: of the group.
    """

    def __init__(self, path: Path, rank: int, ranks: int):
        size = ranks * CALLS_REMEMBERED * DOUBLE
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, size)
            self._memory = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._times = memoryview(self._memory).cast("d")
        self._rank, self._ranks = rank, ranks
        self._made = 0

    def called(self) -> Callable[[], float]:
        """Notes that this rank calls the next collective now.

        Returns:
            What tells, once the collective is over, when the last rank called it.
        """
        place = self._made % CALLS_REMEMBERED
        self._times[self._rank * CALLS_REMEMBERED + place] = time.perf_counter()
        self._made += 1
        return lambda: max(self._times[rank * CALLS_REMEMBERED + place] for rank in range(self._ranks))

    def close(self) -> None:
        """Gives up the mapping."""
        self._times.release()
        self._memory.close()


class _Handle:
    """Stands for a ``torch.distributed.Work``."""

    def __init__(self, work: Any, wait: Callable[[], None]):
        self._work = work
        self._wait = wait

    def wait(self, *_: Any) -> bool:
        self._wait()
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

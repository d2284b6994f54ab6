"""Makes each transfer of an observed engine cross the rank's emulated links, as on a commodity server:

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
import time
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable, Dict, Optional

from mobius_ds.emulation.streams import SideStream, emulated_streams
from mobius_ds.emulation.wires import WiredLink
from mobius_ds.observation.records import shared_files
from mobius_ds.observation.transfers import TransferCall, Transfers, WorkHandle
from mobius_ds.simulation.simulator import Link

DOUBLE = struct.calcsize("d")
CALLS_REMEMBERED = 4096
"""More than any rank can be ahead of another in calls of one group's collectives."""


class EmulatedTransfers(Transfers):
    """Makes transfers take the time of an emulated server. See the module.

    To be there before the engine is built, which makes its streams then.

    Args:
        link: this rank's, closed with the transfers.
        peer: its GPU's own connection to the others, if it has one.
        folder: of the job's records.
    """

    def __init__(self, link: WiredLink, peer: Optional[Link], folder: Path):
        super().__init__()
        self._link = link
        self._peer = peer
        self._folder = folder
        self._in_place = ExitStack()
        self._in_place.callback(self._link.wires.close)
        self._accelerator = self._in_place.enter_context(emulated_streams(self.notes.waited))
        self._lanes: Dict[str, SideStream] = {}
        self._calls: Dict[str, "CallTimes"] = {}

    def copy(self, category: str, nbytes: int, inward: bool) -> None:
        call = TransferCall("copy", None, category, *((nbytes, 0) if inward else (0, nbytes)))
        self._accelerator.current_stream().submit(lambda begin: self._carry(call, begin))

    def collective(self, call: TransferCall, issue: Callable[[], Any]) -> Any:
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

    def _point_to_point(self, call: TransferCall, work: Any, before: Future, lane: SideStream) -> Any:

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

        return WorkHandle(work, wait)

    def close(self) -> None:
        """Takes the emulation away."""
        self._in_place.close()

    def _carry(self, call: TransferCall, begin: float) -> float:
        if self._peer is not None and call.group is not None:
            crossing = ((self._peer, max(call.sent, call.received)),)
        else:
            crossing = self._link.crossing(call.received, call.sent)
        end = begin + self._link.wires.carry(crossing, begin)
        self.notes.moved(call.name, call.category, call.received, call.sent, begin, end, crossing)
        return end

    def _lane(self, call: TransferCall) -> SideStream:
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

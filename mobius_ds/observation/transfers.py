"""When an observed engine's transfers run, and when compute waits for them.

A collective lasts from the call to the moment somebody has waited for it. Copies between host and device are none on
CPU and take no time. Links that are emulated (``emulated_links``) make transfers take time.
"""

import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

from mobius_ds.simulation.simulator import Link


class TransferCall(NamedTuple):
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


class StepNotes:
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
        self.notes = StepNotes()

    def copy(self, category: str, nbytes: int, inward: bool) -> None:
        """Takes a copy between host and device, which DeepSpeed asks for now."""

    def collective(self, call: TransferCall, issue: Callable[[], Any]) -> Any:
        """Calls a collective.

        Returns:
            What stands for torch's handle of it.
        """
        begin = time.perf_counter()
        work = issue()
        return work and WorkHandle(work, lambda: self._wait(call, work, begin))

    def _wait(self, call: TransferCall, work: Any, issued: float) -> None:
        begin = time.perf_counter()
        work.wait()
        end = time.perf_counter()
        self.notes.waited(begin, end)
        self.notes.moved(call.name, call.category, call.received, call.sent, issued, end)

    def close(self) -> None:
        """Nothing was put in place."""


class WorkHandle:
    """Stands for a ``torch.distributed.Work``.

    Args:
        work: torch's own, for all but waiting.
        wait: what waits for it.
    """

    def __init__(self, work: Any, wait: Callable[[], None]):
        self._work = work
        self._wait = wait

    def wait(self, *_: Any) -> bool:
        self._wait()
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

"""The bytes that collectives move over a GPU's host link, observed under an unmodified DeepSpeed engine.

Every byte counts that crosses the link in either direction on a server without peer-to-peer, where whatever one GPU
sends to another leaves through its own link and arrives through the other's. Collectives are those of a ring, as
NCCL runs them; for data of D bytes on N ranks a rank sends and receives

    all-gather, reduce-scatter    (N-1)/N · D each
    all-reduce                    twice that: a reduce-scatter and an all-gather
    broadcast                     D from one to the next, the root first: the root receives nothing, the last sends nothing
    reduce                        D from one to the next, the root last: the first receives nothing, the root sends nothing
    send, receive                 D at the sender, D at the receiver

What a collective carries decides the categories of the ledger, and that is known where DeepSpeed asks for it: the
sources of the engines (``zero3_traffic``, ``data_parallel_traffic``, ``pipeline_traffic``) say it with ``carrying``.
Collectives themselves are counted at the methods of ``torch.distributed.ProcessGroup``, which all of DeepSpeed's
wrappers end in, at no cost per tensor operation.
"""

import functools
import threading
from contextlib import contextmanager
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from deepspeed.accelerator import get_accelerator

from mobius_ds.observation.transfers import TransferCall, Transfers
from mobius_ds.runtime.device.ledger import Bytes, Ledger
from mobius_ds.schedule.tasks import DELIVERED


class Purpose(NamedTuple):
    """What a collective carries: the categories of the bytes it makes a rank send and receive."""

    sent: str
    received: str

    def asked_for(self, sent: int) -> str:
        """The one that is not ``other``; of two, the one that a rank has bytes of that sends so many."""
        return self.sent if sent and self.sent != "other" else self.received


PARAMETERS = Purpose("other", "parameters_in")
GRADIENTS = Purpose("gradients_out", "other")
ACTIVATIONS = Purpose("activations_out", "activations_in")
ANYTHING = Purpose("other", "other")


class Pass(NamedTuple):
    """Bytes one rank sends and receives in one pass around the ring."""

    sent: int
    received: int


def around(nbytes: int, ranks: int) -> Pass:
    """A pass in which every rank hands on all parts of the data but one: all-gather, reduce-scatter, all-to-all."""
    return Pass(nbytes * (ranks - 1) // ranks, nbytes * (ranks - 1) // ranks)


def broadcast(nbytes: int, ranks: int, after_root: int) -> Pass:
    """The data from one rank to the next, for the rank that comes ``after_root`` places after the root."""
    return Pass(nbytes if after_root < ranks - 1 else 0, nbytes if after_root else 0)


def reduce(nbytes: int, ranks: int, after_root: int) -> Pass:
    """Partial sums from one rank to the next, the root last."""
    return Pass(nbytes if after_root else 0, nbytes if after_root != 1 % ranks else 0)


# Method of ProcessGroup: position of the argument that holds the full-size data.
# torch 2.13 calls the *_single methods, earlier versions the underscored ones.
_GATHERS = {"allgather": 0, "allgather_coalesced": 0, "allgather_into_tensor_coalesced": 0, "_allgather_base": 0,
            "all_gather_single": 0, "all_gather_single_coalesced": 0}
_SCATTERS = {"reduce_scatter": 1, "reduce_scatter_tensor_coalesced": 1, "_reduce_scatter_base": 1,
             "reduce_scatter_single": 1, "reduce_scatter_single_coalesced": 1,
             "alltoall": 1, "alltoall_base": 1, "all_to_all_single": 1}
_ALL_REDUCES = {"allreduce": 0, "allreduce_coalesced": 0}
_ROOTED: Dict[str, Callable[[int, int, int], Pass]] = {"broadcast": broadcast, "reduce": reduce}
_POINT_TO_POINT = {"send": lambda nbytes: Pass(nbytes, 0), "recv": lambda nbytes: Pass(0, nbytes)}
_POSITION = {**_GATHERS, **_SCATTERS, **_ALL_REDUCES, **dict.fromkeys((*_ROOTED, *_POINT_TO_POINT), 0)}


def passes_of(name: str, group, arguments: Tuple[Any, ...]) -> List[Pass]:
    """The passes a call of a method of ``ProcessGroup`` makes this rank take part in.

    Args:
        name: of the method, one of those observed.
        group: the process group.
        arguments: of the call.
    """
    nbytes, ranks = _device_bytes(arguments[_POSITION[name]]), group.size()
    if name in _POINT_TO_POINT:
        return [_POINT_TO_POINT[name](nbytes)]
    if name in _ROOTED:
        return [_ROOTED[name](nbytes, ranks, (group.rank() - arguments[1].rootRank) % ranks)]
    return [around(nbytes, ranks)] * (2 if name in _ALL_REDUCES else 1)


def observed_by(observer: Callable, original: Callable) -> Callable:
    """``original`` as ``observer`` sees it, which gets it and the arguments of each call, the object first for a method."""

    @functools.wraps(original)
    def observed(*args, **kwargs):
        return observer(original, *args, **kwargs)

    return observed


class ObservedTraffic:
    """Counts this rank's bytes from ``start()`` to ``stop()``. One at a time in a process.

    Subclasses add, in ``_observe``, what their engine moves besides, and say what its collectives carry.

    Args:
        transfers: takes every transfer beside being counted; None on an accelerator, which runs them in its own time.
    """

    def __init__(self, transfers: Optional[Transfers] = None):
        self._ledger = Ledger()
        self._transfers = transfers
        self._purpose = threading.local()
        self._originals: List[Tuple[Any, str, Any]] = []

    def start(self) -> "ObservedTraffic":
        """Puts the observers in place."""
        for name in _POSITION:
            if hasattr(torch.distributed.ProcessGroup, name):
                self.wrap(torch.distributed.ProcessGroup, name, functools.partial(self._observe_collective, name))
        self._observe()
        return self

    def stop(self) -> None:
        """Takes the observers away again; DeepSpeed and torch are as they were."""
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def take(self) -> Bytes:
        """This rank's bytes by category since the last call. Their sum is ``link``."""
        return self._ledger.take()

    def delivered(self, traffic: Bytes) -> int:
        """The paper's count, in bytes, from the bytes by category: what arrives or leaves for its own sake."""
        return sum(traffic[category] for category in DELIVERED)

    # For subclasses.

    def _observe(self) -> None:
        """Wraps what is to be observed besides collectives."""

    def wrap(self, owner: Any, name: str, observer: Callable) -> None:
        """Has a class's method or a module's function observed until ``stop()``."""
        self.replace(owner, name, observed_by(observer, getattr(owner, name)))

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Puts something in the place of a class's or a module's attribute until ``stop()``."""
        # Restored as it lies in the class: what getattr returns for a C++ method would not bind to an object again.
        self._originals.append((owner, name, vars(owner)[name]))
        setattr(owner, name, replacement)

    def carrying_all(self, purpose: Purpose) -> Callable:
        """The observer of a method whose collectives all carry the same."""

        def observer(call, *args, **kwargs):
            with self.carrying(purpose):
                return call(*args, **kwargs)

        return observer

    @contextmanager
    def carrying(self, purpose: Purpose):
        """Says what the collectives within carry."""
        before = getattr(self._purpose, "now", ANYTHING)
        self._purpose.now = purpose
        try:
            yield
        finally:
            self._purpose.now = before

    def copied_to_device(self, category: str, nbytes: int) -> None:
        """Takes a copy from host memory, to the stream that is current."""
        self._copied(category, nbytes, inward=True)

    def copied_to_host(self, category: str, nbytes: int) -> None:
        """Takes a copy to host memory, from the stream that is current."""
        self._copied(category, nbytes, inward=False)

    def _copied(self, category: str, nbytes: int, inward: bool) -> None:
        self._ledger.add(category, nbytes)
        if self._transfers is not None:
            self._transfers.copy(category, nbytes, inward)

    def _observe_collective(self, name: str, method, group, *args, **kwargs):
        purpose = getattr(self._purpose, "now", ANYTHING)
        passes = passes_of(name, group, (*args, *kwargs.values()))
        for number, (sent, received) in enumerate(passes):
            # The second pass of an all-reduce hands sums around, which nobody asked to have moved.
            categories = purpose if number == 0 else ANYTHING
            self._ledger.add(categories.sent, sent)
            self._ledger.add(categories.received, received)
        issue = functools.partial(method, group, *args, **kwargs)
        sent, received = map(sum, zip(*passes))
        if self._transfers is None or not sent + received:
            return issue()
        return self._transfers.collective(TransferCall(name, group, purpose.asked_for(sent), received, sent), issue)


def _device_bytes(data: Any) -> int:
    """Bytes of the device tensors in nested lists; messages between hosts cross no GPU's link."""
    if isinstance(data, torch.Tensor):
        on_device = get_accelerator().on_accelerator(data)
        return data.numel() * data.element_size() if on_device else 0
    return sum(_device_bytes(part) for part in data)

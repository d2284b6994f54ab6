"""How ranks tell each other that something is ready: small messages over sockets of the node.

One connection between every two ranks, one receiving thread per rank. A wait sleeps on a condition and
ends with the message, with the end of its time, or at once when a peer is lost: the kernel closes a dead
process's connections, so nobody has to ask.
"""

import atexit
import errno
import os
import pickle
import socket
import struct
import sys
import threading
import time
import uuid
import warnings
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

import torch
from deepspeed.utils import logger

from mobius_ds.runtime.ranks.errors import OutOfStep, PeerLost, PeerOutOfMemory, PeerTimeout, PipelineError
from mobius_ds.runtime.ranks.node import Node, check_one_node
from mobius_ds.runtime.ranks.process import MAILBOXES
from mobius_ds.runtime.ranks.standing import Standing, Wait, standing, who_holds_up

# What torch says of its own class when the structure of a microbatch's arguments is unpickled.
warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated", category=FutureWarning)

_LEAVING = "leaving"
_FAILED = "failed"
_MESSAGE = "message"
_QUESTION = "question"
_GATHER = "gather"
_ANSWER = "answer"
_ANSWER_SECONDS = 2.0
_PATIENCE_SECONDS = 60.0
"""A rank says for whom it waits after so long, or after a tenth of its timeout."""
_PEER_CREDENTIALS = struct.Struct("3i")
_TIMEVAL = struct.Struct("ll")
_TAKES_LONGER = 'If its part takes longer, raise "mobius": {"timeout_seconds": ...}.'


class _ToldFailure(NamedTuple):
    """Why a rank is lost."""

    reason: str
    error: type = PeerLost
    """What those who wait for it raise."""


class Mailbox:
    """Messages between the ranks of one node.

    Args:
        exchange: gathers one object from every rank, in rank order (used once, to find each other).
        timeout: seconds any wait may take.
    """

    def __init__(self, rank: int, world_size: int, exchange: Callable[[Any], List[Any]], timeout: float):
        self.rank = rank
        self.world_size = world_size
        self._timeout = timeout
        self._arrived: Dict[Any, Any] = {}
        self._changed = threading.Condition()
        self._lost: Dict[int, _ToldFailure] = {}
        self._left: Dict[int, str] = {}
        self._full: Set[int] = set()
        self._waits: Dict[int, Wait] = {}
        self._heard: Dict[int, Tuple[float, str]] = {}
        self._gathers = self._questions = 0
        self._warned_in = -1
        self._caller = threading.get_ident()
        self._closed = False
        self._sending = {peer: threading.Lock() for peer in range(world_size)}
        self._connections = self._connect(exchange)
        MAILBOXES.add(self)
        self._receiver = threading.Thread(target=self._receive, name="mobius-mailbox", daemon=True)
        self._receiver.start()

    def post(self, peer: int, key: Any, content: Any) -> None:
        """Sends ``content`` to ``peer``, who takes it by ``key``. A lost peer shows at the next wait."""
        if peer == self.rank:
            with self._changed:
                self._arrived[key] = content
                self._changed.notify_all()
        else:
            self._send(peer, (_MESSAGE, key, content))

    def take(self, peer: int, key: Any, what: str) -> Any:
        """Waits for the message ``key`` from ``peer``.

        Args:
            what: what is waited for, for the error message.

        Raises:
            PeerLost: a rank died or failed, or ``peer`` left.
            PeerTimeout: nothing came in time.
        """
        patience = min(_PATIENCE_SECONDS, self._timeout / 10)
        thread = threading.get_ident()
        self._waits[thread] = Wait(peer, what)
        try:
            if not self._comes(peer, key, what, patience):
                self._warn(peer, what, patience)
                if not self._comes(peer, key, what, self._timeout - patience):
                    raise self._timed_out(peer, what)
        finally:
            del self._waits[thread]
        return self._arrived.pop(key)

    def gather(self, call: str, content: Any) -> List[Any]:
        """Gathers one object from every rank, in rank order. All ranks must be in the same ``call``.

        Raises:
            OutOfStep: another rank is in another call.
        """
        number, self._gathers = self._gathers, self._gathers + 1
        self._caller = threading.get_ident()
        for peer in range(self.world_size):
            self.post(peer, (_GATHER, number, self.rank), (call, content))
        gathered = []
        for peer in range(self.world_size):
            other, content = self.take(peer, (_GATHER, number, peer), f"its part of {call}")
            if other != call:
                raise OutOfStep(f"rank {self.rank} is in {call}, but rank {peer} is in {other}. Every rank must make "
                                "the same calls of the engine in the same order. Evaluation counts, and so does the first "
                                "read of an output other than the loss: do both on all ranks.")
            gathered.append(content)
        return gathered

    def raise_told(self, peer: int, what: str) -> None:
        """Raises what ``peer`` has told of why it fails or leaves. It tells before it gives up its memory, so where that is
        gone its word is on the way, if the process did not just die."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or peer in self._left, _ANSWER_SECONDS)
            self._raise_if_lost(peer, what)

    def fail(self, error: BaseException, where: str = "") -> None:
        """Tells every peer that this rank has failed, so that none waits for it, and ends this rank's own waits.

        What failed because another rank was lost passes on the first rank's reason, so that all name the same one.
        """
        rank, reason = self.rank, f"{type(error).__name__}: {error}" + (where and f"; {where}")
        kind: type = PeerLost
        if isinstance(error, (PeerLost, PeerTimeout)):
            rank, reason = error.rank, error.reason
        if isinstance(error, torch.OutOfMemoryError):
            kind = PeerOutOfMemory
        elif isinstance(error, PeerTimeout):
            kind = PeerTimeout
        failure = _ToldFailure(reason, kind)
        self._tell_all((_FAILED, rank, failure))
        if self._connections:  # a rank that is alone waits for nobody, and may go on after an error
            with self._changed:
                self._lost.setdefault(rank, failure)
                self._changed.notify_all()

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tells every peer when the block fails."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def close(self) -> None:
        """Says goodbye and closes the connections."""
        if self._closed:
            return
        self._closed = True
        error = sys.exc_info()[1]  # where the script cleans up after one
        said = f" after {type(error).__name__}: {error}" if isinstance(error, Exception) else ""
        self._tell_all((_LEAVING, None, f"its engine was destroyed or its script ended{said}"))
        for connection in self._connections.values():
            _shut(connection)
        self._receiver.join(timeout=1.0)
        if not self._receiver.is_alive():
            for connection in self._connections.values():
                connection.close()

    # How.

    def _comes(self, peer: int, key: Any, what: str, seconds: float) -> bool:
        """Whether a message is there within a time."""
        def here() -> bool:
            if key not in self._arrived:
                self._raise_if_lost(peer, what)
            return key in self._arrived

        with self._changed:
            return self._changed.wait_for(here, seconds)

    def _warn(self, peer: int, what: str, seconds: float) -> None:
        """Says for whom this rank waits, once in a call."""
        if self._warned_in != self._gathers:
            self._warned_in = self._gathers
            _, does = self._holder(peer)
            logger.warning(f"Mobius: rank {self.rank} has waited {seconds:g} s for {what} from rank {peer}; {does}. It "
                           f"gives up after {self._timeout:g} s (timeout_seconds).")

    def _timed_out(self, peer: int, what: str) -> PeerTimeout:
        holder, does = self._holder(peer)
        reason = f"rank {self.rank} waited {self._timeout:g} s for {what} from rank {peer}; {does}"
        error = PeerTimeout(f"{reason}. {_TAKES_LONGER}", holder, reason)
        self.fail(error)  # the others' waits end with it, and the late one is told when it comes
        return error

    def _holder(self, peer: int) -> Tuple[int, str]:
        """Which rank ``peer`` waits for in the end, and what that one does."""
        holder, does = who_holds_up(self.rank, peer, self._ask)
        if holder in self._heard:
            at, what = self._heard[holder]
            does += f"; its last message, {time.monotonic() - at:.1f} s ago, was {what}"
        return holder, does

    def _ask(self, peer: int) -> Optional[Standing]:
        """Where another rank stands; its receiving thread answers. None if it does not."""
        with self._changed:
            number, self._questions = self._questions, self._questions + 1
        key = (_ANSWER, number, peer)
        self._send(peer, (_QUESTION, key, None))
        return self._arrived.pop(key) if self._comes(peer, key, "an answer", _ANSWER_SECONDS) else None

    def _raise_if_lost(self, peer: int, what: str) -> None:
        for lost, (reason, kind) in self._lost.items():
            if kind is PeerTimeout:
                says = "comes too late" if lost == self.rank else "gives up"
                raise PeerTimeout(f"rank {self.rank} {says}: {reason}. {_TAKES_LONGER}", lost, reason)
            if lost == self.rank:
                raise kind(f"rank {lost} has failed before ({reason}) and cannot go on. Start the job again.", lost, reason)
            raise kind(f"rank {lost} is gone ({reason}) while rank {self.rank} waited for {what}; the first error in the "
                       f"output of rank {lost} says why. Start the job again.", lost, reason)
        if peer in self._left:
            left = f"has left ({self._left[peer]}). Every rank must make the same number of steps: check for uneven data."
            raise PeerLost(f"rank {self.rank} waits for {what} from rank {peer}, which {left}", peer, f"it {left}")

    def _send(self, peer: int, message: Tuple) -> None:
        sent = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending[peer]:
                self._connections[peer].send_bytes(sent)
        except BlockingIOError:  # it has not read for so long that there is no room
            reason = f"rank {self.rank} could not write to rank {peer} for {self._timeout:g} s: its process is stopped"
            with self._changed:
                self._full.add(peer)
                self._lost.setdefault(peer, _ToldFailure(reason, PeerTimeout))
                self._changed.notify_all()
        except OSError:
            pass  # the receiving thread sees the closed connection and says so at the next wait

    def _tell_all(self, message: Tuple) -> None:
        for peer in self._connections:
            if peer not in self._full:  # a write would only wait again
                self._send(peer, message)

    def _connect(self, exchange: Callable[[Any], List[Any]]) -> Dict[int, Connection]:
        # The leading zero byte makes the address abstract: it is no file, so none can be left behind.
        address = f"\0mobius-{uuid.uuid4()}"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen(self.world_size)
            server.settimeout(self._timeout)
            addresses, nodes = zip(*exchange((address, Node.here())))
            check_one_node(nodes)
            connections = {}
            try:
                for peer in range(self.rank):
                    link = socket.socket(socket.AF_UNIX)
                    link.connect(addresses[peer])
                    self._limit_writes(link)
                    if not _is_own(link):  # the rank is gone, and its address taken
                        raise OSError(errno.EACCES, f"what answers for rank {peer} is another user's")
                    connections[peer] = Connection(link.detach())
                    connections[peer].send_bytes(pickle.dumps(self.rank))
                while len(connections) < self.world_size - 1:
                    link, _ = server.accept()
                    if not _is_own(link):  # anyone on the node may find the address
                        link.close()
                        continue
                    link.settimeout(None)
                    self._limit_writes(link)
                    connection = Connection(link.detach())
                    connections[pickle.loads(connection.recv_bytes())] = connection
            except OSError as error:
                missing = sorted(set(range(self.world_size)) - set(connections) - {self.rank})
                raise PipelineError(f"rank {self.rank} could not reach rank(s) {missing} on this node ({error}). Mobius "
                                    "runs on one node: start all ranks there.") from error
        return connections

    def _limit_writes(self, link: socket.socket) -> None:
        # A stopped process reads nothing: once its end is full, a write to it would never return.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO,
                        _TIMEVAL.pack(int(self._timeout), int(self._timeout % 1 * 1e6)))

    def _receive(self) -> None:
        peers = {connection: peer for peer, connection in self._connections.items()}
        while peers:
            for connection in wait(list(peers)):
                try:
                    kind, key, content = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    kind, key, content = _FAILED, peers[connection], _ToldFailure("its process died")
                except Exception as error:  # whatever an object of the script raises when it is unpickled
                    kind, key, content = _FAILED, peers[connection], _ToldFailure(f"its message cannot be read: {error!r}")
                if not self._accept(peers[connection], kind, key, content):
                    del peers[connection]

    def _accept(self, peer: int, kind: str, key: Any, content: Any) -> bool:
        """Takes in what a peer has sent; False if it is the last."""
        if kind == _QUESTION:
            self._send(peer, (_ANSWER, key, standing(self._caller, list(self._waits.values()))))
            return True
        with self._changed:
            if kind == _MESSAGE:
                is_part = isinstance(key, tuple) and key[0] == _GATHER
                self._heard[peer] = time.monotonic(), f"its part of {content[0]}" if is_part else str(key)
            if kind in (_MESSAGE, _ANSWER):
                self._arrived[key] = content
            elif kind == _LEAVING:
                self._left[peer] = content
            elif not self._closed:
                self._lost.setdefault(key, content)
            self._changed.notify_all()
        return kind in (_MESSAGE, _ANSWER)


def _close_inherited() -> None:
    # A forked child (a data loader's worker) holds copies of the connections: they would stay open after this
    # process died, and no peer would notice.
    for mailbox in MAILBOXES:
        for connection in mailbox._connections.values():
            connection.close()


def _say_goodbye() -> None:
    for mailbox in list(MAILBOXES):
        if getattr(sys, "last_value", None) is not None and not mailbox._closed:  # the script ends by this error
            mailbox.fail(sys.last_value)
        mailbox.close()


os.register_at_fork(after_in_child=_close_inherited)
atexit.register(_say_goodbye)


def _is_own(link: socket.socket) -> bool:
    """Whether a process of this user is at the other end. What comes from there is unpickled, and may run code."""
    _, uid, _ = _PEER_CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size))
    return uid == os.getuid()


def _shut(connection: Connection) -> None:
    try:
        # Wakes this side's receiving thread; the peer reads the goodbye before it sees the end of file.
        with socket.socket(fileno=os.dup(connection.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass

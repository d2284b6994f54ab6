"""How ranks tell each other that something is ready: small messages over sockets of the node.

One connection between every two ranks, one receiving thread per rank. A wait sleeps on a condition and
ends with the message, with the end of its time, or at once when a peer is lost: the kernel closes a dead
process's connections, so nobody has to ask.
"""

import atexit
import os
import pickle
import socket
import struct
import sys
import threading
import time
import uuid
import warnings
import weakref
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, Callable, Dict, Iterator, List, Tuple

from mobius_ds.runtime.errors import OutOfStep, PeerLost, PeerTimeout, PipelineError

# What torch says of its own class when the structure of a microbatch's arguments is unpickled.
warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated", category=FutureWarning)

_LEAVING = "leaving"
_FAILED = "failed"
_MESSAGE = "message"
_PEER_CREDENTIALS = struct.Struct("3i")


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
        self._lost: Dict[int, str] = {}
        self._left: Dict[int, str] = {}
        self._gathers = 0
        self._closed = False
        self._sending = {peer: threading.Lock() for peer in range(world_size)}
        self._connections = self._connect(exchange)
        _MAILBOXES.add(self)
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
        deadline = time.monotonic() + self._timeout
        with self._changed:
            while key not in self._arrived:
                self._raise_if_lost(peer, what)
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and key not in self._arrived \
                        and time.monotonic() >= deadline:
                    raise PeerTimeout(f"rank {self.rank} waited {self._timeout:g} s for {what} from rank {peer}, which "
                                      f"is alive but has not got there. If its part takes longer, raise "
                                      f"\"mobius\": {{\"timeout_seconds\": ...}}.")
            return self._arrived.pop(key)

    def gather(self, call: str, content: Any) -> List[Any]:
        """Gathers one object from every rank, in rank order. All ranks must be in the same ``call``.

        Raises:
            OutOfStep: another rank is in another call.
        """
        number, self._gathers = self._gathers, self._gathers + 1
        for peer in range(self.world_size):
            self.post(peer, ("gather", number, self.rank), (call, content))
        gathered = []
        for peer in range(self.world_size):
            other, content = self.take(peer, ("gather", number, peer), f"its part of {call}")
            if other != call:
                raise OutOfStep(f"rank {self.rank} is in {call}, but rank {peer} is in {other}. Every rank must make "
                                "the same calls of the engine in the same order. Evaluation counts, and so does the first "
                                "read of an output other than the loss: do both on all ranks.")
            gathered.append(content)
        return gathered

    def fail(self, error: BaseException, where: str = "") -> None:
        """Tells every peer that this rank has failed, so that none waits for it, and ends this rank's own waits.

        What failed because another rank was lost passes on the first rank's reason, so that all name the same one.
        """
        rank, reason = self.rank, f"{type(error).__name__}: {error}" + (where and f"; {where}")
        if isinstance(error, PeerLost):
            rank, reason = error.rank, error.reason
        self._tell_all((_FAILED, rank, reason))
        if self._connections:  # a rank that is alone waits for nobody, and may go on after an error
            with self._changed:
                self._lost.setdefault(rank, reason)
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
        self._tell_all((_LEAVING, None, "its engine was destroyed or its script ended"))
        for connection in self._connections.values():
            _shut(connection)
        self._receiver.join(timeout=1.0)
        if not self._receiver.is_alive():
            for connection in self._connections.values():
                connection.close()

    def _raise_if_lost(self, peer: int, what: str) -> None:
        for lost, reason in self._lost.items():
            if lost == self.rank:
                raise PeerLost(f"rank {lost} has failed before ({reason}) and cannot go on. Start the job again.",
                               lost, reason)
            raise PeerLost(f"rank {lost} is gone ({reason}) while rank {self.rank} waited for {what}; the first error "
                           f"in the output of rank {lost} says why. Start the job again.", lost, reason)
        if peer in self._left:
            left = f"has left ({self._left[peer]}). Every rank must make the same number of steps: check for uneven data."
            raise PeerLost(f"rank {self.rank} waits for {what} from rank {peer}, which {left}", peer, f"it {left}")

    def _send(self, peer: int, message: Tuple) -> None:
        sent = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending[peer]:
                self._connections[peer].send_bytes(sent)
        except OSError:
            pass  # the receiving thread sees the closed connection and says so at the next wait

    def _tell_all(self, message: Tuple) -> None:
        for peer in self._connections:
            self._send(peer, message)

    def _connect(self, exchange: Callable[[Any], List[Any]]) -> Dict[int, Connection]:
        # The leading zero byte makes the address abstract: it is no file, so none can be left behind.
        address = f"\0mobius-{uuid.uuid4()}"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen(self.world_size)
            server.settimeout(self._timeout)
            addresses = exchange(address)
            connections = {}
            try:
                for peer in range(self.rank):
                    link = socket.socket(socket.AF_UNIX)
                    link.connect(addresses[peer])
                    connections[peer] = Connection(link.detach())
                    connections[peer].send_bytes(pickle.dumps(self.rank))
                while len(connections) < self.world_size - 1:
                    link, _ = server.accept()
                    _, uid, _ = _PEER_CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED,
                                                                         _PEER_CREDENTIALS.size))
                    if uid != os.getuid():  # anyone on the node may find the address
                        link.close()
                        continue
                    link.settimeout(None)
                    connection = Connection(link.detach())
                    connections[pickle.loads(connection.recv_bytes())] = connection
            except OSError as error:
                missing = sorted(set(range(self.world_size)) - set(connections) - {self.rank})
                raise PipelineError(f"rank {self.rank} could not reach rank(s) {missing} on this node ({error}). Mobius "
                                    "runs on one node: start all ranks there.") from error
        return connections

    def _receive(self) -> None:
        peers = {connection: peer for peer, connection in self._connections.items()}
        while peers:
            for connection in wait(list(peers)):
                try:
                    kind, key, content = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    kind, key, content = _FAILED, peers[connection], "its process died"
                except Exception as error:  # whatever an object of the script raises when it is unpickled
                    kind, key, content = _FAILED, peers[connection], f"its message cannot be read: {error!r}"
                with self._changed:
                    peer = peers[connection]
                    if kind == _MESSAGE:
                        self._arrived[key] = content
                    elif kind == _LEAVING:
                        self._left[peer] = content
                        del peers[connection]
                    else:
                        if not self._closed:
                            self._lost.setdefault(key, content)
                        del peers[connection]
                    self._changed.notify_all()


_MAILBOXES: "weakref.WeakSet[Mailbox]" = weakref.WeakSet()


def _close_inherited() -> None:
    # A forked child (a data loader's worker) holds copies of the connections: they would stay open after this
    # process died, and no peer would notice.
    for mailbox in _MAILBOXES:
        for connection in mailbox._connections.values():
            connection.close()


def _say_goodbye() -> None:
    for mailbox in list(_MAILBOXES):
        if getattr(sys, "last_value", None) is not None and not mailbox._closed:  # the script ends by this error
            mailbox.fail(sys.last_value)
        mailbox.close()


os.register_at_fork(after_in_child=_close_inherited)
atexit.register(_say_goodbye)


def _shut(connection: Connection) -> None:
    try:
        # Wakes this side's receiving thread; the peer reads the goodbye before it sees the end of file.
        with socket.socket(fileno=os.dup(connection.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass

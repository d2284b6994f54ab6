"""Where a rank stands while others wait for it: for whom it waits itself, or which line of code it is in.

A rank that is late holds up others, and these hold up more. Following who waits for whom leads to the one to blame.
"""

import sys
import threading
from concurrent import futures
from multiprocessing import connection
from typing import Callable, NamedTuple, Optional, Sequence, Tuple

_THREADING = {threading.__name__, futures._base.__name__, connection.__name__}
"""Where such a thread may be on its way: it waits, or it tells the others."""
_WAITING = {"mobius_ds.runtime.ranks.mailbox", "mobius_ds.runtime.device.device"}
"""Where a thread is that waits for what other threads, and so other ranks, have to do."""


class Wait(NamedTuple):
    """A rank waits for something from another one."""

    peer: int
    what: str


class Standing(NamedTuple):
    """What a rank says when it is asked."""

    waits: Tuple[Wait, ...]
    """None while the thread that makes its calls is at work elsewhere, whatever its other threads wait for."""
    place: str
    """The line of code that thread is in."""


def standing(thread: int, waits: Sequence[Wait]) -> Standing:
    """Of this rank, whose calls are made by ``thread`` (or by the main one, where that has ended)."""
    frames = sys._current_frames()
    frame = frames.get(thread) or frames[threading.main_thread().ident]
    while frame.f_back is not None and frame.f_globals.get("__name__") in _THREADING:
        frame = frame.f_back
    waiting = frame.f_globals.get("__name__") in _WAITING
    place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return Standing(tuple(waits) if waiting else (), place)


def who_holds_up(rank: int, peer: int, ask: Callable[[int], Optional[Standing]]) -> Tuple[int, str]:
    """Follows who waits for whom, from ``rank`` that waits for ``peer`` to a rank that waits for nobody.

    Args:
        ask: where a rank stands; None if it does not answer.

    Returns:
        That rank, and what it does.
    """
    seen = {rank}
    while True:
        seen.add(peer)
        answer = ask(peer)
        if answer is None:
            return peer, f"rank {peer} does not answer: its process is stopped, or in code that lets no other thread run"
        if not answer.waits:
            return peer, f"rank {peer} is alive and waits for nobody: it is at {answer.place}"
        onward = next((wait for wait in answer.waits if wait.peer not in seen), None)
        if onward is None:
            return peer, f"rank {peer} waits for {answer.waits[0].what} from rank {answer.waits[0].peer}"
        peer = onward.peer

"""The processes of a rehearsal: one per emulated GPU, forked from a server that has loaded what they need.

They are started, heard, and gone when ``run`` returns, however it returns. They also end by themselves with the process
that started them, whatever ends that one.
"""

import contextlib
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import tempfile
import threading
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from mobius_ds.emulation.rehearsal import RankReport, Rehearsal

_CONTEXT = multiprocessing.get_context("forkserver")
_LOADED = ["mobius_ds.emulation.rehearsed_pipeline", "torch._dynamo"]
"""Modules; the second is what the first operation on meta tensors imports."""
_ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
"""Of every rank: whatever GPUs this machine has, none is used."""
_GRACE_SECONDS = 5.0
_SAID, _DONE, _FAILED = "said", "done", "failed"


class RehearsalFailed(RuntimeError):
    """A rehearsal did not come to its end; the message says which rank failed and how."""


def load() -> None:
    """Starts the server that loads what ranks need, beside whatever the caller does until ``run``."""
    _CONTEXT.set_forkserver_preload(_LOADED)
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def run(rehearsal: Rehearsal, limit_seconds: float) -> List[RankReport]:
    """Rehearses, and returns what the ranks report, in order.

    Args:
        limit_seconds: how long it may take.

    Raises:
        RehearsalFailed: a rank failed or died, or it took longer.
    """
    load()
    with tempfile.TemporaryDirectory(prefix="mobius_ds_") as folder, _stopped([]) as ranks:
        for rank in range(rehearsal.topology.size):
            ours, theirs = _CONTEXT.Pipe()
            arguments = rehearsal, rank, Path(folder) / "wires", theirs
            process = _CONTEXT.Process(target=_rank_main, args=arguments, daemon=True)
            ranks.append((process, ours))
            process.start()
            theirs.close()
        return _heard(ranks, time.monotonic() + limit_seconds, limit_seconds)


Ranks = List[Tuple[Any, Connection]]


@contextlib.contextmanager
def _stopped(ranks: Ranks) -> Iterator[Ranks]:
    """Sees to it that no rank is left after the block; one that ends with an error waits for none."""
    grace = 0.0
    try:
        yield ranks
        grace = _GRACE_SECONDS
    finally:
        until = time.monotonic() + grace
        for process, connection in ranks:
            connection.close()
            if process.pid is not None:
                process.join(max(0.0, until - time.monotonic()))
                process.kill()
                process.join()


def _heard(ranks: Ranks, deadline: float, limit_seconds: float) -> List[RankReport]:
    """Listens to the ranks until all have reported, and passes on what they exchange."""
    connections = [connection for _, connection in ranks]
    reports: Dict[int, RankReport] = {}
    said: Dict[int, Any] = {}
    while len(reports) < len(ranks):
        ready = wait([connection for rank, connection in enumerate(connections) if rank not in reports],
                     max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RehearsalFailed(f"the rehearsal had {limit_seconds:.0f} s and is not done; the machine may be overloaded")
        for connection in ready:
            rank = connections.index(connection)
            kind, content = _received(connection)
            if kind == _FAILED:
                raise RehearsalFailed(f"rank {rank} failed: {content or _fate(ranks[rank][0])}")
            (reports if kind == _DONE else said)[rank] = content
        if len(said) == len(ranks):
            for connection in connections:
                connection.send([said[rank] for rank in range(len(ranks))])
            said.clear()
    return [reports[rank] for rank in range(len(ranks))]


def _received(connection: Connection) -> Tuple[str, Any]:
    try:
        return connection.recv()
    except (EOFError, OSError):
        return _FAILED, None


def _fate(process: Any) -> str:
    process.join(_GRACE_SECONDS)
    return f"its process ended with status {process.exitcode}"


# In the rank's process.


def _rank_main(rehearsal: Rehearsal, rank: int, wires: Path, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches a terminal's every process; the first stops the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()  # what the server has loaded stays shared: a collection would touch, and so copy, all of it

    import torch
    from deepspeed.utils import logger

    from mobius_ds.emulation.rehearsed_pipeline import rehearse

    torch.set_num_threads(1)
    logger.setLevel("WARNING")

    def exchange(content: Any) -> List[Any]:
        connection.send((_SAID, content))
        return connection.recv()

    try:
        answer = _DONE, rehearse(rehearsal, rank, wires, exchange)
    except Exception as error:
        answer = _FAILED, "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    with contextlib.suppress(OSError):  # nobody listens any more
        connection.send(answer)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)

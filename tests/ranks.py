"""Runs a function on N ranks: real processes with a real process group, forked from a server that has torch loaded."""

import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])
# The server finds modules by the environment alone.
_ROOT = str(Path(__file__).parent.parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))


class RanksFailed(AssertionError):
    """At least one rank raised, died, or did not finish; the message holds every rank's traceback."""


class Outcome(NamedTuple):
    """How one rank ended."""

    result: Any
    error: Optional[str]
    """Traceback of what it raised."""
    exit_code: Optional[int]
    """Of its process; None if it had to be killed for being late."""


def run_ranks(world_size: int, function: Callable, *args: Any, timeout: float = 120.0,
              env: Optional[Dict[str, str]] = None, connected: bool = True) -> List[Any]:
    """Calls ``function(*args)`` on every rank and returns the results in rank order.

    Args:
        function: importable by name; reads its rank from the environment like any training script.
        connected: makes the process group beforehand.

    Raises:
        RanksFailed: a rank raised, died or was late.
    """
    outcomes = outcomes_of_ranks(world_size, function, *args, timeout=timeout, env=env, connected=connected)
    if any(outcome.error or outcome.exit_code != 0 for outcome in outcomes):
        raise RanksFailed("\n".join(f"rank {rank}, exit code {outcome.exit_code}: {outcome.error or 'no error raised'}"
                                    for rank, outcome in enumerate(outcomes)))
    return [outcome.result for outcome in outcomes]


def outcomes_of_ranks(world_size: int, function: Callable, *args: Any, timeout: float = 120.0,
                      env: Optional[Dict[str, str]] = None, connected: bool = True) -> List[Outcome]:
    """Like ``run_ranks``, but returns how each rank ended, however it did."""
    port = free_port()
    readers, processes = [], []
    for rank in range(world_size):
        reader, writer = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=_rank_main, args=(rank, world_size, port, env or {}, connected, writer,
                                                           function, args))
        process.start()
        writer.close()  # the rank's own is the only one now: if it dies, its end of the pipe closes
        readers.append(reader)
        processes.append(process)
    deadline = time.monotonic() + timeout
    told = _what_ranks_tell(readers, processes, deadline)
    outcomes = []
    for rank, process in enumerate(processes):
        process.join(max(0.0, min(30.0, deadline - time.monotonic() + 5.0)))
        exit_code = process.exitcode
        if exit_code is None:
            process.kill()
            process.join()
        process.close()
        outcomes.append(Outcome(*told.get(rank, (None, None)), exit_code))
    for left in Path("/dev/shm").glob(f"deepspeed_*_127.0.0.1_{port}_*"):  # by DeepSpeed's own collectives, for each job
        left.unlink(missing_ok=True)
    return outcomes


def _what_ranks_tell(readers: List[Connection], processes: List[Any], deadline: float) -> Dict[int, Any]:
    """What each rank returned and raised; nothing of those that died or are late."""
    told: Dict[int, Any] = {}
    open_pipes = {reader: rank for rank, reader in enumerate(readers)}
    while open_pipes and time.monotonic() < deadline:
        # A dead rank's pipe stays open where a child of it has inherited the pipe.
        sentinels = {processes[rank].sentinel: reader for reader, rank in open_pipes.items()}
        ready = wait([*open_pipes, *sentinels], max(0.0, deadline - time.monotonic()))
        for reader in {sentinels.get(one, one) for one in ready}:
            rank = open_pipes.pop(reader)
            with suppress(EOFError):
                if reader.poll():  # what it said before it ended
                    result, error = reader.recv()
                    told[rank] = pickle.loads(result) if result else None, error
    for reader in readers:
        reader.close()
    return told


_ports = itertools.count(os.getpid() * 31 % 20000)


def free_port() -> int:
    """A port to listen on, below those that the system gives to whoever connects: nobody else comes by it meanwhile."""
    while True:
        port = 10000 + next(_ports) % 20000
        with socket.socket() as server, suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port


def _rank_main(rank: int, world_size: int, port: int, env: Dict[str, str], connected: bool, results: Connection,
               function: Callable, args: tuple) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", **env)
    os.environ.setdefault("LOCAL_SIZE", "1")  # or DeepSpeed starts numactl at every reduction, to count devices
    # Tests started in the background inherit an ignored interrupt; a script at a terminal does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch
    torch.set_num_threads(1)
    import deepspeed
    import mobius_ds  # noqa: F401, the plugin, which loads itself where it is installed
    from deepspeed.utils import logger
    logger.setLevel("WARNING")
    try:
        if connected:
            deepspeed.init_distributed("gloo", verbose=False)
        results.send((pickle.dumps(function(*args)), None))
    except BaseException:
        results.send((None, traceback.format_exc()))
        os._exit(1)

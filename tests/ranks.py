"""Runs a function on N ranks: real processes with a real process group, forked from a server that has torch loaded."""

import multiprocessing
import os
import pickle
import queue
import signal
import socket
import time
import traceback
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
              env: Optional[Dict[str, str]] = None) -> List[Any]:
    """Calls ``function(*args)`` on every rank and returns the results in rank order.

    Args:
        function: importable by name; reads its rank from the environment like any training script.

    Raises:
        RanksFailed: a rank raised, died or was late.
    """
    outcomes = outcomes_of_ranks(world_size, function, *args, timeout=timeout, env=env)
    if any(outcome.error or outcome.exit_code != 0 for outcome in outcomes):
        raise RanksFailed("\n".join(f"rank {rank}, exit code {outcome.exit_code}: {outcome.error or 'no error raised'}"
                                    for rank, outcome in enumerate(outcomes)))
    return [outcome.result for outcome in outcomes]


def outcomes_of_ranks(world_size: int, function: Callable, *args: Any, timeout: float = 120.0,
                      env: Optional[Dict[str, str]] = None) -> List[Outcome]:
    """Like ``run_ranks``, but returns how each rank ended, however it did."""
    results: Any = CONTEXT.Queue()
    port = _free_port()
    processes = [CONTEXT.Process(target=_rank_main, args=(rank, world_size, port, env or {}, results, function, args))
                 for rank in range(world_size)]
    for process in processes:
        process.start()
    ended: Dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(ended) < world_size and time.monotonic() < deadline:
        try:
            rank, result, error = results.get(timeout=0.2)
            ended[rank] = (pickle.loads(result) if result else None, error)
        except queue.Empty:
            if not any(process.is_alive() for process in processes) and results.empty():
                break
    outcomes = []
    for rank, process in enumerate(processes):
        process.join(max(0.0, min(15.0, deadline - time.monotonic() + 5.0)))
        exit_code = process.exitcode
        if exit_code is None:
            process.kill()
            process.join()
        outcomes.append(Outcome(*ended.get(rank, (None, None)), exit_code))
    return outcomes


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def _rank_main(rank: int, world_size: int, port: int, env: Dict[str, str], results: Any, function: Callable,
               args: tuple) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", **env)
    # Tests started in the background inherit an ignored interrupt; a script at a terminal does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch
    torch.set_num_threads(1)
    import deepspeed
    import mobius_ds  # noqa: F401, the plugin, which loads itself where it is installed
    from deepspeed.utils import logger
    logger.setLevel("WARNING")
    try:
        deepspeed.init_distributed("gloo", verbose=False)
        results.put((rank, pickle.dumps(function(*args)), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
        results.close()
        results.join_thread()
        os._exit(1)
    results.close()
    results.join_thread()

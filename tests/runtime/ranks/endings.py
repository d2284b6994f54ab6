"""Jobs that end in whatever way, on every rank, and what each rank says of it."""

import os
import signal
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch

from mobius_ds.runtime.sweeps.stage_work import ACTIONS
from mobius_ds.schedule.tasks import Kind
from tests.ranks import outcomes_of_ranks
from tests.runtime.jobs import config, initialize, language_model, mine, weights

LONG = 100.0
"""Seconds that no rank waits for which hears of another one's end: that takes milliseconds, on a busy machine seconds."""


def settings(**mobius: Any) -> Dict[str, Any]:
    section = {"enabled": True, "layers_per_stage": 1, "timeout_seconds": 2 * LONG, **mobius}
    return {**config(), "mobius": {key: value for key, value in section.items() if value is not None}}


def train(engine: Any, steps: int, first: int = 0) -> List[float]:
    losses = []
    for step in range(first, first + steps):
        loss = engine(*mine(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Ended:
    """How a job ended on one rank."""

    def __init__(self, error: Optional[BaseException], result: Any = None):
        self.kind = type(error).__name__
        self.text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        self.at = time.time()
        self.result = result

    def __repr__(self) -> str:
        return f"{self.kind}: {self.text}"


def ending(directory: Path, job: Callable, mobius: Dict[str, Any] = {}, *args: Any) -> Ended:
    """Runs ``job(engine, *args)`` to its end, whatever that is, and leaves the pipeline in order."""
    directory.joinpath(f"pid {os.getpid()}").touch()
    engine = initialize(language_model(), settings(**mobius))
    try:
        return Ended(None, job(engine, *args))
    except BaseException as error:
        return Ended(error)
    finally:
        engine.destroy()


def endings(directory: Path, ranks: int, job: Callable, *args: Any) -> List[Optional[Ended]]:
    """How ``job`` ended on every rank; None where the process was killed. Nothing of the job is left afterwards."""
    outcomes = outcomes_of_ranks(ranks, ending, directory, job, *args)
    assert not any(outcome.error for outcome in outcomes), outcomes
    assert all(outcome.exit_code is not None for outcome in outcomes), "a rank hung"
    assert_nothing_left(directory, ranks)
    return [outcome.result for outcome in outcomes]


def assert_nothing_left(directory: Path, ranks: int) -> None:
    pids = [path.name.split()[1] for path in directory.glob("pid *")]
    assert len(pids) == ranks
    # Their regions have no name, so they are gone with the last process.
    assert not [pid for pid in pids if Path("/proc", pid).exists()]
    assert not [name for name in os.listdir("/dev/shm") if "mobius" in name]


# Memory.

def one_step(engine: Any) -> Any:
    before = weights(engine.module)
    try:
        return train(engine, 1)
    except Exception:
        assert all(torch.equal(before[name], weight) for name, weight in weights(engine.module).items())
        raise


# A rank that dies.

def at(kind: Kind, stage: int, act: Callable[[], Any]) -> None:
    """Lets this rank ``act`` in its next task of a kind and stage."""
    action = ACTIONS[kind]

    def acting(work: Any, task: Any, given: Any) -> Any:
        if task.key.stage == stage:
            act()
        return action.do(work, task, given)

    ACTIONS[kind] = action._replace(do=acting)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


class Bug(Exception):
    """Of the script."""


def bug(*_: Any, **__: Any) -> None:
    raise Bug("in line 7")

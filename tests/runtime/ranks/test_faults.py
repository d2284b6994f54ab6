"""A rank that dies, raises or is late ends the job on all: soon, with one clear error each, and nothing stays behind."""

import os
import re
import signal
import subprocess
import threading
import time
from concurrent.futures import Future
from concurrent.futures._base import FINISHED
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, List

import pytest
import torch

from mobius_ds.inputs.units import GIB
from mobius_ds.runtime.checkpoint import checkpoint_files, saved_model
from mobius_ds.schedule.tasks import Kind
from tests.features import survives
from tests.ranks import outcomes_of_ranks
from tests.runtime.jobs import endless, mine, rank_and_size
from tests.runtime.ranks.endings import LONG, at, bug, die, ending, endings, terminate, train


def train_with_death(engine: Any, directory: str, victim: int, place: str, act: Callable[[], None]) -> None:
    """A step, a checkpoint, and a second step of which the victim sees no end."""
    rank, size = rank_and_size()
    train(engine, 1)
    engine.save_checkpoint(directory)
    if rank == victim:
        second_stage = size + rank
        if place in ("forward", "backward", "update"):
            at(Kind[place.upper()], second_stage if place != "update" else rank, act)
        elif place == "step":
            engine.optimizer.optimizer.step = act
        elif place == "save":
            checkpoint_files.write_tensors = lambda *_: act()
        elif place == "load":
            saved_model.read_tensors = lambda *_, **__: act()
        else:
            act()
    if place == "update":  # beside the backward
        engine.train_batch(endless(1))
    train(engine, 1, first=1)
    engine.save_checkpoint(directory)
    engine.load_checkpoint(directory)


DEATHS = [
    (4, 0, "forward", die), (3, 1, "backward", die), (2, 1, "update", die), (2, 0, "step", die), (2, 1, "save", die),
    (2, 1, "load", die), (3, 2, "the script", die), (2, 1, "backward", terminate),
]


@survives("Ranks", "`kill -9` of any rank in forward, backward, the update beside it, the optimizer step, a save, a load "
          "or the script's own code; SIGTERM to one rank", "the other ranks end at once, each with one error that names the "
          "rank and what was waited for; no process and no shared memory stays")
@pytest.mark.parametrize("ranks, victim, place, act", DEATHS)
def test_a_rank_that_is_killed_ends_the_others_at_once(tmp_path, ranks, victim, place, act):
    ended = endings(tmp_path, ranks, train_with_death, {}, str(tmp_path / "saved"), victim, place, act)
    assert ended.pop(victim) is None
    for end in ended:
        assert end.kind == "PeerLost", end
        assert f"rank {victim} is gone (its process died) while rank" in end.text and "waited for" in end.text
        if place in ("forward", "backward"):
            # On a busy machine a rank may still be waiting for what the victim has to give at home.
            waited = r"waited for (\w+ out of stage \d \(.+\)|(inputs|output gradients)) for microbatch \d of rank \d"
            assert re.search(waited, end.text), end
    assert max(end.at for end in ended) - min(end.at for end in ended) < LONG / 2


def dies_with_a_child_left(engine: Any, directory: Path) -> None:
    train(engine, 1)
    rank, _ = rank_and_size()
    if rank == 1:
        if (child := os.fork()) == 0:  # as a data loader's worker, which outlives a killed parent for a while
            time.sleep(2 * LONG)
            os._exit(0)
        directory.joinpath("child").write_text(str(child))
        die()
    train(engine, 1, first=1)


@survives("Ranks", "a killed rank whose data loader workers live on", "the other ranks end at once all the same")
def test_a_forked_child_does_not_hide_the_death_of_its_rank(tmp_path):
    outcomes = outcomes_of_ranks(2, ending, tmp_path, dies_with_a_child_left, {}, tmp_path, timeout=LONG)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert outcomes[0].result.kind == "PeerLost" and "rank 1 is gone (its process died)" in outcomes[0].result.text


# A rank that raises.

def a_token_that_does_not_exist(engine: Any) -> None:
    rank, _ = rank_and_size()
    ids, labels = mine(0)
    engine(ids + 1000 * rank, labels)


@survives("Ranks", "a token that does not exist in one rank's data",
          "its exception, with stage, microbatch and the rank whose data it was; the others' one error quotes it")
def test_bad_data_keeps_its_exception_and_says_whose_it_was(tmp_path):
    first, second = endings(tmp_path, 2, a_token_that_does_not_exist)
    # The first stage runs on rank 0, for everybody's data.
    assert first.kind == "IndexError"
    assert "mobius: rank 0, forward of stage 0 (tokens) for microbatch 1 of rank 1" in first.text
    assert second.kind == "PeerLost", second.text
    assert "rank 0 is gone (IndexError" in second.text and "stage 0 (tokens)" in second.text


class Fussy(torch.autograd.Function):
    """Has no backward for rank 1's second stage."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("no gradient today")


def no_gradient(engine: Any) -> None:
    rank, size = rank_and_size()
    if rank == 1:
        block = engine.module.blocks[size]  # layer size + 1: rank 1's second stage
        up = block.up.forward
        block.up.forward = lambda x: Fussy.apply(up(x))
    loss = engine(*mine(0)).loss
    engine.backward(loss)


@survives("Ranks", "an exception in a custom autograd function's backward",
          "it keeps its type; every other rank's one error quotes it, with stage and microbatch")
def test_an_error_in_backward_keeps_its_type_and_reaches_every_rank(tmp_path):
    first, second, third = endings(tmp_path, 3, no_gradient)
    assert second.kind == "ArithmeticError"
    assert "mobius: rank 1, backward of stage 4 (blocks.3) for microbatch 0 of rank 0" in second.text
    for end in (first, third):
        assert end.kind == "PeerLost"
        assert "rank 1 is gone (ArithmeticError: no gradient today; backward of stage 4 (blocks.3)" in end.text


def a_copy_fails(engine: Any) -> None:
    train(engine, 1)
    if rank_and_size()[0] == 1:
        at(Kind.ACTIVATIONS, 3, lambda: 1 / 0)
    train(engine, 1, first=1)


def test_an_error_on_a_copying_stream_reaches_the_script_that_waits_for_compute(tmp_path):
    first, second = endings(tmp_path, 2, a_copy_fails)
    assert second.kind == "ZeroDivisionError" and "rank 1, activations of stage 3" in second.text
    assert first.kind == "PeerLost" and "rank 1 is gone (ZeroDivisionError" in first.text


def interrupted_in_compute(engine: Any) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    train(engine, 1)
    if rank_and_size()[0] == 1:
        at(Kind.FORWARD, 1, interrupt)
    train(engine, 1, first=1)


def interrupted_while_waiting(engine: Any) -> None:
    train(engine, 1)
    if rank_and_size()[0] == 1:
        # Rank 1 waits in its first compute for what rank 0 sleeps over.
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    else:
        at(Kind.FORWARD, 0, lambda: time.sleep(1.5))
    train(engine, 1, first=1)


def interrupted_before_it_tells(engine: Any) -> None:
    """Between a task's result and the word of it to the threads that wait for it."""
    train(engine, 1)
    tell, told = Future.set_result, []

    def interrupted(future: Future, result: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            told.append(result)
            if len(told) == 2:
                with future._condition:
                    time.sleep(0.3)  # until those that wait are asleep
                    future._result, future._state = result, FINISHED
                    raise KeyboardInterrupt
        tell(future, result)

    if rank_and_size()[0] == 1:
        Future.set_result = interrupted
    train(engine, 1, first=1)


@survives("Ranks", "an interrupt of one rank, while it computes or waits", "it is interrupted, and the others end at once")
@pytest.mark.parametrize("job", [interrupted_in_compute, interrupted_while_waiting, interrupted_before_it_tells])
def test_an_interrupt_hangs_nobody(tmp_path, job):
    first, second = endings(tmp_path, 2, job)
    assert second.kind == "KeyboardInterrupt"
    assert first.kind == "PeerLost" and "rank 1 is gone (KeyboardInterrupt" in first.text


def goes_on_after_an_error(engine: Any) -> List[float]:
    ids, labels = mine(0)
    for _ in range(3):
        with pytest.raises(IndexError):
            engine(ids + 1000, labels)
    return train(engine, 2)


def test_a_single_rank_may_go_on_after_an_error(tmp_path):
    [end] = endings(tmp_path, 1, goes_on_after_an_error, {"device_memory_gb": 36_000 / GIB})
    assert end.kind == "NoneType" and len(end.result) == 2


def train_with_bug(engine: Any, place: str) -> None:
    train(engine, 1)
    rank, _ = rank_and_size()
    try:
        if rank == 1 and place == "hook":
            engine.module.blocks[0].register_forward_hook(bug)  # stage 1, which is rank 1's
        if rank == 1 and place == "scheduler":
            engine.lr_scheduler = SimpleNamespace(step=bug)
        if rank == 0 and place == "monitor":
            engine.monitor = SimpleNamespace(enabled=True, write_events=bug)
        engine.train_batch(endless(1))
        loss = engine(*mine(2)).loss
        if rank == 1 and place == "loss":
            bug()
        engine.backward(loss)
    finally:
        engine.destroy()


LEFT = "which has left (its engine was destroyed or its script ended after Bug: in line 7)"


@survives("Ranks", "an exception in one rank's own code: a forward hook, the loss, a learning rate scheduler, a monitor",
          "it stays what it is on that rank; the others' one error quotes it")
@pytest.mark.parametrize("place, victim, said", [
    ("hook", 1, "rank 1 is gone (Bug: in line 7; forward of stage 1 (blocks.0) for microbatch 0 of rank 0)"),
    ("loss", 1, LEFT), ("scheduler", 1, LEFT), ("monitor", 0, LEFT),
])
def test_an_exception_in_the_scripts_own_code_is_quoted_by_the_others(tmp_path, place, victim, said):
    ended = endings(tmp_path, 2, train_with_bug, {}, place)
    assert ended[victim].kind == "Bug"
    assert ended[1 - victim].kind == "PeerLost" and said in ended[1 - victim].text, ended


# A rank that is late.

LATE = 2.0
"""After how many seconds a rank counts as late."""


def when_others_gave_up(directory: Path, others: int, command: str = "true") -> subprocess.Popen:
    """A process that runs a shell command when so many ranks have given up, and then ends."""
    script = f"while [ $(ls {directory}/gave-up-* | wc -l) -lt {others} ]; do sleep 0.1; done; {command}"
    return subprocess.Popen(["sh", "-c", script], stderr=subprocess.DEVNULL)


def stop(directory: Path, others: int) -> None:
    """Stops this process as a debugger or ``kill -STOP`` does, until the others have given up."""
    when_others_gave_up(directory, others, f"kill -CONT {os.getpid()}")
    os.kill(os.getpid(), signal.SIGSTOP)


def train_with_pause(engine: Any, directory: Path, victim: int, place: str) -> None:
    """A step, and a second one that the victim holds up until all others have ended."""
    rank, size = rank_and_size()
    train(engine, 1)
    engine.pipeline.mailbox._timeout = LATE  # not before: first uses take their time on a busy machine
    if rank == victim:
        if place == "script":
            os.waitpid(when_others_gave_up(directory, size - 1).pid, 0)
        else:
            at(Kind.FORWARD, rank, once(lambda: stop(directory, size - 1)))
    try:
        train(engine, 1, first=1)
    finally:
        directory.joinpath(f"gave-up-{rank}").touch()


def once(act: Callable[[], None]) -> Callable[[], None]:
    """``act``, the first time it is called."""
    acts = iter([act])
    return lambda: next(acts, lambda: None)()


@survives("Ranks", "a rank that sleeps, or is slow, in its own code",
          "after `timeout_seconds` all others end with one error that names it and the line it is in; so does the late one")
@survives("Ranks", "a rank whose process is stopped (`kill -STOP`)",
          "after `timeout_seconds` all others end with one error: it names the one that does not answer, not its neighbours")
@pytest.mark.parametrize("ranks, victim, place, does", [
    (3, 2, "script", r"rank 2 is alive and waits for nobody: it is at .*test_faults.py:\d+ in train_with_pause"),
    (4, 1, "forward", "rank 1 does not answer: its process is stopped"),
])
def test_a_rank_that_is_late_is_named_by_all_others(tmp_path, ranks, victim, place, does):
    ended = endings(tmp_path, ranks, train_with_pause, {}, tmp_path, victim, place)
    for rank, end in enumerate(ended):
        assert end.kind == "PeerTimeout" and "timeout_seconds" in end.text, end
        assert re.search(rf"rank \d waited 2 s for .* from rank \d; {does}", end.text), end
        assert re.search(r"its last message, \d+\.\d s ago, was (its part of engine.step|P1 of forward)", end.text), end
    assert f"rank {victim} comes too late" in ended[victim].text
    assert sum("gives up" in end.text for end in ended) <= ranks - 2

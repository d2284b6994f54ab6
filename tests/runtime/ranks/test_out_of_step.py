"""Ranks that do not do the same, batches that differ between them, and what is left when an engine ends."""

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch import nn

from tests.features import survives
from tests.ranks import run_ranks
from tests.runtime.jobs import endless, failure, initialize, language_model, mine, rank_and_size, tokens, weights
from tests.runtime.ranks.endings import Ended, endings, settings, train


# Ranks out of step.

def another_call(engine: Any) -> None:
    loss = engine(*mine(0)).loss
    engine.backward(loss)
    if rank_and_size()[0] == 0:
        engine.step()
    else:
        engine(*mine(1))


@survives("Ranks", "a rank that makes one forward fewer, or another call", "one error on each rank that names both calls")
def test_different_calls_are_named_on_both_ranks(tmp_path):
    first, second = endings(tmp_path, 2, another_call)
    assert first.kind == second.kind == "OutOfStep"
    assert "rank 0 is in engine.step, but rank 1 is in forward" in first.text
    assert "rank 1 is in forward, but rank 0 is in engine.step" in second.text


def fewer_steps(engine: Any) -> None:
    train(engine, 3 - rank_and_size()[0])


@survives("Ranks", "a rank that makes one step fewer", "the others end with one error: it has left, check for uneven data")
def test_a_rank_that_stops_early_has_left(tmp_path):
    first, second = endings(tmp_path, 2, fewer_steps)
    assert second.kind == "NoneType"
    assert first.kind == "PeerLost" and "rank 1, which has left" in first.text and "uneven data" in first.text


def other_numbers_of_microbatches() -> Ended:
    rank, _ = rank_and_size()
    engine = initialize(language_model(), {**settings(), "gradient_accumulation_steps": 1 + rank})
    try:
        return Ended(None, engine.train_batch(endless()))
    except Exception as error:
        return Ended(error)
    finally:
        engine.destroy()


@survives("Ranks", "ranks with different numbers of microbatches", "one error on all that lists the numbers")
def test_different_numbers_of_microbatches_are_an_error():
    for end in run_ranks(2, other_numbers_of_microbatches):
        assert end.kind == "OutOfStep" and "[1, 2]" in end.text


def runs_dry(engine: Any) -> None:
    data = iter([mine(step) for step in range(2 - rank_and_size()[0])])
    engine.train_batch(data)
    engine.train_batch(data)


@survives("Ranks", "data that runs dry on one rank in a batch", "StopIteration there, one error on the others")
def test_data_that_runs_dry_on_one_rank_ends_the_other(tmp_path):
    first, second = endings(tmp_path, 2, runs_dry)
    assert second.kind == "StopIteration"
    assert first.kind == "PeerLost" and "rank 1" in first.text


# Batches that differ between ranks.

def odd_batch(rank: int):
    ids, labels = tokens(rank, batch=3 - 2 * rank)
    return (ids, labels) if rank == 0 else (ids[:, :4], labels[:, :4])


def odd_batches() -> Any:
    rank, size = rank_and_size()
    alone = language_model()
    losses = [alone(*odd_batch(other)).loss for other in range(size)]
    (sum(losses) / size).backward()
    engine = initialize(language_model(), {**settings(), "optimizer": {"type": "SGD", "params": {"lr": 1.0}}})
    before = weights(engine.module)
    ids, labels = odd_batch(rank)
    loss = (engine(ids, labels) if rank == 0 else engine(labels=labels, ids=ids)).loss
    engine.backward(loss)
    engine.step()
    for name, weight in weights(engine.module).items():
        torch.testing.assert_close(before[name] - weight, dict(alone.named_parameters())[name].grad, rtol=1e-4, atol=1e-6)
    engine.destroy()
    return loss.item(), losses[rank].item()


def test_batches_of_other_sizes_and_structures_count_as_in_the_unsplit_model():
    for loss, expected in run_ranks(2, odd_batches):
        assert loss == pytest.approx(expected, abs=1e-6)


# After the end.

def left_open() -> Any:
    """Threads of pipelines, their files in memory, and sockets between ranks; the process group's own are not counted."""
    local = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return ([thread.name for thread in threading.enumerate() if thread.name.startswith("mobius")],
            sum("memfd:mobius_ds" in file for file in files), sum(file[len("socket:["):-1] in local for file in files))


def settled() -> Any:
    deadline = time.monotonic() + 60
    while left_open()[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    return left_open()


def many_engines() -> Any:
    before, found = left_open(), []
    for _ in range(3):
        model: nn.Module = language_model()
        engine = initialize(model, settings())
        train(engine, 1)
        expected = weights(model)
        engine.destroy()
        engine.destroy()
        assert all(torch.equal(expected[name], weight) for name, weight in weights(model).items())
        loss = model(*tokens(0)).loss
        loss.backward()
        assert loss.item() > 0 and model.head.weight.grad is not None
        del engine, loss
        gc.collect()
        found.append(settled())
    return before, found


@pytest.mark.parametrize("ranks", [1, 2])
def test_engines_leave_no_thread_and_no_file_and_a_working_module(ranks):
    for (_, _, sockets), found in run_ranks(ranks, many_engines):
        the_modules_own = 2  # the file that holds its weights, and its mapping of it
        assert found == [([], the_modules_own, sockets)] * 3


def train_after(change: Callable[[nn.Module], Any]) -> Any:
    engine = initialize(language_model(), settings())
    train(engine, 1)
    change(engine.module)
    said = failure(lambda: train(engine, 1, first=1))
    engine.destroy()
    return said


def replace_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()  # what moving to another device and back does


def load_by_assignment(module: nn.Module) -> None:
    module.load_state_dict({name: tensor.clone() for name, tensor in module.state_dict().items()}, assign=True)


def cast(module: nn.Module) -> None:
    module.half()


@pytest.mark.parametrize("change, said", [
    (replace_data, "'tokens.weight' has left the memory"), (load_by_assignment, "'tokens.weight' has left the memory"),
    (cast, "'tokens.weight' has left the memory"),
])
def test_parameters_that_are_no_longer_the_trained_ones_are_named(change, said):
    for error in run_ranks(2, train_after, change):
        assert error.startswith("RuntimeError") and said in error

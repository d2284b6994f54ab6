"""A long run: memory and step time stay what they were. ``make soak`` runs it long, the ordinary tests short."""

import re
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch

from tests.features import survives
from tests.ranks import run_ranks
from tests.runtime.jobs import SEQUENCE, config, initialize, language_model, rank_and_size, tokens, weights

RANKS = 4
ALONE_FROM = 1000
"""Steps of a run that is not one of many tests."""
KEPT = 2
"""Checkpoints that stay on the disk, as scripts keep them."""


def of_some_length(number: int):
    """Micro-batch ``number``, of one of a few lengths: they come again and again, in another order on each rank."""
    ids, labels = tokens(number)
    length = 2 + number % (SEQUENCE - 1)
    return ids[:, :length].contiguous(), labels[:, :length].contiguous()


def own_bytes() -> int:
    """Memory of this process and its share of what it shares; not of files, whose shares change with other processes."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(1024 * int(kilobytes) for kilobytes in re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+) kB$", rollup, re.MULTILINE))


def known_work() -> float:
    """The processor time of a known piece of work: what the machine's other jobs leave of a processor's speed right now."""
    begun = time.process_time()
    sum(number * number for number in range(20_000))
    return time.process_time() - begun


def soak(folder: Path, steps: int) -> List[Dict[str, float]]:
    """Trains, evaluates and saves. What each step took, and what this rank held after it."""
    rank, size = rank_and_size()
    engine = initialize(language_model(tied=True), config(accumulation=2, gradient_clipping=1.0))
    evaluate_every, save_every = min(50, steps // 4), min(100, steps // 2)
    marks = []
    for step in range(steps):
        start, worked = time.perf_counter(), time.process_time()
        for micro in range(2):
            loss = engine(*of_some_length((2 * step + micro) * size + rank)).loss
            engine.backward(loss)
            engine.step()
        seconds, worked = time.perf_counter() - start, (time.process_time() - worked) / known_work()
        if step % evaluate_every == 0:
            engine.eval()
            with torch.no_grad():
                engine(*of_some_length(10**6 + rank)).logits.sum().item()
            engine.train()
        if step % save_every == 0:
            engine.save_checkpoint(str(folder), tag=f"step{step}")
            old = folder / f"step{step - KEPT * save_every}"
            if rank == 0 and old.exists():
                shutil.rmtree(old)
        marks.append({"seconds": seconds, "worked": worked, "host": own_bytes(),
                      "device": engine.peak_device_bytes(), "loss": loss.item()})
    engine.destroy()
    return marks


@survives("Load", "a long run with evaluation and checkpoints in between, on 4 ranks",
          "host and device memory stay within 1 %, step time does not grow")
@pytest.mark.timeout(0)
def test_a_long_run_stays_as_it_was(tmp_path, soak_steps):
    ranks = run_ranks(RANKS, soak, tmp_path, soak_steps, timeout=300 + soak_steps)
    host = [sum(marks[step]["host"] for marks in ranks) for step in range(soak_steps)]
    quarter = soak_steps // 4
    early, late = slice(quarter, 2 * quarter), slice(3 * quarter, None)
    assert max(host[late]) <= 1.01 * max(host[early]), (max(host[early]), max(host[late]))
    for marks in ranks:
        device = [mark["device"] for mark in marks]
        assert max(device[late]) <= 1.01 * max(device[early])
        # Processor time says what a step takes also while other tests run, in measures of a known piece of work; the clock,
        # only where this one has the machine.
        alone = soak_steps >= ALONE_FROM
        for kind, growth in [("worked", 1.25), ("seconds", 1.25)] if alone else [("worked", 2)]:
            took = [mark[kind] for mark in marks]
            assert statistics.quantiles(took[late], n=10)[0] <= growth * statistics.quantiles(took[early], n=10)[0], kind
    losses = [mark["loss"] for mark in ranks[0]]
    assert all(loss == loss for loss in losses)


def short_job(seed: int) -> Any:
    rank, size = rank_and_size()
    engine = initialize(language_model(blocks=2 + seed), config())
    losses = []
    for step in range(10):
        loss = engine(*tokens(1000 * seed + step * size + rank)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    result = losses, weights(engine.module)
    engine.destroy()
    return result


@survives("Load", "two jobs of one user at the same time on one machine", "neither notices the other")
def test_two_jobs_side_by_side():
    alone = [run_ranks(2, short_job, seed) for seed in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda seed: run_ranks(2, short_job, seed), (0, 1)))
    for expected, found in zip(alone, together):
        for (losses, values), (their_losses, their_values) in zip(expected, found):
            assert losses == their_losses
            assert all(torch.equal(value, their_values[name]) for name, value in values.items())

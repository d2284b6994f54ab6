"""Random delays on every example model. ``make chaos`` tries more seeds."""

from contextlib import nullcontext
from typing import Any, List, Optional

import pytest
import torch

from tests.features import survives
from tests.model.zoo import ZOO, batch, build
from tests.ranks import run_ranks
from tests.runtime.jobs import config, initialize, rank_and_size, weights
from tests.runtime.sweeps.test_delays import at_random, delayed


def train(name: str, steps: int, delayed_from: Optional[int] = None) -> List[Any]:
    """Steps of two microbatches on each rank, dropout on: losses and norm of each, and the final weights.

    Args:
        delayed_from: delays every task, by another seed in every step; this is the first step's.
    """
    rank, size = rank_and_size()
    torch.manual_seed(0)
    settings = config(accumulation=2)
    settings["mobius"]["layers_per_stage"] = 1
    engine = initialize(build(name, dropout=0.1), settings)
    numbers = []
    try:
        for step in range(steps):
            with delayed(at_random(1000 * (delayed_from + step) + rank)) if delayed_from is not None else nullcontext():
                for micro in range(2):
                    loss = engine(**batch(name, (2 * step + micro) * size + rank)).loss
                    engine.backward(loss)
                    engine.step()
                    numbers.append((step, loss.item()))
            numbers.append((step, float(engine.get_global_grad_norm())))
        return [*numbers, weights(engine.module)]
    finally:
        engine.destroy()


def first_difference(name: str, seeds: int) -> Optional[str]:
    """What delays by so many seeds change first."""
    undelayed, held_up = train(name, seeds), train(name, seeds, delayed_from=0)
    for one, other in zip(undelayed[:-1], held_up[:-1]):
        if one != other:
            return f"seed {one[0]}: {one[1]} without delays, {other[1]} with them"
    return next((f"weights of {key}" for key, weight in undelayed[-1].items() if not torch.equal(weight, held_up[-1][key])),
                None)


@survives("Schedules", "streams held up at random, on every example model of transformers", "no bit changes, whatever the seed")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", ZOO)
def test_delays_change_no_bit_of_any_model(name, seeds):
    assert run_ranks(2, first_difference, name, seeds, timeout=120 + 10 * seeds) == [None, None]

"""Every byte that crossed a link is one that the schedule named, category by category."""

import itertools
from typing import Any, Dict, List

import pytest
import torch

from mobius_ds.schedule.tasks import CATEGORIES
from tests.ranks import run_ranks
from tests.runtime.jobs import config, initialize, language_model, rank_and_size, tokens

MODELS = {"plain": {}, "tied": {"tied": True}, "frozen": {"frozen": 2}}
DTYPES = ("fp32", "bf16")
ALIGNMENT = 64


def settings(dtype: str, **mobius: Any) -> Dict[str, Any]:
    made = config(gradient_clipping=1.0, bf16={"enabled": dtype == "bf16"})
    made["mobius"].update(mobius)
    return made


def batch(step: int) -> Any:
    """Another length on every rank and in every step."""
    rank, size = rank_and_size()
    ids, labels = tokens(step * size + rank)
    length = 2 + (step + rank) % 5
    return ids[:, :length], labels[:, :length]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def closed_form(model: Any, dtype: str) -> Dict[str, int]:
    """Bytes of one step with one layer per stage: weights twice, gradients once, whatever the number of ranks."""
    size = 4 if dtype == "fp32" else 2
    stages = [[model.tokens], *([block] for block in model.blocks), [model.norm, model.head]]
    weights = gradients = 0
    for stage in stages:
        parameters = [p for module in stage for p in module.parameters()]
        padded = [aligned(p.numel() * size) for p in parameters]
        # One copy from the first byte to the last, unless a tied parameter lies elsewhere.
        if parameters[-1] is model.tokens.weight and len(parameters) > 1:
            weights += sum(padded[:-2]) + parameters[-2].numel() * size + parameters[-1].numel() * size
        else:
            weights += sum(padded[:-1]) + parameters[-1].numel() * size
        gradients += sum(nbytes for p, nbytes in zip(parameters, padded) if p.requires_grad)
    return {"parameters_in": 2 * weights, "gradients_out": gradients}


def record(dtype: str, options: Dict[str, Any], layers_per_stage: int) -> List[Any]:
    """(what happened, measured, predicted) for every kind of sweep, and the closed form of the first."""
    torch.manual_seed(0)
    model = language_model(**options)
    engine = initialize(model, settings(dtype, layers_per_stage=layers_per_stage))
    found: List[Any] = [closed_form(model, dtype)]

    def note(what: str) -> None:
        found.append((what, engine.take_traffic(), engine.take_predicted_traffic()))

    for step in range(3):
        loss = engine(*batch(step)).loss
        engine.backward(loss)
        engine.step()
        note(f"step {step}")
    engine.eval()
    with torch.no_grad():
        engine(*batch(3))
        note("evaluation without gradients")
    engine(*batch(4))
    note("evaluation with gradients")
    engine.train()
    outputs = engine(*batch(5))
    outputs.logits.sum().item()
    engine.backward(outputs.loss)
    engine.step()
    note("outputs read")
    engine.backward(engine(*batch(6)).loss)
    engine.step()
    note("outputs kept from then on")
    engine.train_batch(iter([batch(7)]))
    note("train_batch")
    engine.destroy()
    return found


def records() -> Dict[Any, List[Any]]:
    return {(dtype, name, layers): record(dtype, options, layers)
            for (dtype, (name, options)), layers in itertools.product(itertools.product(DTYPES, MODELS.items()), (1, 2))
            if layers == 1 or name == "tied"}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_measured_bytes_are_the_schedules(ranks):
    everyones = run_ranks(ranks, records)
    for case in everyones[0]:
        parts = [rank[case] for rank in everyones]
        for (what, measured, predicted) in (entry for part in parts for entry in part[1:]):
            assert measured == predicted and tuple(measured) == CATEGORIES, (case, what)
            assert sum(measured.values()) > 0
        if case[2] == 1:
            expected = parts[0][0]
            total = {category: sum(part[1][1][category] for part in parts) for category in expected}
            assert total == expected, case

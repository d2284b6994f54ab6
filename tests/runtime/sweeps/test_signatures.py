"""Which forwards are traced: one of each kind, and none just because a number in it is new."""

from typing import Any, Dict, List

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from mobius_ds.model.discovery import find_units
from mobius_ds.model.intercept import Entry
from mobius_ds.model.trace import trace
from mobius_ds.runtime.sweeps.signatures import Inputs, Signatures
from tests.ranks import run_ranks
from tests.runtime.jobs import LanguageModel, config, initialize, mine

CPU = torch.device("cpu")
X = torch.zeros(2, 6, 4)


class Layer(nn.Module):

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x, number=None):
        if number is not None and number > 3:
            x = x + 1
        return self.inner(x)


class Model(nn.Module):
    """Uses a number in one way or another."""

    def __init__(self, use):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.use = use

    def forward(self, x, number):
        return self.use(self.layers, x, number)


def plainly(layers, x):
    return layers[1](layers[0](x))


USES = {
    "divides": lambda layers, x, number: plainly(layers, x).sum() / number,
    "weighs": lambda layers, x, number: (1 - number) * plainly(layers, x).sum() + number * layers[0](x).sum(),
    "is looked at": lambda layers, x, number: plainly(layers, x) if number > 3 else layers[0](x),
    "is a size": lambda layers, x, number: plainly(layers, x)[:, :number],
    "is a count": lambda layers, x, number: sum(plainly(layers, x) for _ in range(number)),
    "is returned": lambda layers, x, number: (plainly(layers, x), number),
    "is looked at by a layer": lambda layers, x, number: layers[1](layers[0](x, number)),
    "is ignored": lambda layers, x, number: plainly(layers, x),
}
ONLY_ARITHMETIC = {"divides", "weighs", "is ignored"}


@pytest.mark.parametrize("use", USES)
def test_a_number_decides_if_code_can_look_at_it(use):
    model = Model(USES[use])
    entry, units = Entry(model), find_units(model)
    signatures = Signatures(lambda entry, args, kwargs: trace(entry, units, args, kwargs, CPU))
    seen = [signatures.of(entry, Inputs(*tree_flatten(((X, number), {})), ())) for number in (5, 2, 4, 2, 7)]
    later = seen[1:]  # by the second one it is known
    assert len(set(later)) == (1 if use in ONLY_ARITHMETIC else 3)
    assert seen[1] == seen[3]
    other = signatures.of(entry, Inputs(*tree_flatten(((X[:1], 7), {})), ()))
    assert other not in seen


def test_numbers_are_tried_one_by_one():
    def use(layers, x, numbers):
        return plainly(layers, x)[:, :numbers["size"]] / numbers["count"]

    model = Model(use)
    entry, units = Entry(model), find_units(model)
    signatures = Signatures(lambda entry, args, kwargs: trace(entry, units, args, kwargs, CPU))

    def of(**numbers: int) -> str:
        return signatures.of(entry, Inputs(*tree_flatten(((X, numbers), {})), ()))

    of(size=2, count=1)
    assert of(size=2, count=9) == of(size=2, count=8) != of(size=3, count=8)
    assert of(size=3, count=8) == of(size=3, count=5)


class Normalized(LanguageModel):
    """Divides its loss by a count of tokens that the script gives."""

    def forward(self, ids, labels, count):
        output = super().forward(ids, labels)
        return output.loss * labels.numel() / count


def counted(as_tensor: bool) -> Dict[str, Any]:
    torch.manual_seed(7)
    engine = initialize(Normalized(), config())
    losses: List[float] = []
    for step in range(5):
        ids, labels = mine(step)
        loss = engine(ids, labels, torch.tensor(20 + step) if as_tensor else 20 + step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    traced = len(engine.pipeline._announcer._traced)
    engine.destroy()
    return {"losses": losses, "traced": traced}


def test_a_count_of_tokens_costs_no_trace_a_step():
    for as_tensor, as_number in zip(run_ranks(2, counted, True), run_ranks(2, counted, False)):
        assert as_tensor["losses"] == as_number["losses"]
        assert as_tensor["traced"] == 1 and as_number["traced"] == 2

"""Jobs small enough to work out by hand: every number here is known in advance (fp32, SGD with lr 1)."""

from typing import Dict, List, Sequence

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks


class Scale(nn.Module):
    """y = x * w."""

    def __init__(self, weight: float):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([float(weight)]))

    def forward(self, x):
        return x * self.weight


def config(ranks: int, samples: int, lr: float = 1.0) -> Dict:
    return {"train_batch_size": samples, "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": samples // ranks, "gradient_clipping": 0,
            "optimizer": {"type": "SGD", "params": {"lr": lr}},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
            "mobius": {"enabled": True, "layers_per_stage": 1}}


def train_one_step(model: nn.Module, samples: Sequence[float], lr: float = 1.0) -> Dict:
    """One optimizer step on this rank's share of ``samples``; what a test may want to know afterwards."""
    import deepspeed
    import torch.distributed as dist
    ranks, rank = dist.get_world_size(), dist.get_rank()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    engine, *_ = deepspeed.initialize(model=model, config=config(ranks, len(samples), lr))
    losses: List[float] = []
    for first in range(0, len(samples), ranks):
        loss = engine(torch.tensor([[float(samples[first + rank])]])).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    every = [None] * ranks
    dist.all_gather_object(every, losses)
    measured, predicted = engine.take_traffic(), engine.take_predicted_traffic()
    result = {"loss": sum(map(sum, every)) / len(samples), "norm": engine.get_global_grad_norm(),
              "after": [parameter.detach().clone() for parameter in model.parameters()],
              "change": [(b - p.detach()).item() / lr for b, p in zip(before, model.parameters())],
              "traffic": measured, "predicted": predicted, "state": len(engine.optimizer.state)}
    engine.destroy()
    return result


def four_layers() -> Dict:
    return train_one_step(nn.Sequential(*map(Scale, (1, 2, 3, 4))), (1, 2, 3, 4))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_four_layers(ranks):
    for result in run_ranks(ranks, four_layers):
        assert result["loss"] == 60
        assert result["change"] == [60, 30, 20, 15]
        assert result["traffic"] == result["predicted"]


def a_layer_used_twice() -> Dict:
    shared = Scale(2)
    return train_one_step(nn.Sequential(shared, Scale(3), shared), (1, 2, 3, 4))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_used_twice(ranks):
    for result in run_ranks(ranks, a_layer_used_twice):
        assert result["change"] == [30, 10]
        assert result["norm"] == pytest.approx(31.6228, abs=1e-4)


class Mixed(nn.Module):
    """Hands on a float with a gradient, a bool, and a float without a gradient."""

    def __init__(self, weight: float):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([float(weight)]))

    def forward(self, carried):
        hidden, _, aside = carried if isinstance(carried, tuple) else (carried, None, None)
        mask = hidden > 0
        if aside is None:
            aside = (0.5 * hidden).detach()
        return hidden * self.weight * mask, mask, aside


class SumOfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Mixed(2), Mixed(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        hidden, _, aside = x
        return hidden + aside


def mixed_tuples() -> Dict:
    return train_one_step(SumOfTwo(), (1, 2))


@pytest.mark.parametrize("ranks", [1, 2])
def test_tuples_bools_and_ungraded_tensors_cross_stages(ranks):
    for result in run_ranks(ranks, mixed_tuples):
        assert result["loss"] == 9.75
        assert result["change"] == [4.5, 3]


def half_frozen() -> Dict:
    layers = [Scale(w) for w in (1, 2, 3, 4)]
    for layer in layers[:2]:
        layer.weight.requires_grad_(False)
    return train_one_step(nn.Sequential(*layers), (1, 2), lr=0.01)


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_layers_have_no_gradients_no_state_and_no_traffic(ranks):
    results = run_ranks(ranks, half_frozen)
    for result in results:
        assert [w.item() for w in result["after"]] == pytest.approx([1, 2, 2.88, 3.91], abs=1e-6)
        assert result["traffic"] == result["predicted"]
    stages_trained, micro_steps, bytes_on_the_wire = 2, 2 // ranks, 64  # one float, alone on its cache line
    assert sum(result["traffic"]["gradients_out"] for result in results) == \
        stages_trained * micro_steps * bytes_on_the_wire


class Dropped(nn.Module):
    """y = dropout(x) * w: the loss is the gradient times w."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Scale(2)])

    def forward(self, x):
        return self.layers[0](nn.functional.dropout(x.expand(1, 4096), 0.5))


def dropout_once() -> Dict:
    return train_one_step(Dropped(), (1, 1))


@pytest.mark.parametrize("ranks", [1, 2])
def test_dropout_draws_the_same_mask_when_recomputed(ranks):
    for result in run_ranks(ranks, dropout_once):
        assert result["loss"] == 2 * result["change"][0]
        assert 0.9 < result["change"][0] < 1.1 and result["change"][0] != 1

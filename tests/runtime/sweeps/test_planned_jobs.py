"""Jobs that plan by themselves, or run a plan file: the executor runs whatever the planner returns."""

import os
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mobius_ds.inputs.profile import ModelProfile
from mobius_ds.inputs.topology import preset
from mobius_ds.planner.plan_files import from_json, write
from mobius_ds.planner.planner import Request, make_best_plan
from tests.ranks import run_ranks


class Net(nn.Module):
    """Layers of unequal width, so that an even cut is not the best one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        widths = [16, 64, 64, 16, 16, 16, 16, 16, 16]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, y)


def batch(number: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(number))


def train(mobius: Dict[str, Any]) -> Dict[str, Any]:
    import deepspeed
    import torch.distributed as dist
    ranks, rank = dist.get_world_size(), dist.get_rank()
    engine, *_ = deepspeed.initialize(model=Net(), config={
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0, "mobius": {"enabled": True, **mobius},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}}})
    losses, equal = [], []
    for step in range(3):
        loss = engine(batch(2 * (step * ranks + rank)), batch(2 * (step * ranks + rank) + 1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        equal.append(engine.take_traffic() == engine.take_predicted_traffic())
    plan = engine.pipeline.plan
    weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
    engine.destroy()
    return {"losses": losses, "equal": equal, "plan": plan, "weights": weights}


@pytest.mark.parametrize("ranks, topology", [(2, "3090-2"), (4, "3090ti-4-2+2")])
def test_a_job_plans_for_its_topology_once_and_trains_the_same(tmp_path, ranks, topology):
    env = {"MOBIUS_DS_CACHE": str(tmp_path / "plans")}
    planned = run_ranks(ranks, train, {"topology": topology}, env=env)
    by_hand = run_ranks(ranks, train, {"layers_per_stage": 1}, env=env)
    assert len({result["plan"] for result in planned}) == 1
    assert len(list((tmp_path / "plans").iterdir())) == 1
    for result, reference in zip(planned, by_hand):
        assert all(result["equal"])
        assert result["losses"] == reference["losses"]
        assert all(torch.equal(a, b) for a, b in zip(result["weights"], reference["weights"]))
    run_ranks(ranks, train, {"topology": topology}, env=env)
    assert len(list((tmp_path / "plans").iterdir())) == 1


def test_a_job_runs_a_plan_file_and_refuses_one_of_another_model(tmp_path):
    env = {"MOBIUS_DS_CACHE": str(tmp_path / "plans")}
    run_ranks(2, train, {"topology": "3090-2"}, env=env)
    [made] = (tmp_path / "plans").iterdir()
    pinned = tmp_path / "plan.json"
    os.replace(made, pinned)
    for result in run_ranks(2, train, {"plan": str(pinned)}):
        assert result["plan"] == from_json(pinned).plan and all(result["equal"])
    other = from_json(pinned).request.profile
    shorter = ModelProfile(other.name, other.layers[:5], other.parameters)
    wrong = tmp_path / "wrong.json"
    write(make_best_plan(Request(shorter, preset("3090-2"), 2, strategy="even")), Path(wrong))
    with pytest.raises(AssertionError, match="5 in all, but the model has 8") as failure:
        run_ranks(2, train, {"plan": str(wrong)})
    assert str(failure.value).count("ValueError") >= 2, "the same error on every rank"

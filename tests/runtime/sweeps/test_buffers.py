"""Buffers that a forward writes into: counted once per microbatch, the same on every rank after a step."""

import io
from typing import Dict

import torch
from torch import nn

from tests.ranks import run_ranks


class Normed(nn.Module):

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def inputs(rank: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))


def train_one_step() -> Dict:
    import deepspeed
    import torch.distributed as dist
    rank = dist.get_rank()
    engine, *_ = deepspeed.initialize(model=Normed(), config={
        "train_micro_batch_size_per_gpu": 6, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0, "mobius": {"enabled": True, "layers": ["layers.*"], "layers_per_stage": 1}})
    engine.backward(engine(inputs(rank)))
    engine.step()
    saved = io.BytesIO()
    torch.save(engine.module.layers[0].state_dict(), saved)
    result = {"state": {name: value.clone() for name, value in engine.module.state_dict().items()},
              "saved_bytes": saved.tell()}
    engine.destroy()
    return result


def test_running_statistics_count_each_microbatch_once_and_are_shared():
    for ranks in (1, 2):
        reference = Normed()
        for rank in range(ranks):
            reference(inputs(rank))
        for result in run_ranks(ranks, train_one_step):
            for name, buffer in reference.named_buffers():
                torch.testing.assert_close(result["state"][name], buffer)


def big_and_small() -> Dict:
    import deepspeed
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 4))
    engine, *_ = deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, "mobius": {"enabled": True}})
    saved = io.BytesIO()
    torch.save(model[1].state_dict(), saved)
    engine.destroy()
    return {"saved_bytes": saved.tell()}


def test_saving_one_layer_does_not_write_the_whole_model():
    [result] = run_ranks(1, big_and_small)
    assert result["saved_bytes"] < 4 * 512 * 16

"""Models that are built or loaded under stage 3, and what became of their parameters. Each job runs on every rank."""

import copy
import gc
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List

import torch
from torch import nn

from tests.runtime.jobs import LanguageModel, config, initialize, mine, rank_and_size, tokens, weights

BF16 = {"bf16": {"enabled": True}}


class Initialized(LanguageModel):
    """Draws its weights again when it is built, as most models do."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.register_buffer("scale", torch.ones(3))
        self.apply(self._draw)

    def _draw(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.1)


def stage3(mobius: bool = True, **sections: Any) -> Dict[str, Any]:
    """A stage-3 config that clips, so that the norm of all gradients counts."""
    return config(mobius, gradient_clipping=1.0, optimizer={"type": "AdamW", "params": {"lr": 5e-3}}, **sections)


def built(settings: Dict[str, Any], seed: int = 0, make: Any = Initialized, **options: Any) -> nn.Module:
    """A model made under ``zero.Init``, every rank with random numbers of its own."""
    import deepspeed
    torch.manual_seed(seed + rank_and_size()[0])
    with deepspeed.zero.Init(config_dict_or_path=settings):
        return make(**options)


def engine_of(model: nn.Module, settings: Dict[str, Any]):
    return initialize(model, settings, model_parameters=[p for p in model.parameters() if p.requires_grad])


def losses(engine: Any, steps: int = 3) -> List[float]:
    found = []
    for step in range(steps):
        ids, labels = mine(step)
        loss = engine(ids, labels).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def whole(model: nn.Module) -> Dict[str, torch.Tensor]:
    """The parameters' values, as a script of stage 3 reads them."""
    import deepspeed
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return weights(model)


def memory_of(pids: List[int]) -> int:
    """Summed PSS of some processes, bytes."""
    total = 0
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            total += sum(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    return total


def taken() -> int:
    """Bytes of DRAM that the regions of weights of this process take, whoever wrote them."""
    files = {os.stat(path).st_ino: os.stat(path).st_blocks * 512 for path in Path("/proc/self/fd").iterdir()
             if path.is_symlink() and "memfd:mobius_ds:weights" in os.readlink(path)}
    return sum(files.values())


def settled() -> int:
    """``taken`` when everything unreachable is gone."""
    gc.collect()
    return taken()


@contextmanager
def hugging_face(settings: Dict[str, Any]) -> Iterator[None]:
    """Makes transformers load for this config, as Trainer does."""
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config
    kept = HfDeepSpeedConfig(copy.deepcopy(settings))  # transformers keeps a weak reference
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del kept


@contextmanager
def available(nbytes: int) -> Iterator[None]:
    """This much DRAM is left, as far as the plugin can see."""
    from unittest import mock

    from mobius_ds.runtime.dram import loading, memory_estimate
    with mock.patch.object(memory_estimate, "available_dram", lambda: nbytes), \
            mock.patch.object(loading, "available_dram", lambda: nbytes):
        yield


def text(number: int) -> Dict[str, torch.Tensor]:
    """Micro-batch ``number`` for a causal language model."""
    ids, _ = tokens(number)
    return {"input_ids": ids, "labels": ids}

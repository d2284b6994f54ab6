"""A small job that saves and resumes, the same under either value of the flag and on any number of ranks."""

from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import torch
import torch.distributed as dist
from torch import nn

from tests.runtime.jobs import config, language_model, mine, rank_and_size

MICRO_BATCHES = 4
"""In a step, over all ranks."""

ADAMW = {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "torch_adam": True}}
CPU_ADAM = {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.95]}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 5e-3}}


class Ran(NamedTuple):
    """What a job shows to its script."""

    losses: List[float]
    """Of each step, over all ranks."""
    rates: List[Any]
    counters: Any
    client: Optional[Dict[str, Any]]
    weights: Dict[str, torch.Tensor]


def model_of(dropout: float = 0.0, **options: Any) -> nn.Module:
    model = language_model(**options)
    for block in model.blocks if dropout else ():
        block.down = nn.Sequential(block.down, nn.Dropout(dropout))
    return model


def groups_of(model: nn.Module) -> List[Dict[str, Any]]:
    """Matrices decay, the rest does not and has a rate of its own."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [{"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.3},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "eps": 1e-6}]


def start(mobius: bool, model: nn.Module, **sections: Any) -> Any:
    """An engine for the job."""
    import deepspeed
    sections = {"optimizer": ADAMW, "scheduler": WARMUP, **sections}
    settings = config(mobius, accumulation=MICRO_BATCHES // rank_and_size()[1], **sections)
    return deepspeed.initialize(model=model, model_parameters=groups_of(model), config=settings)[0]


def scrambled(model: nn.Module) -> nn.Module:
    """The model with other weights and buffers, frozen ones too: what loading must overcome."""
    torch.manual_seed(1000)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
            tensor.add_(torch.randn_like(tensor))
    return model


def train(engine: Any, first: int, steps: int) -> List[float]:
    """Trains from step ``first`` on. Returns each step's loss."""
    losses = []
    accumulation = engine.gradient_accumulation_steps()
    for step in range(first, first + steps):
        total = torch.zeros((), dtype=torch.float64)
        for number in range(accumulation):
            loss = engine(*mine(step * accumulation + number)).loss
            engine.backward(loss)
            engine.step()
            total += loss.item() / MICRO_BATCHES
        dist.all_reduce(total)
        losses.append(total.item())
    return losses


def whole_weights(engine: Any) -> Dict[str, torch.Tensor]:
    """Copies of the parameters, whole under ZeRO-3 as well."""
    import deepspeed
    whole = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            whole[name] = parameter.detach().clone()
    return whole


def ran(mobius: bool, first: int, steps: int, load: Optional[str] = None, save: Optional[str] = None,
        model: Dict[str, Any] = {}, **sections: Any) -> Ran:
    """Trains ``steps`` steps from step ``first`` on, loading before and saving after."""
    made = model_of(**model)
    engine = start(mobius, scrambled(made) if load else made, **sections)
    client = engine.load_checkpoint(load)[1] if load else None
    losses = train(engine, first, steps)
    if save:
        engine.save_checkpoint(save, client_state={"note": [first, steps], "rank": rank_and_size()[0]})
    counters = (engine.global_steps, engine.global_samples, engine.skipped_steps)
    result = Ran(losses, engine.get_lr(), counters, client and {key: client[key] for key in ("note", "rank")},
                 whole_weights(engine))
    engine.destroy()
    return result


def saved_tensors(folder: Path) -> Dict[str, Any]:
    """Everything below a checkpoint's ``zero`` but the optimizer's common state, by path."""
    found = {}
    for path in sorted((folder / "zero").rglob("*.pt")):
        if path.name != "optimizer_state.pt":
            content = torch.load(path, weights_only=True)
            found[path.relative_to(folder).as_posix()] = content["param"] if isinstance(content, dict) else content
    return found

"""Small training jobs that several tests of the runtime share. Nothing here knows how Mobius works inside."""

import copy
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 31
WIDTH = 16
SEQUENCE = 6


class Block(nn.Module):
    """Pre-norm MLP with a residual."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Output(NamedTuple):
    loss: Optional[torch.Tensor]
    logits: torch.Tensor


class LanguageModel(nn.Module):
    """Token ids, and labels if a loss is wanted, both (batch, sequence)."""

    def __init__(self, blocks: int = 4, tied: bool = False, unused: bool = False, frozen: int = 0):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        if unused:
            self.unused = nn.Linear(WIDTH, WIDTH)
        for block in self.blocks[:frozen]:
            block.requires_grad_(False)

    def forward(self, ids, labels=None):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = None if labels is None else F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return Output(loss, logits)


def language_model(**options: Any) -> LanguageModel:
    """Always the same weights."""
    torch.manual_seed(7)
    return LanguageModel(**options)


def tokens(number: int, batch: int = 2) -> Tuple[torch.Tensor, torch.Tensor]:
    """Micro-batch ``number`` of an endless data set: ids and labels."""
    generator = torch.Generator().manual_seed(100 + number)
    drawn = torch.randint(VOCABULARY, (batch, SEQUENCE + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def config(mobius: bool = True, accumulation: int = 1, timeout_seconds: float = 60.0, **sections: Any) -> Dict[str, Any]:
    """A ZeRO-3 offload config with the flag; a micro-batch is two samples."""
    offload = {"device": "cpu"}
    base = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 0, "steps_per_print": 10**6,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
            "mobius": {"enabled": mobius, "timeout_seconds": timeout_seconds}}
    return {**base, **sections}


def initialize(model: nn.Module, settings: Dict[str, Any], **options: Any):
    """The engine alone."""
    import deepspeed
    engine, *_ = deepspeed.initialize(model=model, config=copy.deepcopy(settings), **options)
    return engine


def rank_and_size() -> Tuple[int, int]:
    import torch.distributed as dist
    return dist.get_rank(), dist.get_world_size()


def mine(micro_step: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """This rank's micro-batch at ``micro_step``; all ranks together see the same data however many they are."""
    rank, size = rank_and_size()
    return tokens(micro_step * size + rank)


def endless(start: int = 0) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
    """This rank's micro-batches."""
    while True:
        yield mine(start)
        start += 1


def weights(module: nn.Module) -> Dict[str, torch.Tensor]:
    """Copies of the parameters."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def train_alone(model: nn.Module, make_optimizer: Callable[[Any], torch.optim.Optimizer], steps: int, micro_batches: int,
                loss_of: Callable[[nn.Module, Any], torch.Tensor] = lambda model, batch: model(*batch).loss,
                batches: Callable[[int], Any] = tokens) -> List[float]:
    """Trains an ordinary module in this process; what every arrangement of ranks must match.

    Args:
        micro_batches: in one step, over all ranks.
    """
    optimizer = make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses = []
    for step in range(steps):
        total = 0.0
        for number in range(micro_batches):
            loss = loss_of(model, batches(step * micro_batches + number))
            (loss / micro_batches).backward()
            total += loss.item() / micro_batches
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def failure(function: Callable[[], Any]) -> str:
    """What ``function`` raises, as text."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"

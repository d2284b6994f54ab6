"""Small layers and inputs of which tests make models."""

import torch
from torch import nn
from torch.nn import functional

WIDTH = 8
X = torch.linspace(-2, 2, 3 * WIDTH).view(3, WIDTH)
IDS = torch.tensor([[1, 5, 2, 7], [0, 3, 3, 6]])


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def blocks(count: int = 3, make=linear) -> nn.ModuleList:
    return nn.ModuleList([make() for _ in range(count)])


class Base(nn.Module):
    """A list of layers, to be called by the subclass's forward."""

    def __init__(self, make=linear, count: int = 3):
        super().__init__()
        self.blocks = blocks(count, make)


class Residual(nn.Module):

    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x):
        return x + self.inner(x).relu()


class NanoGPT(nn.Module):
    """A dictionary holds everything; the head is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(wte=nn.Embedding(8, WIDTH), wpe=nn.Embedding(4, WIDTH), drop=nn.Dropout(0.0),
                                              h=blocks(3, Residual), ln_f=nn.LayerNorm(WIDTH)))
        self.lm_head = nn.Linear(WIDTH, 8, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids, targets):
        x = self.transformer.wte(ids) + self.transformer.wpe(torch.arange(ids.shape[1]))
        x = self.transformer.drop(x)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def first(loss: torch.Tensor) -> torch.Tensor:
    """The loss of a model that returns nothing else."""
    return loss

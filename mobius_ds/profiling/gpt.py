"""GPTs by name: the sizes that papers on training beyond GPU memory compare, and the plain module they describe.

``gpt-8b``, ``gpt-15b`` and ``gpt-51b`` have the depths and widths by which models of about that size are usually given
(72 x 3072, 78 x 4096, 62 x 8192, 16 heads); that the Mobius paper uses just these is not confirmed. No shape is handed
down for ``gpt-3b``: 60 x 2048, with the same number of heads, has 3.1 billion parameters.
"""

from dataclasses import dataclass
from typing import Dict

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GptShape:
    """What decides a GPT's parameters and arithmetic."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    """Of GPT-2's tokenizer."""
    positions: int = 2048
    """The longest sequence, in tokens."""

    def __post_init__(self):
        if self.width % self.heads:
            raise ValueError(f"a width of {self.width} cannot be divided among {self.heads} heads")


SIZES: Dict[str, GptShape] = {
    "gpt-3b": GptShape(layers=60, width=2048, heads=16),
    "gpt-8b": GptShape(layers=72, width=3072, heads=16),
    "gpt-15b": GptShape(layers=78, width=4096, heads=16),
    "gpt-51b": GptShape(layers=62, width=8192, heads=16),
}


class Embeddings(nn.Module):
    """Token ids, (samples, sequence), to vectors that also tell their position."""

    def __init__(self, shape: GptShape):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.positions, shape.width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Adds both vectors."""
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


class Block(nn.Module):
    """Pre-norm attention and MLP: (samples, sequence, width) to the same shape."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds what attention and MLP make of ``x`` to it."""
        samples, sequence, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(samples, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(samples, sequence, width))
        return x + self.narrow(F.gelu(self.widen(self.norm_2(x))))


class Gpt(nn.Module):
    """A GPT with learned positions, without dropout, whose head is tied to its token embedding (GPT-2)."""

    def __init__(self, shape: GptShape):
        super().__init__()
        self.embeddings = Embeddings(shape)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.embeddings.tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy.

        Args:
            input_ids, labels: tokens and the ones that follow them, both (samples, sequence).
        """
        x = self.embeddings(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

"""Trains a small GPT, byte by byte, on the source text of the running Python's standard library.

A plain DeepSpeed script: the JSON config decides the precision, the optimizer and how memory is used.

    torchrun --nproc_per_node 4 comparisons/train_gpt.py --deepspeed_config ds_configs/gpt_offload.json
"""

import argparse
import sysconfig
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 256  # a token is a byte

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--heads", type=int, default=6)
parser.add_argument("--seq", type=int, default=64, help="tokens in a sample")
parser.add_argument("--seed", type=int, default=1337)
parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")
parser = deepspeed.add_config_arguments(parser)


class Block(nn.Module):
    """Pre-norm attention and MLP: (batch, seq, width) to the same shape."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Token ids and targets, both (batch, seq), to the mean cross entropy."""

    def __init__(self, layers: int, width: int, heads: int, seq: int):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._initialize)

    @staticmethod
    def _initialize(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_text() -> torch.Tensor:
    """The standard library's top-level modules, in order of their names, as one tensor of bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def draw_batch(text, seq, samples, seed):
    """``samples`` random pieces of the text and the bytes that follow each of theirs; the seed decides which."""
    starts = torch.randint(len(text) - seq, (samples,), generator=torch.Generator().manual_seed(seed))
    pieces = torch.stack([text[start:start + seq + 1] for start in starts.tolist()]).long()
    return pieces[:, :-1], pieces[:, 1:]


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)  # the same initial weights on every rank
    model = GPT(args.layers, args.width, args.heads, args.seq)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    text = read_text()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    samples, microbatches = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()

    for step in range(args.steps):
        mean_loss = 0.0
        for microbatch in range(microbatches):
            # every rank, step and microbatch draws its own samples
            draw = args.seed + (step * microbatches + microbatch) * ranks + rank
            ids, targets = (t.to(engine.device) for t in draw_batch(text, args.seq, samples, draw))
            loss = engine(ids, targets)
            engine.backward(loss)
            engine.step()
            mean_loss += loss.item() / microbatches
        if rank == 0:
            print(f"step {step:4d}  loss {mean_loss:.4f}", flush=True)

    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

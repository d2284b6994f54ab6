"""Trains a small GPT, byte by byte, on the source text of the running Python's standard library.

A plain DeepSpeed script: the JSON config decides the precision, the optimizer and how memory is used.

    torchrun --nproc_per_node 4 comparisons/train_gpt.py --deepspeed_config ds_configs/gpt_offload.json

With ``--pipeline`` the same model trains on the same data as a pipeline of DeepSpeed's with one stage per rank, for
which the config must be of ZeRO stage 0 or 1 and have as many times more gradient accumulation steps as there are ranks.
"""

import argparse
import itertools
import sysconfig
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
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
parser.add_argument("--pipeline", action="store_true", help="train with DeepSpeed's PipelineEngine, a stage per rank")
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


class Embeddings(nn.Module):
    """Token ids, (batch, seq), to (batch, seq, width)."""

    def __init__(self, width: int, seq: int):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(seq, width)

    def forward(self, ids):
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


class GPT(nn.Module):
    """Token ids and targets, both (batch, seq), to the mean cross entropy."""

    def __init__(self, layers: int, width: int, heads: int, seq: int):
        super().__init__()
        self.embeddings = Embeddings(width, seq)
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
        x = self.embeddings(ids)
        for block in self.blocks:
            x = block(x)
        return mean_cross_entropy(self.head(self.norm(x)), targets)

    def as_pipeline(self, stages: int) -> PipelineModule:
        """The same layers, one after the other."""
        layers = [self.embeddings, *self.blocks, self.norm, self.head]
        return PipelineModule(layers, num_stages=stages, loss_fn=mean_cross_entropy)


def mean_cross_entropy(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def read_text() -> torch.Tensor:
    """The standard library's top-level modules, in order of their names, as one tensor of bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def draw_batch(text, seq, samples, seed):
    """``samples`` random pieces of the text and the bytes that follow each of theirs; the seed decides which."""
    starts = torch.randint(len(text) - seq, (samples,), generator=torch.Generator().manual_seed(seed))
    pieces = torch.stack([text[start:start + seq + 1] for start in starts.tolist()]).long()
    return pieces[:, :-1], pieces[:, 1:]


def batches(text, seq, samples, first, stride):
    """Endless batches, drawn with the seeds ``first``, ``first + stride``, ..."""
    return (draw_batch(text, seq, samples, seed) for seed in itertools.count(first, stride))


def train_step(engine, data):
    """Takes one optimizer step and returns the mean loss of this rank's microbatches."""
    mean_loss = 0.0
    for ids, targets in itertools.islice(data, engine.gradient_accumulation_steps()):
        loss = engine(ids.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        mean_loss += loss.item() / engine.gradient_accumulation_steps()
    return mean_loss


def main():
    args = parser.parse_args()
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be cut into {args.heads} heads; give a multiple of --heads")
    deepspeed.init_distributed()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(args.seed)  # the same initial weights on every rank
    model = GPT(args.layers, args.width, args.heads, args.seq)
    if args.pipeline:
        model = model.as_pipeline(stages=ranks)
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    text, samples = read_text(), engine.train_micro_batch_size_per_gpu()
    if args.pipeline:
        data = batches(text, args.seq, samples, args.seed, stride=1)  # one replica takes what all ranks would draw
    else:
        data = batches(text, args.seq, samples, args.seed + rank, stride=ranks)  # every rank draws its own samples

    for step in range(args.steps):
        loss = engine.train_batch(data).item() if args.pipeline else train_step(engine, data)
        if rank == 0:
            print(f"step {step:4d}  loss {loss:.4f}", flush=True)

    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

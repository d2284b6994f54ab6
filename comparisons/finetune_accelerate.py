"""Trains a small GPT-2 in a loop of Accelerate, byte by byte, on the source text of Python's standard library.

A plain Accelerate script: the JSON config decides how memory is used, and takes its "auto" values from the arguments here.

    torchrun --nproc_per_node 4 comparisons/finetune_accelerate.py --deepspeed_config ds_configs/auto_offload.json
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--deepspeed_config", required=True)
parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--seq", type=int, default=64, help="tokens in a sample")
parser.add_argument("--batch", type=int, default=2, help="samples of a rank's micro-batch")
parser.add_argument("--accumulation", type=int, default=2, help="micro-batches of a step")
parser.add_argument("--mixed_precision", choices=("no", "bf16"), default="no")
parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")


def pieces(text: bytes, seq: int):
    """The text as samples of ``seq`` tokens; a token is a byte."""
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)[:len(text) // seq * seq].view(-1, seq).long()
    return [{"input_ids": piece, "labels": piece} for piece in whole]


def evaluate(accelerator, model, loader):
    """The mean loss, and how often the most likely byte is the next one, over all ranks' batches."""
    model.eval()
    losses, hits = [], []
    for batch in loader:
        with torch.no_grad():
            output = model(**batch)
        right = (output.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).float().mean(-1)
        losses.append(accelerator.gather_for_metrics(output.loss.repeat(len(right))))
        hits.append(accelerator.gather_for_metrics(right))
    model.train()
    return torch.cat(losses).mean().item(), torch.cat(hits).mean().item()


def main():
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation, mixed_precision=args.mixed_precision,
                              deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=args.deepspeed_config))
    set_seed(1337)
    model = AutoModelForCausalLM.from_config(GPT2Config(
        vocab_size=256, n_positions=args.seq, n_embd=args.width, n_layer=args.layers, n_head=4,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    train_loader = DataLoader(pieces(text[:2**20], args.seq), batch_size=args.batch, shuffle=True)
    eval_loader = DataLoader(pieces(text[-9 * args.seq:], args.seq), batch_size=args.batch)
    optimizer = DummyOptim(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = DummyScheduler(optimizer, total_num_steps=args.steps * accelerator.num_processes, warmup_num_steps=2)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler)

    step = 0
    while step < args.steps:
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step += 1
                accelerator.print(f"step {step:4d}  loss {loss.item():.4f}  lr {scheduler.get_last_lr()[0]:.2e}")
                if step == args.steps:
                    break
    loss, accuracy = evaluate(accelerator, model, eval_loader)
    accelerator.print(f"evaluation: loss {loss:.4f}, accuracy {accuracy:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()

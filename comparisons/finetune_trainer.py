"""Trains a small Llama with Hugging Face's Trainer, byte by byte, on the source text of Python's standard library.

A plain Trainer script: the JSON config decides how memory is used, and takes its "auto" values from the arguments here.

    torchrun --nproc_per_node 4 comparisons/finetune_trainer.py --deepspeed_config ds_configs/auto_offload.json
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--deepspeed_config", required=True)
parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--seq", type=int, default=64, help="tokens in the longest sample")
parser.add_argument("--batch", type=int, default=2, help="samples of a rank's micro-batch")
parser.add_argument("--accumulation", type=int, default=2, help="micro-batches of a step")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--gradient_checkpointing", action="store_true")
parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")


class Pieces(Dataset):
    """Pieces of a text, as long as ``seq`` or up to a half shorter; a token is a byte."""

    def __init__(self, text: bytes, seq: int, count: int):
        lengths = torch.randint(seq // 2, seq + 1, (count,), generator=torch.Generator().manual_seed(0)).tolist()
        self.pieces = [text[number * seq:number * seq + length] for number, length in enumerate(lengths)]

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, number):
        return torch.tensor(list(self.pieces[number]))


def collate(pieces):
    """Pads to the longest piece of the batch; padding has no loss."""
    ids = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=0)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(piece) for piece in pieces], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def accuracy(predictions):
    """How often the most likely byte is the next one."""
    labels, likely = predictions.label_ids[:, 1:], predictions.predictions[:, :-1]
    return {"accuracy": (likely == labels)[labels != -100].mean()}


def main():
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        training_arguments = TrainingArguments(
            output_dir=folder, deepspeed=args.deepspeed_config, max_steps=args.steps, bf16=args.bf16,
            per_device_train_batch_size=args.batch, per_device_eval_batch_size=args.batch,
            gradient_accumulation_steps=args.accumulation, gradient_checkpointing=args.gradient_checkpointing,
            learning_rate=1e-3, warmup_steps=2, weight_decay=0.1, max_grad_norm=1.0,
            eval_strategy="steps", eval_steps=max(1, args.steps // 2), logging_steps=1, save_strategy="no",
            report_to="none", use_cpu=not torch.cuda.is_available())
        set_seed(training_arguments.seed)
        model = AutoModelForCausalLM.from_config(LlamaConfig(
            vocab_size=256, hidden_size=args.width, intermediate_size=2 * args.width, num_hidden_layers=args.layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=args.seq, tie_word_embeddings=True))
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)
        trainer = Trainer(
            model=model, args=training_arguments, data_collator=collate, train_dataset=Pieces(text, args.seq, 4096),
            eval_dataset=Pieces(text[::-1], args.seq, 9), compute_metrics=accuracy,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1))
        trainer.train()
        print(trainer.evaluate())


if __name__ == "__main__":
    main()

"""Fine-tunes a language model with LoRA, byte by byte, on the source text of the running Python's standard library.

A plain DeepSpeed script around transformers and peft: the base model is frozen and the adapters are trained in fp32. The
JSON config decides the precision of the base, the optimizer and how memory is used.

    torchrun --nproc_per_node 4 comparisons/finetune_lora.py --deepspeed_config ds_configs/gpt_offload.json --out adapter

Without ``--model`` the base is a small Llama with random weights, so that nothing has to be downloaded.
"""

import argparse

import deepspeed
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations import HfDeepSpeedConfig

from train_gpt import VOCABULARY, draw_batch, read_text

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="folder of a pretrained causal language model")
parser.add_argument("--out", help="folder for the adapter")
parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
parser.add_argument("--rank", type=int, default=16, help="of the adapters' matrices")
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--seq", type=int, default=64, help="tokens in a sample")
parser.add_argument("--seed", type=int, default=1337)
parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")
parser = deepspeed.add_config_arguments(parser)


def load_base(args):
    """The pretrained model, or a random one in its place."""
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=args.width, intermediate_size=3 * args.width,
                         num_hidden_layers=args.layers, num_attention_heads=args.width // 64,
                         num_key_value_heads=args.width // 64, max_position_embeddings=args.seq)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def main():
    args = parser.parse_args()
    deepspeed.init_distributed()
    hf_config = HfDeepSpeedConfig(args.deepspeed_config)  # while it lives, transformers builds models for this config
    torch.manual_seed(args.seed)  # the same initial weights on every rank
    model = get_peft_model(load_base(args), LoraConfig(task_type="CAUSAL_LM", r=args.rank, lora_alpha=2 * args.rank,
                                                       target_modules="all-linear"))
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=adapters)

    text = read_text()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    samples, microbatches = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()

    for step in range(args.steps):
        mean_loss = 0.0
        for microbatch in range(microbatches):
            # every rank, step and microbatch draws its own samples
            draw = args.seed + (step * microbatches + microbatch) * ranks + rank
            ids, _ = draw_batch(text, args.seq, samples, draw)
            ids = ids.to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            mean_loss += loss.item() / microbatches
        if rank == 0:
            print(f"step {step:4d}  loss {mean_loss:.4f}", flush=True)

    if args.out:
        with deepspeed.zero.GatheredParameters(adapters):
            if rank == 0:
                model.save_pretrained(args.out)
    del hf_config
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

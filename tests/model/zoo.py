"""Tiny random models of transformers, without dropout where they are compared with themselves unsplit."""

from typing import Callable, Dict

import torch
from torch import nn

DECODER = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
               max_position_embeddings=64)
GROUPED = dict(DECODER, num_key_value_heads=2)


def gpt2(dropout: float = 0.0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0,
                                      eos_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout))


def llama(dropout: float = 0.0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM
    return LlamaForCausalLM(LlamaConfig(**GROUPED, attention_dropout=dropout))


def qwen3(dropout: float = 0.0) -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM
    return Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=8, attention_dropout=dropout))


def opt(dropout: float = 0.0) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM
    return OPTForCausalLM(OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=3,
                                    num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32,
                                    dropout=dropout, attention_dropout=dropout))


def bert(dropout: float = 0.0) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM
    return BertForMaskedLM(BertConfig(**DECODER, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout))


def mixtral(dropout: float = 0.0) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM
    return MixtralForCausalLM(MixtralConfig(**GROUPED, num_local_experts=4, attention_dropout=dropout))


def gemma3(dropout: float = 0.0) -> nn.Module:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    return Gemma3ForCausalLM(Gemma3TextConfig(**GROUPED, head_dim=8, attention_dropout=dropout, sliding_window=8))


def t5(dropout: float = 0.0) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration
    return T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4,
                                               decoder_start_token_id=0, pad_token_id=0, dropout_rate=dropout))


ZOO: Dict[str, Callable[..., nn.Module]] = {"gpt2": gpt2, "llama": llama, "qwen3": qwen3, "opt": opt, "bert": bert,
                                            "mixtral": mixtral, "gemma3": gemma3, "t5": t5}


def build(name: str, dropout: float = 0.0) -> nn.Module:
    """The model in training mode, the same whenever and wherever it is built."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return ZOO[name](dropout).train()


def batch(name: str, number: int = 0, masked: bool = True) -> Dict[str, torch.Tensor]:
    """A micro-batch of two sequences. ``number`` decides the tokens and how much of the second one is padding."""
    generator = torch.Generator().manual_seed(100 + number)
    ids = torch.randint(5, 64, (2, 12), generator=generator)
    labels = ids.clone()
    mask = torch.ones_like(ids)
    if masked:
        padded = 12 - 3 * (number % 3) - 2
        mask[1, padded:] = 0
        ids[1, padded:], labels[1, padded:] = 0, -100
    if name == "bert":  # masked language modelling: every third token is hidden, and only those count
        hidden = torch.arange(12) % 3 == 1
        ids[:, hidden] = 4
        labels[:, ~hidden] = -100
    given = {"input_ids": ids, "labels": labels}
    return {**given, "attention_mask": mask} if masked else given

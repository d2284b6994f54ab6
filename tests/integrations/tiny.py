"""Small language models and adapters, made from configs: nothing is downloaded."""

from typing import Any

import torch
from torch import nn

VOCABULARY = 64
SEQUENCE = 8


def llama(dtype: torch.dtype = torch.float32, tied: bool = False, seed: int = 0, **settings: Any) -> nn.Module:
    """A Llama of four layers; the same seed gives the same weights."""
    from transformers import LlamaForCausalLM
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(tied, **settings)).to(dtype)


def llama_config(tied: bool = False, **settings: Any) -> Any:
    """The config of ``llama``."""
    from transformers import LlamaConfig
    return LlamaConfig(**{**dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                                 num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                                 tie_word_embeddings=tied), **settings})


def lora(base: nn.Module, seed: int = 1, **settings: Any) -> nn.Module:
    """LoRA on a model's attention. Its B matrices are not zero, so that switching it off shows."""
    from peft import LoraConfig, get_peft_model
    torch.manual_seed(seed)
    adapted = get_peft_model(base, LoraConfig(**{**dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"],
                                                       task_type="CAUSAL_LM"), **settings}))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    return adapted


def trained(model: nn.Module) -> list:
    """The parameters that require a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def ids_of(number: int, batch: int = 2, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Token ids of micro-batch ``number`` of an endless data set."""
    return torch.randint(vocabulary, (batch, SEQUENCE), generator=torch.Generator().manual_seed(500 + number))


def words_tokenizer() -> Any:
    """A tokenizer that knows the words w0, w1, ... and padding, begin and end tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    words = [f"w{number}" for number in range(VOCABULARY - 4)]
    known = {word: number for number, word in enumerate(("<pad>", "<s>", "</s>", "<unk>", *words))}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
                                   unk_token="<unk>")

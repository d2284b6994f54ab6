"""A model from its description alone: a named GPT size or a Hugging Face config. No weight is ever made.

Parameters are meta tensors: shapes without storage. Buffers and all else that a constructor computes are real, so
that a trace sees the model's own masks and rotary tables.
"""

import difflib
import inspect
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple, Union

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from mobius_ds.profiling.gpt import SIZES, Gpt

Source = Union[str, Path, Dict[str, Any]]
"""A GPT size's name, a folder or file with a Hugging Face config, or that config's content."""


class UnknownModel(ValueError):
    """A description that leads to no model; the message says what is missing."""


class DescribedModel(NamedTuple):
    """A model without weights and a microbatch to trace it with."""

    name: str
    model: nn.Module
    """In training mode; its parameters are meta tensors of the compute dtype."""
    inputs: Dict[str, torch.Tensor]
    """Keyword arguments of one forward: token ids and labels, (samples, sequence), on CPU."""


@contextmanager
def weightless() -> Iterator[None]:
    """Modules constructed in this block have meta tensors as parameters; what is tied stays tied."""
    replaced = WeakIdKeyDictionary()

    def replace(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter is None or parameter.is_meta:
            return parameter
        if parameter not in replaced:
            replaced[parameter] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        return replaced[parameter]

    hook = register_module_parameter_registration_hook(replace)
    try:
        yield
    finally:
        hook.remove()


def describe(source: Source, samples: int, sequence: int, dtype: torch.dtype = torch.bfloat16) -> DescribedModel:
    """Builds a model without its weights.

    Args:
        samples, sequence: the shape of one microbatch, in samples and tokens.
        dtype: that it computes in.

    Raises:
        UnknownModel: there is no such GPT size and no such config, or the config has no language model that
            transformers knows; or transformers is not installed.
    """
    for what, value in (("samples", samples), ("sequence", sequence)):
        if value < 1:
            raise UnknownModel(f"a microbatch cannot have {what}={value}; it must be at least 1")
    if isinstance(source, str) and source in SIZES:
        shape, name = SIZES[source], source
        if sequence > shape.positions:
            raise UnknownModel(f"{source} is defined for sequences of up to {shape.positions} tokens, not {sequence}")
        with weightless():
            model = Gpt(shape)
    else:
        name, config = _config(source)
        model = _language_model(name, config)
    ids = torch.ones(samples, sequence, dtype=torch.long)
    return DescribedModel(name, model.to(dtype).train(), {"input_ids": ids, "labels": ids})


def _config(source: Source) -> Any:
    """The config's name and its content."""
    if isinstance(source, dict):
        return source.get("_name_or_path") or source.get("model_type", "model"), source
    path = Path(source)
    if not path.exists():
        nearest = difflib.get_close_matches(str(source).lower(), SIZES, n=1, cutoff=0.4)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise UnknownModel(f"{str(source)!r} is neither a known model nor a file or folder.{hint} Known are "
                           f"{', '.join(SIZES)}; or give the folder or file of a Hugging Face config.")
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise UnknownModel(f"the folder {str(path)!r} has no config.json; save one there with transformers' "
                           "config.save_pretrained(folder)")
    try:
        config = json.loads(file.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UnknownModel(f"{str(file)!r} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise UnknownModel(f"{str(file)!r} holds a {type(config).__name__}, where a Hugging Face config is an object")
    return file.absolute().parent.name if file.name == "config.json" else file.stem, config


def _language_model(name: str, content: Dict[str, Any]) -> nn.Module:
    try:
        import transformers
        from transformers.models.auto import modeling_auto
    except ImportError as error:
        raise UnknownModel(f"a Hugging Face config needs transformers ({error}): pip install transformers. Without it "
                           f"there are {', '.join(SIZES)}.") from None
    model_type = content.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise UnknownModel(f"the config of {name} has model_type {model_type!r}, which transformers "
                           f"{transformers.__version__} does not know")
    try:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(content)
    except Exception as error:  # of the many kinds by which transformers says that a value is not one for a key
        raise UnknownModel(f"transformers cannot read the config of {name}; correct it ({type(error).__name__}: "
                           f"{error})") from None
    config.use_cache = False  # training has no use for keys and values of earlier tokens
    # A GPU's fused attention draws its dropout mask again in the backward. The CPU's cannot, so with dropout another
    # one is traced, which would hold all scores in memory.
    for dropout in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if hasattr(config, dropout):
            setattr(config, dropout, 0.0)
    tasks = [(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForSeq2SeqLM),
             (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, transformers.AutoModelForMaskedLM),
             (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForCausalLM)]
    # A config whose architecture has no such head (the base model, a classifier) gets its family's first one.
    asked = next(iter(content.get("architectures") or ()), None)
    known = [auto for names, auto in tasks if model_type in names]
    chosen = [auto for names, auto in tasks if asked and names.get(model_type) == asked] or known
    if not chosen:
        raise UnknownModel(f"transformers {transformers.__version__} has no language model with a loss for model_type "
                           f"{model_type!r} of {name}")
    with weightless():
        model = chosen[0].from_config(config)
    if "labels" not in inspect.signature(model.forward).parameters:
        raise UnknownModel(f"{type(model).__name__} of {name} takes no labels, so it has no loss to train")
    return model

"""Small jobs of Hugging Face's libraries: configs with "auto" values, models from a config, text of made-up tokens.

Each runs unmodified under either value of the flag, on CPU processes as ``mobius-ds run`` starts them.
"""

import argparse
import copy
import gc
import json
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch
from torch import nn

from mobius_ds.plugin import launcher
from mobius_ds.reporting import compare

CHECKOUT = Path(__file__).parents[2]

VOCABULARY = 41
PADDING = 0
SEQUENCE = 16


def auto_config(mobius: bool, **sections: Any) -> Dict[str, Any]:
    """A ZeRO-3 offload config whose numbers come from the script."""
    offload = {"device": "cpu"}
    base = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "steps_per_print": 10**6,
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
            "scheduler": {"type": "WarmupDecayLR", "params": {
                "warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
            "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload,
                                  "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                                  "stage3_param_persistence_threshold": "auto",
                                  "stage3_gather_16bit_weights_on_model_save": True},
            "mobius": {"enabled": mobius, "timeout_seconds": 60.0}}
    return {**base, **sections}


def llama_config(**options: Any) -> Any:
    """Of a tiny Llama with tied embeddings."""
    from transformers import LlamaConfig
    return LlamaConfig(**{**dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
                                 num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
                                 pad_token_id=PADDING, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True), **options})


def causal_model(config: Any) -> nn.Module:
    """A causal language model with the same random weights each time; under ``zero.Init`` if stage 3 is configured."""
    from transformers import AutoModelForCausalLM
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config)


def texts(count: int, seed: int = 0, shortest: int = 4) -> List[Dict[str, torch.Tensor]]:
    """Samples of ``shortest`` to ``SEQUENCE`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, SEQUENCE + 1, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(3, VOCABULARY, (length,), generator=generator)} for length in lengths]


def padded(samples: List[Dict[str, torch.Tensor]]) -> Dict[str, torch.Tensor]:
    """A batch as long as its longest sample."""
    ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True, padding_value=PADDING)
    mask = (ids != PADDING).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Both:
    """What one function returned under ZeRO-3 and under Mobius."""

    def __init__(self, zero3: Any, mobius: Any):
        self.zero3, self.mobius = zero3, mobius


def both_arms(job: Callable[..., Any], *args: Any) -> Both:
    """Runs ``job(mobius, *args)`` under both values of the flag in this process."""
    launcher.let_accelerate_run_on_cpu()
    results = []
    for mobius in (False, True):
        results.append(job(mobius, *args))
        forget_the_job()
    return Both(*results)


def forget_the_job() -> None:
    """Makes Accelerate and transformers as in a new process."""
    from accelerate.state import AcceleratorState
    AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()  # transformers keeps a weak reference to the job's DeepSpeed config


def whole_weights(model: nn.Module) -> Dict[str, torch.Tensor]:
    """Copies of the parameters, gathered where they are partitioned."""
    import deepspeed
    weights = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            weights[name] = parameter.detach().clone()
    return weights


def train(mobius: bool, folder: str, sections: Optional[Dict[str, Any]] = None, make: Optional[Callable] = None,
          use: Optional[Callable] = None, trainer_class: Any = None, trainer: Optional[Dict[str, Any]] = None,
          resume: Optional[str] = None, **arguments: Any) -> Dict[str, Any]:
    """A Trainer script.

    Args:
        sections: of the DeepSpeed config, in place of the usual ones.
        make: the model; by default a Llama.
        use: what to do with the Trainer after training; its result is the run's "used".
        trainer_class: a subclass of Trainer.
        trainer: more arguments of the Trainer.
        resume: the checkpoint to start from.
        arguments: of TrainingArguments.
    """
    from transformers import Trainer, TrainingArguments
    defaults = dict(output_dir=folder, max_steps=4, per_device_train_batch_size=2, per_device_eval_batch_size=2,
                    learning_rate=5e-3, warmup_steps=2, weight_decay=0.1, max_grad_norm=1.0, logging_steps=1,
                    save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, seed=11)
    training_arguments = TrainingArguments(**{**defaults, **arguments},
                                           deepspeed=copy.deepcopy(auto_config(mobius, **(sections or {}))))
    model = make() if make else causal_model(llama_config())
    options = {**dict(data_collator=padded, train_dataset=texts(64), eval_dataset=texts(7, seed=1)), **(trainer or {})}
    trainer = (trainer_class or Trainer)(model=model, args=training_arguments, **options)
    trainer.train(resume_from_checkpoint=resume)
    result = {"log": [without_times(entry) for entry in trainer.state.log_history],
              "used": use(trainer) if use else None, "weights": whole_weights(trainer.model),
              "engine": type(trainer.model_wrapped).__name__}
    trainer.model_wrapped.destroy()
    return result


def without_times(entry: Dict[str, float]) -> Dict[str, float]:
    """A log entry's figures that are alike in two runs alike."""
    return {key: value for key, value in entry.items() if not any(word in key for word in ("runtime", "per_second", "flos"))}


def compared(script: str, out: Path, *script_arguments: str) -> Dict[str, Any]:
    """The report of ``mobius-ds compare`` on a script of comparisons/, two ranks and two steps."""
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    arguments = parser.parse_args(["--script", str(CHECKOUT / "comparisons" / script), "--ranks", "2", "--steps", "2",
                                   "--config", str(CHECKOUT / "ds_configs" / "auto_offload.json"), "--arms", "zero3,mobius",
                                   "--out", str(out), "--", *script_arguments])
    assert compare.main(arguments) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["comparison"]["max_loss_difference"] <= report["comparison"]["loss_tolerance"]
    for arm in report["arms"].values():
        assert len(arm["losses"]) == 2 and None not in arm["losses"]
    assert report["arms"]["mobius"]["traffic"]["per_step_bytes"] == report["arms"]["mobius"]["predicted_traffic"]
    return report

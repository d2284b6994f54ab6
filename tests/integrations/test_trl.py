"""TRL's trainers under either value of the flag: losses, accuracies and rewards are the same."""

import copy
from pathlib import Path
from typing import Any, Callable, Dict

import pytest
import torch
import torch.distributed as dist

from tests.features import works
from tests.integrations import jobs
from tests.integrations.jobs import Both, both_arms
from tests.integrations.tiny import llama_config, words_tokenizer
from tests.ranks import run_ranks


def words(number: int, count: int) -> str:
    drawn = torch.randint(60, (count,), generator=torch.Generator().manual_seed(number))
    return " ".join(f"w{word}" for word in drawn.tolist())


def texts(samples: int = 24) -> Any:
    from datasets import Dataset
    return Dataset.from_list([{"text": words(number, 6 + number % 5)} for number in range(samples)])


def completions(samples: int = 24) -> Any:
    from datasets import Dataset
    return Dataset.from_list([{"prompt": words(number, 4), "completion": " " + words(100 + number, 3 + number % 4)}
                              for number in range(samples)])


def preferences(folder: str, samples: int) -> Any:
    """On disk, where the ranks find each other's reference log probabilities."""
    from datasets import Dataset, load_from_disk
    path = Path(folder, f"preferences-{samples}")
    if dist.get_rank() == 0:
        Dataset.from_list([{"prompt": words(number, 4), "chosen": " " + words(100 + number, 5),
                            "rejected": " " + words(200 + number, 3 + number % 4)} for number in range(samples)]
                          ).save_to_disk(path)
    dist.barrier()
    return load_from_disk(path)


def model_of(seed: int = 3) -> Any:
    from transformers import AutoModelForCausalLM
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(llama_config(pad_token_id=0, bos_token_id=1, eos_token_id=2))


def lora_config() -> Any:
    from peft import LoraConfig
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def arguments(folder: str, mobius: bool, **settings: Any) -> Dict[str, Any]:
    defaults = dict(output_dir=folder, max_steps=5, per_device_train_batch_size=2, per_device_eval_batch_size=2,
                    learning_rate=5e-3, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
                    use_cpu=True, bf16=False, seed=11, max_length=16, dataset_num_proc=None)
    return {**defaults, **settings, "deepspeed": copy.deepcopy(jobs.auto_config(mobius))}


def finished(trainer: Any) -> Dict[str, Any]:
    trainer.train()
    result = {"log": [jobs.without_times(entry) for entry in trainer.state.log_history],
              "engine": type(trainer.model_wrapped).__name__}
    result["final"] = jobs.without_times(trainer.evaluate()) if trainer.eval_dataset is not None else {}
    for engine in (trainer.model_wrapped, getattr(trainer, "ref_model", None), getattr(trainer, "_precompute_engine", None)):
        if engine is not None:
            engine.destroy()
    return result


def sft(mobius: bool, folder: str, dataset: str, adapted: bool, settings: Dict[str, Any]) -> Dict[str, Any]:
    from trl import SFTConfig, SFTTrainer
    config = SFTConfig(**arguments(folder, mobius, packing=False, **settings))
    data = {"texts": texts, "completions": completions}[dataset]
    trainer = SFTTrainer(model=model_of(), args=config, train_dataset=data(), eval_dataset=data(4),
                         processing_class=words_tokenizer(), peft_config=lora_config() if adapted else None)
    return finished(trainer)


def dpo(mobius: bool, folder: str, reference: str, settings: Dict[str, Any]) -> Dict[str, Any]:
    """Args:
        reference: "model" for a second one, "adapter" for the base under an adapter, "itself" for what it was at the start.
    """
    from trl import DPOConfig, DPOTrainer
    folder = f"{folder}/{mobius}"
    config = DPOConfig(**arguments(folder, mobius, beta=0.5, **settings))
    trainer = DPOTrainer(model=model_of(), ref_model=model_of(seed=4) if reference == "model" else None, args=config,
                         train_dataset=preferences(folder, 16), eval_dataset=preferences(folder, 4),
                         processing_class=words_tokenizer(), peft_config=lora_config() if reference == "adapter" else None)
    return finished(trainer)


def assert_same_runs(both: Both, name: str) -> None:
    """Every figure that a trainer logs."""
    zero3, mobius = both.zero3, both.mobius
    assert (zero3["engine"], mobius["engine"]) == ("DeepSpeedEngine", "MobiusEngine"), name
    for theirs, ours in zip([*zero3["log"], zero3["final"]], [*mobius["log"], mobius["final"]], strict=True):
        assert set(theirs) == set(ours), name
        for figure, value in theirs.items():
            assert ours[figure] == pytest.approx(value, abs=1e-5, rel=1e-4), (name, figure)


def every(job: Callable, cases: Dict[str, tuple], folder: str) -> Dict[str, Both]:
    """One after another in the same processes: nothing is left behind that the next would trip over."""
    return {name: both_arms(job, f"{folder}/{number}", *case) for number, (name, case) in enumerate(cases.items())}


SFT_CASES = {
    "whole texts": ("texts", False, dict(gradient_checkpointing=False, gradient_accumulation_steps=2)),
    "whole texts, gradient checkpointing": ("texts", False, {}),
    "completions, LoRA, gradient checkpointing": ("completions", True, dict(completion_only_loss=True)),
}

DPO_CASES = {
    "a second model": ("model", {}),
    "a second model, precomputed": ("model", dict(precompute_ref_log_probs=True)),
    "the base under LoRA": ("adapter", dict(learning_rate=0.05)),
    "the base under LoRA, precomputed": ("adapter", dict(learning_rate=0.05, precompute_ref_log_probs=True)),
}


@works("TRL", "SFTTrainer, with LoRA, completion-only loss, gradient checkpointing")
def test_supervised_fine_tuning(tmp_path):
    for result in run_ranks(2, every, sft, SFT_CASES, str(tmp_path), timeout=250):
        for name, both in result.items():
            assert_same_runs(both, name)


@works("TRL", "DPOTrainer with a reference model, a second engine")
@works("TRL", "DPOTrainer with LoRA, whose base is the reference")
@works("TRL", "DPOTrainer with precompute_ref_log_probs=True")
def test_direct_preference_optimization(tmp_path):
    for result in run_ranks(2, every, dpo, DPO_CASES, str(tmp_path), timeout=300):
        for name, both in result.items():
            assert_same_runs(both, name)
            rewards = [entry["rewards/margins"] for entry in both.mobius["log"] if "rewards/margins" in entry]
            assert len(set(rewards)) > 2, name
        # Precomputed or not, a reference says the same.
        for reference in ("a second model", "the base under LoRA"):
            now, before = result[reference].mobius, result[f"{reference}, precomputed"].mobius
            assert now["final"] == pytest.approx(before["final"], abs=1e-6)

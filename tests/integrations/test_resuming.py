"""A Trainer job is stopped, its flag is flipped, and it goes on from its last checkpoint as if nothing had been."""

from typing import Any, Dict

import pytest
import torch
from torch import nn

from tests.features import works
from tests.integrations.jobs import causal_model, forget_the_job, llama_config, train
from tests.ranks import run_ranks


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model
    model = causal_model(llama_config(tie_word_embeddings=False))
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False,
                                            target_modules=["q_proj", "v_proj"]))


CASES = {"whole model": dict(gradient_accumulation_steps=2), "adapters": dict(make=adapted)}


def flipped(root: str) -> Dict[str, Any]:
    """Each case: six steps under ZeRO-3, and for either flag the last three under the other."""
    from mobius_ds.plugin import launcher
    launcher.let_accelerate_run_on_cpu()
    runs = {}
    for case, arguments in CASES.items():
        for mobius in (False, True):
            folder = f"{root}/{case}/{mobius}"
            runs[case, mobius, "straight"] = train(mobius, folder, max_steps=6, save_strategy="steps", save_steps=3,
                                                   **arguments)
            forget_the_job()
        for mobius in (False, True):
            runs[case, mobius, "resumed"] = train(mobius, f"{root}/{case}/again", max_steps=6, **arguments,
                                                  resume=f"{root}/{case}/{not mobius}/checkpoint-3")
            forget_the_job()
    return runs


@works("Trainer", "resume_from_checkpoint under the other flag, either way; a whole model or a PEFT model")
def test_a_trainer_goes_on_under_the_other_flag(tmp_path):
    runs = run_ranks(2, flipped, str(tmp_path), timeout=280)[0]
    for case in CASES:
        straight = runs[case, False, "straight"]
        losses = [entry["loss"] for entry in straight["log"] if "loss" in entry]
        for mobius in (False, True):
            resumed = runs[case, mobius, "resumed"]
            logged = [entry for entry in resumed["log"] if "loss" in entry]
            assert [entry["step"] for entry in logged] == [1, 2, 3, 4, 5, 6]
            assert [entry["loss"] for entry in logged] == pytest.approx(losses, rel=1e-5), (case, mobius)
            assert [entry["learning_rate"] for entry in logged] == [
                entry["learning_rate"] for entry in straight["log"] if "loss" in entry]
            for name, weight in straight["weights"].items():
                torch.testing.assert_close(resumed["weights"][name], weight, atol=2e-5, rtol=0)

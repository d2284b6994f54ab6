"""Loops of Hugging Face's Accelerate under either value of the flag."""

import copy
import json
import os
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
import torch
from torch.utils.data import DataLoader

from tests.features import works
from tests.integrations.jobs import (Both, auto_config, both_arms, causal_model, compared, forget_the_job, llama_config,
                                     padded, texts, whole_weights)
from tests.ranks import run_ranks


def prepared(mobius: bool, accumulation: int = 2, precision: str = "no", own: bool = False,
             file: Optional[Path] = None) -> Dict[str, Any]:
    """What ``accelerator.prepare`` returns.

    Args:
        own: optimizer and scheduler come from the script, and not from the config.
        file: where to put the config for the environment to name it, as ``accelerate launch`` does.
    """
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler
    config = copy.deepcopy(auto_config(mobius))
    if own:
        del config["optimizer"], config["scheduler"]
        config["zero_force_ds_cpu_optimizer"] = False
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    if file:
        file.write_text(json.dumps(config))
        os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(file))
        plugin = None
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, mixed_precision=precision, deepspeed_plugin=plugin)
    model = causal_model(llama_config())
    loader = DataLoader(texts(16 * accelerator.num_processes + 3, seed=4), batch_size=2, collate_fn=padded)
    evaluation = DataLoader(texts(7, seed=5), batch_size=2, collate_fn=padded)
    if own:
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    else:
        optimizer = DummyOptim(model.parameters(), lr=5e-3, weight_decay=0.1)
        scheduler = DummyScheduler(optimizer, total_num_steps=8 * accelerator.num_processes, warmup_num_steps=2)
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(model, optimizer, loader, evaluation, scheduler)
    return dict(accelerator=accelerator, model=model, optimizer=optimizer, loader=loader, evaluation=evaluation,
                scheduler=scheduler)


def trained(job: Dict[str, Any], seen: Dict[str, List], skip: int = 0, stop: Optional[int] = None) -> None:
    """One epoch of the usual loop, or its micro-batches from ``skip`` to ``stop``."""
    accelerator, model = job["accelerator"], job["model"]
    for number, batch in enumerate(accelerator.skip_first_batches(job["loader"], skip), start=skip):
        if number == stop:
            break
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else None
            job["optimizer"].step()
            job["scheduler"].step()
            job["optimizer"].zero_grad()
        seen["losses"].append(loss.item())
        if accelerator.sync_gradients:
            seen["norms"].append(float(norm))
            seen["rates"].append(job["optimizer"].param_groups[0]["lr"])


def evaluated(job: Dict[str, Any]) -> Dict[str, torch.Tensor]:
    """The logits' best tokens and the losses of the whole evaluation set, on each rank."""
    job["model"].eval()
    best, losses = [], []
    for batch in job["evaluation"]:
        with torch.no_grad():
            output = job["model"](**batch)
        rows = job["accelerator"].pad_across_processes(output.logits.argmax(-1), dim=1, pad_index=-1)
        best += job["accelerator"].gather_for_metrics(rows).tolist()
        losses.append(job["accelerator"].gather_for_metrics(output.loss.repeat(len(rows))))
    job["model"].train()
    return {"best": best, "losses": torch.cat(losses)}


def loop(mobius: bool, folder: str, arguments: Dict[str, Any]) -> Dict[str, Any]:
    launched = arguments.get("launched") and {"file": Path(folder) / f"{mobius}-{os.environ['RANK']}.json"}
    job = prepared(mobius, **(launched or arguments))
    seen: Dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    trained(job, seen)
    seen["evaluation"] = evaluated(job)
    trained(job, seen)
    accelerator, model = job["accelerator"], job["model"]
    unwrapped = accelerator.unwrap_model(model)
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, f"{folder}/{type(model).__name__}")
    unwrapped.save_pretrained(f"{folder}/{type(model).__name__}-pretrained", is_main_process=accelerator.is_main_process,
                              save_function=accelerator.save, state_dict=state)
    accelerator.wait_for_everyone()
    seen.update(engine=type(model).__name__, unwrapped=type(unwrapped).__name__, weights=whole_weights(unwrapped),
                state=None if state is None else {name: tensor.clone() for name, tensor in state.items()})
    model.destroy()
    return seen


def assert_same_loops(both: Both, bf16: bool = False) -> None:
    theirs, ours = both.zero3, both.mobius
    assert (theirs["engine"], ours["engine"]) == ("DeepSpeedEngine", "MobiusEngine")
    tolerance = 2e-2 if bf16 else 1e-5
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=tolerance)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=5e-2 if bf16 else 1e-4)
    assert ours["rates"] == theirs["rates"] and len(set(ours["rates"])) > 2
    torch.testing.assert_close(ours["evaluation"]["losses"], theirs["evaluation"]["losses"], atol=tolerance, rtol=0)
    assert len(ours["evaluation"]["best"]) == 7 and (bf16 or ours["evaluation"]["best"] == theirs["evaluation"]["best"])
    for name, weight in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], weight, atol=tolerance, rtol=0)


@works("Accelerate", "prepare() with DummyOptim and DummyScheduler, accumulate(), backward(), clip_grad_norm_()")
@works("Accelerate", "gather_for_metrics() in evaluation")
@works("Accelerate", "get_state_dict(), unwrap_model(), save_model(), save_pretrained()")
@works("Accelerate", 'mixed_precision="bf16"')
@works("Accelerate", "the script's own optimizer and scheduler")
@works("Accelerate", "accelerate launch --use_deepspeed --deepspeed_config_file")
@pytest.mark.parametrize("arguments", [{}, {"precision": "bf16"}, {"own": True, "accumulation": 1}, {"launched": True}],
                         ids=["config", "bf16", "own", "launched"])
def test_a_loop_is_the_same_loop(arguments, tmp_path):
    from safetensors.torch import load_file
    results = run_ranks(2, both_arms, loop, str(tmp_path), arguments, timeout=200)
    for both in results:
        assert_same_loops(both, bf16="precision" in arguments)
        assert both.mobius["unwrapped"] == both.zero3["unwrapped"] == "LlamaForCausalLM"
    ours, theirs = results[0].mobius, results[0].zero3
    assert results[1].mobius["state"] is None and results[1].zero3["state"] is None
    assert set(ours["state"]) == set(theirs["state"]) and len(ours["losses"]) == 18
    for how in ("", "-pretrained"):
        files = {engine: load_file(tmp_path / f"{engine}{how}" / "model.safetensors")
                 for engine in ("DeepSpeedEngine", "MobiusEngine")}
        assert set(files["MobiusEngine"]) == set(files["DeepSpeedEngine"])
        for name, weight in files["MobiusEngine"].items():
            assert torch.equal(weight, ours["weights"][name]) and weight.dtype == files["DeepSpeedEngine"][name].dtype


def saved_and_loaded(mobius: bool, folder: str) -> Dict[str, Any]:
    """Eight micro-batches straight, and the last four again in a job that loads the state after four."""
    first = prepared(mobius)
    whole: Dict[str, List] = {"losses": [], "norms": [], "rates": []}
    trained(first, whole, stop=4)
    first["accelerator"].save_state(f"{folder}/{mobius}")
    trained(first, whole, skip=4, stop=8)
    weights = whole_weights(first["accelerator"].unwrap_model(first["model"]))
    first["model"].destroy()
    first.clear()
    forget_the_job()

    second = prepared(mobius)
    again: Dict[str, List] = {"losses": [], "norms": [], "rates": []}
    second["accelerator"].load_state(f"{folder}/{mobius}")
    trained(second, again, skip=4, stop=8)
    same = {name: torch.equal(weights[name], weight)
            for name, weight in whole_weights(second["accelerator"].unwrap_model(second["model"])).items()}
    second["model"].destroy()
    return {"whole": whole, "again": again, "same": same}


@works("Accelerate", "save_state() and load_state(): the same steps, bit for bit")
def test_a_saved_state_goes_on_as_if_nothing_had_been(tmp_path):
    for both in run_ranks(2, both_arms, saved_and_loaded, str(tmp_path), timeout=200):
        whole, again = both.mobius["whole"], both.mobius["again"]
        assert again["losses"] == whole["losses"][4:] and again["norms"] == whole["norms"][2:]
        assert again["rates"] == whole["rates"][2:] == both.zero3["again"]["rates"]
        assert all(both.mobius["same"].values())
        assert whole["losses"] == pytest.approx(both.zero3["whole"]["losses"], abs=1e-5)


@works("Accelerate", "comparisons/finetune_accelerate.py under mobius-ds compare")
def test_the_script_is_compared(tmp_path):
    report = compared("finetune_accelerate.py", tmp_path, "--width", "16", "--seq", "16", "--layers", "2")
    assert report["dtype"] == "fp32"

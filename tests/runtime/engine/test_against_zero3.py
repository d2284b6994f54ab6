"""The same script and config under either value of the flag: losses, norms, rates and counters are the same."""

import copy
from typing import Any, Dict, List

import pytest
import torch

from tests.ranks import run_ranks
from tests.runtime.jobs import config, language_model, mine

ADAMW = {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 5e-3}}
DECAY = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "warmup_max_lr": 5e-3, "total_num_steps": 12}}

CASES: Dict[str, Dict[str, Any]] = {
    "clipped, accumulated, warmed up": dict(
        steps=10, model={}, config=dict(accumulation=2, gradient_clipping=1.0, optimizer=ADAMW, scheduler=WARMUP)),
    "tied, frozen, unused, two groups": dict(
        steps=6, model=dict(tied=True, frozen=2, unused=True), groups=True,
        config=dict(gradient_clipping=0.1, optimizer=ADAMW, scheduler=DECAY)),
    "loss.backward": dict(steps=4, model={}, direct=True, config=dict(accumulation=2, optimizer=ADAMW)),
    "loss from logits, loss.backward": dict(
        steps=4, model={}, direct=True, from_logits=True, config=dict(accumulation=2, optimizer=ADAMW)),
    "scale_wrt_gas=False": dict(steps=4, model={}, scale_wrt_gas=False, config=dict(accumulation=2, optimizer=ADAMW)),
    "bf16": dict(steps=6, model=dict(tied=True), config=dict(
        accumulation=2, gradient_clipping=1.0, optimizer=ADAMW, scheduler=WARMUP, bf16={"enabled": True})),
}
ONLY_TWO_RANKS = {"loss.backward", "scale_wrt_gas=False", "loss from logits, loss.backward"}


def run_of(case: Dict[str, Any], mobius: bool) -> Dict[str, List]:
    """The script: it never looks at the flag."""
    import deepspeed
    model = language_model(**case["model"])
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if case.get("groups"):
        parameters = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.3},
                      {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
    settings = config(mobius, **case["config"])
    engine, optimizer, _, scheduler = deepspeed.initialize(model=model, model_parameters=parameters,
                                                           config=copy.deepcopy(settings))
    seen: Dict[str, List] = {key: [] for key in ("losses", "norms", "rates", "counters")}
    accumulation = engine.gradient_accumulation_steps()
    for micro_step in range(case["steps"] * accumulation):
        ids, labels = mine(micro_step)
        output = engine(ids, labels)
        loss = output.loss
        if case.get("from_logits"):
            loss = loss + output.logits.float().pow(2).mean()
        if case.get("direct"):
            loss.backward()
        else:
            engine.backward(loss, scale_wrt_gas=case.get("scale_wrt_gas", True))
        engine.step()
        seen["losses"].append(loss.item())
        seen["counters"].append((engine.micro_steps, engine.global_steps, engine.global_samples, engine.skipped_steps,
                                 engine.was_step_applied(), engine.is_gradient_accumulation_boundary()))
        if (micro_step + 1) % accumulation == 0:
            seen["norms"].append(float(engine.get_global_grad_norm()))
            seen["rates"].append((engine.get_lr(), scheduler.get_last_lr() if scheduler else None, engine.get_mom()))
    engine.eval()
    ids, labels = mine(10**6)
    with torch.no_grad():
        seen["losses"].append(engine(ids, labels).loss.item())
    engine.destroy()
    return seen


def both_arms(names: List[str]) -> Dict[str, Any]:
    return {name: {mobius: run_of(CASES[name], mobius) for mobius in (False, True)} for name in names}


@pytest.mark.parametrize("ranks,names", [
    (1, [name for name in CASES if name not in ONLY_TWO_RANKS]), (2, list(CASES)),
    (4, ["clipped, accumulated, warmed up"])])
def test_the_flag_changes_nothing_a_script_can_see(ranks, names):
    for result in run_ranks(ranks, both_arms, names, timeout=250):
        for name in names:
            zero3, mobius = result[name][False], result[name][True]
            tolerance = 2e-2 if name == "bf16" else 1e-5
            assert mobius["losses"] == pytest.approx(zero3["losses"], abs=tolerance), name
            assert mobius["norms"] == pytest.approx(zero3["norms"], rel=5e-2 if name == "bf16" else 1e-4), name
            assert mobius["counters"] == zero3["counters"], name
            assert mobius["rates"] == zero3["rates"], name

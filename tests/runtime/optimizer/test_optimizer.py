"""The optimizer: updates bit-equal to the unsplit model's, whoever made the optimizer and the scheduler."""

import sys
from typing import Any, Callable, Dict, List

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from tests.runtime.jobs import (config, failure, initialize, language_model, mine, rank_and_size, tokens, train_alone,
                                weights)

STEPS = 4


def without(*sections: str, **more: Any) -> Dict[str, Any]:
    settings = config(**more)
    for section in sections:
        del settings[section]
    return settings


def train(engine: Any, steps: int = STEPS, before_step: Callable[[int], None] = lambda step: None) -> List[float]:
    accumulation = engine.gradient_accumulation_steps()
    losses = []
    for micro_step in range(steps * accumulation):
        loss = engine(*mine(micro_step)).loss
        engine.backward(loss)
        if (micro_step + 1) % accumulation == 0:
            before_step(micro_step // accumulation)
        engine.step()
        losses.append(loss.item())
    return losses


def trained(settings: Dict[str, Any], model: nn.Module = None, **options: Any) -> Dict[str, torch.Tensor]:
    engine = initialize(model or language_model(), settings, **options)
    train(engine)
    after = weights(engine.module)
    engine.destroy()
    return after


CONFIGURED = {
    "SGD": {"type": "SGD", "params": {"lr": 0.25, "momentum": 0.5}},
    "AdamW": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
}
TORCH = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.25, momentum=0.5),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
}


def unequal_for_equal_gradients() -> List[str]:
    """One step of micro-batches that are all the same: the mean over a power of two of equal gradients is exact."""
    _, ranks = rank_and_size()
    engine = initialize(language_model(), config(optimizer=CONFIGURED["SGD"], accumulation=4 // ranks))
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(*tokens(0)).loss)
        engine.step()
    after = weights(engine.module)
    engine.destroy()
    alone = language_model()
    train_alone(alone, TORCH["SGD"], 1, 4, batches=lambda number: tokens(0))
    return [f"equal gradients {name}" for name, tensor in weights(alone).items() if not torch.equal(after[name], tensor)]


def unequal_to_the_unsplit_model() -> List[str]:
    unequal = unequal_for_equal_gradients()
    _, ranks = rank_and_size()
    for name in CONFIGURED:
        ours = trained(config(optimizer=CONFIGURED[name], accumulation=2))
        alone = language_model()
        train_alone(alone, TORCH[name], STEPS, 2 * ranks)
        unequal += [f"{name} {parameter}" for parameter, tensor in weights(alone).items()
                    if not (torch.equal(ours[parameter], tensor) if ranks == 1
                            else torch.allclose(ours[parameter], tensor, atol=2e-6 if name == "SGD" else 2e-4))]
    return unequal


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_weights_equal_the_unsplit_models_after_several_steps(ranks):
    """Bit for bit on one rank and, where the mean is exact, on more; else that is summed in another order."""
    for unequal in run_ranks(ranks, unequal_to_the_unsplit_model):
        assert unequal == []


def who_makes_it() -> Dict[str, bool]:
    """The same training with optimizer and scheduler from the config, as objects and as callables."""
    from deepspeed.runtime.lr_schedules import WarmupLR
    rates = {"warmup_num_steps": 3, "warmup_max_lr": 0.2, "warmup_min_lr": 0.1}
    expected = trained(config(optimizer=CONFIGURED["SGD"], scheduler={"type": "WarmupLR", "params": rates}))

    def same(**options: Any) -> bool:
        model = language_model()
        made = {key: make(model) if key == "optimizer" else make for key, make in options.items()}
        ours = trained(without("optimizer"), model, **made)
        return all(torch.equal(ours[name], tensor) for name, tensor in expected.items())

    def scheduler(optimizer):
        return WarmupLR(optimizer, **rates)

    def object_of_both() -> bool:
        model = language_model()
        optimizer = TORCH["SGD"](model.parameters())
        ours = trained(without("optimizer"), model, optimizer=optimizer, lr_scheduler=scheduler(optimizer))
        return all(torch.equal(ours[name], tensor) for name, tensor in expected.items())

    by_hand = initialize(language_model(), config(optimizer=CONFIGURED["SGD"]))
    seen = []
    wanted = [0.1, 0.1, 0.2, 0.2]

    def set_rate(step: int) -> None:
        by_hand.optimizer.param_groups[0]["lr"] = wanted[step]
        seen.append(by_hand.get_lr() == [wanted[step]])

    train(by_hand, before_step=set_rate)
    by_hand.destroy()
    alone = language_model()
    optimizer = TORCH["SGD"](alone.parameters())
    _, ranks = rank_and_size()
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = wanted[step]
        for number in range(ranks):
            (alone(*tokens(step * ranks + number)).loss / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "optimizer object, scheduler callable": same(optimizer=lambda model: TORCH["SGD"](model.parameters()),
                                                     lr_scheduler=scheduler),
        "optimizer callable, scheduler callable": same(optimizer=lambda model: TORCH["SGD"], lr_scheduler=scheduler),
        "objects": object_of_both(),
        "rate by hand": all(seen) and all(torch.allclose(tensor, weights(alone)[name], atol=1e-6)
                                          for name, tensor in weights(by_hand.module).items()),
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_does_not_matter_who_makes_optimizer_and_scheduler(ranks):
    for result in run_ranks(ranks, who_makes_it):
        assert [how for how, equal in result.items() if not equal] == []


def adam_of(settings: Dict[str, Any]) -> Any:
    engine = initialize(language_model(), settings)
    train(engine)
    inner = engine.optimizer.optimizer
    result = f"{type(inner).__module__}.{type(inner).__name__}", weights(engine.module)
    engine.destroy()
    return result


def which_adam() -> Dict[str, Any]:
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from deepspeed.utils import logger
    plain = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1, "bias_correction": True}}
    result = {"cpu adam": adam_of(config(optimizer=plain)),
              "torch_adam": adam_of(config(optimizer={"type": "Adam", "params": {
                  "lr": 1e-3, "weight_decay": 0.1, "torch_adam": True, "foreach": False}}))}

    def cannot_compile(self, *args, **kwargs):
        raise RuntimeError("no compiler here")

    warned = []
    CPUAdamBuilder.load, logger.warning = cannot_compile, lambda message, *args: warned.append(message)
    result["fallback"] = adam_of(config(optimizer=plain))
    result["warned"] = [message for message in warned if "DeepSpeedCPUAdam" in message]
    return result


def test_adam_is_deepspeeds_and_torchs_where_that_cannot_be_built():
    [result] = run_ranks(1, which_adam)
    assert result["cpu adam"][0].endswith("DeepSpeedCPUAdam")
    assert result["torch_adam"][0].startswith("torch.optim") and result["fallback"][0].startswith("torch.optim")
    assert len(result["warned"]) == 1 and "no compiler here" in result["warned"][0]
    for name, tensor in result["cpu adam"][1].items():
        assert torch.allclose(tensor, result["fallback"][1][name], atol=1e-5)
        assert torch.equal(result["torch_adam"][1][name], result["fallback"][1][name])


def untouched_parts() -> Dict[str, Any]:
    """Frozen and unused parameters: the former have no state, the latter decay like under torch with zero gradients."""
    model = language_model(frozen=2, unused=True)
    before = weights(model)
    engine = initialize(model, config(optimizer=CONFIGURED["AdamW"]))
    train(engine)
    after = weights(model)
    owned = {id(p) for p in engine.optimizer.state}
    names = [name for name, p in model.named_parameters() if id(p) in owned]
    everyones = [None] * rank_and_size()[1]
    torch.distributed.all_gather_object(everyones, names)
    engine.destroy()
    return {"before": before, "after": after, "state": everyones}


def test_frozen_parameters_have_no_state_and_every_trained_one_exactly_one_owner():
    for result in run_ranks(2, untouched_parts):
        trained_names = [name for name in result["before"] if not name.startswith(("blocks.0.", "blocks.1."))]
        assert sorted(sum(result["state"], [])) == sorted(trained_names)
        for name, tensor in result["before"].items():
            moved = not torch.equal(tensor, result["after"][name])
            assert moved == (name in trained_names), name
            if name.startswith("unused"):
                assert torch.allclose(result["after"][name], tensor * (1 - 1e-2 * 0.1) ** STEPS, rtol=1e-5)


def clipped() -> Dict[str, Any]:
    engine = initialize(language_model(), config(optimizer={"type": "SGD", "params": {"lr": 1.0}}, gradient_clipping=0.01))
    before = weights(engine.module)
    engine.backward(engine(*mine(0)).loss)
    engine.step()
    moved = torch.cat([(before[name] - tensor).flatten() for name, tensor in weights(engine.module).items()]).norm().item()
    norm = engine.get_global_grad_norm()
    closure = failure(lambda: engine.optimizer.step(lambda: None))
    engine.destroy()
    return {"moved": moved, "norm": norm, "closure": closure}


def test_clipping_bounds_the_norm_over_all_ranks():
    alone = language_model()
    (sum(alone(*tokens(number)).loss for number in range(2)) / 2).backward()
    norm = torch.cat([p.grad.flatten() for p in alone.parameters()]).norm().item()
    for result in run_ranks(2, clipped):
        assert result["norm"] == pytest.approx(norm, rel=1e-5)
        assert result["moved"] == pytest.approx(0.01, rel=1e-2)
        assert "closures" in result["closure"]


MUON = "deepspeed.runtime.zero.muon.muon_optimizer"


def trained_without_muon() -> bool:
    """Whether a job that does not use DeepSpeed's Muon does not import it either, which would load torch's compiler."""
    sys.modules.pop(MUON, None)
    engine = initialize(language_model(), config())
    engine.backward(engine(*mine(0)).loss)
    engine.step()
    engine.destroy()
    return MUON not in sys.modules


def test_the_compiler_is_not_loaded_for_an_optimizer_that_is_not_used():
    assert run_ranks(1, trained_without_muon) == [True]

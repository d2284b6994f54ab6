"""fp16 with DeepSpeed's loss scaling, and gradients that are not finite in any dtype: step for step what ZeRO-3 does.

DeepSpeed refuses fp16 on most CPUs. torch computes it there all the same, so these jobs say that the device supports it.
"""

import copy
import math
from typing import Any, Dict, List, Tuple

import pytest
import torch
from torch import nn

from tests.features import survives, works
from tests.ranks import outcomes_of_ranks, run_ranks
from tests.runtime.jobs import config, endless, failure, initialize, language_model, mine, rank_and_size, tokens, weights

ADAMW = {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.1, "torch_adam": True}}
SGD = {"type": "SGD", "params": {"lr": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 5e-3, "warmup_min_lr": 1e-4}}
EVERY_STEP = {"enabled": True, "initial_scale_power": 21, "hysteresis": 1, "loss_scale_window": 2}
"""From a scale at which everything overflows down to one that fits, up again, and over."""


def supported() -> None:
    """Says that the device computes fp16, in this process."""
    from deepspeed.accelerator import get_accelerator
    type(get_accelerator()).is_fp16_supported = lambda self: True


def run_of(mobius: bool, steps: int, poison: Dict[Tuple[int, int], float], settings: Dict[str, Any],
           model: Dict[str, Any] = {}, always: bool = False) -> Dict[str, List[Any]]:
    """The script: it never looks at the flag.

    Args:
        poison: by (micro-step, rank), what that loss is multiplied by.
        always: the same micro-batch every time, on every rank.
    """
    import deepspeed
    rank, _ = rank_and_size()
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=language_model(**model), config=copy.deepcopy(config(mobius, zero_allow_untested_optimizer=True, **settings)))
    seen: Dict[str, List[Any]] = {"losses": [], "norms": [], "scales": []}
    for micro_step in range(steps * engine.gradient_accumulation_steps()):
        loss = engine(*(tokens(0) if always else mine(micro_step))).loss
        seen["losses"].append(loss.item())
        engine.backward(loss * poison.get((micro_step, rank), 1.0))
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if boundary:
            seen["norms"].append(float(engine.get_global_grad_norm()))
            seen["scales"].append((optimizer.cur_scale, optimizer.loss_scale, optimizer.overflow, engine.skipped_steps,
                                   engine.was_step_applied(), engine.global_steps, engine.get_lr(),
                                   scheduler.get_last_lr() if scheduler else None))
    engine.destroy()
    return seen


INF, NAN = math.inf, math.nan
CASES: Dict[str, Dict[str, Any]] = {
    "down, up and down again": dict(steps=12, poison={}, settings=dict(
        fp16=EVERY_STEP, gradient_clipping=1.0, optimizer=ADAMW, scheduler=WARMUP), model=dict(tied=True)),
    "hysteresis, accumulation": dict(
        steps=8, poison={(2, 1): INF, (5, 0): NAN, (7, 1): INF, (10, 0): INF}, settings=dict(
            fp16={"enabled": True, "initial_scale_power": 10, "hysteresis": 2, "loss_scale_window": 2},
            accumulation=2, gradient_clipping=0.5, optimizer=ADAMW)),
    "hysteresis filled up again": dict(
        steps=7, poison={(1, 1): INF, (3, 0): INF, (4, 1): INF}, settings=dict(
            fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 2, "consecutive_hysteresis": True,
                  "min_loss_scale": 128}, optimizer=SGD)),
    # Ever larger, so that for some steps each micro-batch's gradient can be held and their sum cannot.
    "sums that overflow": dict(
        steps=8, always=True, poison={(number, rank): 1e5 * 1.2**(number // 2) for number in range(16) for rank in range(2)},
        settings=dict(fp16={"enabled": True, "loss_scale": 1.0}, accumulation=2,
                      optimizer={"type": "SGD", "params": {"lr": 1e-12}})),
    "a fixed scale": dict(steps=4, poison={(2, 0): INF}, settings=dict(
        fp16={"enabled": True, "loss_scale": 96.0}, gradient_clipping=1.0, optimizer=SGD)),
    "fp32": dict(steps=5, poison={(1, 1): NAN, (3, 0): INF}, settings=dict(
        gradient_clipping=1.0, optimizer=ADAMW, scheduler=WARMUP)),
    "fp32, squares that overflow": dict(steps=4, poison={(1, 0): 1e21, (2, 1): 1e15}, settings=dict(
        gradient_clipping=1.0, optimizer=ADAMW)),
    "bf16": dict(steps=5, poison={(1, 1): NAN, (3, 0): INF}, settings=dict(
        bf16={"enabled": True}, optimizer=ADAMW, scheduler=WARMUP)),
}


def both_arms(names: List[str]) -> Dict[str, Any]:
    supported()
    return {name: {mobius: run_of(mobius, **CASES[name]) for mobius in (False, True)} for name in names}


@works("Precision", "fp16 with dynamic or fixed loss scale")
@survives("Numbers", "gradients of one rank's microbatch are inf or NaN, in fp16, bf16 or fp32",
          "every rank skips the step; loss scale, learning rate, norms and later losses go on as under ZeRO-3")
@pytest.mark.parametrize("ranks,names", [(2, list(CASES)), (4, ["down, up and down again", "fp32"])])
def test_steps_are_skipped_and_losses_scaled_as_under_zero3(ranks, names):
    results = run_ranks(ranks, both_arms, names, timeout=250)
    for result in results:
        for name in names:
            zero3, mobius = result[name][False], result[name][True]
            low = "fp32" not in name
            assert mobius["scales"] == zero3["scales"], name
            assert mobius["losses"] == pytest.approx(zero3["losses"], abs=2e-2 if low else 1e-5), name
            assert mobius["norms"] == pytest.approx(zero3["norms"], rel=5e-2 if low else 1e-4), name
    # They do what they are here for.
    for name in names:
        skipped = [overflow for _, _, overflow, *_ in results[0][name][True]["scales"]]
        assert True in skipped and False in skipped, name


class _Bursts(torch.autograd.Function):
    """A parameter whose gradient is infinite where ``burst`` says so."""

    @staticmethod
    def forward(ctx, parameter: torch.Tensor, burst: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(burst)
        return parameter.clone()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        burst, = ctx.saved_tensors
        return torch.where(burst, math.inf, gradient), None


class Layer(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.number = number
        self.linear = nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x, bursting):
        return x + torch.tanh(self.linear(x) * _Bursts.apply(self.gain, bursting == self.number))


class Layers(nn.Module):
    """Four layers; the gain of one, and nothing else, gets an infinite gradient. -1: of none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(map(Layer, range(4)))

    def forward(self, x, bursting):
        x = x.to(self.layers[0].gain.dtype)
        for layer in self.layers:
            x = layer(x, bursting)
        return x.float().square().mean()


def layers_data(step: int, bursting: int) -> Tuple[torch.Tensor, torch.Tensor]:
    rank, size = rank_and_size()
    generator = torch.Generator().manual_seed(step * size + rank)
    return torch.randn(2, 8, generator=generator), torch.tensor(bursting if rank == size - 1 else -1)


def moved(before: Dict[str, torch.Tensor], module: nn.Module) -> List[str]:
    return [name for name, value in weights(module).items() if not torch.equal(value, before[name])]


def bursts(sections: Dict[str, Any]) -> Dict[str, Any]:
    """Per layer: what moved in a step in which it bursts, by forward and by ``train_batch``, and what was said."""
    from deepspeed.utils import logger
    settings = config(optimizer=SGD, **sections)
    settings["mobius"]["layers_per_stage"] = 1
    engine = initialize(Layers(), settings)
    said: List[str] = []
    logger.warning = lambda message, *_: said.append(message) if message.startswith("Mobius") else None
    seen: Dict[str, Any] = {"forward": [], "train_batch": [], "said": said}
    for bursting in range(-1, 4):
        before = weights(engine.module)
        engine.backward(engine(*layers_data(bursting, bursting)))
        engine.step()
        seen["forward"].append((bursting, moved(before, engine.module), engine.optimizer.overflow, engine.skipped_steps))
    for bursting in range(-1, 4):
        before = weights(engine.module)
        engine.train_batch(iter([layers_data(bursting, bursting)]))
        seen["train_batch"].append((bursting, moved(before, engine.module), engine.optimizer.overflow, engine.skipped_steps))
    seen["norm"] = float(engine.get_global_grad_norm())
    engine.destroy()
    return seen


PRECISIONS: Dict[str, Dict[str, Any]] = {
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
    "bf16": {"bf16": {"enabled": True}, "gradient_clipping": 1.0},
    "fp32": {"gradient_clipping": 1.0}}


def bursts_in_every_precision() -> Dict[str, Any]:
    supported()
    return {**{name: bursts(sections) for name, sections in PRECISIONS.items()}, "beside": bursts({})}


@survives("Numbers", "an infinite gradient in one layer of one stage",
          "the step is skipped on every rank, by train_batch as well; no parameter moves")
@survives("Numbers", "an infinite gradient when train_batch updates beside its backward (no clipping, not fp16)",
          "the stage keeps its values and the step counts as skipped; stages that were updated already, by finite "
          "gradients, are named in a warning")
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_layers_infinite_gradient_skips_the_step_everywhere(ranks):
    results = run_ranks(ranks, bursts_in_every_precision)
    for result in results:
        names = [f"layers.{number}.{name}" for number in range(4) for name in ("gain", "linear.weight", "linear.bias")]
        for name in PRECISIONS:
            for how, skipped_before in (("forward", 0), ("train_batch", 4)):
                (_, first, overflow, skipped), *others = result[name][how]
                assert (sorted(first), overflow, skipped) == (sorted(names), False, skipped_before), (name, how)
                assert others == [(n, [], True, skipped_before + n + 1) for n in range(4)], (name, how)
            assert math.isinf(result[name]["norm"]) and result[name]["said"] == []
        for bursting, changed, overflow, skipped in result["beside"]["train_batch"]:
            assert sorted(changed) == sorted(name for name in names if not name.startswith(f"layers.{bursting}."))
            assert (overflow, skipped) == (bursting >= 0, 4 + bursting + 1)
    said = [line for result in results for line in result["beside"]["said"]]
    assert said and all("updated by them before the others were known" in line for line in said)


def whole_batches() -> Dict[str, Any]:
    """The same steps micro-batch by micro-batch and by ``train_batch``."""
    supported()
    settings = config(accumulation=2, optimizer=ADAMW, fp16=EVERY_STEP)
    seen = {}
    for how in ("backward", "train_batch"):
        engine, scales = initialize(language_model(tied=True), settings), []
        for step in range(10):
            if how == "train_batch":
                engine.train_batch(endless(2 * step))
            else:
                for number in range(2):
                    engine.backward(engine(*mine(2 * step + number)).loss)
                    engine.step()
            scales.append((engine.optimizer.cur_scale, engine.optimizer.overflow, engine.skipped_steps))
        seen[how] = scales, weights(engine.module)
        engine.destroy()
    return seen


def test_train_batch_scales_and_skips_like_forward_and_backward():
    for seen in run_ranks(2, whole_batches):
        (scales, one), (others, other) = seen["backward"], seen["train_batch"]
        assert scales == others and {overflow for _, overflow, _ in scales} == {True, False}
        for name in one:
            torch.testing.assert_close(one[name], other[name], atol=2e-2, rtol=0)


# Checkpoints.

def go(engine: Any, first: int, steps: int, bad: Tuple[int, ...] = ()) -> List[Any]:
    """This rank's losses and what became of the scale, from step ``first`` on. Steps in ``bad`` overflow."""
    seen = []
    for step in range(first, first + steps):
        loss = engine(*mine(step)).loss
        engine.backward(loss * (math.inf if step in bad else 1.0))
        engine.step()
        seen.append((loss.item(), engine.optimizer.cur_scale, engine.optimizer.overflow, engine.skipped_steps))
    return seen


def saved_and_resumed(root: str) -> Dict[str, Any]:
    supported()
    scaling = {"enabled": True, "initial_scale_power": 10, "hysteresis": 2, "loss_scale_window": 3}

    def start(mobius: bool, **sections: Any) -> Any:
        return initialize(language_model(), config(mobius, optimizer=ADAMW, fp16=scaling, **sections))

    bad = (1, 2, 5)  # one of the hysteresis is used up where it is saved, and two of the window
    seen: Dict[str, Any] = {}

    def save(mobius: bool) -> None:
        engine = start(mobius)
        go(engine, 0, 5, bad)
        engine.save_checkpoint(f"{root}/{mobius}")
        seen[f"on from {mobius}"] = go(engine, 5, 6, bad)
        engine.destroy()

    def resume(saved: bool, mobius: bool, **sections: Any) -> None:
        engine = start(mobius, **sections)
        engine.load_checkpoint(f"{root}/{saved}")
        seen[f"{saved} under {mobius}"] = go(engine, 5, 6, bad)
        engine.destroy()

    save(True)
    resume(True, True)
    save(False)  # ZeRO-3 gives the process another F.linear, which rounds in another way: nothing is exact from here
    resume(False, True)
    resume(True, False, checkpoint={"load_universal": True})
    engine = initialize(language_model(), config(optimizer=ADAMW, bf16={"enabled": True}))
    engine.load_checkpoint(f"{root}/{True}")
    seen["in bf16"] = engine.optimizer.loss_scaler.loss_scale
    engine.destroy()
    return seen


@works("Checkpoints", "fp16: the loss scale goes on where it was, under either flag")
def test_a_checkpoint_carries_the_loss_scale(tmp_path):
    for seen in run_ranks(2, saved_and_resumed, str(tmp_path), timeout=200):
        assert seen["True under True"] == seen["on from True"]
        assert seen.pop("in bf16") == 1.0
        losses, *scaling = zip(*seen["on from False"])
        for how, steps in seen.items():
            some, *others = zip(*steps)
            assert (some, others) == (pytest.approx(losses, abs=2e-2), scaling), how
        assert len(set(scaling[0])) > 1


# What is refused.

def refused() -> Dict[str, str]:
    said = {mobius: failure(lambda: initialize(language_model(), config(mobius, fp16={"enabled": True})))
            for mobius in (False, True)}
    supported()
    engine = initialize(language_model(), config(optimizer=SGD, fp16=EVERY_STEP))
    loss = engine(*mine(0)).loss
    said["unscaled"] = failure(loss.backward)
    engine.destroy()
    said["autocast"] = failure(lambda: initialize(language_model(), config(
        torch_autocast={"enabled": True, "dtype": "fp16"})))
    said["masters"] = failure(lambda: initialize(language_model(), config(
        fp16={"enabled": True, "fp16_master_weights_and_grads": True})))
    return said


def test_what_is_refused_of_fp16():
    [said] = run_ranks(1, refused)
    from deepspeed.accelerator import get_accelerator
    if not get_accelerator().is_fp16_supported():
        assert said[True] == said[False] == "ValueError: Type fp16 is not supported on your device."
    assert "Loss scaling is required" in said["unscaled"] and "engine.scale(loss)" in said["unscaled"]
    assert 'Mobius does not run "torch_autocast" in float16' in said["autocast"] and "bfloat16" in said["autocast"]
    assert 'Mobius does not run "fp16_master_weights_and_grads"' in said["masters"] and "fp32" in said["masters"]


def always_overflows() -> None:
    supported()
    engine = initialize(language_model(), config(optimizer=SGD, fp16={
        "enabled": True, "initial_scale_power": 2, "hysteresis": 1, "min_loss_scale": 1}))
    go(engine, 0, 10, tuple(range(10)))


@survives("Numbers", "fp16 overflows at the smallest loss scale", "every rank ends with DeepSpeed's error")
def test_overflow_at_the_smallest_scale_ends_the_job_on_every_rank():
    for outcome in outcomes_of_ranks(2, always_overflows, timeout=60):
        assert outcome.exit_code == 1 and "Current loss scale already at minimum" in outcome.error

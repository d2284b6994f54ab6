"""Numbers that are easily got wrong: odd parameters, odd outputs and losses, buffers, and whether a run repeats itself."""

from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from torch import nn

from tests.features import survives, works
from tests.ranks import run_ranks
from tests.runtime.jobs import config, failure, initialize, language_model, mine, rank_and_size, weights
from tests.runtime.optimizer.test_fp16 import supported
from tests.runtime.sweeps.test_delays import at_random, delayed

SGD = {"type": "SGD", "params": {"lr": 0.05}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
WIDTH = 8


def one_layer_each(**sections: Any) -> Dict[str, Any]:
    settings = config(zero_allow_untested_optimizer=True, **sections)
    settings["mobius"]["layers_per_stage"] = 1
    return settings


# The same job twice.

PRECISIONS: Dict[str, Dict[str, Any]] = {
    "fp32": {}, "bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}


def history(sections: Dict[str, Any]) -> List[torch.Tensor]:
    """Every loss, gradient and norm of three steps of a job with tied weights, and the weights after them."""
    from deepspeed.utils import safe_get_full_grad
    engine = initialize(language_model(tied=True), one_layer_each(
        accumulation=3, gradient_clipping=0.5, optimizer=ADAMW, **sections))
    seen: List[torch.Tensor] = []
    for micro_step in range(9):
        loss = engine(*mine(micro_step)).loss
        engine.backward(loss)
        seen.append(loss.detach())
        boundary = engine.is_gradient_accumulation_boundary()
        seen += [safe_get_full_grad(parameter) for parameter in engine.module.parameters()] if boundary else []
        engine.step()
        seen += [engine.get_global_grad_norm()] if boundary else []
    seen += weights(engine.module).values()
    engine.destroy()
    return seen


def histories(seed: int) -> Dict[str, List[torch.Tensor]]:
    """Run as it comes where ``seed`` is 0, with every stream held up at random where it is not."""
    supported()
    rank, _ = rank_and_size()
    with delayed(at_random(100 * seed + rank) if seed else lambda: 0):
        return {name: history(sections) for name, sections in PRECISIONS.items()}


@survives("Numbers", "the same job again, as it comes and with streams held up at random (tied weights, accumulation)",
          "no bit of losses, gradients, norms and weights differs")
def test_a_job_repeats_itself_to_the_bit():
    first, *others = [run_ranks(4, histories, seed, timeout=250) for seed in (0, 0, 1)]
    for other in others:
        for before, after in zip(first, other):
            for name in PRECISIONS:
                assert len(before[name]) == len(after[name]) > 30
                assert all(torch.equal(one, same) for one, same in zip(before[name], after[name])), name
    for name in PRECISIONS:
        assert not torch.equal(first[0][name][0], first[0][name][-1])


# Odd parameters.

class Odd(nn.Module):
    """A layer with parameters of every dtype and of no size, some frozen, some unused; integer and bool buffers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))
        self.flat = nn.Parameter(torch.empty(3, 0))
        self.short = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        self.long = nn.Parameter(torch.full((WIDTH,), 0.5, dtype=torch.float64))
        self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
        self.frozen = nn.Parameter(torch.empty(2, 0), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(WIDTH))
        self.register_buffer("mask", torch.arange(WIDTH) > 2)

    def forward(self, x):
        y = self.linear(x) * self.gain + self.empty.sum() + self.flat.sum() + self.frozen.sum()
        y = y * self.short + (y.double() * self.long).to(y.dtype)
        return x + torch.tanh(y[..., self.order]) * self.mask + self.table * 0.01


class OddModel(nn.Module):
    """Odd layers, and odd parameters of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(3, WIDTH)
        self.shift = nn.Parameter(torch.tensor(0.1))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Parameter(torch.ones(2))
        self.layers = nn.ModuleList(Odd() for _ in range(4))
        self.outer = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.inner(x) + self.shift + self.empty.sum()
        for layer in self.layers:
            x = layer(x)
        return self.outer(x).square().mean()


def samples(number: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(number))


OPTIMIZERS: Dict[str, Tuple[Dict[str, Any], Callable]] = {
    "SGD": (SGD, lambda parameters: torch.optim.SGD(parameters, lr=0.05)),
    "AdamW": (ADAMW, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1))}


def with_masters(model: nn.Module, make: Callable, steps: int, ranks: int) -> List[float]:
    """Trains a model on its own, on fp32 masters of whatever is trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in trained]
    optimizer, losses = make(masters), []
    for step in range(steps):
        for master in masters:
            master.grad = torch.zeros_like(master)
        for rank in range(ranks):
            loss = model(samples(step * ranks + rank))
            loss.backward()
            losses.append(loss.item())
            for parameter, master in zip(trained, masters):
                if parameter.grad is not None:  # an unused one is as if it had a gradient of zeros, as under ZeRO-3
                    master.grad += parameter.grad
                    parameter.grad = None
        for parameter, master in zip(trained, masters):
            master.grad = master.grad.div_(ranks).to(parameter.dtype).float()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(trained, masters):
                parameter.copy_(master)
    return losses


def odd_parameters() -> Dict[str, Any]:
    rank, ranks = rank_and_size()
    result = {}
    for name, (section, make) in OPTIMIZERS.items():
        for how in ("backward", "train_batch"):
            model = OddModel()
            engine = initialize(model, one_layer_each(optimizer=section), model_parameters=list(model.parameters()))
            losses = []
            for step in range(3):
                if how == "train_batch":
                    engine.train_batch(iter([(samples(step * ranks + rank),)]))
                else:
                    loss = engine(samples(step * ranks + rank))
                    losses.append(loss.item())
                    engine.backward(loss)
                    engine.step()
            traffic = engine.take_traffic() == engine.take_predicted_traffic()
            trained = weights(engine.module)
            engine.destroy()
            alone = OddModel()
            expected = with_masters(alone, make, 3, ranks)
            far = [key for key, value in weights(alone).items() if trained[key].dtype != value.dtype
                   or not (torch.equal(trained[key], value) if ranks == 1 else
                           torch.allclose(trained[key].double(), value.double(), atol=1e-6 if name == "SGD" else 1e-4))]
            result[name, how] = losses, expected[rank::ranks] if losses else [], far, traffic
    return result


@survives("Numbers", "parameters without elements or dimensions, fp64, fp32 and bf16 in one layer, integer or unused ones",
          "trained as by the unsplit model on fp32 masters, on one rank to the bit; unused ones decay, as under ZeRO-3")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_odd_parameters_are_trained_as_by_the_unsplit_model(ranks):
    for result in run_ranks(ranks, odd_parameters):
        for how, (losses, expected, far, traffic) in result.items():
            assert losses == (expected if ranks == 1 else pytest.approx(expected, abs=1e-5)), how
            assert (far, traffic) == ([], True), how


def unused_under(mobius: bool) -> Dict[str, torch.Tensor]:
    """The unused parameters, of a layer and of the model's own, after some steps."""
    import deepspeed
    settings = one_layer_each(optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.3, "torch_adam": True}})
    settings["mobius"]["enabled"] = mobius
    model = Unused()
    engine = initialize(model, settings)
    for step in range(3):
        engine.backward(engine(samples(step)))
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        after = weights(model)
    engine.destroy()
    return after


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.aside = nn.Parameter(torch.ones(2, 2))
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        for layer in self.layers:
            layer.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def unused_parameters() -> Dict[bool, Any]:
    return {mobius: unused_under(mobius) for mobius in (True, False)}


def test_unused_parameters_end_as_under_zero3():
    for result in run_ranks(2, unused_parameters):
        assert set(result[True]) == set(result[False])
        for name, value in result[True].items():
            torch.testing.assert_close(value, result[False][name], atol=1e-4, rtol=0)
        assert torch.allclose(result[True]["aside"], torch.tensor((1 - 1e-2 * 0.3)**3))


# Odd outputs and losses.

@dataclass
class Scored:
    loss: Any
    best: Any
    note: str = "plain"


OUTPUTS: Dict[str, Callable[[torch.Tensor], Any]] = {
    "mean": lambda x: x.square().mean(),
    "sum": lambda x: x.square().sum(),
    "one element": lambda x: x.square().mean().reshape(1),
    "fp64": lambda x: x.double().square().mean(),
    "bf16": lambda x: x.bfloat16().square().mean(),
    "zero": lambda x: x.sum() * 0.0,
    "integer before it": lambda x: {"count": (x > 0).sum(), "loss": x.square().mean(), "best": x.argmax(-1)},
    "bools, None and numbers": lambda x: {"loss": x.square().mean(), "best": (x > 0).any(-1), "none": None, "five": 5},
    "dataclass": lambda x: Scored(x.square().mean(), x.argmax(-1)),
    "dataclass in a list": lambda x: [None, {"in": Scored(x.square().mean(), x > 0)}],
    "without grad": lambda x: x.detach().square().mean(),
    "constant": lambda x: torch.zeros(()),
    "integer": lambda x: (x > 0).sum(),
    "none": lambda x: None,
}
NO_LOSS = {"without grad", "constant", "integer", "none"}


class Answers(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(3)
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return OUTPUTS[self.kind](x)


def read(output: Any) -> Tuple[Any, List[Any]]:
    """The loss, and what a script sees beside it."""
    if isinstance(output, list):
        assert output[0] is None
        output = output[1]["in"]
    if isinstance(output, Scored):
        return output.loss, [output.best.dtype, output.best.tolist(), output.note]
    if isinstance(output, dict):
        beside = {key: (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value
                  for key, value in output.items() if key != "loss"}
        return output["loss"], [beside]
    return output, []


def answer(kind: str, mobius: bool) -> Tuple[Any, ...]:
    settings = one_layer_each(optimizer=SGD, gradient_clipping=1.0)
    settings["mobius"]["enabled"] = mobius
    engine = initialize(Answers(kind), settings)
    rank, _ = rank_and_size()
    try:
        loss, beside = read(engine(samples(rank)))
        refused = failure(lambda: engine.backward(loss))
        if kind in NO_LOSS:
            return refused,
        engine.step()
        assert refused == "nothing was raised"
        return loss.item(), loss.dtype, tuple(loss.shape), beside, float(engine.get_global_grad_norm())
    finally:
        engine.destroy()


def by_train_batch(kind: str) -> Any:
    engine = initialize(Answers(kind), one_layer_each(optimizer=SGD, gradient_clipping=1.0))
    rank, _ = rank_and_size()
    said = []
    error = failure(lambda: said.append(engine.train_batch(iter([(samples(rank),)])).item()))
    norm = float(engine.get_global_grad_norm() or 0)
    engine.destroy()
    return error if kind in NO_LOSS else (*said, norm)


def answers() -> Dict[str, Any]:
    return {kind: (answer(kind, True), by_train_batch(kind), answer(kind, False)) for kind in OUTPUTS}


@works("Models", "outputs: integers, bools, None, dicts, dataclasses; losses of another dtype or shape (1,), sums, zero")
@survives("Numbers", "a loss that requires no gradient", "an error as DeepSpeed's; train_batch as well does not train on it")
def test_outputs_and_losses_of_any_kind_are_those_of_zero3():
    results = run_ranks(2, answers, timeout=200)
    for result in results:
        for kind, (mobius, _, zero3) in result.items():
            assert mobius[:-1] == zero3[:-1], kind
            assert mobius[-1] == (zero3[-1] if kind in NO_LOSS else pytest.approx(zero3[-1], rel=1e-5)), kind
    for kind in OUTPUTS:
        if kind in NO_LOSS:
            for mobius, said, _ in (result[kind] for result in results):
                assert "loss must be a scalar tensor" in mobius[0], kind
                assert "require grad" in said or "returns its loss" in said, kind
        else:
            mean = sum(result[kind][0][0] for result in results) / 2
            assert results[0][kind][1] == pytest.approx((mean, results[0][kind][0][-1]), rel=1e-5), kind


# Buffers.

class Normed(nn.Module):
    """Batch norm of every kind: decaying and plain averages, no statistics at all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        norms = ({}, {"momentum": None}, {"track_running_stats": False}, {"momentum": 0.5, "affine": False})
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, **options)) for options in norms)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + x
        return x.square().mean()


def normed(mobius: bool) -> Dict[str, Any]:
    """Two steps of two micro-batches, an evaluation after the first micro-batch of each and one at the end."""
    rank, ranks = rank_and_size()
    model = Normed()
    losses: List[float] = []
    engine = initialize(model, one_layer_each(optimizer=SGD, accumulation=2)) if mobius else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            losses.append((engine or model)(samples(99)).item())
        model.train()

    for micro_step in range(4):
        if mobius:
            engine.backward(engine(samples(micro_step * ranks + rank)))
            engine.step()
        else:
            for number in range(ranks):
                (model(samples(micro_step * ranks + number)) / (2 * ranks)).backward()
            if micro_step % 2:
                optimizer.step()
                optimizer.zero_grad()
        if micro_step != 1:
            evaluate()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if mobius:
        engine.destroy()
    return {"losses": losses, "state": state}


def normed_both() -> Dict[bool, Any]:
    return {mobius: normed(mobius) for mobius in (True, False)}


@survives("Numbers", "batch norm with accumulation and evaluations in between (running, plain and no averages)",
          "every buffer counts each microbatch once and is the unsplit model's on every rank")
@pytest.mark.parametrize("ranks", [1, 2])
def test_batch_norm_is_the_unsplit_models(ranks):
    for result in run_ranks(ranks, normed_both):
        assert result[True]["losses"] == pytest.approx(result[False]["losses"], abs=1e-5)
        assert set(result[True]["state"]) == set(result[False]["state"])
        for name, value in result[False]["state"].items():
            torch.testing.assert_close(result[True]["state"][name], value, atol=1e-5, rtol=1e-5)
        counts = [int(value) for name, value in result[True]["state"].items() if name.endswith("num_batches_tracked")]
        assert counts == [4 * ranks] * 3

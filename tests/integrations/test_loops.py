"""Training loops that people write around ``deepspeed.initialize``, each under both values of the flag."""

import contextlib
import copy
import io
import threading
import time
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.features import refused, works
from tests.ranks import run_ranks
from tests.runtime.jobs import (VOCABULARY, WIDTH, Block, Output, config, failure, language_model, mine, rank_and_size,
                                tokens)

ACCUMULATED = dict(accumulation=2)
BF16 = dict(bf16={"enabled": True})


class Dropped(nn.Module):
    """Like ``LanguageModel``, with dropout, and sentence embeddings instead of logits."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.2)) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids, labels=None):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        embedded = self.head(x).mean(1)
        return Output(None if labels is None else embedded.pow(2).mean(), embedded)


def dropped() -> nn.Module:
    torch.manual_seed(7)
    return Dropped()


def started(model: nn.Module, **settings: Any) -> Any:
    import deepspeed
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=copy.deepcopy(config(**settings)))
    return engine


def train(engine: Any, loss: torch.Tensor) -> float:
    engine.backward(loss)
    engine.step()
    return loss.item()


# Loops. Each yields the figures that it sees on its way; both values of the flag must give the same ones.

def plain(engine) -> Iterator[float]:
    for number in range(4):
        yield train(engine, engine(*mine(number)).loss)
        yield engine.get_global_grad_norm().item()


def two_losses_one_backward(engine):
    for number in range(3):
        first, second = engine(*mine(2 * number)).loss, engine(*mine(2 * number + 1)).loss
        yield train(engine, first + 0.5 * second)


def contrastive(engine):
    engine.eval()  # without dropout, whose masks are no rank's but the job's
    for number in range(3):
        queries, keys = engine(mine(number)[0]).logits, engine(mine(number)[1]).logits
        scores = F.normalize(queries, dim=-1) @ F.normalize(keys, dim=-1).T
        yield train(engine, F.cross_entropy(scores / 0.1, torch.arange(len(scores))))


def reference_in_between(engine):
    for number in range(3):
        output = engine(*mine(number))
        with torch.no_grad():
            reference = engine(*mine(number + 10)).loss
        yield train(engine, output.loss * (1 + reference.item()))


def dropped_forward(engine):
    for number in range(3):
        engine(*mine(number + 10))
        yield train(engine, engine(*mine(number)).loss)


def evaluation_between_microbatches(engine):
    for number in range(4):
        yield train(engine, engine(*mine(number)).loss)
        engine.eval()
        with torch.no_grad():
            yield engine(*mine(number + 10)).loss.item()
        engine.train()


def loss_from_logits(engine):
    for number in range(3):
        ids, labels = mine(number)
        yield train(engine, F.cross_entropy(engine(ids).logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1))


def scaled_loss(engine):
    for number in range(4):
        yield train(engine, engine(*mine(number)).loss * 0.25)
        if number % 2 == 1:
            yield engine.get_global_grad_norm().item()


def eval_at_the_forward_train_at_the_backward(engine):
    for number in range(3):
        engine.eval()
        loss = engine(*mine(number)).loss
        engine.train()
        yield train(engine, loss)


def zeroed(engine):
    for number in range(3):
        engine.zero_grad()
        engine.optimizer.zero_grad()
        yield train(engine, engine(*mine(number)).loss)


def boundary_by_hand(engine):
    for number in range(6):
        engine.set_gradient_accumulation_boundary(number % 3 == 2)
        loss = engine(*mine(number)).loss
        engine.backward(loss / 3)
        yield loss.item()
        yield float(engine.is_gradient_accumulation_boundary())
        engine.step()


def boundary_asked_for(engine):
    for number in range(4):
        yield float(engine.is_gradient_accumulation_boundary())
        yield train(engine, engine(*mine(number)).loss)


def rate_changed_in_the_middle(engine):
    for number in range(4):
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.02 / (1 + number)
        yield train(engine, engine(*mine(number)).loss)
        yield engine.get_lr()[0]


def parameters_read(engine):
    import deepspeed
    for number in range(2):
        yield train(engine, engine(*mine(number)).loss)
        for name, parameter in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters(parameter):
                yield parameter.float().norm().item()


def parameters_written(engine):
    """By the one rank that is allowed to; by all ranks alike, of which one's counts; by one whose writes are forgotten."""
    import deepspeed
    head = engine.module.head.weight
    yield train(engine, engine(*mine(0)).loss)
    with deepspeed.zero.GatheredParameters(head, modifier_rank=0), torch.no_grad():
        if rank_and_size()[0] == 0:
            head.mul_(0.5)
    with deepspeed.zero.GatheredParameters(engine.module.blocks.parameters(), modifier_rank=0), torch.no_grad():
        for parameter in engine.module.blocks.parameters():
            parameter.add_(0.25)
    with deepspeed.zero.GatheredParameters([head], modifier_rank=0), torch.no_grad():
        if rank_and_size()[0] != 0:
            head.zero_()
    engine.optimizer.refresh_fp32_params()  # under ZeRO-3 the next step would overwrite what was written
    for number in range(1, 4):
        yield train(engine, engine(*mine(number)).loss)
    with deepspeed.zero.GatheredParameters(head):
        yield head.float().norm().item()


def fp32_state_read(engine):
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
    for number in range(2):
        loss = engine(*mine(number)).loss
        engine.backward(loss)
        for parameter in engine.module.parameters():
            yield safe_get_full_grad(parameter).float().norm().item()
        engine.step()
        yield loss.item()
        for parameter in engine.module.parameters():
            yield safe_get_full_fp32_param(parameter).norm().item()
            yield safe_get_full_optimizer_state(parameter, "exp_avg").norm().item()
            yield safe_get_full_optimizer_state(parameter, "exp_avg_sq").sum().item()


def fp32_state_written(engine):
    from deepspeed.utils import (safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state,
                                 safe_set_full_fp32_param, safe_set_full_grad, safe_set_full_optimizer_state)
    head = engine.module.head.weight
    yield train(engine, engine(*mine(0)).loss)
    loss = engine(*mine(1)).loss
    engine.backward(loss)
    safe_set_full_fp32_param(head, safe_get_full_fp32_param(head) * 0.5)
    safe_set_full_optimizer_state(head, safe_get_full_optimizer_state(head, "exp_avg") * 2, "exp_avg")
    safe_set_full_grad(head, safe_get_full_grad(head) * 3)
    yield safe_get_full_fp32_param(head).norm().item()
    yield safe_get_full_optimizer_state(head, "exp_avg").norm().item()
    yield safe_get_full_grad(head).float().norm().item()
    engine.step()
    yield safe_get_full_fp32_param(head).norm().item()
    for number in range(2, 4):
        yield train(engine, engine(*mine(number)).loss)


LOOPS: Dict[str, tuple] = {
    loop.__name__ + suffix: (loop, make, settings) for loop, suffix, make, settings in [
        (plain, "", language_model, {}), (plain, ", bf16", language_model, BF16),
        (two_losses_one_backward, "", language_model, {}), (contrastive, "", dropped, {}),
        (reference_in_between, "", language_model, {}), (dropped_forward, "", language_model, {}),
        (evaluation_between_microbatches, "", language_model, ACCUMULATED), (loss_from_logits, "", language_model, {}),
        (scaled_loss, "", language_model, ACCUMULATED), (eval_at_the_forward_train_at_the_backward, "", dropped, {}),
        (zeroed, "", language_model, {}), (boundary_by_hand, "", language_model, {}),
        (boundary_asked_for, "", language_model, ACCUMULATED), (rate_changed_in_the_middle, "", language_model, {}),
        (parameters_read, "", language_model, {}),
        (parameters_written, "", language_model, {}), (parameters_written, ", bf16", language_model, BF16),
        (fp32_state_read, "", language_model, {}), (fp32_state_read, ", bf16", language_model, BF16),
        (fp32_state_written, "", language_model, {}), (fp32_state_written, ", bf16", language_model, BF16),
    ]}


def run_of(name: str, mobius: bool) -> List[float]:
    loop, make, settings = LOOPS[name]
    engine = started(make(), mobius=mobius, **settings)
    figures = list(loop(engine))
    engine.eval()
    with torch.no_grad():
        figures.append(engine(*mine(10**6)).loss.item())
    engine.destroy()
    return figures


def both_arms(names: Tuple[str, ...]) -> Dict[str, Dict[bool, List[float]]]:
    return {name: {mobius: run_of(name, mobius) for mobius in (False, True)} for name in names}


@pytest.mark.parametrize("ranks, names", [(2, tuple(LOOPS)), (4, ("plain", "contrastive"))])
@works("Loops", "a plain deepspeed.initialize loop, its grad norms")
@works("Loops", "two forwards before one backward: a sum of losses, one loss of two outputs")
@works("Loops", "a no-grad reference forward between a forward and its backward; a forward without backward")
@works("Loops", "evaluation between the micro-batches of a step; engine.eval() and train() anywhere")
@works("Loops", "a loss from logits or scaled by the script; zero_grad()")
@works("Loops", "is_gradient_accumulation_boundary(), set_gradient_accumulation_boundary()")
@works("Loops", "learning rates changed in mid-training")
@works("Loops", "reading and writing parameters under deepspeed.zero.GatheredParameters")
@works("Loops", "safe_get_full_* and safe_set_full_* for fp32 parameters, gradients and optimizer states")
def test_a_loop_sees_the_same_figures(ranks, names):
    for result in run_ranks(ranks, both_arms, names, timeout=300):
        for name, figures in result.items():
            assert figures[True] == pytest.approx(figures[False], abs=2e-2 if "bf16" in name else 1e-5), name
            assert len(set(figures[True])) > 2, name


def policy_and_reference(mobius: bool) -> Dict[str, Any]:
    """Two engines in one process, one of them without an optimizer."""
    import deepspeed
    threads = threading.active_count()
    without_optimizer = config(mobius)
    del without_optimizer["optimizer"]
    policy = started(language_model(), mobius=mobius)
    reference, *_ = deepspeed.initialize(model=language_model(), config=without_optimizer)
    reference.eval()
    losses, references = [], []
    for number in range(3):
        chosen, rejected = policy(*mine(2 * number)).loss, policy(*mine(2 * number + 1)).loss
        with torch.no_grad():
            references.append(reference(*mine(0)).loss.item())
            margin = reference(*mine(2 * number)).loss - reference(*mine(2 * number + 1)).loss
        losses.append(train(policy, -F.logsigmoid(margin - chosen + rejected)))
    policy.destroy()
    with torch.no_grad():
        references.append(reference(*mine(0)).loss.item())
    reference.destroy()
    deadline = time.monotonic() + 60  # a thread that receives ends when the other rank has left, too
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    return {"losses": losses, "references": references, "threads": threading.active_count() - threads}


def two_engines() -> Dict[bool, Dict[str, Any]]:
    return {mobius: policy_and_reference(mobius) for mobius in (False, True)}


@works("Loops", "two engines in one process, one destroyed before the other")
def test_a_second_engine_lives_beside_the_first():
    for arms in run_ranks(2, two_engines):
        assert arms[True]["losses"] == pytest.approx(arms[False]["losses"], abs=1e-5)
        assert arms[True]["references"] == pytest.approx(arms[False]["references"], abs=1e-6)
        assert len(set(arms[True]["references"])) == 1 and arms[True]["threads"] == 0


# What ZeRO-3 refuses, or does in a way of its own, against the unsplit model.

STEPS = 4


def not_as_zero3(loop: Callable) -> Dict[str, torch.Tensor]:
    engine = started(language_model(), optimizer={"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}})
    loop(engine, lambda number: engine(*mine(number)).loss, lambda loss: engine.backward(loss), engine.step)
    weights = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
    engine.destroy()
    return weights


def alone(loop: Callable, ranks: int) -> Dict[str, torch.Tensor]:
    """The same loop with an ordinary module, on all ranks' micro-batches."""
    model = language_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    unsplit = SimpleNamespace(module=model, no_sync=contextlib.nullcontext)
    loop(unsplit, lambda number: sum(model(*tokens(number * ranks + rank)).loss for rank in range(ranks)) / ranks,
         lambda loss: loss.backward(), step)
    return dict(model.named_parameters())


def frozen_for_a_while(engine, loss_of, backward, step):
    """What is frozen is not touched, by momentum either. (ZeRO-3 steps it with the gradient it had last.)"""
    for number in range(STEPS):
        engine.module.blocks[0].requires_grad_(number in (0, 3))
        backward(loss_of(number))
        step()


def without_sync(engine, loss_of, backward, step):
    for number in range(STEPS):
        with engine.no_sync():
            backward(loss_of(2 * number))
        backward(loss_of(2 * number + 1))
        step()


def written_without_a_word_to_the_optimizer(engine, loss_of, backward, step):
    """What one rank writes stays written. (Under ZeRO-3 the next step starts from the fp32 values that it had before.)"""
    import deepspeed
    for number in range(STEPS):
        backward(loss_of(number))
        step()
        with deepspeed.zero.GatheredParameters(engine.module.head.weight, modifier_rank=0), torch.no_grad():
            engine.module.head.weight.mul_(0.5)


@pytest.mark.parametrize("loop", [frozen_for_a_while, without_sync, written_without_a_word_to_the_optimizer])
@works("Loops", "freezing parameters for a while after initialize; engine.no_sync()")
def test_a_loop_trains_as_the_unsplit_model(loop):
    expected = alone(loop, 2)
    for weights in run_ranks(2, not_as_zero3, loop):
        for name, parameter in weights.items():
            torch.testing.assert_close(parameter, expected[name], atol=1e-5, rtol=1e-5)


def written_in_bf16() -> bool:
    """Whether what one rank writes is still there after a step that changes nothing."""
    import deepspeed
    engine = started(language_model(), **BF16)
    train(engine, engine(*mine(0)).loss)
    head = engine.module.head.weight
    expected = head.detach() * 0.5
    with deepspeed.zero.GatheredParameters(head, modifier_rank=0), torch.no_grad():
        head.mul_(0.5)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    train(engine, engine(*mine(1)).loss)
    kept = torch.equal(head, expected)
    engine.destroy()
    return kept


def test_the_fp32_values_know_what_is_written():
    assert run_ranks(2, written_in_bf16) == [True, True]


def refusals() -> Dict[str, str]:
    rank, _ = rank_and_size()
    model = language_model(frozen=1)
    engine = started(model)
    model.blocks[0].requires_grad_(True)
    said = {"unfrozen": failure(lambda: engine(*mine(0)))}
    engine.destroy()
    engine = started(language_model())
    engine.train(rank == 0)
    said["modes"] = failure(lambda: engine(*mine(0)))
    engine.destroy()
    return said


@refused("Loops", "unfreezing parameters after initialize", "was frozen at deepspeed.initialize")
@refused("Loops", "train() on one rank, eval() on another", "the ranks call the model in different modes")
def test_what_is_refused_is_refused_at_once():
    for said in run_ranks(2, refusals):
        assert "'blocks.0.norm.weight' was frozen at deepspeed.initialize" in said["unfrozen"]
        assert "the ranks call the model in different modes" in said["modes"]


def asked_of_a_copy() -> Dict[str, Any]:
    """Parameters that are saved or copied know of no engine."""
    from deepspeed.utils import safe_get_full_grad
    engine = started(language_model())
    buffer = io.BytesIO()
    torch.save(engine.module.head.weight, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    copied = copy.deepcopy(engine.module).head.weight
    answers = [safe_get_full_grad(loaded), safe_get_full_grad(copied)]
    engine.destroy()
    return {"answers": answers, "after": safe_get_full_grad(engine.module.head.weight),
            "status": hasattr(engine.module.head.weight, "ds_status")}


def test_copies_of_parameters_are_ordinary():
    [result] = run_ranks(1, asked_of_a_copy)
    assert result == {"answers": [None, None], "after": None, "status": False}

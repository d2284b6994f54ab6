"""``train_batch`` and ``eval_batch``: the loop of forward, backward and step, in one sweep."""

from typing import Any, Dict, List

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.features import refused, works
from tests.ranks import run_ranks
from tests.runtime.jobs import (VOCABULARY, WIDTH, Block, config, endless, failure, initialize, language_model, mine,
                                tokens, weights)

ACCUMULATION = 3
DECAYING = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}, "scheduler": {
    "type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 1e-2, "total_num_steps": 9}}}


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def project_with(embedding: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, embedding.weight)


def pipeline_module(tied: bool):
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    torch.manual_seed(3)
    if tied:
        first = TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH)
        last = TiedLayerSpec("embedding", nn.Embedding, VOCABULARY, WIDTH, forward_fn=project_with)
    else:
        first, last = LayerSpec(nn.Embedding, VOCABULARY, WIDTH), LayerSpec(nn.Linear, WIDTH, VOCABULARY)
    return PipelineModule([first, *[LayerSpec(Block) for _ in range(3)], nn.LayerNorm(WIDTH), torch.tanh, last],
                          num_stages=1, loss_fn=token_loss)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        ids, labels = tokens(index, batch=1)
        return ids[0], labels[0]


def by_train_batch(model: nn.Module, clip: float = 0.5, steps: int = 3, **settings: Any) -> Dict[str, Any]:
    engine = initialize(model, config(accumulation=ACCUMULATION, gradient_clipping=clip, **settings))
    batches = endless()
    losses = [engine.train_batch(batches).item() for _ in range(steps)]
    counters = engine.micro_steps, engine.global_steps, engine.global_samples, engine.was_step_applied()
    evaluated = engine.eval_batch(batches).item()
    result = {"losses": losses, "evaluated": evaluated, "counters": counters, "weights": weights(engine.module),
              "norm": float(engine.get_global_grad_norm()), "training": engine.module.training}
    engine.destroy()
    return result


def by_loop(model: nn.Module, loss_of: Any, clip: float = 0.5, steps: int = 3, **settings: Any) -> Dict[str, Any]:
    engine = initialize(model, config(accumulation=ACCUMULATION, gradient_clipping=clip, **settings))
    batches = endless()
    losses = []
    for _ in range(steps):
        total = []
        for _ in range(ACCUMULATION):
            loss = loss_of(engine, next(batches))
            engine.backward(loss)
            engine.step()
            total.append(loss.item())
        losses.append(mean_over_ranks(total))
    counters = engine.micro_steps, engine.global_steps, engine.global_samples, engine.was_step_applied()
    with torch.no_grad():
        evaluated = mean_over_ranks([loss_of(engine, next(batches)).item() for _ in range(ACCUMULATION)])
    result = {"losses": losses, "evaluated": evaluated, "counters": counters, "weights": weights(engine.module),
              "norm": float(engine.get_global_grad_norm()), "training": True}
    engine.destroy()
    return result


def mean_over_ranks(losses: List[float]) -> float:
    import torch.distributed as dist
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, losses)
    flat = [loss for part in every for loss in part]
    return sum(flat) / len(flat)


def differences(ours: Dict[str, Any], theirs: Dict[str, Any], loose: float = 0.0) -> List[str]:
    close = {
        "losses": ours["losses"] == pytest.approx(theirs["losses"], abs=loose or 1e-6),
        "evaluated": ours["evaluated"] == pytest.approx(theirs["evaluated"], abs=loose or 1e-6),
        "norm": ours["norm"] == pytest.approx(theirs["norm"], rel=loose or 1e-5),
        "counters": ours["counters"] == theirs["counters"], "training": ours["training"] == theirs["training"],
        "weights": all(torch.allclose(tensor, theirs["weights"][name], atol=loose or 1e-5)
                       for name, tensor in ours["weights"].items()),
    }
    return [what for what, equal in close.items() if not equal]


class LogitsFirst(nn.Module):
    """Returns its loss as the second of two."""

    def __init__(self):
        super().__init__()
        self.inner = language_model()

    def forward(self, ids, labels):
        loss, logits = self.inner(ids, labels)
        return logits, loss


def three_kinds() -> Dict[str, List[str]]:
    def through_loss_fn(engine, batch):
        return token_loss(engine(batch[0]), batch[1])

    return {
        "layers": differences(by_train_batch(pipeline_module(False)), by_loop(pipeline_module(False), through_loss_fn)),
        "tied layers": differences(by_train_batch(pipeline_module(True)), by_loop(pipeline_module(True), through_loss_fn)),
        "plain module": differences(by_train_batch(language_model()),
                                    by_loop(language_model(), lambda engine, batch: engine(*batch).loss)),
        # Without clipping a stage may be updated before all gradients are known.
        "not clipped": differences(by_train_batch(language_model(tied=True, frozen=1, unused=True), 0, **DECAYING),
                                   by_loop(language_model(tied=True, frozen=1, unused=True),
                                           lambda engine, batch: engine(*batch).loss, 0, **DECAYING)),
        "bf16": differences(by_train_batch(language_model(), 0, bf16={"enabled": True}),
                            by_loop(language_model(), lambda engine, batch: engine(*batch).loss, 0,
                                    bf16={"enabled": True}), loose=5e-2),
        "loss last": differences(by_train_batch(LogitsFirst()),
                                 by_loop(LogitsFirst(), lambda engine, batch: engine(*batch)[1])),
    }


@works("Loops", "engine.train_batch and engine.eval_batch with any model that returns its loss")
@pytest.mark.parametrize("ranks", [1, 2])
def test_train_batch_equals_the_loop(ranks):
    for result in run_ranks(ranks, three_kinds):
        assert {kind: different for kind, different in result.items() if different} == {}


def traffic_of(accumulation: int) -> Dict[str, int]:
    engine = initialize(language_model(), config(accumulation=accumulation))
    engine.train_batch(endless())
    measured, predicted = engine.take_traffic(), engine.take_predicted_traffic()
    engine.destroy()
    assert measured == predicted
    return dict(measured)


def traffic_by_accumulation() -> List[Dict[str, int]]:
    return [traffic_of(1), traffic_of(4)]


def test_parameter_and_gradient_traffic_does_not_grow_with_accumulation():
    for once, four_times in run_ranks(2, traffic_by_accumulation):
        for category in ("parameters_in", "gradients_out"):
            assert once[category] == four_times[category] > 0
        assert four_times["activations_in"] == 4 * once["activations_in"]


def from_its_own_loader() -> Dict[str, Any]:
    engine = initialize(pipeline_module(False), config(accumulation=2), training_data=Numbers())
    losses = [engine.train_batch().item() for _ in range(5)]  # longer than the data: it starts over
    steps = engine.global_steps
    engine.destroy()
    mapping = initialize(language_model(), config(accumulation=1))
    from transformers import BatchEncoding
    ids, labels = mine(0)
    with_names = mapping.train_batch(iter([BatchEncoding({"ids": ids, "labels": labels})])).item()
    mapping.eval()
    mapping.train_batch(endless())
    training = mapping.module.training
    mapping.destroy()
    return {"losses": losses, "steps": steps, "named": with_names, "training": training}


def test_batches_come_from_the_engines_own_loader_or_by_name():
    results = run_ranks(2, from_its_own_loader)
    assert results[0] == results[1]
    assert results[0]["steps"] == 5 and results[0]["losses"][-1] < results[0]["losses"][0] and results[0]["training"]
    alone = language_model()
    expected = sum(alone(*tokens(number)).loss.item() for number in range(2)) / 2
    assert results[0]["named"] == pytest.approx(expected, abs=1e-6)


def misuse() -> Dict[str, str]:
    engine = initialize(language_model(), config())
    said = {"no data": failure(engine.train_batch),
            "logits wanted": failure(lambda: engine.eval_batch(endless(), return_logits=True))}
    with torch.no_grad():
        said["no grad"] = failure(lambda: engine.train_batch(endless()))
    said["no loss"] = failure(lambda: engine.train_batch(iter([tokens(0)[:1]])))
    engine.destroy()
    return said


@refused("PipelineModule", "eval_batch with return_logits, without compute_loss, or with another reduce_output than avg",
         "under Mobius eval_batch returns the mean loss. For other outputs call the engine itself under torch.no_grad()")
def test_misuse_is_one_clear_error():
    [said] = run_ranks(1, misuse)
    assert "training_data" in said["no data"]
    assert "torch.no_grad()" in said["logits wanted"]
    assert "eval_batch" in said["no grad"]
    assert "loss" in said["no loss"] and said["no loss"].startswith("ValueError")


def what_step_hooks_see() -> Dict[str, Any]:
    engine = initialize(language_model(), config(accumulation=2))
    apart = engine.optimizer.can_update_apart
    zeros = []
    engine.optimizer.optimizer.register_step_post_hook(
        lambda *_: zeros.append([name for name, p in engine.module.named_parameters() if p.dim() > 1 and not p.any()]))
    batches = endless()
    for _ in range(2):
        engine.train_batch(batches)
    return {"apart": (apart, engine.optimizer.can_update_apart), "zeros": zeros}


def test_hooks_on_the_optimizers_step_see_the_model_and_no_stand_ins():
    """Updates that run beside a sweep would show them a model whose parameters are replaced while a stage computes."""
    for seen in run_ranks(2, what_step_hooks_see):
        assert seen["apart"] == (True, False)
        assert seen["zeros"] and not any(seen["zeros"])

"""What a script may do with the engine, each compared with the unsplit model or with DeepSpeed's own answer."""

import copy
import gc
from typing import Any, Callable, Dict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.ranks import run_ranks
from tests.runtime.jobs import (Output, config, failure, initialize, language_model, mine, rank_and_size,
                                tokens, train_alone, weights)

SGD = {"type": "SGD", "params": {"lr": 0.5}}


def gradients_of(loss_of: Callable[[nn.Module], torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Gradients of the unsplit model."""
    model = language_model()
    loss_of(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def step_of(use: Callable[[Any], Any], **settings: Any) -> Dict[str, torch.Tensor]:
    """The gradients that ``use`` of a fresh engine puts into its next step: SGD with rate 1 shows them."""
    engine = initialize(language_model(), config(optimizer={"type": "SGD", "params": {"lr": 1.0}}, **settings))
    before = weights(engine.module)
    use(engine)
    engine.step()
    changed = {name: before[name] - parameter.detach() for name, parameter in engine.module.named_parameters()}
    left = settle(engine)
    engine.destroy()
    assert left == 0, f"{left} forwards are still kept"
    return changed


def settle(engine: Any) -> int:
    """How many forwards the pipeline still keeps when nothing of the script refers to them."""
    gc.collect()
    engine.pipeline.step("settle", None)
    return len(engine.pipeline._lifetimes._sweeps)


def same(ours: Dict[str, torch.Tensor], theirs: Dict[str, torch.Tensor], scale: float = 1.0) -> bool:
    """Equal up to the rounding of the weights' own update."""
    return all(torch.allclose(ours[name], scale * gradient, atol=2e-6, rtol=1e-4) for name, gradient in theirs.items())


# Ways to a backward. Each function runs on one rank, where its own gradients are the job's.

def backward_through_the_engine(engine):
    engine.backward(engine(*tokens(0)).loss)


def backward_on_the_loss(engine):
    engine(*tokens(0)).loss.backward()


def backward_on_the_raw_module(engine):
    engine.module(*tokens(0)).loss.backward()


def loss_from_returned_logits(engine):
    ids, labels = tokens(0)
    engine.backward(F.cross_entropy(engine(ids).logits.flatten(0, 1), labels.flatten()))


def loss_plus_something_of_the_logits(engine):
    output = engine(*tokens(0))
    engine.backward(output.loss + output.logits.pow(2).mean())


def two_forwards_one_backward(engine):
    first, second = engine(*tokens(0)).loss, engine(*tokens(1)).loss
    engine.backward(first + 2 * second)


def retained_graph(engine):
    loss = engine(*tokens(0)).loss
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)


def forwards_that_lead_nowhere(engine):
    engine(*tokens(3))
    with torch.no_grad():
        engine(*tokens(4))
        engine.module(*tokens(4))
    engine.backward(engine(*tokens(0)).loss)


def forgotten_gradients(engine):
    engine.backward(engine(*tokens(5)).loss)
    engine.optimizer.zero_grad()
    engine.backward(engine(*tokens(0)).loss)


def evaluation_in_between(engine):
    loss = engine(*tokens(0)).loss
    engine.eval()
    with torch.no_grad():
        engine(*tokens(1))
    engine.train()
    engine.backward(loss)


def model_loss(model):
    return model(*tokens(0)).loss


def with_logits(model):
    output = model(*tokens(0))
    return output.loss + output.logits.pow(2).mean()


def two_losses(model):
    return model(*tokens(0)).loss + 2 * model(*tokens(1)).loss


WAYS = [(backward_through_the_engine, model_loss, 1), (backward_on_the_loss, model_loss, 1),
        (backward_on_the_raw_module, model_loss, 1), (loss_from_returned_logits, model_loss, 1),
        (loss_plus_something_of_the_logits, with_logits, 1), (two_forwards_one_backward, two_losses, 1),
        (retained_graph, model_loss, 2), (forwards_that_lead_nowhere, model_loss, 1),
        (forgotten_gradients, model_loss, 1), (evaluation_in_between, model_loss, 1)]


def every_way() -> Dict[str, bool]:
    return {use.__name__: same(step_of(use), gradients_of(loss_of), scale) for use, loss_of, scale in WAYS}


def still_trains_after(use: Callable[[Any], Any]) -> bool:
    """Whether what ``use`` does to an engine first leaves its later training as it should be."""
    def first(engine):
        use(engine)
        backward_through_the_engine(engine)

    return same(step_of(first), gradients_of(model_loss))


def inference_mode(engine):
    with torch.inference_mode():
        assert not engine(*tokens(4)).loss.requires_grad


def a_zero_grad_of_the_engine(engine):
    engine.zero_grad()  # DeepSpeed's own forgets nothing that ZeRO-3 has accumulated


def copies_of_the_module(engine):
    import inspect
    assert list(inspect.signature(engine.module.forward).parameters) == ["ids", "labels"]
    copied = copy.deepcopy(engine.module)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert copied(*tokens(0)).logits.abs().max() == 0


def every_way_around() -> Dict[str, bool]:
    return {use.__name__: still_trains_after(use) for use in (inference_mode, a_zero_grad_of_the_engine,
                                                             copies_of_the_module)}


def test_what_scripts_do_between_steps_does_not_disturb_training():
    [result] = run_ranks(1, every_way_around)
    assert [name for name, equal in result.items() if not equal] == []


def test_every_way_to_a_backward_gives_the_unsplit_models_gradients_and_leaves_nothing_behind():
    [result] = run_ranks(1, every_way)
    assert [name for name, equal in result.items() if not equal] == []


def accumulation_semantics() -> Dict[str, bool]:
    """Gradients of one micro-batch of two, by how its backward was called."""
    expected = gradients_of(model_loss)

    def accumulated(first: Callable[[Any], Any]) -> Dict[str, torch.Tensor]:
        def use(engine):
            first(engine)
            engine.set_gradient_accumulation_boundary(True)  # steps without the second micro-batch

        return step_of(use, accumulation=2)

    def first_read_of_deferred_logits(engine):
        output = engine(*tokens(0))
        (output.loss + output.logits.pow(2).mean()).backward()

    return {
        "engine.backward divides": same(accumulated(backward_through_the_engine), expected, 0.5),
        "scale_wrt_gas=False does not": same(
            accumulated(lambda engine: engine.backward(engine(*tokens(0)).loss, scale_wrt_gas=False)), expected),
        "loss.backward divides": same(accumulated(backward_on_the_loss), expected, 0.5),
        "raw module: nobody divides": same(accumulated(backward_on_the_raw_module), expected),
        "deferred logits: divided": same(accumulated(first_read_of_deferred_logits), gradients_of(with_logits), 0.5),
        "engine.scale": same(accumulated(lambda engine: engine.scale(engine(*tokens(0)).loss).backward()), expected, 0.5),
    }


def test_gradient_accumulation_scales_as_deepspeed_does():
    [result] = run_ranks(1, accumulation_semantics)
    assert [name for name, equal in result.items() if not equal] == []


def boundary_by_hand() -> Dict[str, Any]:
    """accelerate's way: the script says which micro-batch is the last and steps once."""
    engine = initialize(language_model(), config(accumulation=1, optimizer=SGD))
    for micro_step in range(4):
        engine.set_gradient_accumulation_boundary(micro_step % 2 == 1)
        engine.backward(engine(*mine(micro_step)).loss / 2, scale_wrt_gas=False)
        if micro_step % 2 == 1:
            engine.step()
    after = weights(engine.module)
    steps = engine.global_steps
    engine.destroy()
    model = language_model()
    train_alone(model, lambda parameters: torch.optim.SGD(parameters, lr=0.5), 2, 2 * rank_and_size()[1])
    return {"steps": steps, "equal": all(torch.allclose(after[name], p, atol=1e-6) for name, p in weights(model).items())}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_boundary_set_by_hand(ranks):
    for result in run_ranks(ranks, boundary_by_hand):
        assert result == {"steps": 2, "equal": True}


def refusals() -> Dict[str, str]:
    engine = initialize(language_model(), config(optimizer=SGD))
    said = {}
    loss = engine(*tokens(0)).loss
    engine.backward(loss)
    said["second backward"] = failure(lambda: engine.backward(loss))
    prompts = torch.zeros(2, 3, requires_grad=True)
    said["input with gradient"] = failure(lambda: engine(tokens(0)[0], prompts))
    engine.destroy()
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1)
    config_without = config()
    del config_without["optimizer"]
    said["foreign optimizer"] = failure(lambda: initialize(language_model(), config_without, optimizer=stranger))
    return said


def test_what_is_refused_names_the_way_out():
    [said] = run_ranks(1, refusals)
    assert "second time" in said["second backward"] and "retain_graph=True" in said["second backward"]
    assert said["input with gradient"].startswith("ValueError") and "Detach it" in said["input with gradient"]
    assert "model.parameters()" in said["foreign optimizer"]


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids, labels = tokens(index, batch=1)
        return ids[0], labels[0]


def figures(folder: str) -> Dict[str, Any]:
    """Everything that scripts read, after two steps on the engine's own data loader."""
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine
    settings = config(accumulation=2, optimizer={"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True,
                                                                            "foreach": False}},
                      steps_per_print=1, wall_clock_breakdown=True,
                      csv_monitor={"enabled": True, "output_path": folder, "job_name": "job"})
    model = language_model(tied=True)
    engine, optimizer, loader, _ = deepspeed.initialize(model=model, config=settings, training_data=Numbers())
    samples = 0
    for ids, labels in list(loader)[:4]:
        samples += len(ids)
        engine.backward(engine(ids, labels).loss)
        engine.step()
    with engine.no_sync():
        engine.backward(engine(*tokens(0)).loss)
    full = engine.module_state_dict()
    result = {
        "isinstance": isinstance(engine, DeepSpeedEngine), "module": engine.module is model, "samples": samples,
        "parameters": [name for name, _ in engine.named_parameters()] == [f"module.{name}" for name, _ in
                                                                          model.named_parameters()],
        "counters": (engine.micro_steps, engine.global_steps, engine.global_samples, engine.skipped_steps),
        "applied": engine.was_step_applied(), "batch": (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(),
                                                        engine.gradient_accumulation_steps()),
        "lr": engine.get_lr(), "mom": engine.get_mom(), "config": engine.config["train_micro_batch_size_per_gpu"],
        "shapes": {name: tuple(tensor.shape) for name, tensor in full.items()}, "weights": weights(model),
        "engine_state": set(engine.state_dict()) == {f"module.{name}" for name in full},
        "loss_scale": optimizer.loss_scale, "overflow": optimizer.overflow, "norm": engine.get_global_grad_norm(),
        "timers": sorted(engine.get_wall_clock_timers()), "dtype": engine.get_data_types(),
        "second_loader": len(list(engine.deepspeed_io(Numbers()))),
    }
    engine.destroy()
    return result


@pytest.mark.parametrize("ranks", [2])
def test_everything_a_script_reads_is_there_and_whole_on_every_rank(ranks, tmp_path):
    results = run_ranks(ranks, figures, str(tmp_path))
    reference = language_model(tied=True).state_dict()
    for result in results:
        assert result["isinstance"] and result["module"] and result["parameters"] and result["engine_state"]
        assert result["samples"] == 8 and result["counters"] == (4, 2, 2 * 2 * 2 * ranks, 0)
        assert result["applied"] and result["batch"] == (2 * 2 * ranks, 2, 2)
        assert result["lr"] == [1e-3] and result["mom"] == [(0.9, 0.999)] and result["config"] == 2
        assert result["shapes"] == {name: tuple(tensor.shape) for name, tensor in reference.items()}
        assert result["loss_scale"] == 1 and result["overflow"] is False and result["norm"] > 0
        assert {"fwd_microstep", "bwd_microstep", "step_microstep"} <= set(result["timers"])
        assert result["second_loader"] == 16 // 2 // ranks
        for name, tensor in results[0]["weights"].items():
            assert torch.equal(tensor, result["weights"][name])
    files = {path.name for path in tmp_path.rglob("*.csv")}
    assert any("lr" in name for name in files), files


def evaluation_only() -> Dict[str, Any]:
    settings = config()
    del settings["optimizer"]
    engine = initialize(language_model(), settings)
    engine.eval()
    with torch.no_grad():
        output = engine(*mine(0))
    after = {"loss": output.loss.item(), "logits": output.logits.clone(), "optimizer": engine.optimizer is None,
             "backward": failure(lambda: engine.backward(language_model()(*tokens(0)).loss)), "left": settle(engine)}
    engine.destroy()
    alone = language_model()(*mine(0))
    after["equal"] = torch.equal(alone.logits, after.pop("logits")) and alone.loss.item() == after["loss"]
    with_grad = language_model()
    after["module_works_alone"] = torch.equal(engine.module(*mine(0)).logits, with_grad(*mine(0)).logits)
    return after


def test_an_engine_without_optimizer_evaluates():
    for result in run_ranks(2, evaluation_only):
        assert result["optimizer"] and result["equal"] and result["left"] == 0 and result["module_works_alone"]
        assert "must provide optimizer" in result["backward"]


def saved(folder: str) -> Dict[str, Any]:
    """A bf16 model with tied and frozen weights, saved in the ways that do work, and loaded back."""
    model = language_model(tied=True, frozen=1)
    engine = initialize(model, config(optimizer=SGD, bf16={"enabled": True}))
    engine.backward(engine(*mine(0)).loss)
    engine.step()
    written = engine.save_16bit_model(folder, "whole.bin"), engine.save_16bit_model(folder, "trained.bin",
                                                                                    exclude_frozen_parameters=True)
    consolidated = engine._zero3_consolidated_16bit_state_dict()
    kept = weights(engine.module)
    copied = copy.deepcopy(engine.module)
    with torch.no_grad():
        alone = copied(*mine(3)).loss.item()  # in no step with the other rank
        for parameter in copied.parameters():
            parameter.zero_()
    dist.barrier()  # the ranks of a node share the weights: none may load before all have looked
    untouched = all(torch.equal(kept[name], p) for name, p in weights(engine.module).items())
    masters = [master.detach().clone() for master in engine.optimizer.param_groups[0]["params"]]
    dist.barrier()
    engine.module.load_state_dict(engine.module.state_dict())
    precise = all(torch.equal(*pair) for pair in zip(masters, engine.optimizer.param_groups[0]["params"]))
    # What is loaded must survive the next step, which starts from the fp32 masters.
    other = {name: tensor.bfloat16() + 1 for name, tensor in language_model(tied=True).state_dict().items()}
    dist.barrier()
    engine.module.load_state_dict(other)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    engine.backward(engine(*mine(1)).loss)
    engine.step()
    survived = all(torch.equal(tensor, engine.module.state_dict()[name]) for name, tensor in other.items())
    engine.destroy()
    return {"written": written, "consolidated": None if consolidated is None else set(consolidated),
            "kept": kept, "untouched": untouched, "survived": survived, "precise": precise, "alone": alone}


def test_weights_are_saved_whole_once_and_loaded_weights_survive_a_step(tmp_path):
    results = run_ranks(2, saved, str(tmp_path))
    whole = torch.load(tmp_path / "whole.bin")
    trained = torch.load(tmp_path / "trained.bin")
    model = language_model(tied=True, frozen=1).bfloat16()
    model.load_state_dict(whole)
    assert model.head.weight is model.tokens.weight
    for result in results:
        assert result["written"] == (True, True) and result["untouched"] and result["survived"]
        assert result["precise"] and result["alone"] > 0
        for name, tensor in result["kept"].items():
            assert torch.equal(tensor, dict(model.named_parameters())[name])
    assert results[0]["consolidated"] == set(whole) and results[1]["consolidated"] is None
    frozen = {f"blocks.0.{name}" for name, _ in model.blocks[0].named_parameters()}
    assert set(trained) == set(whole) - frozen


class Autocast(nn.Module):
    """Casts differ between its parts: a matrix product is bf16, a norm is fp32."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return Output(x.float().pow(2).mean(), x)


def under_autocast() -> Dict[str, Any]:
    def model():
        torch.manual_seed(0)
        return Autocast()

    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    alone = model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = alone(inputs)
    expected.loss.backward()

    def trained(settings, call):
        engine = initialize(model(), {**settings, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}})
        before = weights(engine.module)
        output = call(engine)
        engine.backward(output.loss)  # outside of the block that the forward was in
        loss, dtype, logits = output.loss.item(), output.logits.dtype, output.logits.detach().clone()
        engine.step()
        changed = {name: before[name] - p for name, p in weights(engine.module).items()}
        engine.destroy()
        return (loss == expected.loss.item(), dtype == expected.logits.dtype, torch.equal(logits, expected.logits),
                all(torch.allclose(changed[name], p.grad, atol=1e-6) for name, p in alone.named_parameters()))

    def by_hand(engine):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return engine.module(inputs)

    section = config(torch_autocast={"enabled": True, "dtype": "bfloat16"})
    return {"section": trained(section, lambda engine: engine(inputs)), "by hand": trained(config(), by_hand)}


def test_autocast_holds_in_the_recomputation_as_well():
    [result] = run_ranks(1, under_autocast)
    assert result == {"section": (True,) * 4, "by hand": (True,) * 4}

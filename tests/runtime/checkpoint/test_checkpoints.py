"""Saving and loading under Mobius: what comes back is what was saved, to the last bit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from torch import nn

from mobius_ds.plugin import hooks
from tests.features import works
from tests.ranks import run_ranks
from tests.runtime.checkpoint.checkpoint_jobs import (CPU_ADAM, groups_of, model_of, ran, saved_tensors, scrambled,
                                                      start, train)
from tests.runtime.engine.test_pipeline_module import data, pipeline_module
from tests.runtime.jobs import config, initialize, rank_and_size, weights

DROPOUT = dict(dropout=0.2, tied=True, frozen=1)
BF16 = {"bf16": {"enabled": True}}


def resumed_unequal(folder: str) -> List[str]:
    """What differs between six steps straight and three and three, or nine and six and three."""
    unequal = []
    for case, (first, sections) in {"fp32": (3, {}), "bf16": (3, BF16), "DeepSpeed's Adam": (6, {"optimizer": CPU_ADAM}),
                                    "clipped": (3, {"gradient_clipping": 0.1})}.items():
        torch.manual_seed(5)
        straight = ran(True, 0, first + 3, model=DROPOUT, **sections)
        torch.manual_seed(5)
        before = ran(True, 0, first, save=f"{folder}/{case}", model=DROPOUT, **sections)
        torch.manual_seed(6)  # the seed of dropout comes from the checkpoint
        after = ran(True, first, 3, load=f"{folder}/{case}", model=DROPOUT, **sections)
        unequal += [f"{case}: rates or counters"] * ((straight.rates, straight.counters) != (after.rates, after.counters))
        unequal += [f"{case}: losses"] * (straight.losses != before.losses + after.losses)
        unequal += [f"{case}: {name}" for name, tensor in straight.weights.items()
                    if not torch.equal(tensor, after.weights[name])]
        unequal += [f"{case}: client state"] * (after.client != {"note": [0, first], "rank": rank_and_size()[0]})
    return unequal


@works("Checkpoints", "resuming, bit-equal to the uninterrupted run (dropout, warmup, accumulation, clipping)")
@pytest.mark.parametrize("ranks", [1, 2])
def test_three_steps_and_three_are_six(ranks, tmp_path):
    for unequal in run_ranks(ranks, resumed_unequal, str(tmp_path)):
        assert unequal == []


@works("Checkpoints", "loading on another number of ranks")
def test_a_job_goes_on_with_fewer_ranks(tmp_path):
    [straight] = run_ranks(1, ran, True, 0, 6, None, None, DROPOUT)
    parts = [run_ranks(4, ran, True, 0, 2, None, str(tmp_path), DROPOUT)[0],
             run_ranks(2, ran, True, 2, 2, str(tmp_path), str(tmp_path), DROPOUT)[0],
             run_ranks(1, ran, True, 4, 2, str(tmp_path), None, DROPOUT)[0]]
    assert sum((part.losses for part in parts), []) == pytest.approx(straight.losses, rel=1e-6)
    assert parts[-1].counters == straight.counters and parts[-1].rates == straight.rates
    for name, tensor in straight.weights.items():
        assert torch.allclose(parts[-1].weights[name], tensor, atol=2e-5), name
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step2", "global_step4", "latest", "latest_universal", "zero_to_fp32.py"]
    assert (tmp_path / "latest").read_text() == "global_step4"


OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.01),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.001, centered=True),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=0.001),
    "AMSGrad": lambda groups: torch.optim.AdamW(groups, lr=0.001, amsgrad=True),
    "of rows": lambda groups: Rows(groups, lr=0.01),
}


class Rows(torch.optim.Optimizer):
    """State of another shape than the parameter's, numbers, and a tensor without dimensions."""

    def __init__(self, groups, lr):
        super().__init__([{key: value for key, value in group.items() if key != "eps"} for group in groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (parameter for parameter in group["params"] if parameter.grad is not None):
                state = self.state[parameter]
                if not state:
                    state.update(step=0, scale=1.0, rows=torch.zeros(parameter.shape[:1]), largest=torch.tensor(1e-3))
                state["step"] += 1
                state["scale"] *= 0.5
                flat = parameter.grad.reshape(len(parameter), -1)
                state["rows"].mul_(0.9).add_(flat.pow(2).mean(1), alpha=0.1)
                state["largest"].copy_(torch.maximum(state["largest"], flat.abs().max()))
                scaled = flat / (state["rows"].sqrt() + state["largest"])[:, None]
                parameter.sub_(scaled.reshape(parameter.shape), alpha=group["lr"] * (state["scale"] + 1 / state["step"]))


def of_optimizer(make: Any, first: int, steps: int, load: str = None, save: str = None) -> Dict[str, torch.Tensor]:
    model = model_of(tied=True)
    settings = config(accumulation=2)
    del settings["optimizer"]
    engine = initialize(scrambled(model) if load else model, settings, optimizer=make(
        [{key: value for key, value in group.items() if key != "eps"} for group in groups_of(model)]))
    if load:
        engine.load_checkpoint(load)
    train(engine, first, steps)
    if save:
        engine.save_checkpoint(save)
    after = weights(engine.module)
    engine.destroy()
    return after


def optimizers_unequal(folder: str) -> List[str]:
    unequal = []
    for case, make in OPTIMIZERS.items():
        straight = of_optimizer(make, 0, 4)
        of_optimizer(make, 0, 2, save=f"{folder}/{case}")
        after = of_optimizer(make, 2, 2, load=f"{folder}/{case}")
        unequal += [f"{case}: {name}" for name, tensor in straight.items() if not torch.equal(tensor, after[name])]
    return unequal


@works("Checkpoints", "any torch optimizer")
def test_the_state_of_any_optimizer_comes_back(tmp_path):
    for unequal in run_ranks(2, optimizers_unequal, str(tmp_path)):
        assert unequal == []


class Normed(nn.Module):
    """Batch norm has buffers, one of them an integer; ``table`` is of no checkpoint."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
        self.register_buffer("table", torch.ones(8), persistent=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x * self.table).pow(2).mean() + x.mean()


def normed() -> nn.Module:
    torch.manual_seed(3)
    return Normed()


def of_buffers(folder: str) -> Dict[str, Any]:
    def batch(step):
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank_and_size()[0]))

    def trained(engine, first, steps):
        for step in range(first, first + steps):
            engine.backward(engine(batch(step)))
            engine.step()
        return {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}

    def unequal(expected, found):
        return [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]

    engine = initialize(normed(), config())
    straight = trained(engine, 0, 4)
    engine.destroy()
    engine = initialize(normed(), config())
    trained(engine, 0, 2)
    engine.save_checkpoint(folder)
    halfway = {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}
    trained(engine, 2, 1)
    engine.load_checkpoint(folder)  # in the middle of training
    result = {"back": unequal(halfway, engine.module.state_dict()), "again": unequal(straight, trained(engine, 2, 2))}
    engine.destroy()
    engine = initialize(scrambled(normed()), config())
    engine.module.table.fill_(1)
    engine.load_checkpoint(folder)
    result["resumed"] = unequal(straight, trained(engine, 2, 2))
    engine.destroy()
    engine = initialize(normed(), config(optimizer={"type": "SGD", "params": {"lr": 0.1}}))
    halfway, straight = trained(engine, 0, 1), trained(engine, 1, 1)
    engine.pipeline.step("copied", None)
    engine.module.load_state_dict(halfway)  # by hand, on every rank
    result["load_state_dict"] = unequal(straight, trained(engine, 1, 1))
    engine.destroy()
    return result


@works("Checkpoints", "loading in the middle of training (load_best_model_at_end)")
def test_buffers_come_back_and_a_running_job_can_be_set_back(tmp_path):
    for result in run_ranks(2, of_buffers, str(tmp_path)):
        assert result == {"back": [], "again": [], "resumed": [], "load_state_dict": []}


class Odd(nn.Module):
    """Parameters without dimensions, without elements, of integers, and with a slash in the name."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.table = nn.Parameter(torch.arange(6, dtype=torch.int32).view(2, 3), requires_grad=False)
        self.named = nn.ParameterDict({"a/b": nn.Parameter(torch.ones(3))})

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.scale).pow(2).mean() + self.named["a/b"].pow(2).mean()


def odd_unequal(folder: str) -> List[str]:
    def trained(engine, steps):
        for _ in range(steps):
            engine.backward(engine(torch.full((2, 7), 0.1 + engine.global_steps)))
            engine.step()
        return weights(engine.module)

    engine = initialize(Odd(), config())
    trained(engine, 2)
    engine.save_checkpoint(folder)
    straight = trained(engine, 2)
    engine.destroy()
    other = Odd()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(3)
    engine = initialize(other, config())
    engine.load_checkpoint(folder)
    again = trained(engine, 2)
    engine.destroy()
    return [name for name, tensor in straight.items() if not torch.equal(tensor, again[name])]


def test_odd_parameters_come_back(tmp_path):
    for unequal in run_ranks(2, odd_unequal, str(tmp_path)):
        assert unequal == []


def choices(folder: str) -> Dict[str, Any]:
    model = dict(frozen=1, tied=True)
    engine = start(True, model_of(**model))
    assert engine.load_checkpoint(f"{folder}/none") == (None, None)
    train(engine, 0, 3)
    saved = weights(engine.module)
    rate = engine.get_lr()
    returned = [engine.save_checkpoint(folder, tag="mine", client_state={"epoch": 7}),
                engine.save_checkpoint(folder, "other", save_latest=False),
                engine.save_checkpoint(f"{folder}/thin", exclude_frozen_parameters=True)]
    # Saved again as soon as it is loaded, before any rank knows what it updates.
    engine.destroy()
    engine = start(True, scrambled(model_of(**model)))
    path, client = engine.load_checkpoint(folder)
    engine.save_checkpoint(f"{folder}/again", "mine")
    engine.destroy()

    def loaded(at: str, **options: Any) -> Dict[str, Any]:
        engine = start(True, scrambled(model_of(**model)))
        before = weights(engine.module)
        path, client = engine.load_checkpoint(at, **options)
        same = {name for name, tensor in weights(engine.module).items() if torch.equal(tensor, saved[name])}
        kept = {name for name, tensor in weights(engine.module).items() if torch.equal(tensor, before[name])}
        result = {"same": len(same) == len(saved), "kept": sorted(kept), "state": len(engine.optimizer.state) > 0,
                  "steps": engine.global_steps, "scheduled": engine.lr_scheduler.last_batch_iteration,
                  "epoch": client.get("epoch"), "decay": [group["eps"] for group in engine.optimizer.param_groups],
                  "scheduler in client": "lr_scheduler" in client}
        engine.destroy()
        return result

    return {"returned": returned, "path": path, "epoch": client["epoch"], "rate": rate,
            "all": loaded(folder), "no optimizer": loaded(folder, load_optimizer_states=False),
            "no scheduler": loaded(folder, load_lr_scheduler_states=False),
            "module": loaded(folder, load_module_only=True), "tag": loaded(folder, tag="other"),
            "thin": loaded(f"{folder}/thin", load_module_strict=False)}


@works("Checkpoints", "tag, client_state, save_latest, exclude_frozen_parameters, load_optimizer_states, "
                      "load_lr_scheduler_states, load_module_only, load_module_strict")
def test_every_argument_does_what_it_does_in_deepspeed(tmp_path):
    results = run_ranks(2, choices, str(tmp_path))
    for rank, result in enumerate(results):
        assert result["returned"] == [True] * 3 and result["epoch"] == 7
        assert result["path"] == str(tmp_path / "mine" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        whole = {"same": True, "kept": [], "state": True, "steps": 3, "scheduled": 2, "epoch": 7, "decay": [1e-8, 1e-6],
                 "scheduler in client": False}
        assert result["all"] == whole
        assert result["no optimizer"] == {**whole, "state": False}
        assert result["no scheduler"] == {**whole, "scheduled": -1, "scheduler in client": True}
        assert result["module"] == {**whole, "state": False, "steps": 0, "scheduled": -1}
        assert result["tag"] == {**whole, "epoch": None}
        frozen = sorted(name for name in model_of().state_dict() if name.startswith("blocks.0."))
        assert result["thin"] == {**whole, "same": False, "kept": frozen, "epoch": None}
    assert (tmp_path / "latest").read_text() == "mine"
    first, again = saved_tensors(tmp_path / "mine"), saved_tensors(tmp_path / "again" / "mine")
    assert set(first) == set(again) and len(first) > 60
    for path, content in first.items():
        assert torch.equal(torch.as_tensor(content), torch.as_tensor(again[path])), path
    assert not any("frozen" in path for path in saved_tensors(tmp_path / "thin" / "global_step3"))


def exported(folder: str) -> Dict[str, torch.Tensor]:
    """A bf16 job's checkpoint, and what its fp32 masters were. Fills ``save_16bit_model`` files too."""
    model = model_of(tied=True, frozen=1)
    model.register_buffer("scale", torch.full((3,), 1.5))
    engine = start(True, model, **BF16)
    train(engine, 0, 2)
    engine.save_checkpoint(folder, tag="first")
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder, "whole.bin")
    engine.save_16bit_model(folder, "trained.bin", exclude_frozen_parameters=True)
    assert engine.zero_gather_16bit_weights_on_model_save()
    expected = {name: tensor.float().clone() for name, tensor in engine.module.state_dict().items()}
    for name in engine.optimizer.trains:
        expected[name] = engine.pipeline.store.master(name).detach().clone()
    expected["head.weight"] = expected["tokens.weight"]
    engine.pipeline.step("copied", None)
    engine.destroy()
    return expected


def run_script(folder: Path, *arguments: str) -> str:
    """Runs the script beside the checkpoints where neither this project nor DeepSpeed can be imported."""
    blocker = ("import sys, runpy\n"
               "for name in ('mobius_ds', 'deepspeed', 'numpy.distutils'): sys.modules[name] = None\n"
               f"sys.argv = ['zero_to_fp32.py', {str(folder)!r}, *{list(arguments)!r}]\n"
               f"runpy.run_path({str(folder / 'zero_to_fp32.py')!r}, run_name='__main__')\n")
    done = subprocess.run([sys.executable, "-c", blocker], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    return done.stdout


@works("Checkpoints", "zero_to_fp32.py beside the checkpoints (shards, safetensors, tied weights)")
@works("Checkpoints", "save_16bit_model, exclude_frozen_parameters")
def test_weights_are_exported_by_a_script_that_stands_alone(tmp_path):
    expected = run_ranks(2, exported, str(tmp_path))[0]
    assert os.access(tmp_path / "zero_to_fp32.py", os.X_OK)

    assert run_script(tmp_path, str(tmp_path / "bin")).split() == [str(tmp_path / "bin" / "pytorch_model.bin")]
    whole = torch.load(tmp_path / "bin" / "pytorch_model.bin", weights_only=True)
    assert set(whole) == set(expected)
    for name, tensor in expected.items():
        assert whole[name].dtype == torch.float32 and torch.equal(whole[name], tensor), name
    assert whole["head.weight"].data_ptr() == whole["tokens.weight"].data_ptr()

    run_script(tmp_path, str(tmp_path / "shards"), "-t", "first", "--max_shard_size", "8KB", "--exclude_frozen_parameters")
    index = json.loads((tmp_path / "shards" / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 2 and set(index) == {name for name in expected if not name.startswith("blocks.0.")}
    for name, file in index.items():
        assert torch.equal(torch.load(tmp_path / "shards" / file, weights_only=True)[name], expected[name])

    from safetensors.torch import load_file
    run_script(tmp_path, str(tmp_path / "safe"), "--safe_serialization")
    safe = load_file(tmp_path / "safe" / "model.safetensors")
    assert set(safe) == set(expected) - {"head.weight"}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in safe.items())

    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as read_by_deepspeed
    hooks.install()
    read = read_by_deepspeed(str(tmp_path))
    assert set(read) == set(expected) and all(torch.equal(tensor, expected[name]) for name, tensor in read.items())

    for path in tmp_path.rglob("frozen.pt"):  # and not the memory of the whole model around it
        tensor = torch.load(path)["param"]
        assert tensor.dtype == torch.bfloat16 and tensor.untyped_storage().nbytes() == tensor.nbytes
    whole = torch.load(tmp_path / "whole.bin")
    assert set(whole) == set(expected) and whole["head.weight"].data_ptr() == whole["tokens.weight"].data_ptr()
    assert all(torch.equal(tensor, expected[name].to(tensor.dtype)) for name, tensor in whole.items())
    assert set(torch.load(tmp_path / "trained.bin")) == set(index)


class Wide(nn.Module):
    """64 MiB of fp32 weights in layers of 4 MiB."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(16))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def grown_by(work: Any) -> int:
    """Bytes by which the most memory that ``work`` ever held exceeds what was held before."""
    def status(key):
        [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
        return int(line.split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def memory_of_a_save(folder: str) -> Dict[str, int]:
    engine = initialize(Wide(), config())
    engine.backward(engine(torch.randn(2, 1024)))
    engine.step()
    engine.save_checkpoint(folder, "warm")
    result = {"saving": grown_by(lambda: engine.save_checkpoint(folder, "measured"))}
    size = sum(path.stat().st_size for path in Path(folder, "measured").rglob("*"))
    engine.destroy()
    return {**result, "size": size}


def test_a_save_takes_memory_for_a_parameter_not_for_a_model(tmp_path):
    [result] = run_ranks(1, memory_of_a_save, str(tmp_path))
    assert 192 * 2**20 < result["size"] < 200 * 2**20  # values and two moments, each written once
    assert result["saving"] < 24 * 2**20


def of_a_pipeline_module(folder: str) -> List[str]:
    settings = config(accumulation=4, optimizer=CPU_ADAM)

    def trained(steps, load=None, save=None):
        engine = initialize(pipeline_module(2, tied=True, drop=0.1), settings)
        if load:
            engine.load_checkpoint(load)
        batches = data(2)
        for _ in range(4 * engine.global_steps):
            next(batches)
        losses = [engine.train_batch(batches).item() for _ in range(steps)]
        if save:
            engine.save_checkpoint(save)
        after = weights(engine.module)
        engine.destroy()
        return losses, after

    straight, expected = trained(4)
    before, _ = trained(2, save=folder)
    after, found = trained(2, load=folder)
    return ["losses"] * (straight != before + after) + [name for name, tensor in expected.items()
                                                        if not torch.equal(tensor, found[name])]


@works("PipelineModule", "save_checkpoint and load_checkpoint")
def test_a_pipeline_module_is_saved_and_resumed(tmp_path):
    for unequal in run_ranks(2, of_a_pipeline_module, str(tmp_path)):
        assert unequal == []

"""What happens where the device's memory ends, and that no more of it is taken than the plan says."""

from typing import Any, Callable, Dict, List, Tuple
from unittest import mock

import torch
from accelerate.utils.memory import find_executable_batch_size, should_reduce_batch_size
from torch import nn

from mobius_ds.inputs.units import GIB
from mobius_ds.runtime.sweeps import pipeline
from tests.features import survives
from tests.ranks import run_ranks
from tests.runtime.jobs import config, failure, initialize, language_model, mine, rank_and_size, tokens


def section(**mobius: Any) -> Dict[str, Any]:
    return {**config(), "mobius": {"enabled": True, "timeout_seconds": 60, **mobius}}


def train(engine: Any, steps: int, batch: int = 2) -> List[float]:
    losses = []
    for step in range(steps):
        rank, size = rank_and_size()
        loss = engine(*tokens(step * size + rank, batch)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# The device's memory.

ALLOCATION = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB, 1.00 GiB is free."


class Exhausting(torch.autograd.Function):

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError(ALLOCATION)


def raising(error: Callable[[], Any]) -> Callable:
    def forward(x):
        error()
    return forward


def exhausted() -> List[Tuple[str, bool, bool]]:
    def no_memory() -> None:
        raise torch.OutOfMemoryError(ALLOCATION)

    rank, _ = rank_and_size()
    found = []
    for kind in ("forward", "backward", "host allocator"):
        engine = initialize(language_model(), section(layers_per_stage=1))
        train(engine, 1)
        if rank == 1:
            up = engine.module.blocks[2].up  # layer 3
            own = up.forward
            up.forward = {"forward": raising(no_memory), "backward": lambda x: Exhausting.apply(own(x)),
                          "host allocator": raising(lambda: torch.empty(2**60))}[kind]
        try:
            train(engine, 1)
        except torch.OutOfMemoryError as error:
            found.append((f"{type(error).__name__}: {error}", should_reduce_batch_size(error), error.__cause__ is not None))
        finally:
            engine.destroy()
    return found


@survives("Memory", "the device runs out of memory in the forward or backward of a stage",
          "`torch.OutOfMemoryError` on every rank, which names stage, layers, microbatch, what was wanted, what is held, "
          "and the settings that help")
def test_a_device_out_of_memory_is_one_error_on_every_rank():
    others, owners = run_ranks(2, exhausted)
    wants = (ALLOCATION, ALLOCATION, f"you tried to allocate {4 * 2**60}")
    for (said, reduce, _), wanted, doing in zip(owners, wants, ("forward", "backward", "forward")):
        assert said.startswith("DeviceOutOfMemory: the device of rank 1 is out of memory. ")
        assert f"In {doing} of stage 3 (blocks.2) for microbatch 0 of rank 0: " in said and wanted in said
        assert "are held for two slots, their gradients and boundary activations" in said
        assert all(setting in said for setting in ("train_micro_batch_size_per_gpu", '"stages"', "device_memory_gb"))
        assert reduce
    assert all(caused for _, _, caused in owners)
    for (said, reduce, _), (owned, _, _) in zip(others, owners):
        assert said.startswith("PeerOutOfMemory: rank 1 is gone (") and owned in said and reduce


def searching() -> Tuple[List[int], List[float]]:
    tried: List[int] = []

    @find_executable_batch_size(starting_batch_size=8)
    def attempt(batch_size: int) -> List[float]:
        tried.append(batch_size)
        model = language_model()
        if rank_and_size()[0] == 1:  # where the first forward that is too large fails
            up, own = model.blocks[2].up, model.blocks[2].up.forward
            up.forward = lambda x: raising(lambda: (_ for _ in ()).throw(torch.OutOfMemoryError(ALLOCATION)))(x) \
                if len(x) > 2 else own(x)
        engine = initialize(model, section(layers_per_stage=1))
        losses = train(engine, 2, batch_size)
        engine.destroy()
        return losses

    return tried, attempt()


def test_accelerates_search_for_a_batch_size_goes_on_with_a_new_engine():
    for tried, losses in run_ranks(2, searching):
        assert tried[0] == 8 and tried[-1] <= 2 < tried[-2] and len(losses) == 2


def over_the_budget() -> str:
    engine = initialize(language_model(), section(layers_per_stage=1, device_memory_gb=36_000 / GIB))
    train(engine, 1)
    said = failure(lambda: train(engine, 1, batch=64))
    engine.destroy()
    return said


def test_a_larger_micro_batch_than_was_planned_for_names_the_budget():
    for rank, said in enumerate(run_ranks(2, over_the_budget)):
        assert "boundary activations of two microbatches needs" in said and "budget (device_memory_gb)" in said
        assert "In reserving room for its stages, most of it for the weights of stage " in said
        assert "train_micro_batch_size_per_gpu" in said


# The planner's memory model.

MODELS: Dict[str, Callable[[], nn.Module]] = {
    "plain": language_model,
    "tied": lambda: language_model(tied=True),
    "unused": lambda: language_model(unused=True),
    "first half frozen": lambda: language_model(blocks=8, frozen=4),
}
PLANS = [1, 2, 3, None]
FROZEN_BESIDE_TRAINED = [1, 4, 4, 1]
"""For ten layers: rank 1 has a stage of frozen blocks and one of the trained head."""


def measured_and_needed() -> List[Tuple[str, int, int, int]]:
    """Name, what training alone took, what reading outputs and evaluating took besides, and what was needed of a device."""
    rank, _ = rank_and_size()
    found = []
    for name, make in MODELS.items():
        for layers in [*PLANS, *([FROZEN_BESIDE_TRAINED] if name == "first half frozen" else [])]:
            with mock.patch.object(pipeline, "gpu_needs", wraps=pipeline.gpu_needs) as asked:
                needs: List[Any] = []
                asked.side_effect = lambda *of: needs.extend(asked.__dict__["_mock_wraps"](*of)) or needs
                engine = initialize(make(), section(**({"layers_per_stage": layers} if layers else {})))
                train(engine, 2)
            trained = engine.peak_device_bytes()
            engine(*mine(0)).logits.sum()
            with torch.no_grad():
                engine(*mine(1))
            train(engine, 1)
            found.append((f"{name}, {layers}", trained, engine.peak_device_bytes(), needs[rank].total))
            engine.destroy()
    return found


def test_a_device_takes_no_more_than_the_plan_says_and_not_much_less():
    for found in run_ranks(2, measured_and_needed, timeout=240):
        for name, trained, peak, needed in found:
            assert trained <= peak <= needed <= 1.1 * trained, name

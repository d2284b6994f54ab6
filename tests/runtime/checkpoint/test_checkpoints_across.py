"""Checkpoints across the flag: what ZeRO saved goes on under Mobius, and back, and neither notices."""

import argparse
from typing import Any, Dict

import pytest
import torch
import torch.distributed as dist

from tests.features import works
from tests.ranks import run_ranks
from tests.runtime.checkpoint.checkpoint_jobs import (ADAMW, model_of, ran, saved_tensors, scrambled, start, train,
                                                      whole_weights)
from tests.runtime.checkpoint.test_checkpoints import normed
from tests.runtime.jobs import config, failure, initialize, rank_and_size

MODEL = dict(tied=True, frozen=1, unused=True)
BF16 = {"bf16": {"enabled": True}}
UNIVERSAL = {"checkpoint": {"load_universal": True}}
"""What plain DeepSpeed needs in its config; going back from Mobius must not."""


def zero(stage: int) -> Dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


def convert(folder: str) -> None:
    """DeepSpeed's own converter."""
    from deepspeed.checkpoint import ds_to_universal
    if rank_and_size()[0] == 0:
        ds_to_universal.main(argparse.Namespace(
            input_folder=f"{folder}/global_step3", output_folder=f"{folder}/universal", num_extract_workers=1,
            num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True))
    dist.barrier()


def both_ways(root: str) -> Dict[str, Any]:
    """Goes on from step 3 under the other flag, from every kind of checkpoint."""
    import deepspeed.checkpoint.ds_to_universal  # noqa: F401, before engines change what it would see
    result = {"straight": ran(False, 0, 6, model=MODEL)}
    for stage in (1, 2, 3):
        result[f"ZeRO-{stage} before"] = ran(False, 0, 3, save=f"{root}/zero{stage}", model=MODEL,
                                             **(zero(stage) if stage < 3 else {}))
        convert(f"{root}/zero{stage}")
        result[f"ZeRO-{stage} universal to Mobius"] = ran(True, 3, 3, load=f"{root}/zero{stage}", model=MODEL, **UNIVERSAL)
    result["ZeRO-3 to Mobius"] = ran(True, 3, 3, load=f"{root}/zero3", model=MODEL)
    # Several sub-groups in each parameter group.
    small = {"zero_optimization": {**config()["zero_optimization"], "sub_group_size": 600}}
    result["ZeRO-3, small before"] = ran(False, 0, 3, save=f"{root}/small", model=MODEL, **small)
    result["ZeRO-3, small to Mobius"] = ran(True, 3, 3, load=f"{root}/small", model=MODEL)
    result["Mobius before"] = ran(True, 0, 3, save=f"{root}/mobius", model=MODEL)
    result["Mobius to ZeRO-3"] = ran(False, 3, 3, load=f"{root}/mobius", model=MODEL)
    result["Mobius to ZeRO-3, small"] = ran(False, 3, 3, load=f"{root}/mobius", model=MODEL, **small)
    for stage in (1, 2):
        result[f"Mobius to ZeRO-{stage}"] = ran(False, 3, 3, load=f"{root}/mobius", model=MODEL, **zero(stage))
    result["Mobius to ZeRO-3, asked for"] = ran(False, 3, 3, load=f"{root}/mobius", model=MODEL, **UNIVERSAL)
    return result


@works("Checkpoints", "ZeRO-3's own shards, loaded under Mobius without converting them")
@works("Checkpoints", "Universal Checkpoints of ZeRO-1, 2 and 3, loaded under Mobius")
@works("Checkpoints", "going back to ZeRO-3 (or 1, 2) by the flag alone, with moments, step, rates, groups, frozen and tied")
def test_a_job_goes_on_under_the_other_flag(tmp_path):
    [result, _] = run_ranks(2, both_ways, str(tmp_path), timeout=250)
    straight = result.pop("straight")
    for case, part in result.items():
        expected = straight.losses[:3] if "before" in case else straight.losses[3:]
        assert part.losses == pytest.approx(expected, rel=1e-6), case
        if "before" not in case:
            assert part.counters == straight.counters and part.rates == straight.rates, case
            assert part.client == {"note": [0, 3], "rank": 0}, case
            for name, tensor in straight.weights.items():
                assert torch.allclose(part.weights[name], tensor, atol=2e-5), (case, name)
                assert not name.startswith("blocks.0.") or torch.equal(part.weights[name], tensor), (case, name)
    # And other numbers of ranks at the same time.
    for ranks, mobius, folder, first in [(1, True, "zero3", 3), (4, True, "zero3", 3), (1, False, "mobius", 3),
                                         (4, False, "mobius", 3)]:
        part = run_ranks(ranks, ran, mobius, first, 3, str(tmp_path / folder), None, MODEL)[0]
        assert part.losses == pytest.approx(straight.losses[3:], rel=1e-6), (ranks, folder)
        assert part.counters == straight.counters and part.rates == straight.rates, (ranks, folder)


def exactly(root: str) -> Dict[str, Any]:
    """bf16: fp32 masters, moments and frozen weights are carried over to the bit, either way."""
    unequal = []
    ran(False, 0, 2, save=f"{root}/zero", model=MODEL, **BF16)
    engine = start(True, scrambled(model_of(**MODEL)), **BF16)
    engine.load_checkpoint(f"{root}/zero")
    engine.save_checkpoint(f"{root}/mobius", tag="global_step2")
    casts = [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad
             and not torch.equal(parameter.detach(), engine.pipeline.store.master(name).bfloat16())]
    weights = whole_weights(engine)
    engine.destroy()
    engine = start(False, scrambled(model_of(**MODEL)), **BF16)
    engine.load_checkpoint(f"{root}/mobius")
    back = whole_weights(engine)
    hyper = [(group["weight_decay"], group["eps"]) for group in engine.optimizer.param_groups]
    steps = {id(state["step"]): float(state["step"]) for state in engine.optimizer.optimizer.state.values()}
    states = len(engine.optimizer.optimizer.state)
    engine.save_checkpoint(f"{root}/again", tag="global_step2")
    unequal += [name for name, tensor in weights.items() if not torch.equal(tensor, back[name])]
    engine.destroy()
    rank = rank_and_size()[0]
    name = f"global_step2/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    first, again = (torch.load(f"{root}/{where}/{name}", weights_only=False)["optimizer_state_dict"]
                    for where in ("zero", "again"))
    for before, after in zip(first["fp32_flat_groups"], again["fp32_flat_groups"]):
        unequal += ["masters"] * (not torch.equal(before, after))
    for group, state in first["optimizer_state_dict"]["state"].items():
        unequal += [key for key, value in state.items() if not torch.equal(
            torch.as_tensor(value), torch.as_tensor(again["optimizer_state_dict"]["state"][group][key]))]
    return {"unequal": unequal, "casts": casts, "hyper": hyper, "steps": steps, "states": states}


def test_masters_moments_and_frozen_weights_survive_a_round_trip_to_the_bit(tmp_path):
    for result in run_ranks(2, exactly, str(tmp_path)):
        assert result["unequal"] == [] and result["casts"] == []
        assert result["hyper"] == [(0.3, 1e-8), (0.0, 1e-6)]
        assert len(result["steps"]) == result["states"] == 2 and set(result["steps"].values()) == {2.0}


def other_choices(root: str) -> Dict[str, Any]:
    """What ZeRO-3 loads of a folder of Mobius beside a whole job, and that it stays as it was with its own."""
    result = {}

    def loaded(engine, folder, **options):
        path, client = engine.load_checkpoint(folder, **options)
        left = whole_weights(engine)
        engine.destroy()
        return left, engine.global_steps

    first = start(True, model_of(**MODEL))
    train(first, 0, 2)
    first.save_checkpoint(f"{root}/mobius")
    first.save_checkpoint(f"{root}/thin", exclude_frozen_parameters=True)
    saved = whole_weights(first)
    first.destroy()
    for case, options in {"module": dict(load_module_only=True), "no optimizer": dict(load_optimizer_states=False),
                          "tag": dict(tag="global_step2")}.items():
        left, steps = loaded(start(False, scrambled(model_of(**MODEL))), f"{root}/mobius", **options)
        result[case] = (steps, [name for name, tensor in saved.items() if not torch.equal(tensor, left[name])])
    left, steps = loaded(start(False, scrambled(model_of(**MODEL))), f"{root}/thin", load_module_strict=False)
    result["thin"] = (steps, [name for name, tensor in saved.items() if not torch.equal(tensor, left[name])])
    result["thin, strict"] = failure(lambda: loaded(start(False, model_of(**MODEL)), f"{root}/thin"))

    # Saved under one tag by turns, as Accelerate does.
    where = dict(load_dir=f"{root}/turns", tag="same")
    for turn, mobius in enumerate([True, False, False, True, True]):
        engine = start(mobius, scrambled(model_of(**MODEL)) if turn else model_of(**MODEL))
        if turn:
            engine.load_checkpoint(**where)
            again = whole_weights(engine)
            result[f"turn {turn}"] = (engine.global_steps, [name for name, tensor in saved.items()
                                                            if not torch.equal(tensor, again[name])])
        train(engine, turn, 1)
        engine.save_checkpoint(f"{root}/turns", tag="same")
        saved = whole_weights(engine)
        dist.barrier()
        engine.destroy()

    momentum = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    plain = {"type": "SGD", "params": {"lr": 0.1}}
    for name, optimizer in {"momentum": momentum, "plain": plain}.items():
        engine = initialize(model_of(), config(True, accumulation=2, optimizer=optimizer))
        train(engine, 0, 1)
        engine.save_checkpoint(f"{root}/{name}")
        saved = whole_weights(engine)
        engine.destroy()
        engine = initialize(scrambled(model_of()), config(
            False, accumulation=2, optimizer=optimizer, zero_allow_untested_optimizer=True,
            zero_force_ds_cpu_optimizer=False))
        result[name] = failure(lambda: engine.load_checkpoint(f"{root}/{name}"))
        result[f"{name} same"] = all(torch.equal(tensor, saved[n]) for n, tensor in whole_weights(engine).items())
        engine.destroy()

    engine = initialize(normed(), config(True, optimizer=ADAMW))
    engine.backward(engine(torch.randn(4, 8)))
    engine.step()
    engine.save_checkpoint(f"{root}/normed")
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    engine.destroy()
    engine = initialize(scrambled(normed()), config(False, optimizer=ADAMW))
    engine.load_checkpoint(f"{root}/normed")
    result["buffers"] = [name for name, buffer in engine.module.named_buffers()
                         if name != "table" and not torch.equal(buffer, buffers[name])]
    result["config"] = engine.load_universal_checkpoint()
    engine.destroy()
    return result


def test_weights_alone_other_optimizers_and_buffers_go_back_or_are_refused(tmp_path):
    for result in run_ranks(2, other_choices, str(tmp_path), timeout=200):
        frozen = sorted(name for name in model_of().state_dict() if name.startswith("blocks.0."))
        assert result["module"] == (0, []) and result["no optimizer"] == (2, []) and result["tag"] == (2, [])
        assert result["thin"][0] == 2 and sorted(result["thin"][1]) == frozen
        assert "lacks the frozen parameter 'blocks.0." in result["thin, strict"]
        for turn in range(1, 5):
            assert result[f"turn {turn}"] == (turn, [])
        assert "momentum_buffer; ZeRO loads Adam's only" in result["momentum"]
        assert result["plain"] == "nothing was raised" and result["plain same"]
        assert result["buffers"] == [] and result["config"] is False


def test_a_second_save_of_what_was_loaded_from_zero3_holds_the_same(tmp_path):
    run_ranks(2, ran, False, 0, 2, None, str(tmp_path / "zero"), MODEL)
    run_ranks(1, ran, True, 2, 0, str(tmp_path / "zero"), str(tmp_path / "one"), MODEL)
    run_ranks(4, ran, True, 2, 0, str(tmp_path / "one"), str(tmp_path / "four"), MODEL)
    one, four = (saved_tensors(tmp_path / where / "global_step2") for where in ("one", "four"))
    assert set(one) == set(four)
    for path, content in one.items():
        assert torch.equal(torch.as_tensor(content), torch.as_tensor(four[path])), path

"""PEFT's adapters: what is frozen stays bit for bit and costs nothing, and losses are those of ZeRO-3."""

import argparse
import copy
import json
from pathlib import Path
from typing import Any, Callable, Dict

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mobius_ds.reporting import compare
from tests.features import works
from tests.integrations import jobs
from tests.integrations.tiny import VOCABULARY, ids_of, llama, llama_config, lora, trained
from tests.ranks import run_ranks
from tests.runtime.jobs import config, rank_and_size, weights

CHECKOUT = Path(__file__).parents[2]
BF16 = {"bf16": {"enabled": True}}


def engine_of(model: Any, **settings: Any) -> Any:
    import deepspeed
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained(model), config=copy.deepcopy(config(**settings)))
    return engine


def step(engine: Any, number: int, vocabulary: int = VOCABULARY) -> float:
    rank, size = rank_and_size()
    ids = ids_of(number * size + rank, vocabulary=vocabulary)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


# A frozen base.

def base_in_bf16_adapters_in_fp32(folder: str) -> Dict[str, Any]:
    """As Hugging Face loads it under a stage-3 config: the base under ``zero.Init``, the adapters after it."""
    import deepspeed
    from peft import PeftModel
    from transformers import LlamaForCausalLM
    values = llama().bfloat16().state_dict()
    with deepspeed.zero.Init(config_dict_or_path=config(**BF16)):
        base = LlamaForCausalLM(llama_config())
    if dist.get_rank() == 0:
        base.load_state_dict(values)
    model = lora(base)
    engine = engine_of(model, gradient_clipping=1.0, **BF16)
    before = weights(model)
    dtypes = {(parameter.dtype, parameter.requires_grad) for parameter in model.parameters()}
    losses = [step(engine, 0)]
    engine.take_traffic()
    losses += [step(engine, number) for number in range(1, 4)]
    traffic = engine.take_traffic()
    moments = sum(state["exp_avg"].numel() for state in engine.optimizer.state.values())
    masters = engine.pipeline.store.layout.needs_masters
    fp32_bytes = engine.pipeline.store.layout.full_bytes
    changed = {name for name, parameter in weights(model).items() if not torch.equal(parameter, before[name])}
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    engine.destroy()
    dist.barrier()
    ids = ids_of(99)
    with torch.no_grad():
        logits = model(ids).logits
        again = llama().bfloat16()
        reloaded = PeftModel.from_pretrained(again, folder)(ids).logits
        merged = model.merge_and_unload()(ids).logits  # every rank merges its own
    return {"losses": losses, "dtypes": dtypes, "traffic": traffic, "moments": moments, "masters": masters,
            "fp32_bytes": fp32_bytes, "changed": changed, "frozen": frozen, "names": set(before),
            "reloaded": torch.equal(logits, reloaded), "merged": (logits - merged).abs().max().item(),
            "base": sum(values[name].numel() for name in values), "scale": logits.abs().max().item()}


def adapter_elements() -> int:
    return sum(parameter.numel() for parameter in trained(lora(llama())))


def losses_of_the_unsplit_model(ranks: int, steps: int) -> list:
    """Clipped as the engine clips, on all ranks' micro-batches."""
    model = lora(llama().bfloat16())
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    losses = []
    for number in range(steps):
        for rank in range(ranks):
            ids = ids_of(number * ranks + rank)
            loss = model(input_ids=ids, labels=ids).loss
            losses.append(loss.item())
            (loss / ranks).backward()
        torch.nn.utils.clip_grad_norm_(trained(model), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("ranks", [2, 4])
@works("PEFT", "LoRA in fp32 on a frozen bf16 base: saved, reloaded, merged")
def test_a_frozen_base_stays_bit_for_bit_and_has_no_state_and_no_gradients(ranks, tmp_path):
    results = run_ranks(ranks, base_in_bf16_adapters_in_fp32, str(tmp_path))
    adapters = adapter_elements()
    for result in results:
        assert result["dtypes"] == {(torch.bfloat16, False), (torch.float32, True)}
        assert result["changed"] and not result["changed"] & result["frozen"]
        assert result["changed"] == result["names"] - result["frozen"]
        assert not result["masters"] and result["fp32_bytes"] == 4 * adapters
        assert result["reloaded"] and result["merged"] < 0.02 * result["scale"]
    moved = {category: sum(result["traffic"][category] for result in results) for category in results[0]["traffic"]}
    assert moved["gradients_out"] == 3 * 4 * adapters
    # With four ranks the embedding is a stage of its own, in which there is nothing to differentiate.
    only_forward = 2 * VOCABULARY * llama_config().hidden_size if ranks == 4 else 0
    assert moved["parameters_in"] == 3 * (2 * (2 * results[0]["base"] + 4 * adapters) - only_forward)
    assert sum(result["moments"] for result in results) == adapters
    seen = [result["losses"][number] for number in range(4) for result in results]
    assert seen == pytest.approx(losses_of_the_unsplit_model(ranks, 4), abs=2e-3)
    saved = sum(path.stat().st_size for path in Path(tmp_path).glob("*.safetensors"))
    assert 4 * adapters < saved < 4 * adapters + 8192


# Kinds of adapters, and what people do with them, against ZeRO-3.

def tied_and_resized(**settings: Any) -> Any:
    base = llama(tied=True)
    base.resize_token_embeddings(VOCABULARY + 6, mean_resizing=False)
    return lora(base, **settings)


def with_checkpointing() -> Any:
    base = llama()
    base.gradient_checkpointing_enable()
    base.enable_input_require_grads()
    base.train()
    return lora(base)


def prompted(kind: str, **settings: Any) -> Any:
    """Trained vectors before the text, or in a cache before every layer's keys and values."""
    import peft
    torch.manual_seed(2)
    return peft.get_peft_model(llama(), getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3, **settings))


def scaled_activations() -> Any:
    from peft import IA3Config, get_peft_model
    return get_peft_model(llama(), IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"],
                                             feedforward_modules=["down_proj"]))


NEW_TOKENS = list(range(VOCABULARY, VOCABULARY + 6))

KINDS: Dict[str, Callable[[], Any]] = {
    "LoRA": lambda: lora(llama()),
    "LoRA with dropout in eval mode, rsLoRA": lambda: lora(llama(), lora_dropout=0.1, use_rslora=True).eval(),
    "LoRA on all linear layers and the embedding": lambda: lora(
        llama(), target_modules=["q_proj", "k_proj", "up_proj", "down_proj", "embed_tokens"]),
    "DoRA": lambda: lora(llama(), use_dora=True),
    "modules_to_save": lambda: lora(llama(), modules_to_save=["lm_head", "norm"]),
    "tied embeddings": lambda: lora(llama(tied=True)),
    "resized embeddings, trained whole": lambda: tied_and_resized(modules_to_save=["embed_tokens"]),
    "resized embeddings, new tokens trained": lambda: tied_and_resized(trainable_token_indices=NEW_TOKENS),
    "gradient checkpointing": with_checkpointing,
    "prompt tuning": lambda: prompted("PromptTuningConfig"),
    "prefix tuning": lambda: prompted("PrefixTuningConfig"),
    "p-tuning": lambda: prompted("PromptEncoderConfig", encoder_hidden_size=16),
    "IA3": scaled_activations,
}


def run_of(kind: str, mobius: bool) -> Dict[str, Any]:
    """The script: it never looks at the flag."""
    model = KINDS[kind]()
    training = model.training
    vocabulary = VOCABULARY + 6 if "resized" in kind else VOCABULARY
    before = {name: parameter for name, parameter in weights(model).items() if not model.get_parameter(name).requires_grad}
    engine = engine_of(model, mobius=mobius, gradient_clipping=0.5)
    engine.train(training)
    losses, norms, references = [], [], []
    for number in range(4):
        losses.append(step(engine, number, vocabulary))
        norms.append(float(engine.get_global_grad_norm()))
        ids = ids_of(number, vocabulary=vocabulary)
        with torch.no_grad(), model.disable_adapter():
            references.append(engine(input_ids=ids, labels=ids).loss.item())
    with model.disable_adapter():  # with gradients on: there is nothing that requires one
        ungraded = not engine(input_ids=ids, labels=ids).loss.requires_grad
    as_planned = not mobius or engine.take_traffic() == engine.take_predicted_traffic()
    frozen = all(torch.equal(weights_of(parameter), before[name]) for name, parameter in model.named_parameters()
                 if name in before)
    left = [name for name, parameter in model.named_parameters() if parameter.requires_grad == (name in before)]
    engine.destroy()
    return {"losses": losses, "norms": norms, "references": references, "frozen": frozen, "left": left,
            "ungraded": ungraded, "as planned": as_planned}


def weights_of(parameter: Any) -> torch.Tensor:
    import deepspeed
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def both_arms(kinds: Any) -> Dict[str, Any]:
    return {kind: {mobius: run_of(kind, mobius) for mobius in (False, True)} for kind in kinds}


@works("PEFT", "LoRA, rsLoRA, DoRA, IA3, prompt, prefix and p-tuning")
@works("PEFT", "modules_to_save")
@works("PEFT", "disable_adapter() for a reference forward, in mid-training")
@works("PEFT", "tied embeddings; resized embeddings, new tokens trained")
@works("PEFT", "gradient checkpointing with enable_input_require_grads()")
def test_adapters_train_as_under_zero3():
    for result in run_ranks(2, both_arms, tuple(KINDS), timeout=300):
        for kind, arms in result.items():
            zero3, mobius = arms[False], arms[True]
            assert mobius["losses"] == pytest.approx(zero3["losses"], abs=1e-5), kind
            assert mobius["references"] == pytest.approx(zero3["references"], abs=1e-5), kind
            assert mobius["norms"] == pytest.approx(zero3["norms"], rel=1e-4), kind
            assert mobius["frozen"] and not mobius["left"] and mobius["as planned"], kind
            assert mobius["ungraded"] == zero3["ungraded"] == (kind != "gradient checkpointing"), kind
            if kind != "gradient checkpointing":
                assert len(set(mobius["losses"])) == 4, kind


# Through Trainer.

def adapted_for_trainer() -> Any:
    return lora(jobs.causal_model(jobs.llama_config()), target_modules=["q_proj", "down_proj"])


def trainer_job(mobius: bool, folder: str) -> Dict[str, Any]:
    from peft import PeftModel
    folder = f"{folder}/{mobius}"
    run = jobs.train(mobius, folder, make=adapted_for_trainer, use=lambda trainer: trainer.save_model(folder),
                     gradient_accumulation_steps=2)
    dist.barrier()  # one rank saves
    plain = llama(**{key: value for key, value in jobs.llama_config().to_dict().items() if key in SIZES})
    reloaded = PeftModel.from_pretrained(plain, folder)
    return {**run, "saved": {name: parameter for name, parameter in weights(reloaded).items() if "lora" in name},
            "bytes": Path(folder, "adapter_model.safetensors").stat().st_size}


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@works("PEFT", "a PEFT model in Trainer, its adapter saved by save_model()")
def test_trainer_trains_and_saves_an_adapter(tmp_path):
    for both in run_ranks(2, jobs.both_arms, trainer_job, str(tmp_path), timeout=200):
        zero3, mobius = both.zero3, both.mobius
        assert (zero3["engine"], mobius["engine"]) == ("DeepSpeedEngine", "MobiusEngine")
        for theirs, ours in zip(zero3["log"], mobius["log"], strict=True):
            for figure, value in theirs.items():
                assert ours[figure] == pytest.approx(value, abs=1e-5, rel=1e-4), figure
        assert mobius["bytes"] == zero3["bytes"] and mobius["saved"]
        for name, parameter in mobius["saved"].items():
            torch.testing.assert_close(parameter, zero3["saved"][name], atol=1e-5, rtol=0)
            assert torch.equal(parameter, mobius["weights"][name]), name


# A script of someone else.

def test_the_lora_script_is_compared(tmp_path):
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    arguments = ["--script", CHECKOUT / "comparisons" / "finetune_lora.py", "--ranks", 2, "--steps", 3,
                 "--arms", "zero3,mobius", "--config", CHECKOUT / "ds_configs" / "gpt_offload.json", "--out", out,
                 "--", "--layers", 2, "--width", 128, "--out", adapter]
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    assert compare.main(parser.parse_args([str(argument) for argument in arguments])) == 0
    report = json.loads((out / "report.json").read_text())
    mobius = report["arms"]["mobius"]
    assert len(mobius["losses"]) == 3 and report["comparison"]["max_loss_difference"] < 5e-3
    assert mobius["traffic"]["per_step_bytes"] == mobius["predicted_traffic"]
    saved = load_file(adapter / "adapter_model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in saved.values())
    assert mobius["traffic"]["per_step_bytes"]["gradients_out"] == 4 * sum(tensor.numel() for tensor in saved.values())

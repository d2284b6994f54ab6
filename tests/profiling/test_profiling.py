"""Profiles computed from shapes alone against formulas, and against profiles that were measured."""

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from mobius_ds.inputs.topology import Gpu
from mobius_ds.model.errors import NotSplittable
from mobius_ds.profiling.computed import computed_profile, profile_description
from mobius_ds.profiling.describe import UnknownModel, describe, weightless
from mobius_ds.profiling.gpt import SIZES, Gpt, GptShape
from mobius_ds.profiling.measured import measured_profile
from mobius_ds.profiling.traced_model import trace_model
from tests.model import zoo

GPU = Gpu("one GFLOP/s", 2**34, 1e9)
SHAPE = GptShape(layers=4, width=64, heads=4, vocabulary=96, positions=32)
SAMPLES, SEQUENCE = 2, 32
TOKENS = SAMPLES * SEQUENCE


def flops(seconds: float) -> float:
    return round(seconds * GPU.flops)


def gpt(shape: GptShape = SHAPE, dtype: torch.dtype = torch.float32) -> Gpt:
    torch.manual_seed(3)
    return Gpt(shape).to(dtype)


def inputs(sequence: int = SEQUENCE) -> dict:
    ids = torch.arange(SAMPLES * sequence).view(SAMPLES, sequence) % 64
    return {"input_ids": ids, "labels": ids}


def computed(model: nn.Module, **given):
    return computed_profile(trace_model(model, (), given or inputs()), GPU, "model")


def described(model: str, **changed):
    """The profile of one of the zoo's models from its config."""
    return profile_description({**zoo.build(model).config.to_dict(), **changed}, SAMPLES, 12, GPU)


# Formulas.


@pytest.mark.parametrize("width, heads", [(64, 4), (96, 2)])
def test_a_gpt_block_costs_what_its_formula_says(width, heads):
    profile = computed(gpt(GptShape(4, width, heads, vocabulary=96, positions=32), torch.bfloat16))
    embedding, block, *_, head = profile.layers
    products, attention = 2 * 12 * width**2 * TOKENS, 2 * 2 * SAMPLES * SEQUENCE**2 * width
    assert flops(block.forward_seconds) == products + attention
    # Again, then each product twice; attention computes its scores once more before its four products.
    assert flops(block.backward_seconds) == 3 * products + (1 + 5 / 2) * attention
    assert block.weight_bytes == block.gradient_bytes == 2 * (12 * width**2 + 13 * width)
    assert block.boundary_bytes == embedding.boundary_bytes == 2 * TOKENS * width
    assert flops(head.forward_seconds) == 2 * width * 96 * TOKENS
    assert flops(head.backward_seconds) == 3 * flops(head.forward_seconds)
    assert head.boundary_bytes == 4, "the loss, in fp32"
    assert embedding.forward_seconds == 0


def test_a_tied_head_is_one_parameter_and_is_streamed_twice():
    profile = computed(gpt(dtype=torch.bfloat16))
    table = 96 * 64
    assert profile.parameters == table + 32 * 64 + 4 * (12 * 64**2 + 13 * 64) + 2 * 64
    assert profile.weight_bytes == 2 * (profile.parameters + table)
    assert profile.layers[0].weight_bytes == 2 * (table + 32 * 64) and profile.layers[-1].weight_bytes == 2 * (table + 2 * 64)


def test_working_memory_holds_what_the_backward_needs():
    width, unit = 64, 4 * TOKENS * 64
    block = computed(gpt()).layers[1]
    saved = 16 * unit  # two norms, q, k, v, attention, its projection's input, the residual, the MLP's 4 + 4
    gradients = 8 * unit  # of the MLP's widest activation and the one before it
    assert saved < block.working_bytes <= saved + gradients + 4 * 4 * width**2 + unit


def test_working_memory_grows_with_scores_only_when_they_are_kept():
    def working(implementation: str, sequence: int) -> int:
        _, model, given = describe({**zoo.build("gpt2").config.to_dict(), "n_positions": 512}, SAMPLES, sequence)
        model.set_attn_implementation(implementation)
        return computed(model, **given).layers[2].working_bytes

    assert working("sdpa", 512) < 2.2 * working("sdpa", 256)
    assert working("eager", 512) > 3 * working("eager", 256)


def test_frozen_layers_hand_back_no_gradient_and_run_a_shorter_backward():
    model = gpt()
    for part in (model.embeddings, model.blocks[:2]):
        part.requires_grad_(False)
    model.blocks[3].requires_grad_(False)
    embedding, first, second, trained, frozen, _ = computed(model).layers
    assert [layer.gradient_bytes for layer in (embedding, first, second, frozen)] == [0] * 4
    assert trained.gradient_bytes == trained.weight_bytes == first.weight_bytes
    assert flops(first.backward_seconds) == flops(first.forward_seconds), "nothing before it is trained: recomputation only"
    assert flops(first.forward_seconds) < flops(frozen.backward_seconds) < flops(trained.backward_seconds)


# Kinds of layers.


def test_layers_alike_run_once(monkeypatch):
    from mobius_ds.profiling import computed as computing
    spans = []
    run = computing._fake_work
    monkeypatch.setattr(computing, "_fake_work", lambda traced, layer: spans.append(layer.span) or run(traced, layer))
    profile = computed(gpt())
    assert [tuple(span) for span in spans] == [(0, 1), (1, 2), (5, 7)]
    assert len(profile.layers) == 6 and len(set(profile.layers)) == 3
    assert [layer.name for layer in profile.layers] == ["Embeddings", *["Block"] * 4, "LayerNorm+Linear"]


def test_layers_that_differ_are_told_apart():
    model = gpt()
    model.blocks[2].widen, model.blocks[2].narrow = nn.Linear(64, 32), nn.Linear(32, 64)
    profile = computed(model)
    assert [layer.name for layer in profile.layers[1:5]] == ["Block", "Block", "Block #2", "Block"]
    assert profile.layers[3].weight_bytes < profile.layers[2].weight_bytes


def test_layers_that_only_their_own_code_tells_apart():
    model = gpt()
    for number, block in enumerate(model.blocks):
        block.label = f"block number {number}"  # so each of them runs, but they turn out equal
    model.blocks[1].heads = 2
    profile = computed(model)
    assert [layer.name for layer in profile.layers[1:5]] == ["Block", "Block #2", "Block", "Block"]
    assert profile.layers[2].weight_bytes == profile.layers[1].weight_bytes
    assert profile.layers[2].working_bytes < profile.layers[1].working_bytes, "of each head's softmax a sum is kept"


# Hugging Face configs.


@pytest.mark.parametrize("name, kinds", [("llama", 3), ("bert", 3), ("gpt2", 4), ("t5", 9), ("mixtral", 3)])
def test_configs_give_the_layers_of_the_real_model(name, kinds):
    profile, program, parameters = described(name)
    model = zoo.build(name)
    assert parameters == profile.parameters == sum(p.numel() for p in model.parameters())
    assert len(profile.layers) == len(program.layer_starts()) >= 5
    assert len(set(profile.layers)) == kinds
    real = trace_model(model.to(torch.bfloat16), (), zoo.batch(name, masked=False)).program
    assert [call.unit for call in real.calls] == [call.unit for call in program.calls]
    assert [program.boundary_bytes(cut) for cut in program.layer_starts()] == \
        [real.boundary_bytes(cut) for cut in real.layer_starts()]


def test_only_active_experts_count():
    def layer(experts: int, active: int):
        return described("mixtral", num_local_experts=experts, num_experts_per_tok=active).profile.layers[1]

    tokens, router, expert = SAMPLES * 12, 2 * 32, 2 * 3 * 32 * 64
    assert flops(layer(8, 2).forward_seconds) - flops(layer(4, 2).forward_seconds) == 4 * router * tokens
    assert flops(layer(4, 3).forward_seconds) - flops(layer(4, 2).forward_seconds) == expert * tokens
    assert flops(layer(4, 3).backward_seconds) - flops(layer(4, 2).backward_seconds) == 3 * expert * tokens
    assert layer(8, 2).weight_bytes > 1.5 * layer(4, 2).weight_bytes


def test_small_experts_that_need_data_run_on_zeros_and_large_ones_are_refused():
    _, model, given = describe(zoo.build("mixtral").config.to_dict(), SAMPLES, 12)
    grouped = computed(model, **given).layers[1]
    model.set_experts_implementation("eager")  # looks at which experts have tokens
    assert computed(model, **given).layers[1].forward_seconds == grouped.forward_seconds
    _, model, given = describe({"model_type": "mixtral", "num_hidden_layers": 2}, SAMPLES, 12)
    model.set_experts_implementation("eager")
    with pytest.raises(NotSplittable, match=r"'model.layers.0' cannot run without data .* 2\.70 GiB .*limit 0\.25 GiB"):
        computed(model, **given)


def test_a_config_is_read_from_a_folder_a_file_or_its_content(tmp_path):
    config = zoo.build("llama").config
    config.save_pretrained(tmp_path / "small")
    file = tmp_path / "other.json"
    file.write_text((tmp_path / "small" / "config.json").read_text())
    profiles = [profile_description(source, SAMPLES, 12, GPU).profile
                for source in (str(tmp_path / "small"), file, json.loads(file.read_text()))]
    assert [profile.name for profile in profiles] == ["small", "other", "llama"]
    assert profiles[0].layers == profiles[1].layers == profiles[2].layers


def test_the_architecture_decides_between_language_models():
    config = zoo.build("bert").config.to_dict()
    assert type(describe(config, 1, 8).model).__name__ == "BertForMaskedLM"
    assert type(describe({**config, "architectures": ["BertModel"]}, 1, 8).model).__name__ == "BertForMaskedLM"
    causal = {**config, "architectures": ["BertLMHeadModel"], "is_decoder": True}
    assert type(describe(causal, 1, 8).model).__name__ == "BertLMHeadModel"


# Named sizes.


@pytest.mark.parametrize("name, billions", [("gpt-3b", 3.1), ("gpt-8b", 8.3), ("gpt-15b", 15.9), ("gpt-51b", 50.4)])
def test_named_sizes(name, billions):
    shape = SIZES[name]
    _, model, _ = describe(name, 1, 16)
    parameters = sum(p.numel() for p in model.parameters())
    width = shape.width
    assert parameters == shape.layers * (12 * width**2 + 13 * width) + (50257 + 2048 + 2) * width
    assert round(parameters / 1e9, 1) == billions


_LARGE = """
import time, torch, torch.utils.flop_counter, torch._subclasses.fake_tensor
from mobius_ds.profiling.computed import profile_description
from mobius_ds.inputs.topology import preset

def profiled(name):
    begun = time.process_time()
    profile = profile_description(name, 4, 2048, preset("3090ti-4").gpus[0]).profile
    return time.process_time() - begun, profile

profiled("gpt-3b")  # whatever is loaded on the way
small, _ = profiled("gpt-3b")
seconds, profile = profiled("gpt-51b")
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(seconds / small, int(peak) * 1024, len(profile.layers), len(set(profile.layers)), profile.model_bytes)
"""


def test_51_billion_parameters_take_no_more_time_than_3_and_no_memory():
    done = subprocess.run([sys.executable, "-c", _LARGE], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).parents[2])
    times_as_long, resident, layers, kinds, model_bytes = map(float, done.stdout.split())
    print(f"gpt-51b: {times_as_long:.2f} times as long as gpt-3b, {resident / 2**20:.0f} MiB with torch")
    assert times_as_long < 3
    assert resident < 700e6 < model_bytes / 250
    assert (layers, kinds) == (64, 3)


# Measured.


def test_a_measured_profile_differs_from_the_computed_one_only_in_time():
    model = gpt()
    traced = trace_model(model, (), inputs())
    expected = computed_profile(traced, GPU, "model")
    measured = measured_profile(traced, dict(model.named_parameters()), "model", repeats=2)
    for layer, real in zip(expected.layers, measured.layers):
        assert real.forward_seconds > 0 and real.backward_seconds > 0
        assert (real.name, real.weight_bytes, real.gradient_bytes, real.boundary_bytes, real.working_bytes) == \
            (layer.name, layer.weight_bytes, layer.gradient_bytes, layer.boundary_bytes, layer.working_bytes)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["llama", "t5", "mixtral", "bert"])
def test_zoo_models_are_measured(name):
    model = zoo.build(name)
    state = torch.get_rng_state()
    traced = trace_model(model, (), zoo.batch(name))
    profile = measured_profile(traced, dict(model.named_parameters()), name, repeats=1)
    assert all(layer.backward_seconds > 0 for layer in profile.layers)
    assert torch.equal(torch.get_rng_state(), state)


def test_times_grow_with_the_width_as_computed():
    sequence = 64
    forward, backward, predicted = [], [], []
    for width in (32, 512):  # 200 times the FLOPs, so that a busy machine cannot turn the order around
        model = gpt(GptShape(2, width, 4, vocabulary=64, positions=sequence))
        traced = trace_model(model, (), inputs(sequence))
        block = measured_profile(traced, dict(model.named_parameters()), "model").layers[1]
        forward.append(block.forward_seconds)
        backward.append(block.backward_seconds)
        predicted.append(computed_profile(traced, GPU, "model").layers[1].forward_seconds)
    assert forward == sorted(forward) and backward == sorted(backward) and predicted == sorted(predicted)


class Weights(Mapping):
    """Weights that exist only from when they are asked for, and the most bytes of them that existed at once."""

    def __init__(self, model: nn.Module):
        self._specs = {name: p.shape for name, p in model.named_parameters()}
        self.asked = []
        self._live = self.peak = 0

    def __getitem__(self, name):
        tensor = torch.full(self._specs[name], 0.01)
        self.asked.append(name)
        self._live += tensor.nbytes
        self.peak = max(self.peak, self._live)
        weakref.finalize(tensor.untyped_storage(), self._gone, tensor.nbytes)
        return tensor

    def _gone(self, nbytes):
        self._live -= nbytes

    def __iter__(self):
        return iter(self._specs)

    def __len__(self):
        return len(self._specs)


def test_one_layers_weights_at_a_time_and_a_model_without_its_own():
    with weightless():
        model = Gpt(SHAPE)
    weights = Weights(model)
    profile = measured_profile(trace_model(model, (), inputs()), weights, "model", repeats=3)
    assert weights.peak == max(layer.weight_bytes for layer in profile.layers)
    tied = "embeddings.tokens.weight"
    asked = {name: weights.asked.count(name) for name in weights.asked}
    assert {name for name, count in asked.items() if count > 2} == {tied}, "once to count, once to time"
    assert not any(name.startswith("blocks.1") for name in weights.asked), "one block stands for all"


def test_layers_that_count_alike_are_timed_once(monkeypatch):
    from mobius_ds.profiling import measured
    timed = []
    run = measured._measured_seconds
    monkeypatch.setattr(measured, "_measured_seconds", lambda traced, layer, *rest: timed.append(layer.span)
                        or run(traced, layer, *rest))
    model = gpt()
    for number, block in enumerate(model.blocks):
        block.label = f"block number {number}"
    profile = measured_profile(trace_model(model, (), inputs()), dict(model.named_parameters()), "model", repeats=1)
    assert len(timed) == len(set(profile.layers)) == 3


def test_no_run_begins_after_the_budget(monkeypatch):
    from mobius_ds.model.replay import Handover
    runs = []
    run = Handover.backward
    monkeypatch.setattr(Handover, "backward", lambda *given: runs.append(given) or run(*given))
    model = gpt()
    measured_profile(trace_model(model, (), inputs()), dict(model.named_parameters()), "model", budget_seconds=0.0)
    assert len(runs) == 3 * 2, "one to warm up and one that is timed, for each kind"


# Bad input.


@pytest.mark.parametrize("source, message", [
    ("gpt-8B", "Did you mean 'gpt-8b'"),
    ("gpt-50b", r"neither a known model nor a file or folder\. Did you mean 'gpt-51b'.*gpt-3b, gpt-8b, gpt-15b, gpt-51b"),
    ("/nowhere/at/all", "neither a known model nor a file or folder"),
    ({}, "model_type None"),
    ({"model_type": "vit"}, "no language model with a loss for model_type 'vit'"),
])
def test_unknown_models(source, message):
    with pytest.raises(UnknownModel, match=message):
        profile_description(source, 1, 8, GPU)


@pytest.mark.parametrize("content, message", [(None, "has no config.json"), ("model_type: llama", "is not JSON"),
                                              ("[1]", "holds a list")])
def test_folders_without_a_proper_config(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnknownModel, match=message):
        describe(tmp_path, 1, 8)


def test_impossible_microbatches():
    with pytest.raises(UnknownModel, match="samples=0"):
        describe("gpt-3b", 0, 8)
    with pytest.raises(UnknownModel, match="up to 2048 tokens, not 4096"):
        describe("gpt-3b", 1, 4096)


def test_transformers_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert describe("gpt-3b", 1, 8).name == "gpt-3b"
    with pytest.raises(UnknownModel, match="needs transformers .*pip install transformers"):
        describe({"model_type": "llama"}, 1, 8)


def test_meta_buffers_are_refused():
    model = zoo.build("llama").to("meta")
    with pytest.raises(ValueError, match="buffer 'model.rotary_emb.inv_freq' is a meta tensor.*weightless"):
        trace_model(model, (), zoo.batch("llama"))

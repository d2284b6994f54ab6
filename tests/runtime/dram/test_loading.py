"""Models built under ``deepspeed.zero.Init``: made once, in shared memory, and adopted where they lie."""

from typing import Any, Dict, List

import pytest
import torch
from torch import nn

from tests.features import refused, works
from tests.ranks import outcomes_of_ranks, run_ranks
from tests.runtime.dram.loading_jobs import BF16, available, built, engine_of, losses, settled, stage3, taken, whole
from tests.runtime.jobs import LanguageModel, failure, initialize, rank_and_size, weights


def same(one: Dict[str, torch.Tensor], other: Dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].dtype == other[name].dtype and torch.equal(one[name], other[name])
                                              for name in one)


def place_of(parameter: nn.Parameter) -> Any:
    """Where in a region a parameter lies."""
    from mobius_ds.runtime.dram.weights import piece_of
    piece = piece_of(parameter.data)
    return piece and piece.extent


# What a script sees.

def both_arms(sections: Dict[str, Any]) -> Dict[bool, Any]:
    found = {}
    for mobius in (False, True):
        settings = stage3(mobius, **sections)
        model = built(settings, tied=True)
        start = whole(model)
        buffers = {name: (buffer.dtype, buffer.tolist()) for name, buffer in model.named_buffers()}
        engine = engine_of(model, settings)
        found[mobius] = start, buffers, losses(engine), whole(engine.module)
        engine.destroy()
    return found


@works("Loading", "deepspeed.zero.Init around the model: the first rank's values count")
@pytest.mark.parametrize("ranks, sections", [(1, {}), (2, {}), (4, {}), (2, BF16)])
def test_a_model_built_under_zero_init_is_the_one_zero3_builds(ranks, sections):
    results = run_ranks(ranks, both_arms, sections, timeout=200)
    for found in results:
        (zero3, zero3_buffers, zero3_losses, zero3_end), (mobius, buffers, mobius_losses, end) = found[False], found[True]
        assert same(zero3, mobius) and same(mobius, results[0][True][0]) and zero3_buffers == buffers
        assert mobius_losses == pytest.approx(zero3_losses, abs=1e-2 if sections else 1e-5)
        tolerance = 2e-2 if sections else 1e-5
        assert all(torch.allclose(end[name].float(), zero3_end[name].float(), atol=tolerance) for name in end)


class Drawing(nn.Module):
    """Every rank writes its own number."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 4)
        nn.init.constant_(self.head.weight, 10.0 + rank_and_size()[0])


def gathered_blocks() -> List[Any]:
    import deepspeed
    rank = rank_and_size()[0]
    model = built(stage3(), make=Drawing)
    weight, found = model.head.weight, [model.head.weight.tolist()]
    for modifier, value in ((0, 20.0), (1, 30.0), (None, 40.0)):
        with deepspeed.zero.GatheredParameters(iter([weight]), modifier_rank=modifier):
            found.append(weight[0, 0].item())
            torch.distributed.barrier()
            weight.data.fill_(value + rank)
        found.append(weight[0, 0].item())
        torch.distributed.barrier()
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0, enabled=False):
        weight.data.fill_(50.0 + rank)
    found.append(weight[0, 0].item())
    return found


@works("Loading", "deepspeed.zero.GatheredParameters with modifier_rank, before deepspeed.initialize")
def test_gathered_parameters_show_the_modifiers_values_to_all_ranks():
    for rank, found in enumerate(run_ranks(2, gathered_blocks)):
        assert found[0] == [[10.0] * 3] * 4
        assert found[1:] == [10.0, 20.0, 20.0, 31.0, 31.0, 40.0, 50.0 + rank]


# How models are built.

class Odd(nn.Module):
    """What parameters can be besides floating matrices."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.whole = nn.Parameter(torch.arange(5), requires_grad=False)
        self.turned = nn.Parameter(torch.rand(3, 5).t())
        self.wide = nn.Parameter(torch.rand(3, dtype=torch.float64))
        self.skipped = nn.utils.skip_init(nn.Linear, 3, 3)
        self.later = nn.Parameter(torch.empty(2, device="meta", dtype=torch.bfloat16))
        self.register_buffer("zeros", torch.zeros(2))
        self.register_buffer("drawn", torch.rand(2))


def ways_of_building() -> Dict[str, Any]:
    import deepspeed
    plain, settings, found = nn.Linear.__init__, stage3(**BF16), {}
    model = built(settings, make=Odd)
    found["placed"] = {name: (place_of(p) is not None, p.dtype, p.device.type) for name, p in model.named_parameters()}
    found["values"] = (model.scalar.item(), model.whole.tolist(), model.turned.is_contiguous(), model.zeros.dtype)

    with deepspeed.zero.Init(config_dict_or_path=settings):
        with deepspeed.zero.Init(config_dict_or_path=settings):
            inner = nn.Linear(3, 3)
        outer = nn.Linear(3, 3)
    after = nn.Linear(3, 3)
    found["nested"] = [place_of(module.weight) is not None for module in (inner, outer, after)]
    found["off"] = [place_of(built(settings, make=lambda: nn.Linear(3, 3)).weight) is not None]
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=False):
        found["off"].append(place_of(nn.Linear(3, 3).weight) is not None)

    moved = LanguageModel(tied=True)
    before = weights(moved)
    deepspeed.zero.Init(module=moved, config_dict_or_path=settings)
    found["moved"] = (all(place_of(p) is not None and p.dtype == torch.bfloat16 for p in moved.parameters()),
                      all(torch.equal(before[name].bfloat16(), p) for name, p in moved.named_parameters())
                      or rank_and_size()[0] > 0, moved.head.weight is moved.tokens.weight)

    del model, inner, outer, moved
    held = settled()
    with pytest.raises(ZeroDivisionError), deepspeed.zero.Init(config_dict_or_path=settings):
        broken = nn.Linear(3, 3)
        1 / 0
    del broken
    found["left"] = (held, settled(), nn.Linear.__init__ is plain)
    found["isinstance"] = isinstance(deepspeed.zero.Init(config_dict_or_path=settings), deepspeed.zero.Init)
    return found


def test_every_way_of_building_a_model():
    for found in run_ranks(2, ways_of_building):
        placed = found["placed"]
        assert placed.pop("later") == (False, torch.bfloat16, "meta")
        assert placed.pop("empty") == (False, torch.bfloat16, "cpu")
        assert placed.pop("whole") == (True, torch.int64, "cpu")
        assert len(placed) == 5 and set(placed.values()) == {(True, torch.bfloat16, "cpu")}
        assert found["values"] == (1.5, [0, 1, 2, 3, 4], True, torch.bfloat16)
        assert found["nested"] == [True, True, False] and found["off"] == [True, False]
        assert found["moved"] == (True, True, True)
        assert found["left"] == (0, 0, True) and found["isinstance"]


WIDE = 2**20


class Wide(nn.Module):
    """4 MiB of weights a layer, drawn twice."""

    def __init__(self, layers: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(layers))
        self.apply(self._draw)

    def _draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            self.most = max(getattr(self, "most", 0), copied_pages())

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def copied_pages() -> int:
    """Bytes of the weights' mappings of which this process holds a copy of its own."""
    copied, inside = 0, False
    for line in open("/proc/self/smaps"):
        if "-" in line.split()[0]:
            inside = "memfd:mobius_ds:weights" in line
        elif inside and line.startswith("Anonymous:"):
            copied += int(line.split()[1]) * 1024
    return copied


def copies_of_a_wide_model() -> Any:
    model = built(stage3(), make=Wide)
    return model.most, copied_pages(), taken()


def test_the_other_ranks_hold_at_most_one_layers_copy_while_a_model_draws_its_weights():
    first, *others = run_ranks(2, copies_of_a_wide_model)
    assert first == (0, 0, 3 * 4 * WIDE)
    for most, left, held in others:
        assert 4 * WIDE <= most < 8 * WIDE and left == 0 and held == 3 * 4 * WIDE


# How they are adopted.

def adoption() -> Dict[str, Any]:
    import deepspeed
    settings, found = stage3(), {}
    with deepspeed.zero.Init(config_dict_or_path=settings):
        reference, policy = Wide(), Wide(4)
    expected = {"policy": whole(policy), "reference": whole(reference)}
    policy.layers[1].weight = nn.Parameter(torch.full((1024, 1024), 5.0))  # made after the block
    policy.layers[2].requires_grad_(False)
    policy.layers[3].weight.data = policy.layers[3].weight.data.clone()
    places = [place_of(parameter) for parameter in policy.parameters()]
    held = settled()
    engine = engine_of(policy, settings)
    store, layout = engine.pipeline.store, engine.pipeline.store.layout
    now = [place_of(parameter) for parameter in policy.parameters()]
    found["in place"] = [before == after for before, after in zip(places, now)]
    found["sizes"] = (held, settled(), layout.placed_bytes, layout.weight_bytes)
    found["extents"] = len(layout.weights(layout.entries).extents)
    expected["policy"]["layers.1.weight"] = torch.full((1024, 1024), 5.0)
    found["values"] = same(weights(policy), expected["policy"]) and same(weights(reference), expected["reference"])
    found["files"] = store.home is place_region(reference)
    found["unshared"] = policy.layers[0].weight.untyped_storage().nbytes() == 4 * WIDE
    engine.destroy()
    found["after"] = same(weights(policy), expected["policy"])
    del engine, store, layout, policy
    reference = reference.layers[0].weight
    found["reference alone"] = (settled(), torch.equal(reference, expected["reference"]["layers.0.weight"]))
    del reference
    found["nothing"] = settled()
    return found


def place_region(model: nn.Module) -> Any:
    from mobius_ds.runtime.dram.weights import piece_of
    return piece_of(next(model.parameters()).data).window().region


@works("Loading", "two models in one zero.Init block; parameters assigned, cast or frozen after it")
def test_parameters_are_adopted_where_they_lie_and_what_was_dropped_is_given_back():
    layer = 4 * WIDE
    for found in run_ranks(2, adoption):
        assert found["in place"] == [True, False, True, False]
        # 7 layers were built, two left the region and are copied to its end; their old pages are given back.
        assert found["sizes"] == (7 * layer, 7 * layer, 2 * layer, 4 * layer)
        assert found["extents"] == 3
        assert found["values"] and found["files"] and found["unshared"] and found["after"]
        assert found["reference alone"][1] and found["nothing"] == 0


def again() -> Dict[str, Any]:
    settings, found = stage3(), {}
    model = built(settings)
    engine = engine_of(model, settings)
    found["first"] = losses(engine)
    region, place = place_region(model), [place_of(parameter) for parameter in model.parameters()]
    trained = weights(model)
    engine.destroy()
    with torch.no_grad():
        model.norm.weight.fill_(0.5 + rank_and_size()[0])  # the module is each rank's own now
    trained["norm.weight"].fill_(0.5)
    engine = engine_of(model, settings)
    found["same place"] = region is place_region(model) and place == [place_of(p) for p in model.parameters()]
    found["same values"] = same(trained, weights(model))
    found["second"] = losses(engine)
    unfinished, engine = engine, engine_of(model, settings)  # without destroying the one before
    found["third"] = losses(engine)
    found["taken"] = settled()
    engine.destroy()
    unfinished.destroy()

    copied = LanguageModel()
    copied.register_buffer("scale", torch.ones(3))
    copied.load_state_dict(trained, strict=False)
    engine = engine_of(copied, settings)
    found["expected second"] = losses(engine)
    middle = weights(copied)
    engine.destroy()
    other = LanguageModel()
    other.load_state_dict(middle)
    engine = engine_of(other, settings)
    found["expected third"] = losses(engine)
    engine.destroy()
    return found


@works("Loading", "several engines on one model, one after another")
def test_a_second_engine_takes_the_same_memory_and_goes_on_from_it():
    results = run_ranks(2, again)
    for found in results:
        assert found["same place"] and found["same values"]
        assert found["second"] == found["expected second"] and found["third"] == found["expected third"]
        assert found["second"] != found["first"] and found["taken"] <= 64 * 1024


# What is refused.

class Differs(LanguageModel):
    def __init__(self):
        super().__init__(blocks=2 + rank_and_size()[0])


class Freezes(LanguageModel):
    def __init__(self):
        super().__init__(frozen=rank_and_size()[0])


def built_and_initialized(make: Any) -> None:
    engine_of(built(stage3(), make=make), stage3())


@refused("Loading", "another model on another rank", "rank 1 has built another model than rank 0")
@pytest.mark.parametrize("make, said", [
    (Differs, "parameter 'blocks.2.norm.weight' is torch.float32 of shape (16,), trained on rank 1 and missing on rank 0"),
    (Freezes, "parameter 'blocks.0.norm.weight' is torch.float32 of shape (16,), frozen on rank 1 and torch.float32 of "
              "shape (16,), trained on rank 0"),
])
def test_different_models_on_different_ranks_are_named(make, said):
    first, second = outcomes_of_ranks(2, built_and_initialized, make)
    assert "OutOfStep: rank 1 has built another model than rank 0: " + said in second.error
    assert "PeerLost: rank 1 is gone (OutOfStep: rank 1 has built another model" in first.error


def without_values() -> List[str]:
    import deepspeed
    with deepspeed.zero.Init(config_dict_or_path=stage3(mobius=False)):
        partitioned = LanguageModel()
    with torch.device("meta"):
        meta = LanguageModel()
    return [failure(lambda: initialize(model, stage3())) for model in (partitioned, meta)]


@refused("Loading", "zero.Init without the config", "was built under a deepspeed.zero.Init that did not know of Mobius")
def test_parameters_without_values_are_named():
    for partitioned, meta in run_ranks(1, without_values):
        assert "ValueError: parameter 'tokens.weight' is partitioned: its model was built under a " \
               "deepspeed.zero.Init that did not know of Mobius." in partitioned
        assert "ValueError: parameter 'tokens.weight' is on the meta device" in meta


def too_large() -> Dict[str, Any]:
    from unittest import mock

    from deepspeed.utils import logger
    found: Dict[str, Any] = {}
    with available(10 * WIDE):
        found["weights"] = failure(lambda: built(stage3(), make=Wide))
    found["left"] = settled()
    with available(30 * WIDE), mock.patch.object(logger, "warning") as warning:
        model = built(stage3(), make=Wide)
        found["warned"] = [call.args[0] for call in warning.call_args_list]
        found["training"] = failure(lambda: engine_of(model, stage3()))
    with available(30 * WIDE):
        model = built(stage3(), make=Wide)
        model.layers[1:].requires_grad_(False)
        found["frozen"] = failure(lambda: engine_of(model, stage3()).destroy())
    return found


@refused("Loading", "a model whose weights exceed the DRAM", "the weights of this model alone need at least")
def test_a_model_that_does_not_fit_is_refused_with_need_and_have():
    for rank, found in enumerate(run_ranks(2, too_large)):
        assert "OutOfMemory: the weights of this model alone need at least 12.00 MiB of DRAM, but only 10.00 MiB are " \
               "available." in found["weights"]
        assert found["left"] == 0
        assert [("needs 48.00 MiB" in text, "only 30.00 MiB are available" in text) for text in found["warned"]] == \
            [(True, True)] * (rank == 0)
        assert "training this model needs 48.00 MiB of DRAM" in found["training"]
        assert "only 42.00 MiB are available" in found["training"]  # 12 of them are its own weights, which are there
        assert found["frozen"] == "nothing was raised"

"""Slots: a stage's weights as they lie in a device buffer, and the gradients that add up beside them."""

import pytest
import torch
from torch import nn

from mobius_ds.runtime.device.device import Device
from mobius_ds.runtime.device.ledger import Ledger
from mobius_ds.runtime.dram.slots import Slots, StageMemory, gradient_groups
from mobius_ds.runtime.dram.store import Layout, ParameterStore
from mobius_ds.runtime.ranks.errors import OutOfMemory
from mobius_ds.runtime.sweeps.stage_work import _add

SHAPES = {"a": (3, 5), "b": (17,), "c": (), "d": (4, 4), "e": (0, 2), "f": (40,)}
BF16 = ("b", "d")
FROZEN = ("f",)


@pytest.fixture
def device():
    device = Device(torch.device("cpu"), Ledger(), budget=10_000)
    yield device
    device.close()


@pytest.fixture
def store():
    torch.manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(shape).to(torch.bfloat16 if name in BF16 else torch.float32),
                                     requires_grad=name not in FROZEN) for name, shape in SHAPES.items()}
    store = ParameterStore(Layout(parameters.items()))
    for name, parameter in parameters.items():
        store.weight(name).copy_(parameter.data)
    yield store
    store.close()


@pytest.fixture
def slots(device, store):
    slots = Slots(device, store)
    slots.reserve(store.layout.weights(SHAPES).nbytes, 2048)
    return slots


@pytest.mark.parametrize("names", [tuple(SHAPES), ("a", "c", "d"), ("f", "a"), ("b",), ("d", "e"), ()])
def test_a_slot_holds_exactly_the_stages_parameters(device, store, slots, names):
    parameters = slots.weights(0, names, "parameters_in")
    assert tuple(parameters) == names
    for name, parameter in parameters.items():
        assert torch.equal(parameter, store.weight(name)) and parameter.dtype == store.weight(name).dtype
        assert parameter.is_leaf and parameter.requires_grad == (name not in FROZEN)
        assert parameter.data_ptr() != store.weight(name).data_ptr() or parameter.numel() == 0
    assert device.ledger.take()["parameters_in"] == store.layout.weights(names).moved


def test_two_stages_in_a_row_lie_apart_and_the_third_takes_the_first_ones_place(slots):
    first, second = (slots.weights(number, ("a",), "parameters_in")["a"] for number in range(2))
    third = slots.weights(2, ("d",), "parameters_in")["d"]
    assert first.data_ptr() != second.data_ptr()
    assert third.data_ptr() == first.data_ptr()


def test_gradients_of_one_dtype_travel_together(store):
    fp32, bf16 = gradient_groups(store.layout, tuple(SHAPES))
    assert (fp32.dtype, fp32.offsets) == (torch.float32, (("a", 0), ("c", 16), ("e", 32)))
    assert (bf16.dtype, bf16.offsets) == (torch.bfloat16, (("b", 0), ("d", 32)))
    assert (fp32.wire_bytes, bf16.wire_bytes) == (32 * 4, 64 * 2)
    assert gradient_groups(store.layout, FROZEN) == ()


def test_gradients_add_up_in_fp32_and_travel_as_a_mean_in_their_own_dtype(store, slots):
    names = ("a", "b", "c", "d", "f")
    groups = gradient_groups(store.layout, names)
    memory = StageMemory(slots.weights(1, names, "parameters_in"), groups, slots.accumulators(1, groups))
    for flat in memory.accumulators:
        flat.fill_(99)  # what the stage before left there
    memory.accumulate()
    for scale in (1.0, 1 / 512):  # in bf16, 1 + 1/512 would still be 1
        memory.accumulate()
        sum(2 * scale * parameter.float().sum() for parameter in memory.parameters.values()).backward()
        assert all(parameter.grad is None for parameter in memory.parameters.values())
    for group, flat, wire in zip(memory.groups, memory.accumulators, memory.wire(replicas=2)):
        assert flat.dtype == torch.float32 and wire.dtype == group.dtype
        for name, start in group.offsets:
            count = memory.parameters[name].numel()
            assert flat[start:start + count].tolist() == [1 + 1 / 512] * count
    groups_apart = [set(range(flat.data_ptr(), flat.data_ptr() + 4 * flat.numel())) for flat in memory.accumulators]
    assert not groups_apart[0] & groups_apart[1]


def test_slots_grow_and_never_beyond_the_budget(device, store):
    slots = Slots(device, store)
    slots.reserve(1000, 0)
    slots.reserve(500, 100)  # smaller: nothing changes
    slots.reserve(2000, 100)
    assert device.peak_bytes() == 2 * 2000 + 2 * 100
    with pytest.raises(OutOfMemory, match="the gradients of two stages needs .* budget.*device_memory_gb"):
        slots.reserve(2000, 4000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_are_added_in_pieces_to_the_same_bits(dtype):
    generator = torch.Generator().manual_seed(0)
    for shape in ((), (0, ), (7, 5), (2**18 + 3, )):
        gradient, arrived = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator).to(dtype)
        expected = gradient.clone().add_(arrived)
        _add(gradient, arrived)
        assert torch.equal(gradient, expected)

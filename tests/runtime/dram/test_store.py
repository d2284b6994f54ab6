"""Where parameters lie: extents, packing, and the shared regions themselves."""

import pytest
import torch
from torch import nn

from mobius_ds.runtime.dram.shared_memory import ALIGNMENT
from mobius_ds.runtime.dram.store import Extent, Layout, ParameterStore, merged, offset_in, packed


def layout_of(*parameters: torch.Tensor, frozen=()) -> Layout:
    return Layout((f"p{i}", nn.Parameter(tensor, requires_grad=i not in frozen)) for i, tensor in enumerate(parameters))


def test_pieces_that_touch_are_one_extent():
    pieces = [Extent(128, 256), Extent(0, 60), Extent(64, 128), Extent(320, 384)]
    assert merged(pieces) == (Extent(0, 256), Extent(320, 384))
    assert merged([]) == ()
    assert merged([Extent(0, 64), Extent(0, 64)]) == (Extent(0, 64),)


def test_a_gap_as_long_as_the_alignment_is_another_parameter():
    assert merged([Extent(0, 64), Extent(64 + ALIGNMENT, 256)]) == (Extent(0, 64), Extent(128, 256))
    assert merged([Extent(0, 4), Extent(64, 128)]) == (Extent(0, 128),)


def test_packing_moves_the_bytes_of_its_extents_and_finds_every_one():
    slot = packed([Extent(0, 60), Extent(64, 100), Extent(640, 644)])
    assert slot.extents == (Extent(0, 100), Extent(640, 644))
    assert (slot.nbytes, slot.moved) == (128 + 64, 104)
    assert [offset_in(slot, position) for position in (0, 64, 640)] == [0, 64, 128]
    with pytest.raises(KeyError):
        offset_in(slot, 300)


def test_parameters_without_elements_lie_somewhere():
    empty = torch.empty(0, 4)
    layout = layout_of(torch.ones(16), empty, torch.ones(16), empty)
    for names in (["p0", "p1"], ["p1"], ["p0", "p1", "p2", "p3"], ["p3"], ["p1", "p2"]):
        slot = layout.weights(names)
        for name in names:
            start = offset_in(slot, layout.entries[name].weight.start)
            assert 0 <= start <= slot.nbytes - layout.entries[name].weight.nbytes


def test_every_parameter_starts_on_the_alignment():
    layout = layout_of(torch.ones(3), torch.ones(1).bfloat16(), torch.tensor(1.0), torch.ones(5, 7).bfloat16(), frozen=(3,))
    assert [entry.weight.start % ALIGNMENT for entry in layout.entries.values()] == [0] * 4
    assert layout.weight_bytes == 64 + 64 + 64 + 128
    assert layout.full_bytes == 3 * 64  # fp32, and none for what is frozen
    assert layout.needs_masters
    assert layout.host_bytes == layout.weight_bytes + 2 * layout.full_bytes
    assert layout.trained(layout.entries) == ("p0", "p1", "p2")
    assert layout.weights(["p1", "p2"]).extents == (Extent(64, 128 + 4),)


def test_weights_that_are_fp32_are_their_own_masters():
    store = ParameterStore(layout_of(torch.ones(3), torch.ones(2, 2).bfloat16()))
    assert store.master("p0").data_ptr() == store.weight("p0").data_ptr()
    assert store.master("p1").dtype == torch.float32 and store.master("p1").shape == (2, 2)
    store.weight("p0").fill_(3)
    assert store.wire_weights[:12].view(torch.float32).tolist() == [3, 3, 3]  # another mapping of the same memory
    store.gradient("p1").fill_(5)
    assert store.gradient("p0").sum() == 0
    other = ParameterStore(store.layout, store.handles)
    assert other.weight("p0").tolist() == [3, 3, 3] and other.gradient("p1").sum() == 20
    weight = store.weight("p0")
    store.close()
    other.close()
    assert weight.tolist() == [3, 3, 3]


def test_weights_are_readable_after_they_were_not():
    store = ParameterStore(layout_of(torch.ones(3)))
    store.weight("p0").fill_(2)
    with pytest.raises(RuntimeError), store.unreadable_weights():
        assert store.wire_weights[:4].view(torch.float32).item() == 2  # copies to the device still work
        raise RuntimeError
    assert store.weight("p0").tolist() == [2, 2, 2]
    store.close()

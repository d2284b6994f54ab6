"""The region of weights: what lies where, who still uses it, and what is given back."""

import copy
import io
import mmap
import os
from pathlib import Path

import torch
from torch import nn

from mobius_ds.runtime.dram.shared_memory import Extent
from mobius_ds.runtime.dram.store import Layout, ParameterStore
from mobius_ds.runtime.dram.weights import WeightsRegion, is_loading, lying, piece_of, publish, revert

PAGE = mmap.PAGESIZE
PER_PAGE = PAGE // 4


def filled(region: WeightsRegion, pages: int, value: float, private: bool = False) -> torch.Tensor:
    """A tensor of some pages at the region's end."""
    extent = region.reserve(pages * PAGE)
    tensor = region.window(extent, private).tensor(extent, (pages, PER_PAGE), torch.float32)
    return tensor.fill_(value)


def pages_of(region: WeightsRegion) -> int:
    return os.stat(f"/proc/self/fd/{region._fd}").st_blocks * 512 // PAGE


def files() -> int:
    paths = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum("memfd:mobius_ds:weights" in os.readlink(path) for path in paths)


def test_pages_are_taken_when_they_are_written_and_given_back_when_nobody_keeps_them():
    region = WeightsRegion.sparse()
    assert pages_of(region) == 0
    tensors = [filled(region, 3, value) for value in (1, 2, 3, 4)]
    odd = region.reserve(10)
    last = region.window(odd).tensor(odd, (5, ), torch.bfloat16).fill_(5)
    assert pages_of(region) == 13 and region.end == 12 * PAGE + 64 and region.used() == (Extent(0, odd.stop), )
    kept = tensors[1][0]  # a view is enough
    del tensors[1], tensors[2]
    assert region.used() == (Extent(0, 9 * PAGE), odd)
    region.release([*region.used(), Extent(10 * PAGE + 8, 10 * PAGE + 16)])  # a page that another process uses a bit of
    assert pages_of(region) == 13 - 2
    assert kept.eq(2).all() and tensors[0].eq(1).all() and tensors[1].eq(3).all() and last.eq(5).all()


def test_the_last_tensor_closes_the_file():
    before = files()
    region = WeightsRegion.sparse()
    tensor, other = filled(region, 1, 1), filled(region, 1, 2)
    del region
    assert files() > before and piece_of(tensor).extent == Extent(0, PAGE)
    view = tensor.view(-1)[3:]
    del tensor, other
    assert files() > before and view.eq(1).all()
    del view
    assert files() == before


def test_a_process_has_one_object_for_a_region():
    region = WeightsRegion.sparse()
    before = len(os.listdir("/proc/self/fd"))
    assert WeightsRegion.open(region.handle) is region and len(os.listdir("/proc/self/fd")) == before
    assert WeightsRegion.sparse() is not region


def test_what_is_written_privately_is_seen_by_nobody_and_can_be_dropped_or_published():
    region = WeightsRegion.sparse()
    shared = filled(region, 2, 1)
    extent = piece_of(shared).extent
    private = nn.Parameter(region.window(extent, private=True).tensor(extent, (2, PER_PAGE), torch.float32))
    assert private.eq(1).all()
    shared.fill_(2)
    assert private.eq(2).all()  # until it is written here
    private.data[0, 0] = 7
    shared.fill_(3)
    assert private[0, 0] == 7 and private[0, 1] == 2 and private[1].eq(3).all() and shared.eq(3).all()
    revert([private, torch.ones(3)])
    assert private.eq(3).all()
    private.data.fill_(8)
    publish([private])
    assert shared.eq(8).all()


def test_a_parameter_is_found_where_it_fills_its_piece_alone():
    region, other = WeightsRegion.sparse(), WeightsRegion.sparse()
    square = filled(region, PER_PAGE, 1)
    parameters = {"whole": nn.Parameter(square), "shares": nn.Parameter(square.view(-1)), "part": nn.Parameter(square[:1]),
                  "turned": nn.Parameter(square.t()), "elsewhere": nn.Parameter(filled(other, 1, 1)),
                  "ordinary": nn.Parameter(torch.ones(3)), "copied": nn.Parameter(copy.deepcopy(square))}
    assert lying(parameters) == (region, {"whole": Extent(0, PER_PAGE * PAGE)})
    assert lying({"ordinary": parameters["ordinary"]}) == (None, {})
    assert not is_loading(parameters["whole"]) and not is_loading("a word")
    stream = io.BytesIO()
    torch.save(parameters["elsewhere"], stream)
    assert stream.tell() < 2 * PAGE  # a storage of its own, not the region


def test_a_store_leaves_placed_parameters_where_they_are_and_makes_room_for_the_others():
    region = WeightsRegion.sparse()
    filled(region, 1, 0)  # gone by now
    parameters = {"a": nn.Parameter(filled(region, 1, 1)), "new": nn.Parameter(torch.full((5, ), 4.0)),
                  "b": nn.Parameter(filled(region, 1, 2))}
    home, placed = lying(parameters)
    layout = Layout(parameters.items(), placed, home.end)
    registered = []
    store = ParameterStore(layout, on_map=registered.append, home=home)
    assert layout.span == Extent(PAGE, 4 * PAGE) and store.home is region and region.end == 4 * PAGE
    assert (layout.placed_bytes, layout.weight_bytes) == (2 * PAGE, 2 * PAGE + 64)
    assert layout.weights(["a", "b"]).extents == (Extent(0, 2 * PAGE), )
    assert store.weight("a").eq(1).all() and store.weight("b").eq(2).all() and store.weight("new").eq(0).all()
    assert store.wire_weights[PAGE:2 * PAGE].view(torch.float32).eq(2).all()
    parameters["b"].data.fill_(3)
    assert store.weight("b").eq(3).all()
    assert sum(piece.numel() for piece in registered) == 3 * PAGE
    store.close()


def test_only_pages_that_hold_weights_are_registered():
    region = WeightsRegion.sparse()
    first, _, last = filled(region, 1, 1), region.reserve(8 * PAGE), filled(region, 1, 2)
    parameters = {"first": nn.Parameter(first), "last": nn.Parameter(last)}
    registered = []
    layout = Layout(parameters.items(), lying(parameters)[1], region.end)
    store = ParameterStore(layout, on_map=registered.append, home=region)
    assert [(piece.storage_offset(), piece.numel()) for piece in registered] == [(0, PAGE), (9 * PAGE, PAGE)]
    store.close()

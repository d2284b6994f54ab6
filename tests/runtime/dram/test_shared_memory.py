"""Memory that ranks share: placed tensors keep their values and their layout, and freed room is used again."""

import gc
import os
import random
from typing import Any, List

import psutil
import pytest
import torch

import mobius_ds.runtime.dram.activations as activations_module
from mobius_ds.runtime.dram.activations import ActivationStore, Arena
from mobius_ds.runtime.dram.shared_memory import ALIGNMENT, Handle, Region, aligned
from mobius_ds.runtime.ranks.errors import PipelineError
from tests.ranks import run_ranks
from tests.runtime.jobs import config, initialize, language_model, mine

TENSORS = {
    "contiguous": lambda: torch.randn(3, 5),
    "transposed": lambda: torch.randn(4, 6, 5).transpose(0, 2),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "strided": lambda: torch.randn(8, 6)[::2, 1:4],
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 7),
    "bool": lambda: torch.rand(9) > 0.5,
    "bf16": lambda: torch.randn(7, 3).bfloat16(),
    "int64": lambda: torch.arange(11),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
}
KEEP_THEIR_STRIDES = ("contiguous", "transposed", "channels last", "scalar", "bool", "bf16", "int64")


@pytest.fixture
def store():
    store = ActivationStore(0)
    yield store
    store.close()


def put(store: ActivationStore, tensor: torch.Tensor):
    placed = store.place(tensor)
    store.view(placed).copy_(tensor)
    return placed


@pytest.mark.parametrize("name", TENSORS)
def test_a_placed_tensor_is_the_same_tensor(store, name):
    before, tensor, after = (put(store, t) for t in (torch.ones(5), TENSORS[name](), torch.ones(5)))
    tensor_again = TENSORS[name]()
    placed = put(store, tensor_again)
    view = store.view(placed)
    assert view.dtype == tensor_again.dtype and view.shape == tensor_again.shape and torch.equal(view, tensor_again)
    assert view.data_ptr() % ALIGNMENT == 0 or view.numel() == 0
    assert placed.block.nbytes == tensor_again.numel() * tensor_again.dtype.itemsize
    if name in KEEP_THEIR_STRIDES:  # so that kernels see the layout they saw in the unsplit model
        assert view.stride() == tensor_again.stride()
    assert store.view(before).sum() == store.view(after).sum() == 5


def test_random_placing_and_freeing_never_overlaps(store):
    chance, alive = random.Random(0), {}
    for number in range(600):
        if alive and chance.random() < 0.5:
            placed, value = alive.pop(chance.choice(list(alive)))
            assert (store.view(placed) == value).all()
            store.free(placed)
        tensor = torch.full((chance.randrange(2000),), number % 251, dtype=torch.uint8)
        alive[number] = put(store, tensor), number % 251
    for placed, value in alive.values():
        assert (store.view(placed) == value).all()


def test_freed_room_is_used_again_for_the_same_size():
    arena = Arena(0)
    blocks = [arena.allocate(1000) for _ in range(10)]
    reached = arena.nbytes
    assert reached == 10 * aligned(1000)
    for _ in range(50):
        for block in blocks:
            arena.free(block)
        blocks = [arena.allocate(1000) for _ in range(10)]
    assert arena.nbytes == reached
    arena.close()


def test_freed_room_is_used_again_for_other_sizes():
    arena, chance = Arena(0), random.Random(0)
    for length in chance.sample(range(1, 2048), 400):  # a sequence length that never comes twice, eight stages
        blocks = [arena.allocate(256 * length) for _ in range(8)]
        for block in chance.sample(blocks, 8):
            arena.free(block)
    assert arena.nbytes <= 8 * 256 * 2048
    arena.close()


def test_an_arena_grows_over_segments(monkeypatch):
    monkeypatch.setattr(activations_module, "SEGMENT_BYTES", 4096)
    store = ActivationStore(0)
    placed = [put(store, torch.full((300,), float(number))) for number in range(12)]  # three in a segment
    large = put(store, torch.full((5000,), -1.0))  # a segment of its own size
    assert sorted({p.block.segment for p in placed}) == [0, 1, 2, 3] and large.block.segment == 4
    for number, p in enumerate(placed):
        assert (store.view(p) == number).all()
    assert (store.view(large) == -1).all()
    store.close()


def hand_over() -> bool:
    import torch.distributed as dist
    rank = dist.get_rank()
    activations_module.SEGMENT_BYTES = 4096
    store = ActivationStore(rank)
    tensors = [make() for _, make in sorted(TENSORS.items()) for _ in range(20)] if rank == 0 else []
    box = [[put(store, tensor) for tensor in tensors], tensors]
    dist.broadcast_object_list(box)
    placed, expected = box
    same = all(torch.equal(store.view(p), tensor) for p, tensor in zip(placed, expected))
    if rank == 1:
        store.view(placed[0]).zero_()
    dist.barrier()
    written = bool((store.view(placed[0]) == 0).all()) and len({p.block.segment for p in placed}) > 1
    store.close()
    return same and written


def test_another_process_maps_what_was_placed():
    torch.manual_seed(0)
    assert run_ranks(2, hand_over) == [True, True]


def test_a_region_has_no_name_and_outlives_its_file():
    region = Region.create("a test", 100)
    memory = region.map()
    other = Region.open(region.handle)
    other_memory = other.map()
    region.close()
    region.close()
    other.close()
    memory[7] = 42
    assert other_memory[7] == 42 and memory.numel() >= 100
    assert not [name for name in os.listdir("/dev/shm") if "mobius" in name]


def test_a_region_of_a_process_that_is_gone_is_an_error():
    with pytest.raises(PipelineError, match="cannot open the shared memory of process 999999999"):
        Region.open(Handle(999999999, 3, 4096, 0))


def test_a_region_that_is_closed_is_not_taken_for_the_file_that_has_its_number_now():
    region = Region.create("first", 100)
    handle = region.handle
    region.close()
    other = Region.create("second", 100)
    assert other.handle.fd == handle.fd
    with pytest.raises(PipelineError, match="closed since"):
        Region.open(handle)
    Region.open(other.handle).close()
    other.close()


def two_hundred_steps() -> List[Any]:
    engine = initialize(language_model(), config())
    pipeline, process, found = engine.pipeline, psutil.Process(), []
    for step in range(200):
        loss = engine(*mine(step)).loss
        engine.backward(loss)
        engine.step()
        if step % 10 == 9:
            with torch.no_grad():
                engine(*mine(step))
        if step in (59, 199):
            gc.collect()
            found.append((pipeline.activations.nbytes, len(pipeline.mailbox._arrived), len(gc.get_objects()),
                          process.memory_info().rss))
    engine.destroy()
    return found


def test_two_hundred_steps_take_no_more_memory_than_sixty():
    for early, late in run_ranks(2, two_hundred_steps):
        assert late[0] == early[0]
        assert late[1] <= 2 and early[1] <= 2  # at most what a faster peer has sent already
        assert late[2] - early[2] < 100
        assert late[3] - early[3] < 4 * 2**20  # the allocator's own warming up

"""The mapping: the least contention of all orders, and never more than sequential."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from mobius_ds.inputs.topology import PRESETS, Gpu, Topology, preset
from mobius_ds.partition.mapping import contention, cross, sequential


def server(root_of, links=None) -> Topology:
    gpu = Gpu("any", 2**30, 1e12)
    return Topology("test", (gpu,) * len(root_of), tuple(root_of), tuple(links or [1e9] * len(root_of)),
                    (1e9,) * len(set(root_of)))


def by_definition(topology, gpu_of_stage) -> float:
    return sum(topology.shared(gpu_of_stage[i], gpu_of_stage[j]) / (j - i)
               for i, j in itertools.combinations(range(len(gpu_of_stage)), 2))


def roots(most: int):
    return st.lists(st.integers(0, 2), min_size=1, max_size=most).map(
        lambda chosen: [sorted(set(chosen)).index(root) for root in chosen])


@settings(max_examples=40, deadline=None)
@given(roots(5), st.integers(1, 14))
def test_least_of_all_orders(root_of, stages):
    topology = server(root_of)
    chosen = cross(topology, stages)
    least = min(by_definition(topology, [order[stage % len(order)] for stage in range(stages)])
                for order in itertools.permutations(range(len(root_of))))
    assert contention(topology, chosen) == pytest.approx(by_definition(topology, chosen))
    assert by_definition(topology, chosen) == pytest.approx(least)


@settings(max_examples=25, deadline=None)
@given(roots(12), st.integers(1, 40))
def test_never_worse_than_sequential_and_the_same_where_equal(root_of, stages):
    topology = server(root_of)
    chosen, plain = cross(topology, stages), sequential(stages, len(root_of))
    assert len(set(chosen)) == min(stages, len(root_of))
    score, reference = contention(topology, chosen), contention(topology, plain)
    assert score <= reference * (1 + 1e-9)
    if score == pytest.approx(reference, rel=1e-9):
        assert chosen == plain


@pytest.mark.parametrize("name, order", [("3090ti-4", (0, 1, 2, 3)), ("3090ti-4-2+2", (0, 2, 1, 3)),
                                         ("3090ti-8-4+4", (0, 4, 1, 5, 2, 6, 3, 7))])
def test_neighbouring_stages_hang_under_different_root_complexes(name, order):
    topology = preset(name)
    assert cross(topology, 4 * topology.size)[:topology.size] == order


def test_gpus_that_differ_keep_their_order_within_a_root_complex():
    topology = preset("3090ti-8-4+4")
    mixed = replace(topology, gpus=tuple(replace(gpu, name=str(number)) for number, gpu in enumerate(topology.gpus)))
    assert cross(mixed, 32) == cross(topology, 32)


def test_sixteen_gpus_are_searched():
    topology = server([0] * 8 + [1] * 8)
    chosen = cross(topology, 64)
    assert [topology.root_of[gpu] for gpu in chosen[:16]] == [0, 1] * 8
    assert cross(topology, 64) == chosen


def test_one_gpu():
    assert cross(server([0]), 3) == sequential(3, 1) == (0, 0, 0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_never_get_worse(name):
    topology = preset(name)
    for stages in range(1, 4 * topology.size):
        assert contention(topology, cross(topology, stages)) \
            <= contention(topology, sequential(stages, topology.size)) * (1 + 1e-9)

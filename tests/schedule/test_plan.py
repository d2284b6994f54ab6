"""Partitions and mappings."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mobius_ds.schedule.plan import InfeasiblePlan, Plan, even_partition, make_plan

UNTIMED = settings(deadline=None)  # a busy machine is no failure
LAYERS, GPUS = st.integers(1, 60), st.integers(1, 8)


def test_a_plan_prints_and_counts():
    plan = make_plan(5, 2, layers_per_stage=2)
    assert str(plan) == "stage 0: 2 layers on GPU 0 | stage 1: 2 layers on GPU 1 | stage 2: 1 layer on GPU 0"
    assert plan == Plan(2, (2, 2, 1), (0, 1, 0))
    assert plan.first_layers() == (0, 2, 4) and plan.stages_of(0) == (0, 2)


@UNTIMED
@given(LAYERS, st.integers(1, 60))
def test_an_even_partition_is_even(layers, stages):
    if stages > layers:
        with pytest.raises(InfeasiblePlan, match=f"{stages} stages were asked for.* only {layers} layers"):
            even_partition(layers, stages)
        return
    partition = even_partition(layers, stages)
    assert len(partition) == stages and sum(partition) == layers
    assert max(partition) - min(partition) <= 1


def assert_sound(plan: Plan, layers: int, gpus: int) -> None:
    assert sum(plan.layers_per_stage) == layers and min(plan.layers_per_stage) > 0
    assert plan.gpu_of_stage == tuple(stage % gpus for stage in range(plan.stages))
    assert sorted(stage for gpu in range(gpus) for stage in plan.stages_of(gpu)) == list(range(plan.stages))
    assert plan.first_layers() == tuple(sum(plan.layers_per_stage[:stage]) for stage in range(plan.stages))


@UNTIMED
@given(LAYERS, GPUS)
def test_by_default_there_are_two_stages_per_gpu_or_one_per_layer(layers, gpus):
    plan = make_plan(layers, gpus)
    assert_sound(plan, layers, gpus)
    assert plan.stages == min(layers, 2 * gpus)


@UNTIMED
@given(LAYERS, GPUS, st.integers(1, 70))
def test_one_number_of_layers_for_every_stage(layers, gpus, per_stage):
    plan = make_plan(layers, gpus, layers_per_stage=per_stage)
    assert_sound(plan, layers, gpus)
    assert set(plan.layers_per_stage[:-1]) <= {per_stage} and plan.layers_per_stage[-1] <= per_stage


@UNTIMED
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), GPUS, st.integers(-2, 2))
def test_layers_of_each_stage_by_hand(partition, gpus, off):
    layers = sum(partition) + off
    if off:
        with pytest.raises(InfeasiblePlan, match=f"adds up to {sum(partition)} layers, but the model has {layers}"):
            make_plan(layers, gpus, layers_per_stage=partition)
    else:
        plan = make_plan(layers, gpus, layers_per_stage=partition)
        assert_sound(plan, layers, gpus)
        assert plan.layers_per_stage == tuple(partition)


@UNTIMED
@given(LAYERS, GPUS, st.integers(1, 60))
def test_a_number_of_stages_by_hand(layers, gpus, stages):
    if stages <= layers:
        assert make_plan(layers, gpus, stages=stages).layers_per_stage == even_partition(layers, stages)


@UNTIMED
@given(LAYERS, GPUS, st.integers(1, 60))
def test_stages_are_added_until_the_largest_fits(layers, gpus, fits):
    plan = make_plan(layers, gpus, shortfall=lambda partition: max(partition) - fits)
    assert_sound(plan, layers, gpus)
    assert max(plan.layers_per_stage) <= fits
    fewest = min(layers, 2 * gpus)
    assert plan.stages == fewest or max(even_partition(layers, plan.stages - 1)) > fits, "no more stages than needed"


def test_where_nothing_fits_every_layer_is_a_stage():
    assert make_plan(7, 1, shortfall=lambda partition: 1).layers_per_stage == (1, ) * 7

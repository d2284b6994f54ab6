"""The partition: its evaluator against the simulator, the MIP against brute force, and what heuristics miss."""

import itertools
from dataclasses import replace
from typing import Iterator, Tuple

import pytest
from hypothesis import given, settings, strategies as st

from mobius_ds.inputs.profile import LayerProfile, ModelProfile
from mobius_ds.inputs.topology import GIB, preset
from mobius_ds.partition.mapping import sequential
from mobius_ds.partition.memory import gpu_memory, shortfall
from mobius_ds.partition.mip import PartitionMip, cut_bounds
from mobius_ds.partition.problem import GpuCost, Problem, problem_of
from mobius_ds.partition.search import best_partition, descend, even, max_stage, min_stage
from mobius_ds.partition.step_time import step_seconds
from mobius_ds.schedule.mobius import Volumes, backward_schedule, forward_schedule
from mobius_ds.schedule.plan import InfeasiblePlan, Plan, even_partition
from mobius_ds.schedule.tasks import Kind
from mobius_ds.simulation.simulator import Cost, simulate


def layer(name="block", forward=0.05, backward=0.15, weights=900_000_000, gradients=900_000_000, boundary=20_000_000,
          working=500_000_000) -> LayerProfile:
    return LayerProfile(name, forward, backward, weights, gradients, boundary, working)


def problem(layers, gpus, microbatches, order=None, **rest) -> Problem:
    order = order or range(len(gpus))
    return Problem(tuple(layers), tuple(gpus), microbatches,
                   lambda stages: tuple(order[stage % len(order)] for stage in range(stages)), **rest)


def gpt(blocks: int, hidden: int, flops: float, sequence: int = 2048, vocabulary: int = 50257) -> ModelProfile:
    """A GPT with a microbatch of one sequence, in 16 bit: two FLOPs a parameter and token, and attention's square."""
    parameters = 12 * hidden * hidden + 13 * hidden
    table = vocabulary * hidden
    boundary = 2 * sequence * hidden
    forward = (2 * parameters * sequence + 4 * sequence * sequence * hidden) / flops
    head = 2 * table * sequence / flops
    block = layer("block", forward, 3 * forward, 2 * parameters, 2 * parameters, boundary, 34 * sequence * hidden)
    layers = (layer("embedding", 1e-4, 2e-4, 2 * table, 2 * table, boundary, boundary), *[block] * blocks,
              layer("head", head, 3 * head, 2 * table, 2 * table, 4, 6 * sequence * vocabulary))
    return ModelProfile(f"gpt-{blocks}x{hidden}", layers, blocks * parameters + 2 * table)


GPT_51B = gpt(62, 8192, preset("3090ti-8-4+4").gpus[0].flops)


def partitions(layers: int, stages: int) -> Iterator[Tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(end - start for start, end in zip((0,) + cuts, cuts + (layers,)))


def brute_force(case: Problem) -> float:
    """The shortest step of all partitions; infinite if none fits."""
    return min((step_seconds(case, partition).total
                for stages in range(case.fewest_stages, len(case.layers) + 1)
                for partition in partitions(len(case.layers), stages) if shortfall(case, partition) <= 0),
               default=float("inf"))


KINDS = st.builds(layer, st.sampled_from("abc"), st.sampled_from([0, 1e-3, 2e-3, 9e-3]),
                  st.sampled_from([0, 1e-3, 3e-3, 2e-2]),
                  st.sampled_from([0, 1_000_000, 10_000_000, 55_000_000]), st.sampled_from([0, 1_000_000, 33_000_000]),
                  st.sampled_from([0, 4, 100_000, 10_000_000]), st.sampled_from([0, 1_000_000, 50_000_000]))
GPUS = st.builds(GpuCost, st.sampled_from([10**8, 3 * 10**8, 10**9, 10**12]), st.sampled_from([1e9, 4e9, 1.3e10]),
                 st.sampled_from([0.5, 1.0, 2.0]))


@st.composite
def problems(draw, most_layers=8):
    kinds = draw(st.lists(KINDS, min_size=1, max_size=3))
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=most_layers))
    gpus = draw(st.lists(GPUS, min_size=1, max_size=3))
    return problem(sorted(chosen, key=kinds.index) if draw(st.booleans()) else chosen, gpus, draw(st.integers(1, 3)),
                   draw(st.permutations(range(len(gpus)))), hop_seconds=draw(st.sampled_from([0.0, 1e-3])),
                   gradient_itemsize=draw(st.sampled_from([2, 4])),
                   update_bandwidth=draw(st.sampled_from([float("inf"), 2e10])))


@settings(max_examples=120, deadline=None)
@given(problems())
def test_equals_brute_force(case):
    shortest = brute_force(case)
    if shortest == float("inf"):
        with pytest.raises(InfeasiblePlan):
            best_partition(case, tolerance=0.0)
        return
    found = best_partition(case, tolerance=0.0)
    assert found.step.total == pytest.approx(shortest, rel=1e-6, abs=1e-9)
    assert found.gap < 1e-5
    assert sum(found.layers_per_stage) == len(case.layers) and min(found.layers_per_stage) >= 1
    assert found.gpu_of_stage == case.mapping(len(found.layers_per_stage))
    assert shortfall(case, found.layers_per_stage) <= 0
    assert found.step.total <= found.beaten.seconds


def test_boundaries_of_a_few_bytes_hide_no_partition():
    """HiGHS' presolve has called the program for the best number of stages infeasible, and with that another one proved best."""
    frozen, heavy = layer("a", 0.001, 0, 1_000_000, 0, 0, 0), layer("a", 0, 0, 1_000_000, 0, 4, 1_000_000)
    case = problem([layer("a", 0.001, 0, 0, 1_000_000, 4, 0), frozen, frozen, *[heavy] * 5],
                   [GpuCost(10**12, 1e9, 1.0)], 3, [0], gradient_itemsize=4)
    found = best_partition(case, tolerance=0.0)
    assert found.step.total == pytest.approx(brute_force(case)) == pytest.approx(0.017000016) and found.gap < 1e-5


@settings(max_examples=60, deadline=None)
@given(problems(6))
def test_bounds_of_cuts_exclude_nothing_that_fits(case):
    for stages in range(case.fewest_stages, len(case.layers) + 1):
        bounds = cut_bounds(case, stages)
        for partition in partitions(len(case.layers), stages):
            if shortfall(case, partition) <= 0:
                assert bounds is not None
                cuts = itertools.accumulate(partition)
                assert all(low <= cut <= high for low, cut, high in zip(bounds[0], cuts, bounds[1]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.builds(layer, forward=st.floats(0.02, 0.1), backward=st.floats(0.05, 0.3),
                          weights=st.integers(10**7, 10**9), gradients=st.integers(1, 10**9),
                          boundary=st.integers(1, 10**7)), min_size=1, max_size=8),
       st.integers(1, 8), st.lists(st.floats(1e9, 1e10), min_size=1, max_size=3), st.integers(1, 4))
def test_evaluator_agrees_with_the_simulator(layers, stages, bandwidths, microbatches):
    """Boundary activations take less than compute and weights here, as Note [first and last] asks."""
    gpus = [GpuCost(GIB, bandwidth, 1 + number) for number, bandwidth in enumerate(bandwidths)]
    case = problem(layers, gpus, microbatches)
    partition = even_partition(len(layers), min(stages, len(layers)))
    plan = Plan(len(bandwidths), partition, sequential(len(partition), len(bandwidths)))
    played = [simulate(schedule, cost_of(case, plan), {(task.gpu, task.stream): bandwidths[task.gpu]
                                                       for task in schedule.tasks}).makespan
              for schedule in schedules(case, plan)]
    step = step_seconds(case, partition)
    assert (step.forward, step.backward) == pytest.approx(tuple(played))


def schedules(case: Problem, plan: Plan):
    ends = list(itertools.accumulate(plan.layers_per_stage))
    stages = [case.layers[start:end] for start, end in zip([0] + ends, ends)]
    made = [[stage[-1].boundary_bytes] * case.microbatches for stage in stages]
    received = [[0] * case.microbatches] + made[:-1]
    volumes = Volumes([sum(layer.weight_bytes for layer in stage) for stage in stages],
                      [sum(layer.gradient_bytes for layer in stage) for stage in stages],
                      [0] * case.microbatches, received, made, made, received)
    home = [microbatch % plan.gpus for microbatch in range(case.microbatches)]
    return forward_schedule(plan, home, volumes), backward_schedule(plan, home, volumes, {})


def cost_of(case: Problem, plan: Plan):
    starts = plan.first_layers()

    def cost(task):
        kind, stage, _ = task.key
        if kind in (Kind.FORWARD, Kind.BACKWARD):
            layers = case.layers[starts[stage]:starts[stage] + plan.layers_per_stage[stage]]
            seconds = sum(layer.forward_seconds if kind is Kind.FORWARD else layer.backward_seconds for layer in layers)
            return Cost(case.gpus[task.gpu].slowdown * seconds)
        last = stage == plan.stages - 1 and kind in (Kind.GRADIENTS, Kind.GIVE_ACTIVATIONS)
        if last or kind in (Kind.OUTPUTS, Kind.GIVE_OUTPUT_GRADIENTS):
            return Cost()  # the model's outputs are no boundary between stages
        return Cost(0.0, (((task.gpu, task.stream), task.nbytes),))

    return cost


def test_51b_is_solved_to_one_percent():
    """62 layers of 8192, 8 GPUs, 8 microbatches; printed with ``pytest -s``."""
    for bandwidth in (None, preset("3090ti-8-4+4").link_bandwidth.__getitem__):
        found = best_partition(problem_of(GPT_51B, preset("3090ti-8-4+4"), 8, bandwidth=bandwidth), time_limit=120.0)
        print(f"\n{GPT_51B.name}: {GPT_51B.parameters / 1e9:.0f}B parameters, {len(found.layers_per_stage)} stages, step "
              f"{found.step.total:.2f} s, gap {100 * found.gap:.2f} % in {found.solver_seconds:.1f} s, "
              f"{100 * found.improvement:.1f} % shorter than {found.beaten.name}")
        assert found.gap <= 0.01 + 1e-9


@pytest.mark.parametrize("name", ["3090ti-4", "3090ti-4-2+2", "3090ti-8-4+4"])
def test_beats_every_heuristic(name):
    """Small stages first and last, where copies are exposed and the pipeline fills; larger ones between."""
    topology = replace(preset(name), update_bandwidth=120e9)
    case = problem_of(gpt(24, 2560, topology.gpus[0].flops), topology, topology.size)
    found = best_partition(case)
    print(f"\n{name}: " + ", ".join(f"{rule.name} {rule.seconds:.3f} s" for rule in found.heuristics)
          + f", MIP {found.step.total:.3f} s, gap {100 * found.gap:.2f} % in {found.solver_seconds:.1f} s")
    assert found.improvement > 0.02
    assert found.beaten.seconds == min(rule(case).seconds for rule in (max_stage, min_stage, even))


def test_exchanges_of_layers_only_improve():
    case = problem([layer(forward=0.01 * (1 + number % 3)) for number in range(12)], [GpuCost(24 * GIB, 3e9)] * 2, 2)
    start = even_partition(12, 5)
    improved = descend(case, start)
    assert len(improved) == 5 and sum(improved) == 12 and min(improved) >= 1
    assert step_seconds(case, improved).total < step_seconds(case, start).total


def test_a_few_bytes_too_many_are_too_many():
    """The shortest step would need 16 bytes more than the second GPU has."""
    light = layer("light", 1e-3, 3e-3, 0, 1_000_000, 0, 50_000_000)
    heavy = layer("heavy", 2e-3, 2e-2, 55_000_000, 33_000_000, 4, 50_000_000)
    case = problem([light, heavy, heavy, light, light, light, heavy, heavy],
                   [GpuCost(10**9, 1.3e10), GpuCost(3 * 10**8, 1.3e10)], 3, hop_seconds=1e-3, update_bandwidth=2e10)
    assert best_partition(case, tolerance=0.0).step.total == pytest.approx(brute_force(case), rel=1e-6)


def test_two_long_runs_keep_their_order():
    """Encoder and decoder blocks, more than brute force can try."""
    case = problem([layer("encoder")] * 12 + [layer("decoder", 0.08, 0.2, 1_200_000_000, 1_200_000_000)] * 12,
                   [GpuCost(24 * GIB, 6e9)] * 4, 4)
    found = best_partition(case, tolerance=0.02)
    assert sum(found.layers_per_stage) == 24 and found.gap <= 0.02 + 1e-9


def test_slow_gpu_gets_fewer_layers():
    gpus = [GpuCost(GIB, 1e10), GpuCost(GIB, 1e10, 3.0)]
    case = problem([layer(weights=1000, gradients=1000, boundary=1000)] * 12, gpus, 8)
    found = best_partition(case, tolerance=0.0)
    layers_of = [sum(count for count, gpu in zip(found.layers_per_stage, found.gpu_of_stage) if gpu == number)
                 for number in range(2)]
    assert layers_of == [9, 3]


def test_heuristics():
    case = problem([layer()] * 10, [GpuCost(6 * GIB, 1e10)] * 2, 2)
    # A layer's weights and fp32 gradients take 2 x 2.7 GB of 6.4 GB.
    assert max_stage(case).layers_per_stage == min_stage(case).layers_per_stage == (1,) * 10
    roomy = problem([layer()] * 10, [GpuCost(18 * GIB, 1e10)] * 2, 2)
    assert max_stage(roomy).layers_per_stage == (3, 3, 3, 1)
    vast = problem([layer()] * 10, [GpuCost(640 * GIB, 1e10)] * 4, 2)
    assert max_stage(vast).layers_per_stage == (3, 3, 2, 2)
    assert even(vast).seconds == min(step_seconds(vast, even_partition(10, stages)).total for stages in range(4, 11))


def test_memory_counts_two_of_each():
    case = problem([layer(weights=100, gradients=50, boundary=7, working=10), layer(weights=30, gradients=80, boundary=9,
                                                                                    working=40)], [GpuCost(GIB, 1e9)], 1)
    need, = gpu_memory(case, (1, 1))
    assert need == (2 * 100, 2 * 2 * 80, 6 * 9, 40)
    assert need.total == 200 + 320 + 54 + 40


def test_without_time_the_best_heuristic_is_returned_and_its_gap_is_honest():
    case = problem([layer()] * 10, [GpuCost(24 * GIB, 1e9)] * 2, 2)
    found = best_partition(case, time_limit=0.0)
    assert found.step.total == found.beaten.seconds
    compute = 2 * 10 * 0.2 / 2  # on two GPUs, and all that is known to be needed
    assert found.gap == pytest.approx(1 - compute / found.step.total)


def test_a_number_of_stages_that_memory_forbids_is_no_program():
    case = problem([layer()] * 10, [GpuCost(6 * GIB, 1e10)] * 2, 2)
    assert PartitionMip(case, 4).relaxation() == float("inf")
    assert PartitionMip(case, 4).solve(1.0) == (None, float("inf"), True)


def test_says_which_layer_is_too_large_and_by_how_much():
    head = layer("head", weights=20 * GIB, gradients=0, working=0, boundary=4)
    case = problem([layer(), head], [GpuCost(24 * GIB, 1e10)] * 2, 2)
    # Two slots of 20 GiB and buffers for the boundary activations it receives.
    missing = 40 * GIB + 6 * 20_000_000 - 24 * GIB
    with pytest.raises(InfeasiblePlan, match=rf"{missing} bytes are missing on GPU 1.*stage 1 \(layer 1, head\)"):
        best_partition(case)


@pytest.mark.parametrize("change, complaint", [(dict(layers=()), "0 layers"), (dict(gpus=()), "0 GPUs"),
                                               (dict(microbatches=0), "0 microbatches"),
                                               (dict(gpus=(GpuCost(GIB, -1.0),)), "GPU 0 has a bandwidth of -1.0")])
def test_rejects_what_cannot_be(change, complaint):
    good = dict(layers=(layer(),), gpus=(GpuCost(GIB, 1e9),), microbatches=1, mapping=lambda stages: (0,) * stages)
    with pytest.raises(ValueError, match=complaint):
        Problem(**{**good, **change})

"""How long planning takes (pytest-benchmark)."""

from mobius_ds.inputs.profile import LayerProfile
from mobius_ds.inputs.topology import GIB, preset
from mobius_ds.partition.mapping import cross
from mobius_ds.partition.mip import PartitionMip
from mobius_ds.partition.problem import GpuCost, Problem, problem_of
from mobius_ds.partition.search import best_partition
from mobius_ds.partition.step_time import step_seconds
from mobius_ds.schedule.plan import even_partition, make_plan
from mobius_ds.simulation.costs import bandwidths, mobius_costs
from tests.partition.test_partition import GPT_51B
from tests.planner.models import even_model, step_seconds as step_seconds_simulated

FIFTY = Problem((LayerProfile("block", 0.05, 0.15, 900_000_000, 900_000_000, 20_000_000, 500_000_000),) * 50,
                (GpuCost(24 * GIB, 13.1e9),) * 8, 8, lambda stages: tuple(stage % 8 for stage in range(stages)))


def test_solver(benchmark):
    """50 layers, 8 GPUs, 8 microbatches, 32 stages, to 1 %."""
    outcome = benchmark.pedantic(lambda: PartitionMip(FIFTY, 32).solve(30.0, gap=0.01), rounds=3)
    assert outcome.finished and outcome.bound >= 0.99 * step_seconds(FIFTY, outcome.partition).total - 1e-9


def test_search(benchmark):
    """51B parameters on 8 GPUs, all numbers of stages, to the default gap."""
    case = problem_of(GPT_51B, preset("3090ti-8-4+4"), 8)
    found = benchmark.pedantic(best_partition, (case,), rounds=1)
    assert found.gap <= 0.01 + 1e-9


def test_evaluator(benchmark):
    assert benchmark(step_seconds, FIFTY, even_partition(50, 32)).total > 0


def test_mapping(benchmark):
    topology = preset("3090ti-8-4+4")
    assert len(benchmark(cross, topology, 40)) == 40


def test_simulator(benchmark):
    """A step of 100 stages, 16 microbatches, 8 GPUs."""
    profile, topology = even_model(layers=100), preset("3090ti-8-4+4")
    plan = make_plan(100, 8, stages=100)
    assert benchmark.pedantic(step_seconds_simulated, (profile, plan, 16, mobius_costs(profile, topology, plan),
                                                       bandwidths(topology)), rounds=1) > 0

"""The peers' schedules, played with published layer times, give the published makespans."""

import json
import time
from pathlib import Path
from typing import Tuple

import pytest

from mobius_ds.inputs.topology import preset
from mobius_ds.schedule.peers import (gpipe_schedule, looped_schedule, one_forward_one_backward_schedule,
                                      roundpipe_schedule, zero3_offload_schedule)
from mobius_ds.schedule.plan import make_plan
from mobius_ds.schedule.tasks import Kind
from mobius_ds.simulation.costs import bandwidths, mobius_costs, zero3_costs
from mobius_ds.simulation.simulator import Cost, simulate
from tests.planner.models import even_model, step_seconds

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_results.json").read_text())["roundpipe-artifact"]
SIMULATED = PUBLISHED["simulated_8_gpus_16_microbatches"]
GPUS, MICROBATCHES = 8, 16


def staged_cost(times, partition):
    """Backward recomputes its layers; the head runs with the last stage and is not recomputed; a hop takes its time."""
    last = len(partition) - 1

    def cost(task):
        kind, stage = task.key.kind, task.key.stage
        if kind is Kind.FORWARD:
            ms = partition[stage] * times["layer_fwd_ms"] + (stage == last) * times["head_fwd_ms"]
        elif kind is Kind.BACKWARD:
            ms = partition[stage] * (times["layer_fwd_ms"] + times["layer_bwd_ms"]) + (stage == last) * times["head_bwd_ms"]
        else:
            ms = times["hop_ms"]
        return Cost(ms / 1e3)

    return cost


@pytest.mark.parametrize("model", sorted(SIMULATED["gpipe"]))
@pytest.mark.parametrize("name, build", [("gpipe", gpipe_schedule), ("looped-bfs", lambda stages, microbatches:
                                                                     looped_schedule(GPUS, stages, microbatches))])
def test_gpipe_and_looped_breadth_first_match_the_published_makespans(model, name, build):
    published = SIMULATED[name][model]
    schedule = build(len(published["partition"]), MICROBATCHES)
    timeline = simulate(schedule, staged_cost(PUBLISHED["models"][model], published["partition"]), {})
    assert timeline.makespan * 1e3 == pytest.approx(published["makespan_ms"], rel=1e-3)
    assert timeline.bubble(GPUS) * 100 == pytest.approx(published["bubble_percent"], rel=1e-3)


@pytest.mark.parametrize("model", sorted(SIMULATED["roundpipe"]))
def test_roundpipe_matches_the_published_makespans(model):
    published, times = SIMULATED["roundpipe"][model], PUBLISHED["models"][model]
    forward, backward = published["partition"]
    per_round = len(forward) + len(backward)

    def cost(task):
        kind, number = task.key.kind, task.key.stage % per_round
        if kind is Kind.FORWARD:
            ms = forward[number] * times["layer_fwd_ms"]
        elif kind is Kind.RECOMPUTE:
            ms = backward[number - len(forward)] * times["layer_fwd_ms"]
        elif kind is Kind.BACKWARD and number == len(forward):
            ms = times["head_fwd_ms"] + times["head_bwd_ms"]
        elif kind is Kind.BACKWARD:
            ms = backward[number - len(forward)] * times["layer_bwd_ms"]
        else:
            ms = times["hop_ms"]
        return Cost(ms / 1e3)

    timeline = simulate(roundpipe_schedule(GPUS, len(forward), len(backward), MICROBATCHES // 2, 2), cost, {})
    assert timeline.makespan * 1e3 == pytest.approx(published["makespan_ms"], rel=0.03)
    assert timeline.bubble(GPUS) * 100 == pytest.approx(published["bubble_percent"], abs=1.0)


def test_1f1b_takes_as_long_as_gpipe_when_hops_are_free_and_holds_fewer_microbatches():
    stages, microbatches = 4, 8
    cost = lambda task: Cost({Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}.get(task.key.kind, 0.0))  # noqa: E731
    schedule = one_forward_one_backward_schedule(stages, microbatches)
    timeline = simulate(schedule, cost, {})
    assert timeline.makespan == simulate(gpipe_schedule(stages, microbatches), cost, {}).makespan == (8 + 3) * 3.0
    held, most = 0, 0
    for task in [task for task in schedule.of(0) if task.stream.value == "compute"]:
        held += 1 if task.key.kind is Kind.FORWARD else -1
        most = max(most, held)
    assert most == stages


def test_zero3_offload_delivers_six_bytes_a_parameter_to_and_from_every_gpu():
    profile = even_model(layers=8)
    for gpus in (2, 4, 8):
        moved = zero3_offload_schedule(profile.layers, gpus).bytes_by_category()
        assert sum(moved.values()) == 6 * gpus * profile.parameters


def test_zero3_offload_without_peer_to_peer_is_bound_by_its_root_complex():
    profile, topology = even_model(layers=8, seconds=1e-6), preset("3090ti-4")
    timeline = simulate(zero3_offload_schedule(profile.layers, 4), zero3_costs(profile.layers, topology),
                        bandwidths(topology))
    # Towards the GPUs: two gathers, and what the ring of the reduction brings; each GPU its own.
    inward = 4 * (2 + 2 + 2 * 3 / 4) * profile.parameters
    assert timeline.makespan == pytest.approx(inward / topology.root_bandwidth[0], rel=0.1)
    nvlink = preset("a100-8-nvlink")
    linked = simulate(zero3_offload_schedule(profile.layers, 8), zero3_costs(profile.layers, nvlink), bandwidths(nvlink))
    assert linked.makespan < timeline.makespan / 2


def simulated(layers: int) -> Tuple[float, float]:
    """The step of a model of so many stages, 16 microbatches, 8 GPUs; and the processor time that its simulation takes."""
    profile, topology = even_model(layers=layers), preset("3090ti-8-4+4")
    plan = make_plan(layers, 8, stages=layers)
    began = time.process_time()
    seconds = step_seconds(profile, plan, 16, mobius_costs(profile, topology, plan), bandwidths(topology))
    return seconds, time.process_time() - began


def test_mobius_with_100_stages_and_16_microbatches_on_8_gpus_is_simulated_in_time_in_proportion():
    few, (seconds, took) = min(simulated(25)[1] for _ in range(3)), simulated(100)
    assert took < 3 * 4 * few, "four times the tasks: half a second, which test_benchmarks.py measures"
    profile, topology = even_model(layers=100), preset("3090ti-8-4+4")
    # No faster than its compute spread over the GPUs, nor than its weights through the root complexes.
    assert seconds > max(100 * 16 * 0.08 / 8, 4 * profile.parameters / (2 * topology.root_bandwidth[0]))

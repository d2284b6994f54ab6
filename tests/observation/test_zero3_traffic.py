"""ZeRO-3's bytes against closed forms, on a real DeepSpeed engine with 1, 2 and 4 ranks."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("zero3_worker.py")
CHECKOUT = Path(__file__).parents[2]

PARAMETERS = 4 * (32 * 32 + 32)
STEPS = 3
MASTER = 4  # bytes of a gradient element in the optimizer's precision
SCALARS = 64  # the gradient norm and the overflow flag, all-reduced once a step
TRACE_CHECK = 600  # ranks compare the order of their layers when DeepSpeed has (re)traced the model


@pytest.fixture(scope="module", params=[1, 2, 4])
def run(request, tmp_path_factory):
    """(ranks, results of rank 0): all cases in one job, for starting DeepSpeed takes longer than running them."""
    ranks, folder = request.param, tmp_path_factory.mktemp("zero3")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "MOBIUS_DS": "0",
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}  # yapf: disable
    jobs = [
        subprocess.Popen([sys.executable, str(WORKER), str(folder)], text=True,
                         stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                         env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(ranks)
    ]  # yapf: disable
    try:
        errors = [job.communicate(timeout=240)[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * ranks, errors[0][-3000:]
    return ranks, json.loads((folder / "results0.json").read_text())


def delivered_over_model_size(ranks, result, step):
    return ranks * result["delivered_bytes"][step] / (4 * result["parameters"])


def link_bytes(ranks, width, microbatches):
    """A rank's link bytes in a step; ``width`` bytes an element, the whole model gathered twice a microbatch."""
    whole, shard = PARAMETERS * width, PARAMETERS * width // ranks
    forwarded = 2 * (whole - shard)  # a ring sends and receives all shards but one
    gathers = 2 * (shard + forwarded)
    reduction = forwarded + 2 * shard  # and the reduced shard goes to the host and back
    return microbatches * (gathers + reduction) + MASTER * PARAMETERS // ranks


@pytest.mark.parametrize("case, width, microbatches", [("fp32", 4, 1), ("bf16", 2, 1), ("bf16-accumulate", 2, 3)])
def test_a_big_model_moves_the_papers_bytes(run, case, width, microbatches):
    ranks, results = run
    result = results[case]
    assert result["parameters"] == PARAMETERS
    for step in range(STEPS):
        traffic = result["traffic"][step]
        assert traffic["parameters_in"] == microbatches * 2 * PARAMETERS * width
        assert traffic["gradients_out"] == microbatches * PARAMETERS * width
        assert delivered_over_model_size(ranks, result, step) == microbatches * 1.5 * ranks * width / 2
        link, expected = sum(traffic.values()), link_bytes(ranks, width, microbatches)
        assert expected <= link <= expected + SCALARS + (TRACE_CHECK if step < STEPS - 1 else 0)


def test_defaults_gather_a_small_model_once_a_step(run):
    ranks, results = run
    # Every parameter is below the persistence threshold: gathered again right after the update.
    for step in range(1, STEPS):
        assert delivered_over_model_size(ranks, results["bf16-defaults"], step) == 1.0 * ranks
    assert results["bf16-defaults"]["peak_device_bytes"] == 2 * PARAMETERS


def test_evaluation_between_steps_is_not_counted(run):
    _, results = run
    for evaluated, plain in zip(results["bf16-evaluate"]["traffic"], results["bf16"]["traffic"]):
        assert abs(evaluated.pop("other") - plain.pop("other")) <= TRACE_CHECK
        assert evaluated == plain


def test_parameters_kept_on_the_device_are_not_fetched_from_the_host(run):
    ranks, results = run
    shard = 2 * PARAMETERS // ranks
    for traffic in results["bf16-optimizer-only"]["traffic"]:
        gathered = 2 * (2 * PARAMETERS - shard)
        assert traffic["parameters_in"] == gathered + shard  # the updated shard comes back from the host


def test_collectives_are_those_the_dispatcher_sees(run):
    ranks, results = run
    for case, width, microbatches in (("fp32", 4, 1), ("bf16-accumulate", 2, 3)):
        whole = PARAMETERS * width * microbatches
        # A single rank has nothing to gather; DeepSpeed reduce-scatters to itself all the same.
        assert results[case]["gathered"] == (2 * whole if ranks > 1 else 0)
        assert results[case]["scattered"] == whole


def test_peak_is_the_largest_layer(run):
    _, results = run
    layer = PARAMETERS // 4
    assert layer * 2 <= results["bf16"]["peak_device_bytes"] <= 2 * layer * 2


def test_losses_are_means_over_the_microbatches(run):
    _, results = run
    for result in results.values():
        assert result["losses"] == pytest.approx(result["expected_losses"], rel=1e-6)
        assert len(result["step_seconds"]) == STEPS
        assert min(result["step_seconds"]) > 0
        assert result["predicted_traffic"] is None
        assert result["pss_bytes"] > 0

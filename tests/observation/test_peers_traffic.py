"""The bytes of ZeRO stages 0 and 2 and of ``PipelineEngine`` against closed forms, on real DeepSpeed engines of 4 ranks."""

import pytest

from mobius_ds.observation.collectives import around, broadcast, reduce
from tests.observation.peers_worker import LAYERS, MICROBATCHES, PARAMETERS, SAMPLES, STEPS, WIDTH, run_all
from tests.ranks import run_ranks

RANKS = 4
MASTER = 4  # bytes of a gradient element in the optimizer's precision
SCALARS = 64  # the gradient norm and the overflow flag, or the loss, once a step
SHAPES = 4 * 1024  # a pipeline's stages tell each other the shapes of what they send, once


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By case, the records of all ranks."""
    ranks = run_ranks(RANKS, run_all, tmp_path_factory.mktemp("peers"), env={"MOBIUS_DS": "0"})
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


def of_every_step(records):
    return [(rank, step, traffic) for rank, record in enumerate(records) for step, traffic in enumerate(record["traffic"])]


def all_but_one(nbytes):
    return nbytes * (RANKS - 1) // RANKS


@pytest.mark.parametrize("case, width", [("ddp-fp32", 4), ("ddp-bf16", 2)])
def test_plain_data_parallelism_all_reduces_gradients_once_a_step(results, case, width):
    each_way = all_but_one(PARAMETERS * width)
    for _, _, traffic in of_every_step(results[case]):
        assert (traffic["parameters_in"], traffic["gradients_out"]) == (0, each_way)
        assert each_way * 3 <= traffic["other"] <= each_way * 3 + SCALARS


@pytest.mark.parametrize("case, width, microbatches", [
    ("zero2-fp32", 4, 1), ("zero2-bf16", 2, 1), ("zero2-bf16-accumulate", 2, MICROBATCHES),
    ("zero2-bf16-sums-in-fp32", 2, MICROBATCHES),
])
def test_zero2_with_the_optimizer_on_the_host(results, case, width, microbatches):
    whole, elements = PARAMETERS * width, PARAMETERS // RANKS
    each_way = all_but_one(whole)
    for _, _, traffic in of_every_step(results[case]):
        # What the rank owns comes from the host, the rest from the others: the whole model arrives.
        assert traffic["parameters_in"] == whole
        gradients = each_way * microbatches
        other = each_way * 3 * microbatches + each_way  # all-reduces, and what is sent in the gather
        if case == "zero2-bf16-accumulate":
            # Sums are kept on the host: out after each microbatch, in before each but the first, out once more at the end.
            gradients += elements * width * microbatches
            other += elements * width * (microbatches - 1) + elements * MASTER
        else:
            gradients += elements * MASTER
        assert traffic["gradients_out"] == gradients
        assert other <= traffic["other"] <= other + SCALARS


@pytest.mark.parametrize("case, width, stages", [("pipeline-fp32", 4, 4), ("pipeline-bf16-data-parallel", 2, 2),
                                                 ("pipeline-tied", 4, 4)])
def test_a_pipeline_sends_activations_and_their_gradients(results, case, width, stages):
    sent = MICROBATCHES * SAMPLES * WIDTH * width
    copies = RANKS // stages
    reduced = {"pipeline-fp32": 0, "pipeline-bf16-data-parallel": PARAMETERS // stages * width * (copies - 1) // copies,
               "pipeline-tied": WIDTH * WIDTH * width // 2}[case]  # the weight alone is tied, between two ranks
    for rank, step, traffic in of_every_step(results[case]):
        stage = rank // copies
        neighbours = (stage > 0) + (stage < stages - 1)
        assert traffic["activations_out"] == traffic["activations_in"] == sent * neighbours
        gradients = reduced if case != "pipeline-tied" or stage in (0, stages - 1) else 0
        assert traffic["gradients_out"] == gradients
        gathered = PARAMETERS // stages * width // 2 if case == "pipeline-bf16-data-parallel" else 0  # its bf16 optimizer
        assert traffic["parameters_in"] == gathered  # is ZeRO-1 and shares the update
        other = gradients * 3 + gathered
        assert other <= traffic["other"] <= other + SCALARS + (SHAPES if step == 0 else 0)


def test_parameters_are_those_of_the_whole_model(results):
    tied = PARAMETERS * (LAYERS - 1) // LAYERS
    for case, records in results.items():
        if case != "out of memory":
            assert {record["parameters"] for record in records} == {tied if case == "pipeline-tied" else PARAMETERS}


def test_what_is_kept_on_the_device(results):
    held = {case: {record["peak_device_bytes"] for record in results[case]} for case in results if case != "out of memory"}
    scalars = 8 * LAYERS  # the optimizer's counts of steps
    assert held["ddp-fp32"] == {(4 + 4 + 8) * PARAMETERS + scalars}  # weights, gradients, two moments
    assert held["ddp-bf16"] == {(2 + 2 + 4 + 8) * PARAMETERS + scalars}  # and masters
    bucket, largest = 4096, WIDTH * WIDTH
    assert held["zero2-bf16"] == {2 * (PARAMETERS + bucket + largest)}
    assert held["zero2-bf16-sums-in-fp32"] == {2 * (PARAMETERS + bucket + largest) + 4 * PARAMETERS // RANKS}
    assert held["pipeline-fp32"] == {(4 + 4 + 8) * PARAMETERS // RANKS + scalars // RANKS}


def test_what_does_not_fit_fails_as_on_such_a_device(results):
    for rank, said in enumerate(results["out of memory"]):
        assert f"rank {rank}: DeepSpeedEngine at ZeRO stage 0 keeps 33.00 KiB" in said["at once"]
        assert "but has 33.00 KiB (device_memory_gb): 1 bytes are missing" in said["at once"]
        assert "keeps 66.03 KiB" in said["in the first step"] and "33.03 KiB of optimizer state" in said["in the first step"]
        assert f"rank {rank}: DeepSpeedEngine at ZeRO stage 3 gathered 16.50 KiB of parameters at once" in said["gathered"]
        assert "has 16.50 KiB (device_memory_gb): 1 bytes are missing" in said["gathered"]


def test_losses_are_means_over_the_microbatches(results):
    for case, records in results.items():
        if case != "out of memory":
            for record in records:
                assert record["losses"] == pytest.approx(record["expected_losses"], rel=1e-6)
                assert len(record["step_seconds"]) == STEPS


@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_what_rings_send_is_what_they_receive(ranks):
    for rooted in (broadcast, reduce):
        passes = [rooted(100, ranks, place) for place in range(ranks)]
        assert sum(sent for sent, _ in passes) == sum(received for _, received in passes) == 100 * (ranks - 1)
    assert broadcast(100, ranks, 0).received == reduce(100, ranks, 0).sent == 0  # the root has it all, and keeps it all
    assert around(700, 7) == (600, 600)

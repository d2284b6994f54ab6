"""Advice: a decision on predictions alone, and the predictions of training that stays on the GPUs."""

from dataclasses import replace

import pytest

from mobius_ds.inputs.topology import preset
from mobius_ds.planner.advice import (DDP, GPIPE, MOBIUS, TOSS_UP, ZERO2, ZERO3, ZERO3_OFFLOAD, Candidate, advise,
                                      candidates)
from mobius_ds.planner.planner import Request, make_best_plan
from mobius_ds.prediction.zero import (accumulated, predict_ddp, predict_zero2_on_gpu, predict_zero3_offload,
                                       predict_zero3_on_gpu)
from tests.planner.models import even_model

COMMODITY, LINKED, SINGLE = preset("3090ti-4-2+2"), preset("a100-8-nvlink"), preset("4090-1")
LARGE = even_model(layers=96)  # 48 B parameters
MIDDLE = even_model(layers=16, seconds=0.01)  # 8 B
SMALL = even_model(layers=16, seconds=0.003, weight_bytes=3 * 10**8)  # 2.4 B


def advised(profile, topology, micro_batches=1):
    mobius = make_best_plan(Request(profile, topology, topology.size, strategy="even")).prediction()
    return advise(candidates(profile, topology, mobius, micro_batches), topology)


def named(found, name):
    return next(one for one in found if one.name == name)


def test_mobius_where_gpus_share_pcie_and_the_model_does_not_fit_them():
    advice = advised(LARGE, COMMODITY)
    assert advice.chosen.name == MOBIUS and advice.equals == ()
    said = " ".join(advice.sentences)
    assert said.startswith(f"Use mobius: {advice.chosen.prediction.step_seconds:.3g} s a step predicted.")
    assert "ZeRO-3 offload brings every parameter to each of the 4 GPUs" in said
    assert "gpipe cannot run: it needs" in said and "Slower: zero3-offload" in said


def test_zero3_stays_where_its_collectives_have_nvlink():
    advice = advised(LARGE, LINKED)  # too large for the GPUs
    assert advice.chosen.name == ZERO3_OFFLOAD
    said = " ".join(advice.sentences)
    assert "tay with zero3-offload" in said and "direct connection (270 GB/s) and leave PCIe to the copies" in said
    without = replace(LINKED, peer_bandwidth=None)
    assert advised(LARGE, without).chosen.name == MOBIUS  # it is the connection that decides


@pytest.mark.parametrize("profile, topology, name", [
    (SMALL, LINKED, DDP),
    (MIDDLE, LINKED, ZERO2),
    (even_model(layers=64, seconds=0.01), LINKED, ZERO3),  # 32 B: 64 GB of weights alone
    (SMALL, COMMODITY, GPIPE),
])
def test_what_fits_the_gpus_stays_there(profile, topology, name):
    advice = advised(profile, topology)
    assert advice.chosen.name == name
    assert any(sentence.startswith("It fits: ") for sentence in advice.sentences)


def test_what_fits_no_dram_is_refused_with_numbers():
    small = replace(COMMODITY, dram_bytes=10**9)
    advice = advise(candidates(LARGE, small, "no room for a plan"), small)
    assert advice.chosen is None
    said = " ".join(advice.sentences)
    assert said.startswith("Nothing fits") and "mobius cannot run: no room for a plan." in said
    assert "zero3-offload cannot run: it needs 804.66 GiB of DRAM, but 3090ti-4-2+2 has 953.67 MiB" in said


def test_one_gpu_has_nothing_to_pipeline():
    advice = advised(SMALL, SINGLE)
    assert {advice.chosen.name, *(one.name for one in advice.equals)} == {ZERO3_OFFLOAD, MOBIUS}
    said = " ".join(advice.sentences)
    assert "A toss-up" in said and "nothing to pipeline" in said and "gpipe" not in said
    assert "up to 1.4 times off on RTX 3090 Ti, and 1.9 times on RTX 4090. Only measuring decides." in said


def test_fewer_layers_than_gpus_are_no_pipeline():
    found = candidates(even_model(layers=2), COMMODITY, "irrelevant")
    assert "only 2 layers" in named(found, GPIPE).why_not


@pytest.mark.parametrize("ratio, chosen, equals", [(0.98 * TOSS_UP, ZERO3_OFFLOAD, [MOBIUS]), (1.02 * TOSS_UP, MOBIUS, [])])
def test_a_toss_up_ends_where_the_simulator_can_tell(ratio, chosen, equals):
    base = predict_zero3_offload(MIDDLE, COMMODITY)
    slow = Candidate(ZERO3_OFFLOAD, replace(base, update_seconds=ratio * base.sweep_seconds - base.sweep_seconds), 1, "")
    advice = advise((Candidate(MOBIUS, replace(base, name=MOBIUS, update_seconds=0.0), 1, ""), slow), COMMODITY)
    assert (advice.chosen.name, [one.name for one in advice.equals]) == (chosen, equals)


def test_accumulation_repeats_sweeps_and_not_the_update():
    once = predict_zero3_offload(MIDDLE, COMMODITY)
    thrice = accumulated(once, 3)
    assert thrice.step_seconds == pytest.approx(3 * once.sweep_seconds + once.update_seconds)
    assert thrice.bytes_by_category == {category: 3 * nbytes for category, nbytes in once.bytes_by_category.items()}
    assert thrice.bubble == pytest.approx(once.bubble)


def test_on_gpu_all_bytes_come_from_the_others_and_memory_is_shared():
    parameters, others = SMALL.parameters, LINKED.size - 1
    predicted = {predict: predict(SMALL, LINKED) for predict in (predict_ddp, predict_zero2_on_gpu, predict_zero3_on_gpu)}
    moved = [sum(prediction.bytes_by_category.values()) for prediction in predicted.values()]
    assert moved == pytest.approx([4 * others * parameters, 4 * others * parameters, 6 * others * parameters])
    memory = [max(prediction.memory_bytes) for prediction in predicted.values()]
    activations = sum(layer.boundary_bytes for layer in SMALL.layers) + SMALL.layers[0].working_bytes
    gathered = 3 * SMALL.layers[0].weight_bytes
    assert memory == [16 * parameters + activations, (2 + 14 / 8) * parameters + activations,
                      16 / 8 * parameters + gathered + activations]
    assert all(prediction.update_seconds == 0 for prediction in predicted.values())


def test_zero3_on_gpu_hides_its_gathers_over_nvlink_and_not_over_pcie():
    assert predict_zero3_on_gpu(SMALL, LINKED).exposed_share < 0.1
    assert predict_zero3_on_gpu(SMALL, replace(LINKED, peer_bandwidth=None)).exposed_share > 0.6

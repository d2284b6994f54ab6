"""Engines over emulated wires: the same run, in the time its bytes take."""

import threading
import time

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from mobius_ds.emulation.streams import emulated_streams
from mobius_ds.names import CACHE_VARIABLE
from mobius_ds.runtime.record.recorded_trace import Trace
from tests.emulation.wired_worker import (BANDWIDTH, COMPUTE_SECONDS, LAYERS, MICROBATCHES, MODEL_BYTES, RANKS, SLOW,
                                          SLOWER, TRACE, VERY_SLOW, WIDTH, run_all)
from tests.ranks import run_ranks

WIRE = BANDWIDTH / SLOW  # bytes/s of the root complex


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("wired")


@pytest.fixture(scope="module")
def job(folder, tmp_path_factory):
    """By case, the records of all ranks; and what is left in the folders."""
    ranks = run_ranks(RANKS, run_all, folder, env={"MOBIUS_DS": "0", CACHE_VARIABLE: str(tmp_path_factory.mktemp("plans"))})
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}, {path.name for path in folder.glob("*/*")}


def waited_in(record, name):
    """Seconds of the last step's waits within its forward or backward."""
    ((_, begin, end),) = [span for span in record["last_step"]["spans"] if span[0] == name]
    return sum(stop - start for start, stop in record["last_step"]["waits"] if begin <= start and stop <= end)


def test_wires_change_neither_losses_nor_bytes(job):
    cases, left = job
    for case in ("fast", "slow"):
        for wired, plain in zip(cases[case], cases["not emulated"]):
            assert wired["losses"] == plain["losses"]
            assert wired["traffic"] == plain["traffic"]
    assert left == {"progress", "rank0.json", "rank1.json"}  # nothing of the emulation


def test_what_crosses_is_what_is_counted(job):
    cases, _ = job
    for record in cases["slow"]:
        carried = {}
        for _, category, received, sent, begin, end, _ in record["last_step"]["transfers"]:
            assert end > begin
            carried[category] = carried.get(category, 0) + (sent if category == "gradients_out" else received)
        counted = record["traffic"][-1]
        for category in ("parameters_in", "gradients_out"):
            assert carried[category] == counted[category]
        assert sum(received + sent for _, _, received, sent, *_ in record["last_step"]["transfers"]) == sum(counted.values())


def test_a_step_over_slow_wires_takes_the_time_of_its_bytes(job):
    cases, _ = job
    # Everything in turn, both GPUs through one root complex: two gathers of the model, a reduction of half of it each way,
    # and three copies of each rank's half.
    expected = (2 * MODEL_BYTES * RANKS + (MODEL_BYTES / 2 * RANKS) * (1 + 3)) / WIRE
    for record in cases["slow"]:
        computing = min(cases["not emulated"][0]["step_seconds"])
        assert expected * 0.85 <= record["step_seconds"][-1]
        # Twice as long if anything crossed twice or waited for what it need not; a busy machine makes some steps longer.
        assert min(record["step_seconds"]) <= expected * 1.8 + computing
        waited = sum(end - begin for begin, end in record["last_step"]["waits"])
        assert waited >= 0.7 * expected


def test_a_prefetched_gather_hides_behind_compute(job):
    cases, _ = job
    gather = MODEL_BYTES / LAYERS * RANKS / (BANDWIDTH / SLOWER)
    assert gather < COMPUTE_SECONDS
    for prefetched, not_prefetched in zip(cases["prefetched"], cases["not prefetched"]):
        # A shard that comes in while the other GPU still computes has the root complex for itself.
        exposed = waited_in(not_prefetched, "forward")
        assert exposed > 0.55 * LAYERS * gather
        assert waited_in(prefetched, "forward") < exposed / 2  # the first layer has nothing to hide behind


def test_mobius_crosses_the_same_wires(job, folder):
    cases, _ = job
    arriving = sum(sum(nbytes for category, nbytes in record["traffic"][-1].items() if category.endswith("_in"))
                   for record in cases["mobius"])
    for wired, zero3 in zip(cases["mobius"], cases["slow"]):
        assert wired["engine"] == "MobiusEngine" and wired["traffic"] == wired["predicted_traffic"]
        assert wired["losses"] == pytest.approx(zero3["losses"], rel=1e-5)
        assert 0.85 * arriving / WIRE <= wired["step_seconds"][-1]
    simulated, says = Trace(folder / TRACE).simulated(None)  # on the same clock
    assert 0.85 * arriving / WIRE <= simulated.seconds and says == f"two GPUs, {SLOW:g} times slower"


def test_stages_wait_for_what_they_send_each_other(job):
    cases, _ = job
    # What one stage sends the other receives meanwhile; the batch needs them there and back, once per microbatch.
    sent = MICROBATCHES * 2 * WIDTH * 4
    crossing = sent / (BANDWIDTH / VERY_SLOW)
    for record in cases["pipeline"]:
        traffic = record["traffic"][-1]
        assert traffic["activations_out"] == traffic["activations_in"] == sent
        assert 0.9 * crossing <= sum(end - begin for begin, end in record["last_step"]["waits"])
        assert record["step_seconds"][-1] >= crossing


def test_streams_overlap_and_wait_as_on_a_device():
    began, waits = [], []

    def transfer(name, may_end):
        def cross(begin):
            began.append(name)
            assert may_end.wait(30)
            return time.perf_counter()

        return cross

    def soon(action):
        threading.Timer(0.2, action).start()

    before = get_accelerator()
    with emulated_streams(lambda begin, end: waits.append(end - begin)) as accelerator:
        assert get_accelerator() is accelerator and not accelerator.resolves_data_dependency()
        first, second = accelerator.Stream(), accelerator.Stream()
        of_first, of_second = threading.Event(), threading.Event()
        first.submit(transfer("one", of_first))
        first.submit(transfer("after it", of_first))
        with accelerator.stream(second):
            second.submit(transfer("beside", of_second))
            event = accelerator.Event()
            event.record()
        torch.zeros(1).record_stream(second)
        second.wait_stream(first)  # holds up the stream, not the caller
        assert not waits and not event.query() and not second.query()
        soon(of_second.set)
        event.synchronize()
        assert event.query() and not first.query() and not second.query()
        assert "beside" in began and "after it" not in began
        soon(of_first.set)
        accelerator.current_stream().wait_stream(second)
        assert first.query() and second.query() and began[-1] == "after it"
        assert len(waits) == 2 and min(waits) > 0.1
        second.submit(lambda begin: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            accelerator.synchronize()
    assert get_accelerator() is before

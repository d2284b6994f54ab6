"""Timelines and figures of engines that are observed, from records made by hand."""

import json

import pytest

from mobius_ds.emulation.server import EmulatedServer
from mobius_ds.emulation.transfers import CALLS_REMEMBERED, CallTimes
from mobius_ds.inputs.topology import preset
from mobius_ds.observation.records import Told, tell, told_in
from mobius_ds.observation.transfers import TransferCall
from mobius_ds.reporting.comparison import observed_timeline
from mobius_ds.reporting.comparison.observed_timeline import without
from mobius_ds.simulation.costs import to_dram, to_gpu

SERVER = EmulatedServer(preset("3090-2"), 10.0)


def to_and_from_dram(gpu, received, sent):
    """As it is read from a record: lists."""
    crossing = *to_gpu(SERVER.topology, gpu, received), *to_dram(SERVER.topology, gpu, sent)
    return json.loads(json.dumps(crossing))


def record(gpu, offset=0.0, crossing=to_and_from_dram):
    """A rank's: forward for 2 s, of which 1 s waits; backward for 2 s, of which 1 s in all waits; 1 s update."""
    return {"step_seconds": [9.0, 5.0], "last_step": {
        "begin": 100.0 + offset, "end": 105.0,
        "spans": [["forward", 100.0, 102.0], ["backward", 102.0, 104.0]],
        "waits": [[100.5, 101.5], [103.0, 103.6], [103.2, 104.0], [104.5, 104.75]],  # a wait within a wait counts once
        "transfers": [["all_gather", "parameters_in", 800, 400, 100.0, 101.5, crossing(gpu, 800, 400)],
                      ["copy", "gradients_out", 0, 100, 103.0, 104.0, to_and_from_dram(gpu, 0, 100)],
                      ["copy", "other", 200, 0, 104.5, 104.75, to_and_from_dram(gpu, 200, 0)]],
    }}  # yapf: disable


def test_a_step_of_all_ranks_and_where_its_time_goes():
    report = {}
    observed_timeline.add_to_report(report, {"zero3": [record(0), record(1, 0.25)], "mobius": [{"last_step": None}]}, emulated=True)
    assert list(report["timelines"]) == list(report["figures"]) == ["zero3"]
    timeline, figures = report["timelines"]["zero3"], report["figures"]["zero3"]
    assert (timeline["step"], timeline["seconds"], timeline["emulated"]) == (2, 5.0, True)
    of_gpu_1 = [task[1:] for task in timeline["tasks"] if task[0] == 1]
    assert of_gpu_1 == [
        ["compute", "forward", "compute", None, None, 0, 0.0, 0.5, ""],
        ["compute", "forward", "compute", None, None, 0, 1.5, 2.0, ""],
        ["compute", "backward", "compute", None, None, 0, 2.0, 3.0, ""],
        ["prefetch", "all_gather", "parameters_in", None, None, 800, 0.0, 1.5, ""],
        ["offload", "copy", "gradients_out", None, None, 100, 3.0, 4.0, ""],
        ["store", "copy", "other", None, None, 200, 4.5, 4.75, ""],
    ]  # yapf: disable
    assert figures["compute_seconds"] == [2.0, 2.0] and figures["exposed_seconds"] == [2.25, 2.25]
    assert (figures["step_seconds"], figures["sweep_seconds"], figures["bubble"]) == (5.0, 4.0, 0.5)
    assert figures["bandwidth"]["in 0"] == [pytest.approx((800 / 1.5, 0.8)), pytest.approx((800, 1.0))]
    assert [share for _, share in figures["bandwidth"]["root out 0"]] == pytest.approx([0.1, 0.2, 0.6, 1.0])


def test_bandwidths_are_those_of_links_that_bytes_crossed():
    report = {}
    not_emulated = record(0)
    for transfer in not_emulated["last_step"]["transfers"]:
        transfer[-1] = []
    observed_timeline.add_to_report(report, {"zero3": [not_emulated]})
    assert report["figures"]["zero3"]["bandwidth"] == {} and not report["timelines"]["zero3"]["emulated"]
    linked = record(0, crossing=lambda gpu, *ways: [[["peer", gpu], max(ways)]])
    observed_timeline.add_to_report(report, {"zero3": [linked]}, emulated=True)
    bandwidth = report["figures"]["zero3"]["bandwidth"]
    assert bandwidth["peer 0"] == [pytest.approx((800 / 1.5, 1.0))]
    assert bandwidth["in 0"] == [(800, 1.0)] and bandwidth["out 0"] == [(100, 1.0)]  # of the copies alone


@pytest.mark.parametrize("holes, left", [
    ([], [(1.0, 2.0)]),
    ([(0.0, 3.0)], []),
    ([(0.0, 1.5)], [(1.5, 2.0)]),
    ([(1.5, 3.0)], [(1.0, 1.5)]),
    ([(1.6, 1.8), (1.2, 1.4)], [(1.0, 1.2), (1.4, 1.6), (1.8, 2.0)]),
    ([(0.0, 0.5), (2.5, 3.0)], [(1.0, 2.0)]),
])
def test_what_is_left_of_a_span(holes, left):
    assert list(without((1.0, 2.0), holes)) == left


def test_collectives_cross_the_gpus_own_connection_where_there_is_one_and_copies_never(tmp_path):
    transfers = EmulatedServer(preset("a100-8-nvlink"), 1e-6).transfers_of(3, tmp_path)
    try:
        for group in (object(), None):
            transfers._carry(TransferCall("any", group, "parameters_in", 800, 100), 0.0)
    finally:
        transfers.close()
    crossed = [[link for link, _ in transfer.crossing] for transfer in transfers.notes.take()["transfers"]]
    assert crossed == [[("peer", 3)], [("in", 3), ("root in", 1), ("out", 3), ("root out", 1)]]


def test_a_server_reaches_the_ranks_through_their_folder(tmp_path):
    server = EmulatedServer(preset("3090ti-4-1+3"), 100.0)
    tell(tmp_path, Told(emulated=server.to_json()))
    assert EmulatedServer.from_json(told_in(tmp_path).emulated) == server
    assert "time on the emulated server runs 100 times slower" in server.to_report()["says"].lower()
    assert "not a measurement" in server.says


def test_a_collective_begins_when_the_last_rank_calls_it(tmp_path):
    first, second = (CallTimes(tmp_path / "calls", rank, 2) for rank in range(2))
    for _ in range(CALLS_REMEMBERED + 2):  # places are used again
        early = first.called()
        late = second.called()
        assert early() == late() == second._times[CALLS_REMEMBERED + (second._made - 1) % CALLS_REMEMBERED]
    first.close(), second.close()

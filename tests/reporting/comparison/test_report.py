"""The report, from records made by hand."""

import json
import math

import pytest
from rich.console import Console

from mobius_ds.reporting.comparison.arms import Failure
from mobius_ds.reporting.comparison.building import build_report
from mobius_ds.reporting.comparison.report import findings, median_step_seconds
from mobius_ds.reporting.comparison.tables import markdown, measures, rich_table, write_report
from mobius_ds.reporting.page import png
from mobius_ds.schedule.tasks import CATEGORIES

MACHINE = {"cpu": "Test CPU", "cores": 2, "memory_bytes": 2**34, "torch": "2.13.0", "deepspeed": "0.19.8"}
PARAMETERS = 1000


def traffic(parameters_in, gradients_out, other):
    counted = {"parameters_in": parameters_in, "gradients_out": gradients_out, "other": other}
    return {**dict.fromkeys(CATEGORIES, 0), **counted}


def record(rank, losses, per_step, delivered, predicted=None):
    return {
        "rank": rank, "ranks": 2, "engine": "E", "device": "cpu", "parameters": PARAMETERS, "dtype": "float32",
        "losses": losses, "step_seconds": [1.0 + rank, 0.5, 0.4], "traffic": per_step, "predicted_traffic": predicted,
        "delivered_bytes": delivered, "peak_device_bytes": 100 + rank, "peak_device_measure": "a test's",
        "store_bytes": None if predicted is None else 5000, "sweeps": 1, "pss_bytes": 7000,
        "pinned_bytes": None if predicted is None else 0, "pageable_bytes": None if predicted is None else 0,
    }  # yapf: disable


@pytest.fixture
def records():
    zero3 = [traffic(4000, 2000, 5000)] * 3
    mobius = [traffic(2000, 1000, 10)] * 3
    return {
        "zero3": [record(rank, [3.0 + rank, 2.0, 1.0], zero3, [6000] * 3) for rank in range(2)],
        "mobius": [record(rank, [3.0 + rank, 2.0, 1.0], mobius, [3010] * 3, [dict(step) for step in mobius])
                   for rank in range(2)],
    }


def test_report_has_the_promised_keys_and_sums(records):
    report = build_report(records, "fp32", MACHINE)
    assert report["model"] == {"parameters": 1000, "model_size_bytes": 4000}
    assert (report["ranks"], report["steps"], report["dtype"]) == (2, 3, "fp32")
    zero3, mobius = report["arms"]["zero3"], report["arms"]["mobius"]
    assert zero3["losses"] == [3.5, 2.0, 1.0]  # mean over ranks
    assert zero3["step_seconds"] == [2.0, 0.5, 0.4]  # slowest rank
    assert zero3["traffic"]["per_step_bytes"] == traffic(8000, 4000, 10000)
    assert zero3["traffic"]["delivered_bytes"] == 12000
    assert zero3["traffic"]["link_bytes"] == 22000
    assert zero3["traffic"]["delivered_over_model_size"] == 3.0
    assert zero3["traffic"]["link_over_model_size"] == 5.5
    assert zero3["peak_device_bytes"] == 101
    assert zero3["host_bytes_per_node"] == mobius["host_bytes_per_node"] == 14000
    assert "predicted_traffic" not in zero3
    assert mobius["predicted_traffic"] == mobius["traffic"]["per_step_bytes"]
    assert mobius["traffic"]["delivered_bytes"] == mobius["traffic"]["link_bytes"] == 6020
    assert findings(report) == ([], [])


def test_losses_that_differ_are_a_problem(records):
    records["mobius"][0]["losses"][1] += 3e-5
    report = build_report(records, "fp32", MACHINE)
    assert report["comparison"]["max_loss_difference"] == pytest.approx(1.5e-5)
    (problem,), _ = findings(report)
    assert problem.startswith("LOSSES DIFFER")
    assert findings(build_report(records, "bf16", MACHINE))[0] == []


def test_a_loss_that_is_no_number_is_a_problem(records, tmp_path):
    records["mobius"][0]["losses"][1] = math.nan
    records["zero3"][0]["losses"][2] = math.inf
    records["ddp"] = [dict(rank, losses=[math.nan] * 3) for rank in records["zero3"]]
    report = build_report(records, "bf16", MACHINE)
    problems, notes = findings(report)
    assert problems == ["The loss is not a number from step 3 on in zero3",
                        "The loss is not a number from step 2 on in mobius"]
    assert notes == ["The loss is not a number from step 1 on in ddp"]
    assert report["comparison"]["max_loss_difference"] is None
    write_report(report, tmp_path)

    def no_number(said):
        raise AssertionError(f"JSON has no {said}")

    written = json.loads((tmp_path / "report.json").read_text(), parse_constant=no_number)
    assert written["arms"]["mobius"]["losses"] == [3.5, None, 1.0]


def test_a_missing_loss_is_a_problem(records):
    records["zero3"][1]["losses"][2] = None
    (problem,), _ = findings(build_report(records, "fp32", MACHINE))
    assert "engine.backward" in problem


def test_one_byte_off_the_prediction_is_a_problem(records):
    # Off by one on each of two ranks, in opposite directions: sums would hide it.
    records["mobius"][0]["predicted_traffic"][1]["other"] += 1
    records["mobius"][1]["predicted_traffic"][1]["other"] -= 1
    report = build_report(records, "fp32", MACHINE)
    assert report["comparison"]["measured_equals_predicted"] is False
    (problem,), _ = findings(report)
    assert "other of rank 0 at step 1: measured 10, predicted 11" in problem


def test_bytes_that_vary_between_steps_are_said_to(records):
    for rank in records["zero3"]:
        rank["delivered_bytes"] = [6000, 8000, 6000]
    _, (note,) = findings(build_report(records, "fp32", MACHINE))
    assert note == "zero3: bytes vary between steps, delivered 3.000 to 4.000 times the model size"


def test_the_first_step_does_not_count_where_there_are_others(records):
    for rank in records["zero3"]:
        rank.update(delivered_bytes=[8000, 6000, 6000], traffic=[traffic(9000, 0, 0), *rank["traffic"][1:]])
    report = build_report(records, "fp32", MACHINE)
    moved = report["arms"]["zero3"]["traffic"]
    assert moved["delivered_over_model_size"] == 3.0 and moved["per_step_bytes"] == traffic(8000, 4000, 10000)
    assert moved["link_over_model_size"] == 5.5 and median_step_seconds(report["arms"]["zero3"]) == 0.45
    assert findings(report)[1] == ["zero3: the first step delivered 4.000 times the model size, and is not counted"]
    assert "the first step is left out" in measures(report)

    for rank in records["zero3"]:
        rank.update({key: rank[key][:1] for key in ("losses", "step_seconds", "delivered_bytes", "traffic")})
    alone = build_report({"zero3": records["zero3"]}, "fp32", MACHINE)["arms"]["zero3"]
    assert alone["traffic"]["delivered_over_model_size"] == 4.0 and median_step_seconds(alone) == 2.0


def test_files_are_written_and_readable(records, tmp_path):
    report = build_report(records, "fp32", MACHINE)
    write_report(report, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    page = (tmp_path / "report.md").read_text()
    assert "Test CPU" in page and "| delivered / model size | 3.000 | 1.505 |" in page
    for plot in png.draw_comparison(report, tmp_path):
        assert plot.read_bytes().startswith(b"\x89PNG")
        assert plot.name in page


def test_table_names_machine_and_arms(records):
    console = Console(width=120, record=True)
    console.print(rich_table(build_report(records, "fp32", MACHINE)))
    text = console.export_text()
    for expected in ("Test CPU", "zero3", "mobius", "0.450", "measured = predicted bytes"):
        assert expected in text


def test_one_arm_alone_is_reported_too(records):
    report = build_report({"zero3": records["zero3"]}, "fp32", MACHINE)
    assert findings(report) == ([], [])
    assert "| delivered, MB | 0.01 |" in markdown(report)


def test_arms_without_numbers_have_a_column_and_a_reason(records, tmp_path):
    failed = {"pipeline": Failure("OOM", "it needs 3 GiB"), "ddp": Failure("not run", "the script cannot")}
    report = build_report(records, "fp32", MACHINE, failed)
    assert report["failed"]["pipeline"] == {"what": "OOM", "why": "it needs 3 GiB"}
    page = markdown(report)
    assert "| per step | zero3 | mobius | pipeline | ddp |" in page
    assert "| step time, s | 0.450 | 0.450 | OOM | not run |" in page and "| 3.000 | 1.505 | - | - |" in page
    assert "pipeline: OOM: it needs 3 GiB" in page and "ddp: not run: the script cannot" in page
    assert findings(report)[0] == []
    assert all(plot.stat().st_size for plot in png.draw_comparison(report, tmp_path))


def test_losses_of_peers_may_differ_but_not_in_silence(records):
    for name in ("ddp", "zero2"):
        records[name] = [dict(rank, losses=[3.0 + rank["rank"], 2.1, 1.0]) for rank in records["zero3"]]
    report = build_report(records, "fp32", MACHINE)
    assert report["comparison"]["loss_differences"] == pytest.approx({"mobius": 0.0, "ddp": 0.1, "zero2": 0.1})
    problems, (ddp, zero2) = findings(report)
    assert problems == [] and ddp.startswith("ddp: losses differ from zero3's by up to 0.1. With 16-bit weights")
    assert zero2 == "zero2: losses differ from zero3's by up to 0.1. The cause is not known"
    assert "| largest loss difference from zero3 | - | 0 | 0.1 | 0.1 |" in markdown(report)

    for rank in records["ddp"]:
        rank["losses"][0] += 0.1
    assert "before the first update" in findings(build_report(records, "fp32", MACHINE))[1][0]

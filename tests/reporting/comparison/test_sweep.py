"""The table and the plots of a sweep, from reports made by hand."""

import argparse

import pytest
from rich.console import Console

from mobius_ds.reporting.comparison import series
from mobius_ds.reporting.comparison.building import build_report
from mobius_ds.reporting.comparison.series import MICRO_BATCH, RANKS, Series
from mobius_ds.reporting.comparison.tables import markdown, rich_table, write_report
from mobius_ds.reporting.page import png
from tests.reporting.comparison.test_report import MACHINE, records  # noqa: F401  (a fixture)

OOM = {"pipeline": {"what": "OOM", "why": "needs 3 GiB"}}


@pytest.fixture
def report(records):  # noqa: F811
    report = build_report(records, "bf16", MACHINE)
    points = [series.point(1, report["arms"], {}), series.point(2, {"zero3": report["arms"]["zero3"]}, OOM)]
    return {**report, "sweep": {"over": RANKS, "points": points}}


@pytest.mark.parametrize("text, expected", [
    ("ranks=1,2,4", Series(RANKS, (1, 2, 4))),
    ("micro_batch=8", Series(MICRO_BATCH, (8, ))),
    ("ranks=2,2", Series(RANKS, (2, ))),
])
def test_what_is_varied_is_read(text, expected):
    assert series.parse(text) == expected


@pytest.mark.parametrize("text", ["ranks", "ranks=", "ranks=1,", "ranks=0", "ranks=-1", "ranks=1.5", "layers=1,2", "=1"])
def test_what_is_no_sweep_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no sweep: give ranks=1,2,4"):
        series.parse(text)


def test_a_point_has_every_arm(report):
    first, second = report["sweep"]["points"]
    assert first["value"] == 1 and second["value"] == 2
    assert first["arms"]["zero3"] == {"step_seconds": 0.45, "delivered_over_model_size": 3.0, "link_over_model_size": 5.5,
                                      "delivered_bytes": 12000, "link_bytes": 22000}
    assert second["arms"]["pipeline"] == {"why": "OOM: needs 3 GiB"}
    assert series.arms_of(report["sweep"]) == ["zero3", "mobius", "pipeline"]


@pytest.mark.parametrize("over, dtype, zero3, mobius", [
    (RANKS, "bf16", [1.5, 3.0], [1.5, 1.5]),
    (RANKS, "fp32", [3.0, 6.0], [3.0, 3.0]),
    (MICRO_BATCH, "bf16", [3.0, 3.0], [1.5, 1.5]),
])
def test_closed_forms(report, over, dtype, zero3, mobius):
    report["sweep"]["over"], report["dtype"] = over, dtype
    assert report["ranks"] == 2
    assert series.closed_forms(report) == {"zero3": zero3, "mobius": mobius}
    report["arms"]["zero3"]["sweeps"] = 4  # microbatches; train_batch takes all of them in one
    assert series.closed_forms(report) == {"zero3": [4 * times for times in zero3], "mobius": mobius}
    del report["arms"]["zero3"]
    assert series.closed_forms(report) == {"mobius": mobius}


def test_the_table_shows_what_is_missing(report):
    rows = dict(series.table_rows(report))
    assert rows["zero3: link / model size"] == ["5.500", "5.500"]
    assert rows["mobius: link / model size"] == ["1.505", "-"]
    assert rows["pipeline: step time, s"] == ["-", "OOM"]
    said = " ".join(series.notes(report))
    assert "global batch grows with the ranks" in said and "pipeline at ranks=2: OOM: needs 3 GiB" in said


def test_page_and_plots_have_the_sweep(report, tmp_path):
    write_report(report, tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "| ranks | 1 | 2 |" in page and "global batch grows" in page
    drawn = {plot.name for plot in png.draw_comparison(report, tmp_path)}
    assert {"sweep_traffic.png", "sweep_time.png"} <= drawn
    assert all(name in page and (tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in drawn)
    del report["sweep"]
    assert "sweep" not in markdown(report)


def test_emulated_times_are_labelled(report):
    report["emulated"] = {"topology": "4090-2", "slowdown": 100, "says": "links of 4090-2 are emulated"}
    page = markdown(report)
    assert page.splitlines()[0].endswith("emulated 4090-2")
    console = Console(width=120, record=True)
    console.print(rich_table(report))
    assert "links of 4090-2 are emulated" in console.export_text()
    assert "## Sweep (emulated)" in page and "| step time, s (emulated) |" in page
    assert "| zero3: step time, s (emulated) |" in page and "| zero3: link / model size |" in page

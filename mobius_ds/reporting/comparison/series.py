"""How traffic and step time grow: a series of comparisons, with several numbers of ranks or several micro-batches.

``compare --sweep`` asks for it. A rank's micro-batch stays what it is when the number of ranks is varied, as more GPUs are
bought for more samples a step, so the global batch grows with the value either way.
"""

import argparse
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

from mobius_ds.reporting.comparison.arms import MOBIUS, ZERO3
from mobius_ds.reporting.comparison.report import Report, median_step_seconds, timed

RANKS, MICRO_BATCH = "ranks", "micro_batch"
STEPS = 4
"""Optimizer steps of each arm at each value, at most."""

GROWS = {RANKS: "samples per rank stay the same, so the global batch grows with the ranks",
         MICRO_BATCH: "ranks stay the same, so the global batch grows with the micro-batch"}
"""What a series keeps, and what grows with it."""

_ONE_SWEEP = 1.5  # times the model: 2 bytes a parameter in for forward, 2 for backward, 2 of gradients out, of 4
_WIDTH = {"fp32": 2}  # times the bytes of what the model size reckons with


class Series(NamedTuple):
    """What is varied, and the values it takes."""

    over: str
    values: Tuple[int, ...]


def parse(text: str) -> Series:
    """Reads ``ranks=1,2,4`` or ``micro_batch=1,2,4``.

    Raises:
        argparse.ArgumentTypeError: it is no such thing.
    """
    over, _, values = text.partition("=")
    numbers = [int(value) for value in values.split(",") if value.isdecimal()]
    if over not in GROWS or len(numbers) != len(values.split(",")) or not all(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is no sweep: give {RANKS}=1,2,4 or {MICRO_BATCH}=1,2,4")
    return Series(over, tuple(dict.fromkeys(numbers)))


def point(value: int, arms: Mapping[str, Mapping[str, Any]], failed: Mapping[str, Mapping[str, str]]) -> Dict[str, Any]:
    """The numbers of all arms at one value.

    Args:
        arms, failed: of the report of the comparison there.
    """
    return {"value": value, "arms": {**{name: _figures(arm) for name, arm in arms.items()},
                                     **{name: {"why": f"{failure['what']}: {failure['why']}"}
                                        for name, failure in failed.items()}}}


def _figures(arm: Mapping[str, Any]) -> Dict[str, Any]:
    keys = ("delivered_over_model_size", "link_over_model_size", "delivered_bytes", "link_bytes")
    return {"step_seconds": median_step_seconds(arm), **{key: arm["traffic"][key] for key in keys}}


def arms_of(series: Mapping[str, Any]) -> List[str]:
    """The names of all arms of a series."""
    return list(dict.fromkeys(name for point in series["points"] for name in point["arms"]))


def closed_forms(report: Report) -> Dict[str, List[float]]:
    """What Mobius and ZeRO-3 deliver by their formulas, without activations: multiples of the model size, at each value.

    A series keeps how many microbatches a step has, and with them how often each engine goes through the model.
    """
    series, width = report["sweep"], _WIDTH.get(report["dtype"], 1)
    ranks = [point["value"] if series["over"] == RANKS else report["ranks"] for point in series["points"]]
    grows = {MOBIUS: [1] * len(ranks), ZERO3: ranks}
    return {name: [_ONE_SWEEP * width * report["arms"][name]["sweeps"] * times for times in grows[name]]
            for name in grows if name in report["arms"]}


def table_rows(report: Report) -> List[Tuple[str, List[str]]]:
    """Label and one cell a value, for every row of the series' table."""
    series = report["sweep"]
    rows = []
    for key, label in (("step_seconds", timed("step time, s", report)),
                       ("delivered_over_model_size", "delivered / model size"),
                       ("link_over_model_size", "link / model size")):
        for name in arms_of(series):
            rows.append((f"{name}: {label}", [_cell(point["arms"].get(name, {}), key) for point in series["points"]]))
    return rows


def _cell(figures: Mapping[str, Any], key: str) -> str:
    return f"{figures[key]:.3f}" if key in figures else figures.get("why", "-").partition(":")[0]


def notes(report: Report) -> List[str]:
    """What has to be said beside the table."""
    series = report["sweep"]
    forms = [f"{name} {', '.join(f'{value:g}' for value in values)}" for name, values in closed_forms(report).items()]
    missing = [f"{name} at {series['over']}={point['value']}: {figures['why']}"
               for point in series["points"] for name, figures in point["arms"].items() if "why" in figures]
    formulas = "Delivered by the formulas, times the model size and without activations"
    return [f"At most {STEPS} steps a point, but as many as the comparison has where it stands itself; "
            f"{GROWS[series['over']]}.", *([f"{formulas}: {'; '.join(forms)}."] if forms else []), *missing]

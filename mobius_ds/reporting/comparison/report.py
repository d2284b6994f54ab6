"""What a comparison found: one dictionary, from which ``report.json`` and all that people read are made.

``building`` makes it of the ranks' records, ``verdict`` says what is wrong with it; the functions here only read it.
"""

import statistics
from typing import Any, Dict, List, Mapping, Sequence, Tuple, TypeVar

from mobius_ds.reporting.comparison.arms import MOBIUS

HOST_WORK = "DeepSpeed's host work included"
"""What is to be said of the compute of an arm that is observed."""

Report = Dict[str, Any]
PerStep = TypeVar("PerStep")


def counted(steps: Sequence[PerStep]) -> Sequence[PerStep]:
    """The steps that an arm is judged by: without the first, in which engines plan and warm up, where there are others."""
    return steps[1:] or steps


def median_step_seconds(arm: Mapping[str, Any]) -> float:
    """An arm's step time in seconds."""
    return statistics.median(counted(arm["step_seconds"]))


def records_itself(arm: str) -> bool:
    """Whether an arm's compute is that of its tasks alone, measured or simulated.

    Other engines are observed from outside: between their waits for transfers all counts as compute, also what DeepSpeed
    does on the host and what it waits for late ranks.
    """
    return arm.partition(" (")[0] == MOBIUS


def times_are_of_a_cpu(report: Report) -> bool:
    """Whether times say nothing about GPUs, real or emulated."""
    return report["machine"]["device"] == "cpu" and not report.get("emulated")


def findings(report: Report) -> Tuple[List[str], List[str]]:
    """What is wrong (each makes the comparison fail), and what is worth saying."""
    comparison = report["comparison"]
    return comparison["problems"], comparison["notes"]


def columns(report: Report) -> List[str]:
    """The names of all arms, those without numbers last."""
    return [*report["arms"], *report["failed"]]


def title(report: Report) -> str:
    """What was compared, in a line."""
    arms, emulated = " vs ".join(columns(report)), report.get("emulated")
    where = f", emulated {emulated['topology']}" if emulated else ""
    return (f"{arms}: {report['model']['parameters'] / 1e6:.1f} M parameters, {report['dtype']}, "
            f"{report['ranks']} ranks, {report['steps']} steps{where}")


def timed(label: str, report: Report) -> str:
    """The label of something whose times are emulated where the report's are."""
    return f"{label} (emulated)" if report.get("emulated") else label

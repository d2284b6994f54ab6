"""What a comparison found: one dictionary, from which ``report.json`` and all that people read are made.

``build_report`` makes it of the ranks' records; the other functions only read it.
"""

import math
import os
import statistics
from importlib.metadata import version
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, TypeVar

import cpuinfo
import psutil

from mobius_ds.inputs.profile import BYTES_PER_PARAMETER
from mobius_ds.observation.records import Record
from mobius_ds.reporting.comparison.arms import KNOWN_DIFFERENCES, MOBIUS, REQUIRED, ZERO3, Failure
from mobius_ds.runtime.device.ledger import CATEGORIES, Bytes

LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
"""Largest difference of two arms' losses at any step that still counts as the same run, by dtype."""

HOST_WORK = "DeepSpeed's host work included"
"""What is to be said of the compute of an arm that is observed."""

Report = Dict[str, Any]
PerStep = TypeVar("PerStep")


def machine_description() -> Dict[str, Any]:
    """The machine and the versions the numbers belong to. Memory in bytes."""
    return {
        "cpu": cpuinfo.get_cpu_info().get("brand_raw", "unknown CPU"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "torch": version("torch"),
        "deepspeed": version("deepspeed"),
    }


def build_report(records: Mapping[str, Sequence[Record]], dtype: str, machine: Mapping[str, Any],
                 failed: Optional[Mapping[str, Failure]] = None) -> Report:
    """Makes the report of a comparison.

    Args:
        records: by arm, the records of all its ranks.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        machine: from ``machine_description``.
        failed: by arm without records, why.
    """
    first = next(iter(records.values()))
    parameters = first[0]["parameters"]
    arms = {name: _summarize(ranks, parameters * BYTES_PER_PARAMETER) for name, ranks in records.items()}
    report = {
        "machine": {**machine, "device": first[0]["device"]},
        "model": {"parameters": parameters, "model_size_bytes": parameters * BYTES_PER_PARAMETER},
        "ranks": len(first),
        "steps": len(first[0]["step_seconds"]),
        "dtype": dtype,
        "arms": arms,
        "failed": {name: failure._asdict() for name, failure in (failed or {}).items()},
    }
    report["comparison"] = _compare(report, records)
    return report


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


def _summarize(ranks: Sequence[Record], model_size: int) -> Dict[str, Any]:
    per_step = counted(_sum_over_ranks([rank["traffic"] for rank in ranks]))
    first, *_ = of_all = [sum(step) for step in zip(*(rank["delivered_bytes"] for rank in ranks))]
    delivered, link = counted(of_all), [sum(step.values()) for step in per_step]
    arm = {
        "losses": [_mean(step) for step in zip(*(rank["losses"] for rank in ranks))],
        "step_seconds": [max(step) for step in zip(*(rank["step_seconds"] for rank in ranks))],
        "traffic": {
            "per_step_bytes": _mean_over_steps(per_step),
            "delivered_bytes": round(statistics.fmean(delivered)),
            "link_bytes": round(statistics.fmean(link)),
            "delivered_over_model_size": statistics.fmean(delivered) / model_size,
            "link_over_model_size": statistics.fmean(link) / model_size,
            "delivered_bytes_in_first_step": first,
            "delivered_bytes_range": [min(delivered), max(delivered)],
            "link_bytes_range": [min(link), max(link)],
        },
        "sweeps": ranks[0]["sweeps"],
        "peak_device_bytes": max(rank["peak_device_bytes"] for rank in ranks),
        "peak_device_measure": ranks[0]["peak_device_measure"],
        "host_bytes_per_node": sum(rank["pss_bytes"] for rank in ranks),
    }
    if ranks[0]["predicted_traffic"] is not None:
        predicted = _sum_over_ranks([rank["predicted_traffic"] for rank in ranks])
        arm["predicted_traffic"] = _mean_over_steps(counted(predicted))
        arm["store_bytes_per_node"] = max(rank["store_bytes"] for rank in ranks)
    for kind in ("pinned_bytes", "pageable_bytes"):
        arm[kind] = sum(rank[kind] or 0 for rank in ranks)
    return arm


def _compare(report: Report, records: Mapping[str, Sequence[Record]]) -> Dict[str, Any]:
    problems, notes = [], []
    comparison = {"problems": problems, "notes": notes}
    for name, arm in report["arms"].items():
        if len(arm["losses"]) != report["steps"]:
            notes.append(f"{name}: {len(arm['losses'])} steps only")
        notes += _varying(name, arm["traffic"], report["model"]["model_size_bytes"])
        if None in arm["losses"]:
            problems.append(f"{name}: no loss was recorded at some steps; the script has to call engine.backward(loss)")
    notes += [f"{name}: {failure['what']}: {failure['why']}" for name, failure in report["failed"].items()]
    comparison["not_a_number_from"] = nans = {
        name: step for name, arm in report["arms"].items() if (step := _first_nan(arm["losses"])) is not None}
    for name, step in nans.items():
        (problems if name in REQUIRED else notes).append(not_a_number({name: step}))
    comparison["loss_differences"] = differences = _loss_differences(report["arms"])
    tolerance = LOSS_TOLERANCE[report["dtype"]]
    if MOBIUS in differences:
        comparison.update(max_loss_difference=differences[MOBIUS], loss_tolerance=tolerance)
    for name, difference in differences.items():
        if difference is not None and difference > tolerance:
            (problems if name == MOBIUS else notes).append(_differing(report, name, difference, tolerance))
    if MOBIUS in records:
        mismatch = _first_mismatch(records[MOBIUS])
        comparison["measured_equals_predicted"] = mismatch is None
        if mismatch:
            problems.append(f"MEASURED BYTES ARE NOT THE PREDICTED ONES: {mismatch}")
    return comparison


def _varying(name: str, traffic: Mapping[str, Any], model_size: int) -> List[str]:
    """What is to be said of steps that do not all deliver as many bytes."""
    first, low, high = (nbytes / model_size for nbytes in (traffic["delivered_bytes_in_first_step"],
                                                           *traffic["delivered_bytes_range"]))
    varies = [f"{name}: bytes vary between steps, delivered {low:.3f} to {high:.3f} times the model size"]
    differs = [f"{name}: the first step delivered {first:.3f} times the model size, and is not counted"]
    return varies * (low != high) + differs * (not low <= first <= high)


def _first_nan(losses: Sequence[Optional[float]]) -> Optional[int]:
    """The number, from 1 on, of the first step whose loss is no finite number."""
    return next((step for step, loss in enumerate(losses, start=1) if loss is not None and not math.isfinite(loss)), None)


def not_a_number(first_step: Mapping[str, int]) -> str:
    """That losses are no numbers, in a sentence.

    Args:
        first_step: by arm, from which step on.
    """
    of_arms = ", ".join(f"from step {step} on in {name}" for name, step in first_step.items())
    return f"The loss is not a number {of_arms}"


def _differing(report: Report, name: str, difference: float, tolerance: float) -> str:
    """What is known of why an arm's losses differ from ZeRO-3's by more than they may."""
    if name == MOBIUS:
        return (f"LOSSES DIFFER: {difference:.3g} at most, more than {tolerance:g} for {report['dtype']}. Dropout draws "
                "other masks in each arm: to compare a model that has it, switch it off")
    first, zero3s_first = (report["arms"][arm]["losses"][0] for arm in (name, ZERO3))
    why = KNOWN_DIFFERENCES.get(name, "The cause is not known") if abs(first - zero3s_first) <= tolerance else (
        "They do so before the first update, so it begins with other weights or samples: transformers, for one, draws a new "
        "model's weights otherwise under ZeRO-3, so start from saved ones")
    return f"{name}: losses differ from {ZERO3}'s by up to {difference:.3g}. {why}"


def _loss_differences(arms: Mapping[str, Mapping[str, Any]]) -> Dict[str, Optional[float]]:
    """By arm other than ZeRO-3, the largest difference of its losses from ZeRO-3's, as ``_max_loss_difference``."""
    if ZERO3 not in arms:
        return {}
    return {name: _max_loss_difference(arms[ZERO3], arm) for name, arm in arms.items() if name != ZERO3}


def _max_loss_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> Optional[float]:
    """The largest absolute difference of two arms' losses at the same step; None if one is missing, or not a number."""
    pairs = list(zip(one["losses"], other["losses"]))
    if any(loss is None or not math.isfinite(loss) for pair in pairs for loss in pair):
        return None
    return max(abs(a - b) for a, b in pairs)


def _first_mismatch(ranks: Sequence[Record]) -> Optional[str]:
    for rank in ranks:
        for step, (measured, predicted) in enumerate(zip(rank["traffic"], rank["predicted_traffic"])):
            for category in CATEGORIES:
                if measured[category] != predicted[category]:
                    return (f"{category} of rank {rank['rank']} at step {step}: measured {measured[category]}, "
                            f"predicted {predicted[category]}")
    return None


def _sum_over_ranks(ranks: Sequence[Sequence[Bytes]]) -> List[Bytes]:
    return [{category: sum(rank[category] for rank in step) for category in CATEGORIES} for step in zip(*ranks)]


def _mean_over_steps(steps: Sequence[Bytes]) -> Bytes:
    return {category: round(statistics.fmean(step[category] for step in steps)) for category in CATEGORIES}


def _mean(losses: Sequence[Optional[float]]) -> Optional[float]:
    return None if None in losses else statistics.fmean(losses)


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

"""What is wrong with a comparison, and what is worth saying of it: losses that differ, bytes that were not predicted."""

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence

from mobius_ds.observation.records import Record
from mobius_ds.reporting.comparison.arms import KNOWN_DIFFERENCES, MOBIUS, REQUIRED, ZERO3
from mobius_ds.reporting.comparison.report import Report
from mobius_ds.schedule.tasks import CATEGORIES

LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
"""Largest difference of two arms' losses at any step that still counts as the same run, by dtype."""


def verdict_on(report: Report, records: Mapping[str, Sequence[Record]]) -> Dict[str, Any]:
    """The report's ``comparison``, from the rest of it.

    Args:
        records: by arm, those that it was made of.
    """
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

"""What a comparison found: ``report.json``, ``report.md`` and the table, all made from one dictionary.

``build_report`` turns the ranks' records into that dictionary; the other functions only read it.
"""

import json
import math
import os
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import cpuinfo
import psutil
from rich.console import Group
from rich.table import Table
from rich.text import Text

from mobius_ds.reporting.records import Record
from mobius_ds.runtime.ledger import CATEGORIES, Bytes

BYTES_PER_PARAMETER = 4
"""Of the model size that traffic is compared with: 16-bit weights and 16-bit gradients, as in the paper."""

LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-2}
"""Largest difference of two arms' losses at any step that still counts as the same run, by dtype."""

ZERO3, ZERO3_DEFAULTS, MOBIUS = "zero3", "zero3-defaults", "mobius"

Report = Dict[str, Any]

_MEASURES = """\
- Model size: {bytes_per_parameter} bytes a parameter, {model_mb:.1f} MB. 1 MB is 10^6 bytes. Traffic is per step, over
  all ranks, the mean over steps.
- delivered: parameter bytes arriving at a GPU, gradient bytes leaving it, activations in and out (the paper's count).
- link: every byte over a GPU's host link, both directions, without peer-to-peer, with what collectives forward. For
  ZeRO-3 it is the sum of all categories, and delivered is all of them but "other"; for Mobius the two are the same.
- Step time: from one step's end to the next, slowest rank, median over steps.
- Peak device memory, most of any rank. {device_measures}
- Host memory: proportional set size (PSS) of the ranks' processes, where a page shared by k processes counts 1/k in
  each, summed, peak at step ends, Python and libraries included.
"""


def machine_description() -> Dict[str, Any]:
    """The machine and the versions the numbers belong to. Memory in bytes."""
    return {
        "cpu": cpuinfo.get_cpu_info().get("brand_raw", "unknown CPU"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "torch": version("torch"),
        "deepspeed": version("deepspeed"),
    }


def build_report(records: Mapping[str, Sequence[Record]], dtype: str, machine: Mapping[str, Any]) -> Report:
    """Makes the report of a comparison.

    Args:
        records: by arm, the records of all its ranks.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        machine: from ``machine_description``.
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
    }
    report["comparison"] = _compare(report, records)
    return report


def write_report(report: Report, folder: Path) -> None:
    """Writes ``report.json`` and ``report.md`` into ``folder``."""
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / "report.md").write_text(markdown(report))


def rich_table(report: Report) -> Group:
    """The table of all arms under what was run where, for the terminal."""
    table = Table()  # a title of its own would be wrapped to its width
    table.add_column("per step")
    for name in report["arms"]:
        table.add_column(name, justify="right")
    for label, cells in table_rows(report):
        table.add_row(label, *cells, end_section=label in ("step time ratio", "link / model size", "other, MB"))
    return Group(Text(_title(report), style="bold"), Text(_machine_line(report)), table)


def markdown(report: Report) -> str:
    """The report as a page, with the plots of ``plots.draw`` beside it."""
    arms = list(report["arms"])
    lines = [f"# {_title(report)}", "", _machine_line(report), "", *_findings_lines(report), ""]
    lines += [f"| per step | {' | '.join(arms)} |", f"|---|{'---:|' * len(arms)}"]
    lines += [f"| {label} | {' | '.join(cells)} |" for label, cells in table_rows(report)]
    lines += ["", "![loss](loss.png)", "![bytes by category](bytes.png)", "![step time](step_time.png)", ""]
    lines.append(measures(report))
    return "\n".join(lines)


def measures(report: Report) -> str:
    """What each number of the table is, as Markdown."""
    by_measure = {}
    for name, arm in report["arms"].items():
        by_measure.setdefault(arm["peak_device_measure"], []).append(name)
    return _MEASURES.format(
        bytes_per_parameter=BYTES_PER_PARAMETER,
        model_mb=report["model"]["model_size_bytes"] / 1e6,
        device_measures=" ".join(f"{', '.join(names)}: {measure}." for measure, names in by_measure.items()),
    )


def table_rows(report: Report) -> List[Tuple[str, List[str]]]:
    """Label and one cell an arm, for every row of the table."""
    arms = list(report["arms"].values())
    seconds = [median_step_seconds(arm) for arm in arms]
    alike = len({arm["peak_device_measure"] for arm in arms}) == 1
    last_step = min(len(arm["losses"]) for arm in arms)
    traffic = [arm["traffic"] for arm in arms]
    rows = [
        ("step time, s", [f"{s:.3f}" for s in seconds]),
        ("step time ratio", [f"{s / seconds[0]:.2f}" for s in seconds]),
        ("delivered, MB", [_mb(t["delivered_bytes"]) for t in traffic]),
        ("delivered / model size", [f"{t['delivered_over_model_size']:.3f}" for t in traffic]),
        ("link, MB", [_mb(t["link_bytes"]) for t in traffic]),
        ("link / model size", [f"{t['link_over_model_size']:.3f}" for t in traffic]),
    ]
    for category in CATEGORIES:
        rows.append((f"{category}, MB", [_mb(t["per_step_bytes"][category]) for t in traffic]))
    rows += [
        ("peak device memory, MB" + ("" if alike else " (not alike, see below)"),
         [_mb(arm["peak_device_bytes"]) for arm in arms]),
        ("host memory per node (PSS), MB", [_mb(arm["host_bytes_per_node"]) for arm in arms]),
        *_pinned_rows(arms),
        (f"loss at step {last_step}", [_loss(arm["losses"][last_step - 1]) for arm in arms]),
    ]
    if MOBIUS in report["arms"]:
        equal = report["comparison"]["measured_equals_predicted"]
        verdict = "yes" if equal else "NO"
        rows.append(("measured = predicted bytes", [verdict if name == MOBIUS else "-" for name in report["arms"]]))
    return rows


def _pinned_rows(arms: Sequence[Mapping[str, Any]]) -> List[Tuple[str, List[str]]]:
    """Nothing where no rank had memory to pin: on a CPU."""
    labels = {"pinned_bytes": "host memory mapped and pinned, all ranks, MB", "pageable_bytes": "could not be pinned, MB"}
    return [(label, [_mb(arm[kind]) for arm in arms]) for kind, label in labels.items() if any(arm[kind] for arm in arms)]


def median_step_seconds(arm: Mapping[str, Any]) -> float:
    """An arm's step time in seconds."""
    return statistics.median(arm["step_seconds"])


def findings(report: Report) -> Tuple[List[str], List[str]]:
    """What is wrong (each makes the comparison fail), and what is worth saying."""
    comparison = report["comparison"]
    return comparison["problems"], comparison["notes"]


def _summarize(ranks: Sequence[Record], model_size: int) -> Dict[str, Any]:
    per_step = _sum_over_ranks([rank["traffic"] for rank in ranks])
    delivered = [sum(step) for step in zip(*(rank["delivered_bytes"] for rank in ranks))]
    link = [sum(step.values()) for step in per_step]
    arm = {
        "losses": [_mean(step) for step in zip(*(rank["losses"] for rank in ranks))],
        "step_seconds": [max(step) for step in zip(*(rank["step_seconds"] for rank in ranks))],
        "traffic": {
            "per_step_bytes": _mean_over_steps(per_step),
            "delivered_bytes": round(statistics.fmean(delivered)),
            "link_bytes": round(statistics.fmean(link)),
            "delivered_over_model_size": statistics.fmean(delivered) / model_size,
            "link_over_model_size": statistics.fmean(link) / model_size,
            "delivered_bytes_range": [min(delivered), max(delivered)],
            "link_bytes_range": [min(link), max(link)],
        },
        "peak_device_bytes": max(rank["peak_device_bytes"] for rank in ranks),
        "peak_device_measure": ranks[0]["peak_device_measure"],
        "host_bytes_per_node": sum(rank["pss_bytes"] for rank in ranks),
    }
    if ranks[0]["predicted_traffic"] is not None:
        predicted = _sum_over_ranks([rank["predicted_traffic"] for rank in ranks])
        arm["predicted_traffic"] = _mean_over_steps(predicted)
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
        low, high = (bound / report["model"]["model_size_bytes"] for bound in arm["traffic"]["delivered_bytes_range"])
        if low != high:
            notes.append(f"{name}: bytes vary between steps, delivered {low:.3f} to {high:.3f} times the model size")
        if None in arm["losses"]:
            problems.append(f"{name}: no loss was recorded at some steps; the script has to call engine.backward(loss)")
    if ZERO3 in report["arms"] and MOBIUS in report["arms"]:
        difference = max_loss_difference(report["arms"][ZERO3], report["arms"][MOBIUS])
        tolerance = LOSS_TOLERANCE[report["dtype"]]
        comparison.update(max_loss_difference=difference, loss_tolerance=tolerance)
        if difference is not None and not difference <= tolerance:
            problems.append(f"LOSSES DIFFER: {difference:.3g} at most, more than {tolerance:g} for {report['dtype']}. "
                            "Dropout draws other masks in each arm: to compare a model that has it, switch it off")
    if MOBIUS in records:
        mismatch = _first_mismatch(records[MOBIUS])
        comparison["measured_equals_predicted"] = mismatch is None
        if mismatch:
            problems.append(f"MEASURED BYTES ARE NOT THE PREDICTED ONES: {mismatch}")
    return comparison


def max_loss_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> Optional[float]:
    """The largest absolute difference of two arms' losses at the same step; infinite if either is not a number.

    None when a loss is missing.
    """
    pairs = list(zip(one["losses"], other["losses"]))
    if any(loss is None for pair in pairs for loss in pair):
        return None
    differences = [abs(a - b) for a, b in pairs]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


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


def _title(report: Report) -> str:
    arms = " vs ".join(report["arms"])
    return (f"{arms}: {report['model']['parameters'] / 1e6:.1f} M parameters, {report['dtype']}, "
            f"{report['ranks']} ranks, {report['steps']} steps")


def _machine_line(report: Report) -> str:
    machine = report["machine"]
    return (f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB; device: "
            f"{machine['device']}; torch {machine['torch']}, DeepSpeed {machine['deepspeed']}")


def _findings_lines(report: Report) -> List[str]:
    problems, notes = findings(report)
    lines = [f"**{problem}**  " for problem in problems] + [f"{note}  " for note in notes]
    difference = report["comparison"].get("max_loss_difference")
    if difference is not None:
        lines.append(f"Largest loss difference of {ZERO3} and {MOBIUS} at any step: {difference:.3g} "
                     f"(allowed for {report['dtype']}: {report['comparison']['loss_tolerance']:g})  ")
    return lines


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.2f}"


def _loss(loss: Optional[float]) -> str:
    return "-" if loss is None else f"{loss:.4f}"

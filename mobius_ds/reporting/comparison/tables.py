"""What a comparison found, to read: the terminal's table and ``report.md``. ``report`` says what is in the dictionary."""

import json
import math
from pathlib import Path
from typing import Any, List, Mapping, Optional, Sequence, Tuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mobius_ds.inputs.profile import BYTES_PER_PARAMETER
from mobius_ds.reporting.comparison import series
from mobius_ds.reporting.comparison.arms import MOBIUS, ZERO3, explained
from mobius_ds.reporting.comparison.report import Report, columns, findings, median_step_seconds, timed, title
from mobius_ds.schedule.tasks import CATEGORIES

_MEASURES = """\
- {arms}
- Model size: {bytes_per_parameter} bytes a parameter, {model_mb:.1f} MB. 1 MB is 10^6 bytes. Traffic is per step, over
  all ranks, the mean over steps.
- Of traffic and step times the first step is left out where there are more: in it engines plan, allocate and warm up.
- delivered: parameter bytes arriving at a GPU, gradient bytes leaving it, activations in and out (the paper's count).
- link: every byte over a GPU's host link, both directions, without peer-to-peer, with what collectives forward. It is
  the sum of all categories, and delivered is all of them but "other"; for Mobius the two are the same.
- Step time: from one step's end to the next, slowest rank, median over steps.
- Peak device memory, most of any rank. {device_measures}
- Host memory: proportional set size (PSS) of the ranks' processes, where a page shared by k processes counts 1/k in
  each, summed, peak at step ends, Python and libraries included.
"""


def write_report(report: Report, folder: Path) -> None:
    """Writes ``report.json`` and ``report.md`` into ``folder``."""
    (folder / "report.json").write_text(json.dumps(_strict(report), indent=2, allow_nan=False) + "\n")
    (folder / "report.md").write_text(markdown(report))


def _strict(value: Any) -> Any:
    """The value with null for numbers that JSON does not have: infinite ones and those that are none."""
    if isinstance(value, dict):
        return {key: _strict(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rich_table(report: Report) -> Group:
    """The table of all arms under what was run where, for the terminal."""
    table = _table("per step", columns(report))  # a title of its own would be wrapped to its width
    for label, cells in table_rows(report):
        ends = label.startswith(("step time ratio", "link / model size", "other, MB"))
        table.add_row(label, *cells, end_section=ends)
    emulated = [Text(report["emulated"]["says"])] if report.get("emulated") else []
    parts = [Text(title(report), style="bold"), Text(_machine_line(report)), *emulated, table]
    if report.get("sweep"):
        swept = _table(report["sweep"]["over"], _values(report))
        for label, cells in series.table_rows(report):
            swept.add_row(label, *cells)
        parts += [Text(timed("sweep", report), style="bold"), swept, *(Text(note) for note in series.notes(report))]
    return Group(*parts)


def _table(corner: str, heads: Sequence[str]) -> Table:
    table = Table()
    table.add_column(corner)
    for head in heads:
        table.add_column(head, justify="right")
    return table


def markdown(report: Report) -> str:
    """The report as a page for a pull request, with the plots of ``png`` beside it. Folded, it fits on a screen."""
    lines = [f"# {title(report)}", ""]
    if report.get("answer"):
        lines += [f"**{report['answer']['headline']}**", "", *(f"- {reason}" for reason in report["answer"]["because"]), ""]
    lines += [_machine_line(report), "", *_findings_lines(report), ""]
    lines += _markdown_table("per step", columns(report), table_rows(report))
    lines += ["", *_folded("Plots", "![loss](loss.png)", "![bytes by category](bytes.png)", "![step time](step_time.png)")]
    if report.get("sweep"):
        lines += [f"## {timed('Sweep', report)}", "", *(f"- {note}" for note in series.notes(report)), ""]
        lines += _markdown_table(report["sweep"]["over"], _values(report), series.table_rows(report))
        lines += ["", *_folded("Plots of the sweep", "![traffic](sweep_traffic.png)", "![step time](sweep_time.png)")]
    lines += _folded("How each number is measured", measures(report))
    return "\n".join(lines)


def _folded(summary: str, *lines: str) -> List[str]:
    return [f"<details><summary>{summary}</summary>", "", *lines, "", "</details>", ""]


def _markdown_table(corner: str, heads: Sequence[str], rows: Sequence[Tuple[str, List[str]]]) -> List[str]:
    return [f"| {corner} | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}",
            *(f"| {label} | {' | '.join(cells)} |" for label, cells in rows)]


def _values(report: Report) -> List[str]:
    return [str(point["value"]) for point in report["sweep"]["points"]]


def measures(report: Report) -> str:
    """What each number of the table is, as Markdown."""
    by_measure = {}
    for name, arm in report["arms"].items():
        by_measure.setdefault(arm["peak_device_measure"], []).append(name)
    return _MEASURES.format(
        arms=explained(columns(report)),
        bytes_per_parameter=BYTES_PER_PARAMETER,
        model_mb=report["model"]["model_size_bytes"] / 1e6,
        device_measures=" ".join(f"{', '.join(names)}: {measure}." for measure, names in by_measure.items()),
    )


def table_rows(report: Report) -> List[Tuple[str, List[str]]]:
    """Label and one cell an arm, for every row of the table; at the end, the arms that failed."""
    rows = _rows_of_arms(report)
    whats = [failure["what"] for failure in report["failed"].values()]
    return [(label, [*cells, *(whats if row == 0 else ["-"] * len(whats))]) for row, (label, cells) in enumerate(rows)]


def _rows_of_arms(report: Report) -> List[Tuple[str, List[str]]]:
    arms = list(report["arms"].values())
    seconds = [median_step_seconds(arm) for arm in arms]
    alike = len({arm["peak_device_measure"] for arm in arms}) == 1
    last_step = min(len(arm["losses"]) for arm in arms)
    traffic = [arm["traffic"] for arm in arms]
    rows = [
        (timed("step time, s", report), [f"{s:.3f}" for s in seconds]),
        (timed("step time ratio", report), [f"{s / seconds[0]:.2f}" for s in seconds]),
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
    differences = report["comparison"]["loss_differences"]
    if differences:
        rows.append((f"largest loss difference from {ZERO3}",
                     [f"{differences[name]:.2g}" if differences.get(name) is not None else "-" for name in report["arms"]]))
    if MOBIUS in report["arms"]:
        equal = report["comparison"]["measured_equals_predicted"]
        verdict = "yes" if equal else "NO"
        rows.append(("measured = predicted bytes", [verdict if name == MOBIUS else "-" for name in report["arms"]]))
    return rows


def _pinned_rows(arms: Sequence[Mapping[str, Any]]) -> List[Tuple[str, List[str]]]:
    """Nothing where no rank had memory to pin: on a CPU."""
    labels = {"pinned_bytes": "host memory mapped and pinned, all ranks, MB", "pageable_bytes": "could not be pinned, MB"}
    return [(label, [_mb(arm[kind]) for arm in arms]) for kind, label in labels.items() if any(arm[kind] for arm in arms)]


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

"""Pictures as PNG files: a comparison's loss, bytes by category, step time, and what grows; and a step, task by task.

Drawn by Matplotlib although the page is Plotly's: those that go into ``report.md`` have to be files that a pull request
shows, and Plotly needs a browser to write one.
"""

from pathlib import Path
from typing import Dict, List, Tuple

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

from mobius_ds.reporting.comparison import series  # noqa: E402
from mobius_ds.reporting.comparison.report import Report, median_step_seconds, timed  # noqa: E402
from mobius_ds.reporting.page.palette import fill_of, line_of  # noqa: E402
from mobius_ds.schedule.tasks import CATEGORIES, Stream  # noqa: E402
from mobius_ds.simulation.steps import Step  # noqa: E402

_SIZE = (8.0, 4.0)  # inches
_ROTATED_FROM = 5  # arms whose names would overlap
# As Matplotlib writes what the palette names.
_DASHES = {"solid": "-", "dot": ":", "dash": "--", "dashdot": "-.", "longdash": (0, (8, 3)),
           "longdashdot": (0, (8, 3, 1, 3))}
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "cross": "P", "x": "X", "triangle-up": "^", "hexagon": "h",
            "star": "*"}


def draw_comparison(report: Report, folder: Path) -> List[Path]:
    """Writes the plots into ``folder`` and returns their paths.

    ``loss.png``, ``bytes.png`` and ``step_time.png``; with a sweep also ``sweep_traffic.png`` and ``sweep_time.png``.
    """
    plots = {"loss.png": _loss, "bytes.png": _bytes, "step_time.png": _step_time}
    if report.get("sweep"):
        plots.update({"sweep_traffic.png": _sweep_traffic, "sweep_time.png": _sweep_time})
    for name, plot in plots.items():
        figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
        plot(axes, report)
        figure.savefig(folder / name, dpi=150)
        plt.close(figure)
    return [folder / name for name in plots]


def draw_step(step: Step, path: Path, title: str) -> None:
    """Draws the step: a row per GPU and stream that has tasks, time to the right."""
    rows = sorted({(played.task.gpu, list(Stream).index(played.task.stream))
                   for part in step.parts for played in part.timeline.played if played.seconds > 0})
    height = {row: number for number, row in enumerate(rows)}
    figure, axes = plt.subplots(figsize=(14, 1.5 + 0.28 * len(rows)), constrained_layout=True)
    used = {}
    for _, begin, timeline in step.parts:
        bars: Dict[Tuple[int, str], List[Tuple[float, float]]] = {}
        for played in timeline.played:
            if played.seconds > 0:
                row = height[played.task.gpu, list(Stream).index(played.task.stream)]
                what = played.task.category or played.task.key.kind.name.lower()
                used[what] = fill_of(what).colour
                bars.setdefault((row, what), []).append((begin + played.start, played.seconds))
        for (row, what), spans in bars.items():
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=used[what], edgecolor="white", linewidth=0.2)
        axes.axvline(begin + timeline.makespan, color="black", linewidth=0.5)
    axes.set_yticks(range(len(rows)), [f"GPU {gpu} {list(Stream)[stream].value}" for gpu, stream in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("s")
    axes.set_title(title)
    figure.legend(handles=[Patch(color=colour, label=what) for what, colour in used.items()], fontsize=7, ncols=8,
                  loc="outside lower center")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _style(arm: str) -> dict:
    line = line_of(arm)
    return dict(color=line.colour, linestyle=_DASHES[line.dash], marker=_MARKERS[line.marker])


def _loss(axes, report: Report) -> None:
    # Equal curves lie on top of each other: wider lines first, so that every arm is seen.
    widths = range(2 * len(report["arms"]), 0, -2)
    for (name, arm), width in zip(report["arms"].items(), widths):
        losses = [float("nan") if loss is None else loss for loss in arm["losses"]]
        axes.plot(range(1, len(losses) + 1), losses, label=name, linewidth=width, alpha=0.8, color=line_of(name).colour)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel="loss, mean over ranks", title=f"Loss ({report['dtype']})")
    _legend_beside(axes)


def _bytes(axes, report: Report) -> None:
    names, bottoms = list(report["arms"]), [0.0] * len(report["arms"])
    for category in CATEGORIES:
        heights = [arm["traffic"]["per_step_bytes"][category] / 1e6 for arm in report["arms"].values()]
        fill = fill_of(category)
        axes.bar(names, heights, bottom=bottoms, label=category, color=fill.colour, hatch=fill.pattern, edgecolor="white")
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
    axes.set(ylabel="MB per step, all ranks", title="Bytes over the GPUs' host links")
    axes.set_ylim(0, max(bottoms) * 1.2)
    model_mb = report["model"]["model_size_bytes"] / 1e6
    for position, (arm, total) in enumerate(zip(report["arms"].values(), bottoms)):
        axes.annotate(f"{total / model_mb:.2f} x model\n({arm['traffic']['delivered_over_model_size']:.2f} delivered)",
                      (position, total), ha="center", va="bottom", fontsize="small")
    for position, (name, failure) in enumerate(report["failed"].items(), start=len(names)):
        axes.bar([name], [0])
        axes.annotate(failure["what"], (position, 0), ha="center", va="bottom", fontweight="bold")
    if len(names) + len(report["failed"]) >= _ROTATED_FROM:
        axes.tick_params(axis="x", rotation=20)
    _legend_beside(axes)


def _step_time(axes, report: Report) -> None:
    for name, arm in report["arms"].items():
        seconds = arm["step_seconds"]
        label = f"{name}, median {median_step_seconds(arm):.3f} s"
        axes.plot(range(1, len(seconds) + 1), seconds, label=label, markersize=4, **_style(name))
    for name, failure in report["failed"].items():
        axes.plot([], [], " ", label=f"{name}: {failure['what']}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel="seconds, slowest rank", title=timed("Step time", report))
    axes.set_ylim(bottom=0)
    _legend_beside(axes)


def _sweep_traffic(axes, report: Report) -> None:
    values = [point["value"] for point in report["sweep"]["points"]]
    _grow(axes, report, "delivered_over_model_size", "{}, delivered")
    _grow(axes, report, "link_over_model_size", "{}, link", alpha=0.35, linewidth=3)
    for name, figures in series.closed_forms(report).items():
        axes.plot(values, figures, label=f"{name}, by formula", color="black", linewidth=0.7,
                  linestyle=_DASHES[line_of(name).dash])
    axes.set(ylabel="bytes per step / model size", title="Traffic")
    axes.set_ylim(bottom=0)
    _legend_beside(axes)


def _sweep_time(axes, report: Report) -> None:
    _grow(axes, report, "step_seconds", "{}")
    axes.set(ylabel="seconds, slowest rank, median", title=timed("Step time", report))
    axes.set_ylim(bottom=0)
    _legend_beside(axes)


def _grow(axes, report: Report, key: str, label: str, **style) -> None:
    """A curve an arm over the swept values, with a gap where it failed."""
    points, over = report["sweep"]["points"], report["sweep"]["over"]
    for name in series.arms_of(report["sweep"]):
        figures = [point["arms"].get(name, {}).get(key, float("nan")) for point in points]
        axes.plot([point["value"] for point in points], figures, label=label.format(name), **{**_style(name), **style})
    axes.set_xticks([point["value"] for point in points])
    axes.set_xlabel(f"{over.replace('_', ' ')}\n{series.GROWS[over]}", fontsize="small")


def _legend_beside(axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")  # where it covers no curve

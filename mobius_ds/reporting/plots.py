"""The plots of a comparison: loss, bytes by category, step time."""

from pathlib import Path
from typing import List

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed

from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)
from matplotlib.ticker import MaxNLocator  # noqa: E402

from mobius_ds.reporting.report import Report, median_step_seconds  # noqa: E402
from mobius_ds.runtime.ledger import CATEGORIES  # noqa: E402

_SIZE = (6.4, 4.0)  # inches


def draw(report: Report, folder: Path) -> List[Path]:
    """Writes ``loss.png``, ``bytes.png`` and ``step_time.png`` into ``folder`` and returns their paths."""
    plots = {"loss.png": _loss, "bytes.png": _bytes, "step_time.png": _step_time}
    for name, plot in plots.items():
        figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
        plot(axes, report)
        figure.savefig(folder / name, dpi=150)
        plt.close(figure)
    return [folder / name for name in plots]


def _loss(axes, report: Report) -> None:
    # Equal curves lie on top of each other: wider lines first, so that every arm is seen.
    widths = range(2 * len(report["arms"]), 0, -2)
    for (name, arm), width in zip(report["arms"].items(), widths):
        losses = [float("nan") if loss is None else loss for loss in arm["losses"]]
        axes.plot(range(1, len(losses) + 1), losses, label=name, linewidth=width, alpha=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel="loss, mean over ranks", title=f"Loss ({report['dtype']})")
    axes.legend()


def _bytes(axes, report: Report) -> None:
    names, bottoms = list(report["arms"]), [0.0] * len(report["arms"])
    for category in CATEGORIES:
        heights = [arm["traffic"]["per_step_bytes"][category] / 1e6 for arm in report["arms"].values()]
        axes.bar(names, heights, bottom=bottoms, label=category)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights)]
    axes.set(ylabel="MB per step, all ranks", title="Bytes over the GPUs' host links")
    axes.set_ylim(0, max(bottoms) * 1.2)
    model_mb = report["model"]["model_size_bytes"] / 1e6
    for position, (arm, total) in enumerate(zip(report["arms"].values(), bottoms)):
        axes.annotate(f"{total / model_mb:.2f} x model\n({arm['traffic']['delivered_over_model_size']:.2f} delivered)",
                      (position, total), ha="center", va="bottom")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _step_time(axes, report: Report) -> None:
    for name, arm in report["arms"].items():
        seconds = arm["step_seconds"]
        label = f"{name}, median {median_step_seconds(arm):.3f} s"
        axes.plot(range(1, len(seconds) + 1), seconds, marker=".", label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel="seconds, slowest rank", title="Step time")
    axes.set_ylim(bottom=0)
    axes.legend()

"""A step as a picture, and a simulated one as a Chrome trace (opens in Perfetto or chrome://tracing)."""

from pathlib import Path
from typing import Dict, List, Tuple

from mobius_ds.reporting.page.palette import fill_of
from mobius_ds.schedule.tasks import Stream
from mobius_ds.simulation.chrome_trace import naming_lines, step_lines
from mobius_ds.simulation.steps import Step


def write_chrome_trace(step: Step, path: Path, says: str) -> None:
    """Writes a simulated step as a job writes its own, one process per GPU and one thread per stream.

    Args:
        says: what was simulated.
    """
    lines = [*naming_lines(step.gpus, f"simulated: {says}", simulated=True), *step_lines(step, 0.0, 1)]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def draw(step: Step, path: Path, title: str) -> None:
    """Draws the step: a row per GPU and stream that has tasks, time to the right."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = sorted({(played.task.gpu, list(Stream).index(played.task.stream))
                   for part in step.parts for played in part.timeline.played if played.seconds > 0})
    height = {row: number for number, row in enumerate(rows)}
    figure, axes = pyplot.subplots(figsize=(14, 1.5 + 0.28 * len(rows)), constrained_layout=True)
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
    pyplot.close(figure)

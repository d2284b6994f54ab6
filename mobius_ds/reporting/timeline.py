"""A simulated step as a Chrome trace (opens in Perfetto or chrome://tracing) and as a picture."""

import json
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from mobius_ds.planning.schedule import Kind, Stream
from mobius_ds.planning.simulator import Timeline

MICROSECONDS = 1e6
COLOURS = {Kind.FORWARD: "tab:blue", Kind.BACKWARD: "tab:green", Kind.RECOMPUTE: "tab:olive", Kind.UPDATE: "tab:brown"}
TRANSFER_COLOURS = {"parameters_in": "tab:orange", "gradients_out": "tab:red", "activations_in": "tab:purple",
                    "activations_out": "tab:pink", "other": "tab:gray"}

Sweeps = Sequence[Tuple[str, Timeline]]
"""The sweeps of a step by name; each starts when the one before has ended."""


def chrome_trace(sweeps: Sweeps) -> Dict[str, Any]:
    """The trace as data: one process per GPU, one thread per stream, times in microseconds."""
    events: List[Dict[str, Any]] = []
    streams = list(Stream)
    begin = 0.0
    for name, timeline in sweeps:
        for played in timeline.played:
            task = played.task
            events.append({
                "name": f"{task.key.kind.name.lower()} {task.key}", "cat": task.category or "compute", "ph": "X",
                "pid": task.gpu, "tid": streams.index(task.stream), "ts": (begin + played.start) * MICROSECONDS,
                "dur": played.seconds * MICROSECONDS,
                "args": {"sweep": name, "stage": task.key.stage, "microbatch": task.key.microbatch, "bytes": task.nbytes,
                         "bytes_per_s": task.nbytes / played.seconds if played.seconds > 0 else None,
                         "after": [str(key) for key in task.after]}})
        begin += timeline.makespan
    for gpu in sorted({event["pid"] for event in events}):
        events.append({"name": "process_name", "ph": "M", "pid": gpu, "args": {"name": f"GPU {gpu}"}})
        events += [{"name": "thread_name", "ph": "M", "pid": gpu, "tid": number, "args": {"name": stream.value}}
                   for number, stream in enumerate(streams)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(sweeps: Sweeps, path: Path) -> None:
    """Writes the trace as JSON."""
    path.write_text(json.dumps(chrome_trace(sweeps)))


def draw(sweeps: Sweeps, path: Path, title: str) -> None:
    """Draws the step: a row per GPU and stream that has tasks, time to the right."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = sorted({(played.task.gpu, list(Stream).index(played.task.stream))
                   for _, timeline in sweeps for played in timeline.played if played.seconds > 0})
    height = {row: number for number, row in enumerate(rows)}
    figure, axes = pyplot.subplots(figsize=(14, 1.5 + 0.28 * len(rows)), constrained_layout=True)
    begin, used = 0.0, {}
    for _, timeline in sweeps:
        bars: Dict[Tuple[int, str], List[Tuple[float, float]]] = {}
        for played in timeline.played:
            if played.seconds > 0:
                row = height[played.task.gpu, list(Stream).index(played.task.stream)]
                what = played.task.category or played.task.key.kind.name.lower()
                used[what] = TRANSFER_COLOURS.get(played.task.category, COLOURS.get(played.task.key.kind))
                bars.setdefault((row, what), []).append((begin + played.start, played.seconds))
        for (row, what), spans in bars.items():
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=used[what], edgecolor="white", linewidth=0.2)
        begin += timeline.makespan
        axes.axvline(begin, color="black", linewidth=0.5)
    axes.set_yticks(range(len(rows)), [f"GPU {gpu} {list(Stream)[stream].value}" for gpu, stream in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("s")
    axes.set_title(title)
    axes.legend(handles=[Patch(color=colour, label=what) for what, colour in used.items()], fontsize=7, ncols=8,
                loc="upper center", bbox_to_anchor=(0.5, -0.08))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)

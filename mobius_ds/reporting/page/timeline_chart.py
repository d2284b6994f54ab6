"""One step of every GPU as an interactive chart: a row per GPU and stream, time to the right."""

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Sequence, Tuple

import plotly.graph_objects as go

from mobius_ds.inputs.units import readable
from mobius_ds.reporting.page.charts import CLEAR, HIGHEST, styled
from mobius_ds.reporting.page.palette import FILLS, fill_of
from mobius_ds.schedule.tasks import Kind, Stream

GB = 1e9
KINDS_OF_COMPUTE = tuple(kind.name.lower() for kind in Kind if kind.category is None)
_HEIGHT, _HEIGHTS = 0.86, {"forward": 0.5, "recompute": 0.68}
_ROW, _FRAME = 18, 60  # pixels: a row, where there is room for it, and what is around all of them


class Looks(NamedTuple):
    """How all bars of a kind look. What shares a row differs in height too: thousands of patterns take minutes to print."""

    what: str
    colour: str
    height: float
    """As a part of the row's."""


def looks_of(what: str) -> Looks:
    """How the bars of ``what`` look."""
    return Looks(what, fill_of(what).colour, _HEIGHTS.get(what, _HEIGHT))


def legend(timelines: Iterable[Mapping[str, Any]]) -> List[Looks]:
    """How everything looks that any of the timelines shows, in the order of the palette."""
    shown = {what_of(task) for recorded in timelines for task in recorded["tasks"]}
    return [looks_of(what) for what in sorted(shown, key=lambda what: (what not in FILLS, [*FILLS, what].index(what)))]


def timeline(recorded: Mapping[str, Any], until: float) -> go.Figure:
    """The chart of one recorded or simulated step.

    All bars of a category are one trace: thousands of traces would take minutes to draw.

    Args:
        recorded: an entry of the report's ``timelines``.
        until: end of the time axis in seconds; the same for all arms, so that lengths compare.
    """
    rows = rows_of(recorded)
    place = {row: number for number, row in enumerate(rows)}
    bars: Dict[str, List[Sequence]] = {}
    for task in recorded["tasks"]:
        bars.setdefault(what_of(task), []).append(task)
    figure = go.Figure()
    for what, tasks in bars.items():
        looks = looks_of(what)
        figure.add_bar(name=what, orientation="h", base=[task[7] for task in tasks], x=[task[8] - task[7] for task in tasks],
                       y=[place[task[0], task[1]] for task in tasks], width=looks.height,
                       hovertext=list(map(described, tasks)), hovertemplate="%{hovertext}<extra></extra>",
                       # An outline of the same colour keeps the shortest tasks visible.
                       marker=dict(color=looks.colour, line=dict(color=looks.colour, width=0.5)))
    height = min(HIGHEST, _FRAME + _ROW * len(rows))
    names = [f"GPU {gpu} {stream}" for gpu, stream in rows]
    return styled(figure, height, barmode="overlay", bargap=0, dragmode="zoom", showlegend=False,
                  xaxis=dict(title="s", range=[0, until], showgrid=True),
                  yaxis=dict(tickvals=list(range(len(rows))), ticktext=names, range=[len(rows) - 0.5, -0.5], fixedrange=True,
                             gridcolor=CLEAR, zeroline=False, tickfont=dict(size=10)))


def rows_of(recorded: Mapping[str, Any]) -> List[Tuple[int, str]]:
    """GPU and stream of every row, in the order of the schedule's streams; those without tasks are left out."""
    order = [stream.value for stream in Stream]
    return sorted({(task[0], task[1]) for task in recorded["tasks"]},
                  key=lambda row: (row[0], order.index(row[1]) if row[1] in order else len(order), row[1]))


def what_of(task: Sequence) -> str:
    """What a task's bar shows: its category of bytes or, of a compute, its kind."""
    kind = task[2].split(" ")[0]
    return kind if task[3] == "compute" and kind in KINDS_OF_COMPUTE else task[3]


def described(task: Sequence) -> str:
    """What is said of a task under the pointer."""
    gpu, stream, name, category, stage, microbatch, nbytes, start, end, sweep = task
    lines = [f"<b>{name}</b>", f"GPU {gpu} {stream}, {sweep}" if sweep else f"GPU {gpu} {stream}"]
    place = [f"{what} {number}" for what, number in (("stage", stage), ("microbatch", microbatch)) if number is not None]
    lines += [", ".join(place)] * bool(place)
    lines.append(f"{start:.6f} to {end:.6f} s: {(end - start) * 1e3:.3f} ms")
    if nbytes:
        rate = f", {nbytes / (end - start) / GB:.3f} GB/s" if end > start else ""
        lines.append(f"{category}: {readable(nbytes)}{rate}")
    return "<br>".join(lines)

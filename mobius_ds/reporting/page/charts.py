"""The report's interactive charts, as Plotly figures made from the report. Times in seconds, bytes in MB of 10^6.

Figures are without background, so that they lie on a light and on a dark page; the page sets the colour of their text.
"""

import re
from typing import Any, Dict, Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mobius_ds.reporting.comparison import series
from mobius_ds.reporting.comparison.report import HOST_WORK, Report, median_step_seconds, records_itself
from mobius_ds.reporting.page.palette import BLUE, fill_of, line_of
from mobius_ds.schedule.tasks import CATEGORIES
from mobius_ds.simulation.exposure import Idle

MB, GB = 1e6, 1e9
FAINT = "rgba(128, 128, 128, 0.35)"
"""Grid lines, on either background."""
CLEAR = "rgba(0, 0, 0, 0)"
HIGHEST = 900
"""Pixels. A chart higher than a page of paper would be cut in print."""
_BUSY = "busy"
_ROW, _FRAME = 56, 110  # pixels: a horizontal bar, and what is around all of them


def styled(figure: go.Figure, height: int, **layout: Any) -> go.Figure:
    """A figure in the report's style, ``height`` pixels high."""
    figure.update_layout(template="none", height=height, paper_bgcolor=CLEAR, plot_bgcolor=CLEAR,
                         font=dict(family="system-ui, sans-serif", size=12), margin=dict(l=8, r=8, t=8, b=8),
                         legend=dict(orientation="h", x=0, xanchor="left", y=1, yanchor="bottom", traceorder="normal"),
                         hovermode="closest")
    axis = dict(gridcolor=FAINT, zerolinecolor=FAINT, linecolor=FAINT, automargin=True)
    return figure.update_xaxes(axis).update_yaxes(axis).update_layout(**layout)


def loss(report: Report) -> go.Figure:
    """Loss by step. Equal curves lie on each other: later ones are thinner, so that every arm is seen."""
    figure = _by_step(report, "losses", "loss %{y:.5f}")
    for depth, trace in enumerate(reversed(figure.data)):
        trace.line.width = 2 + 3 * depth
        trace.marker.size = 5 + 3 * depth
        trace.opacity = 1 if depth == 0 else 0.65
    return styled(figure, 360, yaxis_title="loss, mean over ranks", xaxis=_steps(report))


def step_time(report: Report) -> go.Figure:
    """Seconds by step."""
    figure = _by_step(report, "step_seconds", "%{y:.4f} s")
    for trace, arm in zip(figure.data, report["arms"].values()):
        trace.name += f", median {median_step_seconds(arm):.3f} s"
    return styled(figure, 320, yaxis=dict(title="s, slowest rank", rangemode="tozero"), xaxis=_steps(report))


def bytes_by_category(report: Report) -> go.Figure:
    """A bar per arm, of all bytes over the GPUs' host links."""
    arms, size = report["arms"], report["model"]["model_size_bytes"]
    figure = go.Figure()
    for category in CATEGORIES:
        moved = [arm["traffic"]["per_step_bytes"][category] for arm in arms.values()]
        figure.add_bar(name=category, orientation="h", y=list(arms), x=[nbytes / MB for nbytes in moved],
                       marker=_marker(category), customdata=[nbytes / size for nbytes in moved],
                       hovertemplate=f"%{{y}}, {category}<br>%{{x:,.2f}} MB, %{{customdata:.2f}} x model<extra></extra>")
    labels = [f"{name}<br><b>{arm['traffic']['link_over_model_size']:.2f} x model</b>"
              f"<br>{arm['traffic']['delivered_over_model_size']:.2f} delivered" for name, arm in arms.items()]
    figure = _lying(figure, len(arms), barmode="stack", xaxis_title="MB per step, all ranks")
    return figure.update_yaxes(tickvals=list(arms), ticktext=labels)


def time_split(figures_of: Mapping[str, Mapping[str, Any]]) -> go.Figure:
    """What each GPU's step went into, by arm and GPU.

    Args:
        figures_of: by arm, an entry of the report's ``figures``.
    """
    rows, nothing = [], Idle.NOTHING.value
    parts: Dict[str, Dict[str, float]] = {}
    for arm, figures in figures_of.items():
        waits = figures.get("idle_seconds") or {"transfers": figures["exposed_seconds"]}
        for gpu, computes in enumerate(figures["compute_seconds"]):
            rows.append(f"{arm}, GPU {gpu}")
            spent = {"compute" if records_itself(arm) else _BUSY: computes}
            spent.update((cause, seconds[gpu]) for cause, seconds in waits.items() if cause != nothing)
            spent[nothing] = max(0.0, figures["step_seconds"] - sum(spent.values()))
            for what, seconds in spent.items():
                parts.setdefault(what, {})[rows[-1]] = seconds
    figure = go.Figure()
    names = {"compute": "computes", _BUSY: f"is busy ({HOST_WORK})", nothing: "has nothing to do"}
    for what, seconds in parts.items():
        name = names.get(what, f"waits: {what}")
        figure.add_bar(name=name, orientation="h", y=list(seconds), x=list(seconds.values()), marker=_marker(what),
                       hovertemplate=f"%{{y}} {name}<br>%{{x:.4f}} s<extra></extra>")
    figure = _lying(figure, len(rows), barmode="stack", xaxis_title="s of one step")
    figure.update_layout(height=min(HIGHEST, _FRAME + 24 * len(rows)))
    return figure.update_yaxes(categoryorder="array", categoryarray=rows)


def bandwidth(links: Mapping[str, Mapping[str, Sequence]]) -> go.Figure:
    """By link, the share of its bytes that moved at less than a rate.

    Args:
        links: by arm and link, points (bytes/s, share).
    """
    figure, seen = go.Figure(), set()
    dashes = {"in": "solid", "out": "dash", "root in": "dot", "root out": "dashdot"}
    for arm, distributions in links.items():
        for link, points in distributions.items():
            dash = dashes.get(re.sub(r"\W*\d+", "", link), "longdash")
            figure.add_scatter(name=arm, legendgroup=arm, showlegend=arm not in seen, mode="lines",
                               x=[rate / GB for rate, _ in points], y=[share for _, share in points],
                               line=dict(color=line_of(arm).colour, dash=dash, width=2, shape="hv"),
                               hovertemplate=f"{arm}, {link}<br>%{{y:.0%}} below %{{x:.3g}} GB/s<extra></extra>")
            seen.add(arm)
    return styled(figure, 360, xaxis=dict(title="GB/s", rangemode="tozero"),
                  yaxis=dict(title="share of bytes moved at less", tickformat=".0%", range=[0, 1.02]))


def memory(report: Report) -> go.Figure:
    """Device memory of the fullest rank above host memory of all ranks: their scales differ."""
    arms = report["arms"]
    titles = ("device, most of any rank, MB", "host, all ranks (PSS), MB")
    figure = make_subplots(rows=2, cols=1, subplot_titles=titles, vertical_spacing=0.32)
    for row, key in enumerate(("peak_device_bytes", "host_bytes_per_node"), start=1):
        for name, arm in arms.items():
            figure.add_bar(name=name, orientation="h", y=[name], x=[arm[key] / MB], row=row, col=1, showlegend=False,
                           marker_color=line_of(name).colour, texttemplate="%{x:,.1f}", textposition="auto",
                           hovertemplate="%{y}<br>%{x:,.2f} MB<extra></extra>")
    figure = styled(figure, 2 * (_FRAME + 32 * len(arms)), margin=dict(l=8, r=16, t=32, b=8))
    return figure.update_yaxes(autorange="reversed", gridcolor=CLEAR)


def plan(report: Report) -> go.Figure:
    """Every stage as a bar over its layers, in the row of its GPU."""
    plan = report["plan"]
    first = [sum(plan["layers_per_stage"][:stage]) for stage in range(len(plan["layers_per_stage"]))]
    figure = go.Figure(go.Bar(
        orientation="h", base=first, x=plan["layers_per_stage"], y=plan["gpu_of_stage"], width=0.8,
        marker=dict(color=BLUE, line=dict(width=1, color=FAINT)), text=list(range(len(first))), textangle=0,
        textfont_color="white", textposition="inside", insidetextanchor="middle",
        hovertemplate="stage %{text}, GPU %{y}<br>%{x} layers from layer %{base} on<extra></extra>"))
    gpus = range(plan["gpus"])
    return styled(figure, _FRAME + 24 * len(gpus), barmode="overlay", uniformtext=dict(minsize=9, mode="hide"),
                  xaxis=dict(title="layer", rangemode="tozero"),
                  yaxis=dict(tickvals=list(gpus), ticktext=[f"GPU {gpu}" for gpu in gpus], range=[len(gpus) - 0.5, -0.5],
                             gridcolor=CLEAR, zeroline=False))


def growth(report: Report) -> go.Figure:
    """A sweep: traffic above step time, over what was varied; thin lines are what the formulas say."""
    points, over = report["sweep"]["points"], report["sweep"]["over"]
    values = [point["value"] for point in points]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for row, key in enumerate(("delivered_over_model_size", "step_seconds"), start=1):
        for name in series.arms_of(report["sweep"]):
            line = line_of(name)
            figure.add_scatter(name=name, legendgroup=name, showlegend=row == 1, row=row, col=1, mode="lines+markers",
                               x=values, y=[point["arms"].get(name, {}).get(key) for point in points],
                               line=dict(color=line.colour, dash=line.dash, width=3),
                               marker=dict(symbol=line.marker, size=10),
                               hovertemplate=f"{name}, {over} %{{x}}<br>%{{y:.3f}}<extra></extra>")
    for name, multiples in series.closed_forms(report).items():
        figure.add_scatter(name=f"{name}, by formula", x=values, y=multiples, mode="lines", row=1, col=1,
                           line=dict(color=line_of(name).colour, width=1), hovertemplate=f"{name}: %{{y}}<extra></extra>")
    figure.update_xaxes(tickvals=values)
    figure.update_xaxes(title=over.replace("_", " "), row=2, col=1)
    figure.update_yaxes(title="delivered / model size", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="step time, s", rangemode="tozero", row=2, col=1)
    return styled(figure, 560)


def _by_step(report: Report, key: str, value: str) -> go.Figure:
    figure = go.Figure()
    for name, arm in report["arms"].items():
        line = line_of(name)
        figure.add_scatter(name=name, x=list(range(1, len(arm[key]) + 1)), y=arm[key], mode="lines+markers",
                           line=dict(color=line.colour, dash=line.dash, width=2), marker=dict(symbol=line.marker, size=6),
                           hovertemplate=f"{name}<br>step %{{x}}: {value}<extra></extra>")
    return figure


def _steps(report: Report) -> Dict[str, Any]:
    return dict(title="step", tick0=1, dtick=max(1, report["steps"] // 10))


def _lying(figure: go.Figure, rows: int, **layout: Any) -> go.Figure:
    """Horizontal bars, the first on top."""
    return styled(figure, _FRAME + _ROW * rows, **layout).update_yaxes(autorange="reversed", gridcolor=CLEAR)


def _marker(what: str) -> Dict[str, Any]:
    fill = fill_of(what)
    return dict(color=fill.colour, line=dict(width=0), pattern=dict(
        shape=fill.pattern, fillmode="overlay", fgcolor="white", fgopacity=0.8, size=6, solidity=0.25))

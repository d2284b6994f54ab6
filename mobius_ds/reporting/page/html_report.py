"""A comparison as one HTML file that needs nothing else: no network, no files beside it.

``sections`` says what stands on the page, from the report alone; ``page/`` holds how it looks (``report.html.jinja``,
``report.css``) and what happens in the browser (``report.js``). Plotly's own JavaScript is copied in from its package.
"""

from pathlib import Path
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from mobius_ds.reporting.comparison import series
from mobius_ds.reporting.comparison.report import (HOST_WORK, Report, columns, findings, median_step_seconds,
                                                   records_itself, timed, times_are_of_a_cpu, title)
from mobius_ds.reporting.comparison.tables import measures, table_rows
from mobius_ds.reporting.page import charts
from mobius_ds.reporting.page.timeline_chart import Looks, legend, timeline

FILE = "report.html"
PAGE = Path(__file__).parent
MB, PERCENT = 1e6, 100


class Chart(NamedTuple):
    """A figure with what it says in words."""

    figure: go.Figure
    alt: str
    """For those who cannot see it."""
    caption: str = ""
    seconds: Optional[float] = None
    """Of a timeline: how long its step took. All timelines move through time together."""

    @property
    def json(self) -> Markup:
        """The figure for a script element, which ends at the first ``</``."""
        return Markup(self.figure.to_json().replace("<", "\\u003c"))


class Table(NamedTuple):
    """Rows of text under a head; the first cell of a row names it."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False
    """Whether its cells are words, which start at the left, and not numbers."""


class Section(NamedTuple):
    """A part of the page under a heading."""

    id: str
    title: str
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    text: Sequence[str] = ()
    """Paragraphs above the charts."""
    legend: Sequence[Looks] = ()
    """Of all its charts together, where they are timelines."""
    below: Markup = Markup()
    """HTML below everything."""


def write_html(report: Report, folder: Path) -> Path:
    """Writes ``report.html`` into ``folder`` and returns its path.

    Args:
        report: the whole report, with its ``answer``.
    """
    environment = Environment(loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                              lstrip_blocks=True)
    style, script = (Markup((PAGE / name).read_text()) for name in ("report.css", "report.js"))
    page = environment.get_template("report.html.jinja").render(
        title=title(report), answer=report["answer"], emulated=report.get("emulated"), problems=findings(report)[0],
        sections=sections(report), style=style, script=script, plotly=Markup(get_plotlyjs()))
    path = folder / FILE
    path.write_text(page, encoding="utf-8")
    return path


def sections(report: Report) -> List[Section]:
    """What the page shows under the answer, in order; parts of which the report has nothing are left out."""
    parts: Sequence[Callable[[Report], Optional[Section]]] = (
        _failed, _loss, _bytes, _step_time, _timelines, _time_split, _bandwidth, _memory, _plan, _sweep, _numbers,
        _measures, _machine)
    return [section for section in (part(report) for part in parts) if section is not None]


def _failed(report: Report) -> Optional[Section]:
    if not report["failed"]:
        return None
    rows = [(name, failure["what"], failure["why"]) for name, failure in report["failed"].items()]
    table = Table("What did not run, and why", ("arm", "what", "why"), rows, words=True)
    return Section("failed", "Arms without numbers", tables=[table])


def _loss(report: Report) -> Section:
    last = {name: arm["losses"][-1] for name, arm in report["arms"].items()}
    alt = "Loss by step. At the end: " + ", ".join(
        f"{name} {'unknown' if loss is None else f'{loss:.4f}'}" for name, loss in last.items())
    comparison = report["comparison"]
    difference = comparison.get("max_loss_difference")
    caption = "Wide curves lie under thin ones, so equal curves all stay visible."
    if difference is not None:
        caption += (f" Mobius and ZeRO-3 are at most {difference:.3g} apart at any step; {report['dtype']} allows "
                    f"{comparison['loss_tolerance']:g}.")
    return Section("loss", "Loss", [Chart(charts.loss(report), alt, caption)])


def _bytes(report: Report) -> Section:
    traffic = {name: arm["traffic"] for name, arm in report["arms"].items()}
    alt = "Bytes per step over the GPUs' host links: " + ", ".join(
        f"{name} {moved['link_bytes'] / MB:,.1f} MB, {moved['link_over_model_size']:.2f} times the model size"
        for name, moved in traffic.items())
    size = report["model"]["model_size_bytes"] / MB
    return Section("bytes", "Bytes by category", [Chart(charts.bytes_by_category(report), alt,
                   f"The model size is {size:,.1f} MB. What is delivered leaves out what collectives forward.")])


def _step_time(report: Report) -> Section:
    alt = "Step time, median: " + ", ".join(
        f"{name} {median_step_seconds(arm):.3f} s" for name, arm in report["arms"].items())
    return Section("step-time", timed("Step time", report), [Chart(charts.step_time(report), alt)])


def _timelines(report: Report) -> Optional[Section]:
    timelines = {name: recorded for name, recorded in _by_arm(report, "timelines") if recorded["tasks"]}
    if not timelines:
        return None
    until = max(recorded["seconds"] for recorded in timelines.values())
    drawn = []
    for name, recorded in timelines.items():
        of = ", ".join(filter(None, [name, "emulated" if recorded["emulated"] else "", recorded.get("says")]))
        caption = f"{of}: {recorded['seconds']:.4f} s, {len(recorded['tasks'])} tasks."
        drawn.append(Chart(timeline(recorded, until),
                           f"Timeline of one step, a row for each GPU and stream. {caption}", caption,
                           seconds=recorded["seconds"]))
    return Section("timeline", "Timeline of a step", drawn, legend=legend(timelines.values()), text=[
        "All timelines share one time axis, so lengths compare: drag over one, or use the buttons, and all of them zoom. "
        "Point at a task to read what it is."])


def _by_arm(report: Report, key: str) -> List[Tuple[str, Any]]:
    """The entries of a part of the report in the order of the arms, what is simulated under what was measured."""
    place = {arm: number for number, arm in enumerate(report["arms"])}
    return sorted((report.get(key) or {}).items(), key=lambda entry: place[entry[0].partition(" (")[0]])


def _time_split(report: Report) -> Optional[Section]:
    figures = dict(_by_arm(report, "figures"))
    if not figures:
        return None
    rows = []
    for name, figure in figures.items():
        bubble = figure.get("bubble")
        busy = "" if records_itself(name) else " (busy)"
        rows.append((name, _ms(figure["step_seconds"]), _ms(max(figure["compute_seconds"])) + busy,
                     _ms(max(figure["exposed_seconds"])), "-" if bubble is None else f"{bubble * PERCENT:.1f} %"))
    tables = [Table("Of one step", ("arm", "step, ms", "compute of the busiest GPU, ms",
                                    "transfers waited for, most of any GPU, ms", "bubble"), rows)]
    tables += [Table(f"{name}: how long a stage's weights were waited for", ("stage", "GPU", "forward", "backward"),
                     [(str(stage["stage"]), str(stage["gpu"]), _exposure(stage["forward_exposed_s"]),
                       _exposure(stage["backward_exposed_s"])) for stage in figure["stages"]])
               for name, figure in figures.items() if figure.get("stages") and name in report["arms"]]
    alt = "Where each GPU's time goes: " + "; ".join(
        f"{row[0]} of {row[1]} ms computes {row[2]} and waits for transfers {row[3]}" for row in rows)
    observed = ("" if all(map(records_itself, figures)) else
                f" What an arm that is observed from outside is busy with is not compute alone: {HOST_WORK}, and waits for "
                "late ranks. Its bubble is a lower bound and does not compare with Mobius'.")
    return Section("time", timed("Exposed transfers and bubble", report), [Chart(charts.time_split(figures), alt,
                   "A transfer is exposed while its GPU computes nothing and waits for it. The bubble is the share of "
                   f"all GPUs' time in the sweeps without compute; the update after them is not in it.{observed}")], tables)


def _bandwidth(report: Report) -> Optional[Section]:
    links = {name: figure["bandwidth"] for name, figure in _by_arm(report, "figures") if figure.get("bandwidth")}
    if not links or times_are_of_a_cpu(report):  # what stands in for links there is this machine's memory
        return None
    return Section("bandwidth", timed("Bandwidth of every link", report), [Chart(
        charts.bandwidth(links), f"Cumulative distribution of the bandwidth of every link, for {', '.join(links)}",
        "A curve is a link: solid into a GPU, dashed out of it; dotted and dash-dotted in and out of what GPUs share. "
        "Further right is faster; a steep curve means that its transfers get an even share.")])


def _memory(report: Report) -> Section:
    alt = "Memory: " + ", ".join(
        f"{name} {arm['peak_device_bytes'] / MB:,.1f} MB on a device, {arm['host_bytes_per_node'] / MB:,.1f} MB in the host"
        for name, arm in report["arms"].items())
    kinds = {arm["peak_device_measure"] for arm in report["arms"].values()}
    caption = "" if len(kinds) == 1 else "Device memory is not measured alike in all arms: see how each number is measured."
    return Section("memory", "Memory", [Chart(charts.memory(report), alt, caption)])


def _plan(report: Report) -> Optional[Section]:
    plan = report.get("plan")
    if not plan:
        return None
    how, listed, _ = plan["how"].partition("): stage 0:")  # the table lists the stages
    rows, first = [], 0
    for stage, (count, gpu) in enumerate(zip(plan["layers_per_stage"], plan["gpu_of_stage"])):
        names = plan["layers"][first:first + count]
        rows.append((str(stage), str(gpu), str(count), names[0] if count == 1 else f"{names[0]} to {names[-1]}"))
        first += count
    return Section("plan", "The plan", text=[f"{how})." if listed else how],
                   charts=[Chart(charts.plan(report), "Every stage over its layers, in the row of its GPU; the table below "
                                 "says the same")],
                   tables=[Table("Stages of the mobius arm", ("stage", "GPU", "layers", "which"), rows, words=True)])


def _sweep(report: Report) -> Optional[Section]:
    if not report.get("sweep"):
        return None
    over = report["sweep"]["over"].replace("_", " ")
    values = [str(point["value"]) for point in report["sweep"]["points"]]
    table = Table(f"By {over}", (over, *values), [(label, *cells) for label, cells in series.table_rows(report)])
    return Section("sweep", timed(f"Growth with {over}", report), text=series.notes(report), tables=[table],
                   charts=[Chart(charts.growth(report), f"Traffic and step time by {over}; the table below says the same")])


def _numbers(report: Report) -> Section:
    failed = [f"{name}: {failure['what']}: {failure['why']}" for name, failure in report["failed"].items()]
    notes = [note for note in findings(report)[1] if note not in failed]  # those are told of above
    table = Table("Per step", ("", *columns(report)), [(label, *cells) for label, cells in table_rows(report)])
    return Section("numbers", "All numbers", tables=[table], text=notes)


def _measures(report: Report) -> Section:
    rendered = MarkdownIt("commonmark", {"html": False}).render(measures(report))
    return Section("measures", "How each number is measured", below=Markup(rendered))


def _machine(report: Report) -> Section:
    machine, model = report["machine"], report["model"]
    rows = [("model", f"{model['parameters'] / MB:,.1f} M parameters, {report['dtype']}"),
            ("ranks, steps", f"{report['ranks']} ranks, {report['steps']} steps"),
            ("processor", f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"),
            ("device", machine["device"]), ("torch", machine["torch"]), ("DeepSpeed", machine["deepspeed"])]
    if report.get("command"):
        rows.append(("to run it again", report["command"]))
    return Section("machine", "Machine and versions", tables=[Table("Where this was measured", ("", ""), rows, words=True)])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _exposure(seconds: Optional[float]) -> str:
    if seconds is None:
        return "-"
    return "hidden" if seconds < 5e-5 else f"{_ms(seconds)} ms"

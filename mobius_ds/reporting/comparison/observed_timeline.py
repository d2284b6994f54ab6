"""Timelines and figures of the engines that are observed, for the report: ``zero3`` above all.

They show a run's last step as the recorder noted it. Compute is what the ranks' forward and backward took without their
waits for transfers; DeepSpeed's own work on the host is in it, the optimizer's update is not. A transfer is drawn from
when it could begin to its arrival.
"""

from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

from mobius_ds.observation.records import Record
from mobius_ds.schedule.tasks import Stream, stream_of
from mobius_ds.simulation.exposure import Distribution, cumulative, link_name
from mobius_ds.simulation.simulator import Link

Interval = Tuple[float, float]


def add_to_report(report: Dict[str, Any], records: Mapping[str, Sequence[Record]], emulated: bool = False) -> None:
    """Adds the last step's timeline and figures of every arm that was observed on CPU.

    Args:
        report: of a comparison.
        records: by arm, of all its ranks.
        emulated: whether they crossed emulated links.
    """
    for arm, ranks in records.items():
        if all(rank.get("last_step") for rank in ranks):
            report.setdefault("timelines", {})[arm] = timeline(ranks, emulated)
            report.setdefault("figures", {})[arm] = figures(ranks)


def timeline(ranks: Sequence[Record], emulated: bool) -> Dict[str, Any]:
    """The report's timeline of the last step of all ranks of an arm; times count from its begin."""
    steps = [rank["last_step"] for rank in ranks]
    begin = min(step["begin"] for step in steps)
    return {"step": len(ranks[0]["step_seconds"]), "seconds": max(step["end"] for step in steps) - begin,
            "emulated": emulated, "says": None,
            "tasks": [[gpu, *row, start - begin, end - begin, ""]
                      for gpu, step in enumerate(steps) for *row, start, end in _rows(step)]}


def _rows(step: Mapping[str, Any]) -> Iterator[List[Any]]:
    """Stream, name, category, stage, microbatch, bytes, start and end."""
    for name, *span in step["spans"]:
        for start, end in without(span, step["waits"]):
            yield [Stream.COMPUTE.value, name, "compute", None, None, 0, start, end]
    for name, category, received, sent, start, end, _ in step["transfers"]:
        yield [stream_of(category).value, name, category, None, None, max(received, sent), start, end]


def figures(ranks: Sequence[Record]) -> Dict[str, Any]:
    """The report's figures of the last step; bandwidths are those of emulated links, as no others were crossed."""
    steps = [rank["last_step"] for rank in ranks]
    computing = [sum(end - start for _, *span in step["spans"] for start, end in without(span, step["waits"]))
                 for step in steps]
    sweeps = max(sum(end - start for _, start, end in step["spans"]) for step in steps)
    return {"step_seconds": max(step["end"] for step in steps) - min(step["begin"] for step in steps),
            "sweep_seconds": sweeps, "compute_seconds": computing,
            "bubble": 1 - sum(computing) / (len(steps) * sweeps),
            "exposed_seconds": [sum(end - start for start, end in _merged(step["waits"])) for step in steps],
            "bandwidth": _bandwidth(steps), "stages": None}


def _bandwidth(steps: Sequence[Mapping[str, Any]]) -> Dict[str, Distribution]:
    by_link: Dict[Link, List[Tuple[float, int]]] = {}
    for step in steps:
        for *_, start, end, crossing in step["transfers"]:
            for link, nbytes in crossing:
                if nbytes:
                    by_link.setdefault(tuple(link), []).append((nbytes / (end - start), nbytes))
    return {link_name(link): cumulative(by_link[link]) for link in sorted(by_link)}


def without(span: Interval, holes: Sequence[Interval]) -> Iterator[Interval]:
    """The parts of a span that lie in none of the holes."""
    start, end = span
    for begin, stop in _merged(holes):
        if start < begin < end:
            yield start, begin
        start = max(start, stop) if begin < end else start
    if start < end:
        yield start, end


def _merged(intervals: Sequence[Interval]) -> List[Interval]:
    """The same times, none twice: a wait for a stream may be within a wait for a collective."""
    merged: List[List[float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]

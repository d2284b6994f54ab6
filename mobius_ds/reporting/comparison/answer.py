"""The answer to what a comparison was made for: which arm is faster here, by how much, and why."""

import statistics
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from mobius_ds.reporting.comparison.arms import MOBIUS, ZERO3
from mobius_ds.reporting.comparison.report import (HOST_WORK, Report, counted, median_step_seconds, records_itself,
                                                   timed, times_are_of_a_cpu)
from mobius_ds.reporting.comparison.verdict import not_a_number

MB = 1e6


class Pace(NamedTuple):
    """How one arm's steps went."""

    arm: str
    steps: int
    """That count."""
    seconds: float
    """Median."""
    low: float
    high: float
    """Half of the steps took between these two."""
    link_bytes: float
    over_model_size: float


def answer(report: Report) -> Dict[str, Any]:
    """The answer, from the rest of a report.

    Returns:
        ``headline``, one sentence, and ``because``, a few more with numbers.
    """
    paces = {name: _pace(name, arm) for name, arm in report["arms"].items()}
    pair = _pair(paces)
    if pair is None:
        return {"headline": _alone(report, *paces.values()), "because": _conditions(report, list(paces.values()))}
    fast, slow = sorted(pair, key=lambda pace: pace.seconds)
    because = [_bytes_moved(*pair), _time_spent(report, pair), _fastest_of_all(report, paces, fast), _left_out(report)]
    return {"headline": _headline(report, fast, slow),
            "because": [*filter(None, because), *_conditions(report, pair)]}


def _pace(name: str, arm: Mapping[str, Any]) -> Pace:
    steps = counted(arm["step_seconds"])
    low, _, high = statistics.quantiles(steps, n=4, method="inclusive") if len(steps) > 1 else [*steps] * 3
    traffic = arm["traffic"]
    return Pace(name, len(steps), median_step_seconds(arm), low, high, traffic["link_bytes"],
                traffic["link_over_model_size"])


def _pair(paces: Mapping[str, Pace]) -> Optional[Tuple[Pace, Pace]]:
    """The two arms that the answer is about: Mobius and ZeRO-3 where both ran, else the first two."""
    names = [MOBIUS, ZERO3] if MOBIUS in paces and ZERO3 in paces else list(paces)[:2]
    return (paces[names[0]], paces[names[1]]) if len(names) == 2 else None


def _headline(report: Report, fast: Pace, slow: Pace) -> str:
    comparison = report["comparison"]
    nans = {arm: step for arm, step in comparison.get("not_a_number_from", {}).items() if arm in (fast.arm, slow.arm)}
    if nans:
        return f"{not_a_number(nans)}: nothing was trained whose speed could be compared."
    difference, tolerance = comparison.get("max_loss_difference"), comparison.get("loss_tolerance")
    if difference is not None and not difference <= tolerance:
        return (f"Losses differ by up to {difference:.3g}, more than the {tolerance:g} that {report['dtype']} explains: "
                "these are not two runs of the same training, and their speeds do not compare.")
    light, heavy = sorted((fast, slow), key=lambda pace: pace.link_bytes)
    if times_are_of_a_cpu(report):
        return f"{_fewer(light, heavy)}; without a GPU here, step times say little."
    if not _is_timed(fast, slow):
        return f"{_emulated(report)}{_fewer(light, heavy)}; one step says nothing of speed, so take more with --steps."
    return f"{_emulated(report)}{_speed(fast, slow)}"


def _is_timed(*paces: Pace) -> bool:
    return all(pace.steps > 1 for pace in paces)


def _emulated(report: Report) -> str:
    return f"Emulated {report['emulated']['topology']}: " if report.get("emulated") else ""


def _speed(fast: Pace, slow: Pace) -> str:
    times = f"{_seconds(fast.seconds)} a step against {_seconds(slow.seconds)}"
    if fast.high >= slow.low:  # what half of one's steps took, half of the other's took too
        return f"{fast.arm} and {slow.arm} are about as fast here: {times}, less apart than single steps are."
    advice = " Stay with ZeRO-3 here." if (fast.arm, slow.arm) == (ZERO3, MOBIUS) else ""
    return f"{fast.arm} is {slow.seconds / fast.seconds:.2f} times as fast as {slow.arm} here: {times}.{advice}"


def _fewer(light: Pace, heavy: Pace) -> str:
    if light.link_bytes == heavy.link_bytes:
        return f"{light.arm} and {heavy.arm} move as many bytes"
    if not light.link_bytes:
        return f"{light.arm} moves no bytes over the GPUs' host links, {heavy.arm} does"
    return f"{light.arm} moves {heavy.link_bytes / light.link_bytes:.1f} times fewer bytes than {heavy.arm}"


def _bytes_moved(one: Pace, other: Pace) -> str:
    first, second = (f"{pace.arm} {pace.link_bytes / MB:,.1f} MB a step ({pace.over_model_size:.2f} times the model size)"
                     for pace in (one, other))
    return f"Bytes over the GPUs' host links, as counted without peer-to-peer: {first}, {second}."


def _time_spent(report: Report, pair: Tuple[Pace, Pace]) -> Optional[str]:
    """Where the time of a step goes, for the arms whose timelines were recorded."""
    spent = []
    for pace in pair:
        figures = (report.get("figures") or {}).get(pace.arm)
        if figures:
            does, of = ("computes", "") if records_itself(pace.arm) else ("is busy", f" ({HOST_WORK})")
            spent.append(f"{pace.arm} {does} {_seconds(max(figures['compute_seconds']))} on its busiest GPU{of} and waits "
                         f"for transfers {_seconds(max(figures['exposed_seconds']))} at most")
    return f"{timed('Of a step', report)}, {'; '.join(spent)}." if spent else None


def _fastest_of_all(report: Report, paces: Mapping[str, Pace], fast: Pace) -> Optional[str]:
    first = min(paces.values(), key=lambda pace: pace.seconds)
    if times_are_of_a_cpu(report) or not _is_timed(first, fast) or first.high >= fast.low:
        return None
    return timed(f"The fastest arm is another: {first.arm}, {_seconds(first.seconds)} a step", report) + "."


def _left_out(report: Report) -> Optional[str]:
    failed = [f"{arm} ({failure['what']})" for arm, failure in report["failed"].items()]
    return f"No numbers of {', '.join(failed)}." if failed else None


def _conditions(report: Report, paces: Sequence[Pace]) -> List[str]:
    """What the answer holds for."""
    said = []
    comparison = report["comparison"]
    difference, tolerance = comparison.get("max_loss_difference"), comparison.get("loss_tolerance")
    if difference is not None and difference <= tolerance:
        said.append(f"Both train alike: losses are at most {difference:.3g} apart (allowed for {report['dtype']}: "
                    f"{tolerance:g}).")
    if report.get("emulated"):
        said.append(f"Emulated: {report['emulated']['says'].rstrip('.')}.")
    elif times_are_of_a_cpu(report):
        times = ", ".join(f"{pace.arm} {_seconds(pace.seconds)}" for pace in paces)
        said.append(f"Bytes are counted and hold for any device; step times ({times}) are of a CPU that stands in for the "
                    "GPUs.")
    return said


def _alone(report: Report, pace: Pace) -> str:
    return (f"{_emulated(report)}{pace.arm} took {_seconds(pace.seconds)} a step and moved {pace.over_model_size:.2f} times "
            "the model size; there is no second arm to compare it with.")


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"

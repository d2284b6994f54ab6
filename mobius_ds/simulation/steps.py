"""A step that was played, by the simulator or by the ranks themselves."""

import itertools
from collections import defaultdict
from typing import Dict, Iterable, List, NamedTuple, Sequence, Tuple

from mobius_ds.schedule.schedule import Schedule
from mobius_ds.simulation.simulator import Cost, Played, Timeline, simulate

AGAIN = "measured task times, no waiting for the runtime"
"""What is said of a step of ``without_waiting``."""
EVALUATION = "evaluation"
"""Name of forward sweeps that no backward has followed. They belong to no step."""


class PlayedSweep(NamedTuple):
    """One sweep of a step."""

    name: str
    begin: float
    """Seconds into the step."""
    timeline: Timeline
    """Its times count from ``begin``."""


class Step(NamedTuple):
    """One optimizer step."""

    parts: Tuple[PlayedSweep, ...]
    seconds: float
    """From its first task to the end of its update."""
    begin: float = 0.0
    """On the clock of whoever measured it."""

    @property
    def gpus(self) -> int:
        """How many GPUs have tasks in it."""
        return 1 + max((played.task.gpu for part in self.parts for played in part.timeline.played), default=-1)


class Spans(NamedTuple):
    """What was noted of one sweep: by one rank, or by all."""

    name: str
    number: int
    """Counts the sweeps of a run, which every rank runs in the same order."""
    played: List[Played]
    """Times are of any clock that all ranks share."""


def in_turn(sweeps: Iterable[Tuple[str, Timeline]], update_seconds: float = 0.0) -> Step:
    """The step whose sweeps start when the one before has ended, as those of a ``Prediction`` do."""
    parts, begin = [], 0.0
    for name, timeline in sweeps:
        parts.append(PlayedSweep(name, begin, timeline))
        begin += timeline.makespan
    return Step(tuple(parts), begin + update_seconds)


def measured_step(noted: Iterable[Spans], end: float) -> Step:
    """A step from what all ranks noted of it.

    Args:
        noted: at least one task.
        end: when the last rank had updated.
    """
    sweeps: Dict[Tuple[int, str], List[Played]] = defaultdict(list)
    for spans in noted:
        sweeps[spans.number, spans.name] += spans.played
    begin = min(played.start for played in itertools.chain(*sweeps.values()))
    parts = [_measured_part(name, begin, played) for (_, name), played in sorted(sweeps.items()) if played]
    return Step(tuple(parts), end - begin, begin)


def _measured_part(name: str, step_begin: float, noted: Sequence[Played]) -> PlayedSweep:
    begin, end = min(played.start for played in noted), max(played.end for played in noted)
    ordered = sorted(noted, key=lambda played: played.end)
    return PlayedSweep(name, begin - step_begin, Timeline(tuple(
        Played(played.task, played.start - begin, played.end - begin) for played in ordered), end - begin, {}))


def without_waiting(step: Step) -> Step:
    """The same tasks in the same order, each as long as it was, but started as soon as what it waits for is over.

    What the sweeps took beyond that is what the runtime adds between tasks. The update takes as long as it did, and
    nothing comes between sweeps.
    """
    sweeps = []
    for part in step.parts:
        ordered = sorted(part.timeline.played, key=lambda played: played.start)
        seconds = {played.task.key: played.seconds for played in ordered}
        schedule = Schedule(part.name, step.gpus, tuple(played.task for played in ordered))
        sweeps.append((part.name, simulate(schedule, lambda task: Cost(seconds[task.key]), {})))
    last = step.parts[-1]
    return in_turn(sweeps, step.seconds - last.begin - last.timeline.makespan)


def slowed_down(step: Step, times: float) -> Step:
    """The same step on a clock that runs ``times`` times as slow: an emulated server's, on a machine that computes so."""
    parts = []
    for name, begin, timeline in step.parts:
        played = tuple(Played(task, times * start, times * end) for task, start, end in timeline.played)
        rates = {link: rate / times for link, rate in timeline.peak_rate.items()}
        parts.append(PlayedSweep(name, times * begin, Timeline(played, times * timeline.makespan, rates)))
    return Step(tuple(parts), times * step.seconds, step.begin)

"""A step that was played, by the simulator or by the ranks themselves, and as lines of a Chrome trace.

A line is an event of Chrome's Trace Event Format; of a task, a complete event ("ph": "X") whose process is the GPU and
whose thread is the stream. Times are in microseconds.
"""

import functools
import itertools
import json
from collections import defaultdict
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from mobius_ds.planning.schedule import Key, Schedule, Stream, Task
from mobius_ds.planning.simulator import Cost, Played, Timeline, simulate

MICROSECONDS = 1e6
SIMULATED = 1000
"""Added to a GPU's number, it is the process of that GPU's simulated events: they stand beside the measured ones."""
STEP_THREAD = len(Stream)
"""The thread of whole steps, behind those of the streams."""
PLAN = "mobius_plan"
"""Name of the event that holds the plan."""
STEP_CATEGORY = "step"
"""Category of whole steps."""
AGAIN = "measured task times, no waiting for the runtime"
"""What is said of a step of ``without_waiting``."""
BACKWARD = "backward"
"""Name of the sweep that makes a forward one of training."""
EVALUATION = "evaluation"
"""Name of forward sweeps that no backward has followed. They belong to no step."""

_STREAMS = list(Stream)
_THREAD_OF = {stream: number for number, stream in enumerate(_STREAMS)}


class Part(NamedTuple):
    """One sweep of a step."""

    name: str
    begin: float
    """Seconds into the step."""
    timeline: Timeline
    """Its times count from ``begin``."""


class Step(NamedTuple):
    """One optimizer step."""

    parts: Tuple[Part, ...]
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
        parts.append(Part(name, begin, timeline))
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


def _measured_part(name: str, step_begin: float, noted: Sequence[Played]) -> Part:
    begin, end = min(played.start for played in noted), max(played.end for played in noted)
    ordered = sorted(noted, key=lambda played: played.end)
    return Part(name, begin - step_begin, Timeline(tuple(
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
        parts.append(Part(name, times * begin, Timeline(played, times * timeline.makespan, rates)))
    return Step(tuple(parts), times * step.seconds, step.begin)


# Lines of a trace.


def task_line(task: Task, start: float, end: float, sweep: str, number: int, step: Optional[int],
              simulated: bool = False) -> str:
    """A task that ran from ``start`` to ``end`` (seconds)."""
    rate = f"{task.nbytes / (end - start):.0f}" if task.nbytes and end > start else "null"
    return _template(task, sweep, simulated) % (start * MICROSECONDS, (end - start) * MICROSECONDS,
                                                "null" if step is None else step, number, rate)


@functools.lru_cache(2**14)
def _template(task: Task, sweep: str, simulated: bool) -> str:
    """What is the same of a task's event in every step, which are many, with a gap for each thing that is not."""
    head = {"name": f"{task.key.kind.name.lower()} {task.key}", "cat": task.category or "compute", "ph": "X",
            "pid": task.gpu + simulated * SIMULATED, "tid": _THREAD_OF[task.stream]}
    about = {"sweep": sweep, "stage": task.key.stage, "microbatch": task.key.microbatch, "bytes": task.nbytes,
             "after": [str(key) for key in task.after]}
    return json.dumps(head)[:-1] + ', "ts": %.3f, "dur": %.3f, "args": ' \
        + json.dumps(about)[:-1] + ', "step": %s, "number": %d, "bytes_per_s": %s}}'


def step_lines(step: Step, begin: float, number: int) -> Iterator[str]:
    """A simulated step that starts at ``begin`` seconds, beside the measured step of this number."""
    for order, part in enumerate(step.parts):
        offset = begin + part.begin
        for task, start, end in part.timeline.played:
            yield task_line(task, offset + start, offset + end, part.name, order, number, simulated=True)
    yield whole_step_line(number, begin, begin + step.seconds, SIMULATED)


def naming_lines(gpus: int, says: str, simulated: bool) -> Iterator[str]:
    """What names the processes and threads, with what ``says`` of them, if anything."""
    for gpu in range(gpus):
        process = gpu + simulated * SIMULATED
        yield _metadata("process_name", process, {"name": f"GPU {gpu}{says and f' ({says})'}"})
        yield _metadata("process_sort_index", process, {"sort_index": 2 * gpu + simulated})
        for thread, name in enumerate([*(stream.value for stream in Stream), "step"]):
            yield _metadata("thread_name", process, {"name": name}, tid=thread)


def plan_line(plan: Dict[str, Any]) -> str:
    """What the trace's job ran: viewers pass over it."""
    return _metadata(PLAN, 0, plan)


def whole_step_line(number: int, start: float, end: float, process: int) -> str:
    """One rank's optimizer step, from its first task to the end of its update."""
    return json.dumps({"name": f"step {number}", "cat": STEP_CATEGORY, "ph": "X", "pid": process, "tid": STEP_THREAD,
                       "ts": round(start * MICROSECONDS, 3), "dur": round((end - start) * MICROSECONDS, 3),
                       "args": {"step": number}})


def _metadata(name: str, process: int, what: Dict[str, Any], **place: int) -> str:
    return json.dumps({"name": name, "ph": "M", "pid": process, **place, "args": what})


def read_task(event: Dict[str, Any]) -> Tuple[int, str, Played]:
    """The task of a ``task_line``: the number of its sweep, the sweep's name, and when it ran.

    Raises:
        ValueError: it is another event.
    """
    try:
        about = event["args"]
        task = Task(Key.parse(event["name"].split()[-1]), event["pid"] % SIMULATED, about["bytes"],
                    tuple(map(Key.parse, about["after"])))
        start = event["ts"] / MICROSECONDS
        return about["number"], about["sweep"], Played(task, start, start + event["dur"] / MICROSECONDS)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{event} is no task's event ({type(error).__name__}: {error})") from None

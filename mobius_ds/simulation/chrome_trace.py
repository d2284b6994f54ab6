"""A step as lines of a Chrome trace, and the tasks of such lines.

A line is an event of Chrome's Trace Event Format; of a task, a complete event ("ph": "X") whose process is the GPU and
whose thread is the stream. Times are in microseconds.
"""

import functools
import json
from typing import Any, Dict, Iterator, Optional, Tuple

from mobius_ds.schedule.tasks import Key, Stream, Task
from mobius_ds.simulation.simulator import Played
from mobius_ds.simulation.steps import Step

MICROSECONDS = 1e6
SIMULATED = 1000
"""Added to a GPU's number, it is the process of that GPU's simulated events: they stand beside the measured ones."""
STEP_THREAD = len(Stream)
"""The thread of whole steps, behind those of the streams."""
PLAN = "mobius_plan"
"""Name of the event that holds the plan."""
STEP_CATEGORY = "step"
"""Category of whole steps."""
_THREAD_OF = {stream: number for number, stream in enumerate(Stream)}


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

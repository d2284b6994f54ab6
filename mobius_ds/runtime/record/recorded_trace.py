"""A trace file, read: the steps that a job recorded in it, and the simulated one beside them."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from mobius_ds.simulation.chrome_trace import MICROSECONDS, PLAN, SIMULATED, STEP_CATEGORY, read_task
from mobius_ds.simulation.exposure import Figures, figures
from mobius_ds.simulation.steps import AGAIN, Spans, Step, measured_step, without_waiting

_TASK = re.compile(r'"pid": ([0-9]+),.*"step": ([0-9]+),')
_LABEL = re.compile(r"\(simulated: (.*)\)$")


@dataclass
class _Recorded:
    """What the file has of one step."""

    lines: List[str] = field(default_factory=list)
    """Of tasks; read when they are asked for, as a long run has many."""
    spans: Dict[int, Tuple[float, float]] = field(default_factory=dict)
    """From when to when it was for each rank; seconds."""

    @property
    def seconds(self) -> float:
        begins, ends = zip(*self.spans.values())
        return max(ends) - min(begins)

    def read(self) -> Step:
        tasks = (read_task(event) for event in map(_parsed, self.lines) if event is not None)
        return measured_step((Spans(name, number, [played]) for number, name, played in tasks),
                             max(end for _, end in self.spans.values()))


class Trace:
    """A trace file, also of a job that still runs or was killed: a line that is not whole is passed over.

    Raises:
        ValueError: it cannot be read, or nobody has finished a step in it.
    """

    def __init__(self, path: Path):
        self.plan: Dict[str, Any] = {}
        """What the job ran; see ``runtime.record.trace.Description``. Empty in a trace of ``mobius-ds simulate``."""
        self.simulated_says = ""
        """What the simulated step is."""
        self._measured: Dict[int, _Recorded] = {}
        self._simulated: Dict[int, _Recorded] = {}
        try:
            with path.open() as file:
                for line in file:
                    self._take(line.rstrip(",\n"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read the trace {path}: {getattr(error, 'strerror', None) or error}") from None
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is a trace, but not one of mobius_ds ({type(error).__name__}: {error})") from None
        ranks = max((len(recorded.spans) for recorded in self._measured.values()), default=0)
        self._measured = {number: recorded for number, recorded in self._measured.items()
                          if recorded.lines and recorded.spans and len(recorded.spans) == ranks}
        if not self._measured and not self._simulated:
            raise ValueError(f'{path} holds no finished step of a job with "mobius": {{"trace": FILE}} in its config, and '
                             "none of mobius-ds simulate --trace FILE")

    def _take(self, line: str) -> None:
        task = _TASK.search(line)
        if task is not None:
            self._recorded(int(task[1]), int(task[2])).lines.append(line)
            return
        event = None if '"step": null' in line else _parsed(line)
        if event is None:
            return
        if event["name"] == PLAN:
            self.plan = event["args"]
        elif event["name"] == "process_name":
            label = _LABEL.search(event["args"]["name"])
            self.simulated_says = label[1] if label else self.simulated_says
        elif event.get("cat") == STEP_CATEGORY:
            begin = event["ts"] / MICROSECONDS
            self._recorded(event["pid"], event["args"]["step"]).spans[event["pid"]] = \
                begin, begin + event["dur"] / MICROSECONDS

    def _recorded(self, process: int, number: int) -> _Recorded:
        return (self._simulated if process >= SIMULATED else self._measured).setdefault(number, _Recorded())

    @property
    def numbers(self) -> List[int]:
        """The steps that all ranks have finished."""
        return sorted(self._measured)

    @property
    def emulated(self) -> bool:
        """Whether the GPUs' links were."""
        return self.plan.get("slowdown") is not None

    @property
    def representative(self) -> Optional[int]:
        """The step of the median time, of those after the first; None if no step was measured."""
        numbers = self.numbers[1:] or self.numbers
        ordered = sorted(numbers, key=lambda number: self._measured[number].seconds)
        return ordered[(len(ordered) - 1) // 2] if ordered else None

    def step(self, number: int) -> Step:
        """One of ``numbers``."""
        return self._measured[number].read()

    def simulated(self, measured: Optional[Step]) -> Tuple[Step, str]:
        """The simulated step to hold beside a measured one, and what it is."""
        if self._simulated and (measured is None or self.simulated_says != AGAIN):
            return next(iter(self._simulated.values())).read(), self.simulated_says
        return without_waiting(measured), AGAIN

    def figures(self, step: Step) -> Figures:
        """The figures of one of its steps."""
        return figures(step, self.plan.get("gpus", step.gpus), self.plan.get("root_of"))


def _parsed(line: str) -> Optional[Dict[str, Any]]:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "name" in event else None

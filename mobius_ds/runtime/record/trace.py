"""The recorder: notes when each task of this rank ran, and hands it on at the end of every step.

A task costs two looks at the clock and a tuple in a list while it runs. On an accelerator a look at the clock is a timing
event on the task's stream, read when the step has ended and all of them are over.
"""

import atexit
import time
from typing import Any, Callable, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from mobius_ds.inputs.units import readable
from mobius_ds.runtime.record.trace_file import TraceFile
from mobius_ds.schedule.schedule import BACKWARD
from mobius_ds.schedule.tasks import Task
from mobius_ds.simulation.chrome_trace import naming_lines, plan_line, step_lines, task_line, whole_step_line
from mobius_ds.simulation.simulator import Played
from mobius_ds.simulation.steps import AGAIN, EVALUATION, Spans, Step, measured_step, slowed_down, without_waiting

PLAYED_AGAIN = 2
"""The step whose tasks are played again by the simulator where there is no prediction: the first one also warms up."""

LONGEST_EVALUATION = 100
"""Sweeps of an evaluation that are kept before they are written: there may be thousands between two steps."""

MarkedTask = Tuple[Task, Any, Any]
"""A task with the marks of its start and end."""


class HostClock:
    """Where the CPU computes, its own clock tells when."""

    mark = staticmethod(time.perf_counter)

    def restart(self) -> None:
        """Nothing to do."""

    def seconds(self, mark: float) -> float:
        """A mark in the time of ``time.perf_counter``, which all ranks of a node share."""
        return mark


class DeviceClock:
    """Timing events of an accelerator, from a first one on whose time on the host is known."""

    def __init__(self):
        self.restart()

    def mark(self) -> Any:
        """An event on the calling thread's current stream."""
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def restart(self) -> None:
        """Takes a new first event, as the driver's float loses the microseconds between events far apart.

        Waits for what the script has queued; the pipeline's own tasks are over when this is called.
        """
        self._first = self.mark()
        self._first.synchronize()
        self._first_seconds = time.perf_counter()

    def seconds(self, mark: Any) -> float:
        """A mark in the time of ``time.perf_counter``."""
        mark.synchronize()  # returns at once: what is asked for is over
        return self._first_seconds + self._first.elapsed_time(mark) / 1e3


class Description(NamedTuple):
    """What a trace says of its job."""

    gpus: int
    layers_per_stage: Sequence[int]
    gpu_of_stage: Sequence[int]
    layers: Sequence[str]
    how: str
    root_of: Optional[Sequence[int]]
    """The root complex of each GPU, where the plan is for a topology."""
    slowdown: Optional[float]
    """How many times slower than the topology's the GPUs' links are, where they are emulated; the file says so."""


class _Notes(NamedTuple):
    """One sweep of this rank, whose streams append at the same time."""

    name: str
    number: int
    forward: int
    """The number of the forward that it belongs to."""
    spans: List[MarkedTask]


class Ended(NamedTuple):
    """One rank's step."""

    sweeps: List[Spans]
    end: float


class Recorder:
    """One rank's notes of the step that is under way.

    Args:
        clock: a ``HostClock``, or a ``DeviceClock`` where an accelerator computes.
        file: where steps are written, if anywhere.
        figures: whether ``last_step`` is asked for.
    """

    def __init__(self, rank: int, clock: Any, file: Optional[TraceFile], figures: bool):
        self.mark: Callable[[], Any] = clock.mark
        self.last_step: Optional[Step] = None
        """The last step of all ranks."""
        self._rank = rank
        self._clock = clock
        self._file = file
        self._origin = 0.0 if file is None else file.origin
        self._figures = figures
        self._steps = 0
        self._sweeps = 0
        self._notes: List[_Notes] = []
        self._predicted = False
        atexit.register(self.close)

    @property
    def writes(self) -> bool:
        """Whether there is a file."""
        return self._file is not None

    def begin(self, name: str, forward: int) -> List[MarkedTask]:
        """Starts a sweep, when nothing of an earlier one runs any more.

        Args:
            name: of its schedule.
            forward: the number of the forward that it is, or belongs to.

        Returns:
            What its tasks are to be appended to.
        """
        if len(self._notes) >= LONGEST_EVALUATION and not any(notes.name == BACKWARD for notes in self._notes):
            self._write(self._lines(self._read(), None))
        self._sweeps += 1
        self._notes.append(_Notes(name, self._sweeps, forward, []))
        return self._notes[-1].spans

    def describe(self, description: Description, predicted: Optional[Step], says: str) -> None:
        """Writes the names of the job's processes and its plan; one rank does, as soon as there is one.

        Args:
            predicted: a step under this plan, by the simulator. Where links are emulated it is written as slowed down as
                they are: it stands beside the measured ones.
            says: what that one is.
        """
        slowdown = description.slowdown
        self._write([*naming_lines(description.gpus, "emulated" if slowdown else "", simulated=False),
                     plan_line(description._asdict())])
        self._predicted = predicted is not None
        if predicted is not None:
            if slowdown and slowdown != 1:
                predicted, says = slowed_down(predicted, slowdown), f"{says}, {slowdown:g} times slower"
            self._write_simulated(predicted, says, time.perf_counter(), 1)

    def end_step(self) -> Optional[Ended]:
        """Ends an optimizer step, of which nothing runs any more, and writes it.

        Returns:
            What every rank has to pass to every rank's ``take``; None if that is not called for.
        """
        self._steps += 1
        sweeps = self._read()
        trained = [sweep for sweep in sweeps if sweep.name != EVALUATION and sweep.played]
        end = time.perf_counter()
        lines = self._lines(sweeps, self._steps)
        if self._file is not None and trained:
            begin = min(played.start for sweep in trained for played in sweep.played)
            lines.append(whole_step_line(self._steps, begin - self._origin, end - self._origin, self._rank))
        self._write(lines)
        wanted = self._figures or self._file is not None and self._steps == PLAYED_AGAIN
        return Ended(trained, end) if wanted else None

    def take(self, everyones: Sequence[Optional[Ended]]) -> None:
        """Takes the step that all ranks have ended."""
        if None in everyones:  # of a rank that cannot write any more
            return
        noted = [sweep for ended in everyones for sweep in ended.sweeps]
        self.last_step = measured_step(noted, max(ended.end for ended in everyones)) if noted else None
        if self._rank == 0 and self._steps == PLAYED_AGAIN and self.last_step and not self._predicted:
            self._write_simulated(without_waiting(self.last_step), AGAIN, self.last_step.begin, self._steps)

    def close(self) -> None:
        """Writes what has run since the last step, evaluation for instance, and ends the file."""
        atexit.unregister(self.close)
        try:
            self._write(self._lines(self._read(), None))
        except RuntimeError as error:  # of a device that has failed, which the script's own error tells
            logger.debug(f"Mobius: what ran since step {self._steps} is not in the trace: {error}")
        self._end_file()

    def _read(self) -> List[Spans]:
        notes, self._notes = self._notes, []
        seconds = self._clock.seconds
        # A script may evaluate with gradients on: what trains is what a backward has followed.
        trained = {noted.forward for noted in notes if noted.name == BACKWARD}
        read = [Spans(name if forward in trained else EVALUATION, number,
                      [Played(task, seconds(start), seconds(end)) for task, start, end in spans])
                for name, number, forward, spans in notes]
        self._clock.restart()
        return read

    def _lines(self, sweeps: Sequence[Spans], step: Optional[int]) -> List[str]:
        if self._file is None:
            return []
        origin = self._origin
        return [task_line(task, start - origin, end - origin, sweep.name, sweep.number,
                          None if sweep.name == EVALUATION else step)
                for sweep in sweeps for task, start, end in sweep.played]

    def _write_simulated(self, step: Step, says: str, begin: float, number: int) -> None:
        self._write([*naming_lines(step.gpus, f"simulated: {says}", simulated=True),
                     *step_lines(step, begin - self._origin, number)])

    def _write(self, lines: Iterable[str]) -> None:
        if self._file is None:
            return
        try:
            if self._file.append(lines):
                return
            why = f"is full ({readable(self._file.largest)})" if self._rank == 0 else None  # one rank's word is enough
        except OSError as error:
            why = f"cannot be written any more by rank {self._rank} ({error.strerror})"
        if why is not None:
            logger.warning(f"Mobius: the trace {self._file.path} {why} and ends before step {self._steps}; training "
                           "goes on.")
        self._end_file()

    def _end_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

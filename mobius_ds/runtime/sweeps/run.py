"""One rank's tasks of one sweep, on their streams: in their order, each after those it waits for, on whichever rank.

What a task gives is read from its event on the same rank, and comes as a message from another one.
"""

from collections import defaultdict
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Dict, List, NamedTuple, Optional, Tuple

from mobius_ds.model.replay import own_random_numbers
from mobius_ds.runtime.device.device import Event, is_out_of_memory
from mobius_ds.runtime.dram.slots import gradient_groups
from mobius_ds.runtime.ranks.errors import DeviceOutOfMemory
from mobius_ds.runtime.record.trace import Recorder
from mobius_ds.runtime.sweeps.results import Result
from mobius_ds.runtime.sweeps.stage_work import ACTIONS, StageWork
from mobius_ds.schedule.schedule import Schedule
from mobius_ds.schedule.tasks import DEPTH, Key, Kind, Stream, Task


class Message(NamedTuple):
    """Names what one task has to say to another one; prints as ``3S0 of forward 12``, its sweep's."""

    sweep: int
    schedule: str
    task: Key
    waiter: Key

    def __str__(self) -> str:
        return f"{self.task} of {self.schedule} {self.sweep}"


class ScheduleRun:
    """Runs this rank's tasks of a schedule once."""

    def __init__(self, work: StageWork, schedule: Schedule, recorder: Optional[Recorder]):
        self._work = work
        self._rank = work.holdings.rank
        self._device = work.device
        self._mailbox = work.holdings.mailbox
        self._schedule = schedule
        self._recorder = recorder
        self._tasks = schedule.of(self._rank)
        self.events = {task.key: Event() for task in self._tasks}
        self._gpu_of = schedule.gpu_of()
        self._errors: List[Tuple[Exception, Optional[TracebackType]]] = []
        self._held = 0
        self._messages = self._listeners()
        if recorder is not None:
            self._spans = recorder.begin(schedule.name, work.sweep.number)

    def _listeners(self) -> Dict[Key, List[Tuple[int, Key]]]:
        """Other ranks' tasks that wait for this rank's, with their ranks; each takes a message of its own."""
        listeners = defaultdict(list)
        for task in self._schedule.tasks:
            for key in task.after:
                if task.gpu != self._rank and self._gpu_of[key] == self._rank:
                    listeners[key].append((task.gpu, task.key))
        return dict(listeners)

    def run(self) -> None:
        """Queues every task on its stream, computes in between, and returns when all are done.

        Raises:
            Whatever a task raises first, with a note that says where.
        """
        failure = None
        queued: List[Event] = []
        try:
            self._reserve_memory()
            begun = self._device.begin()
            compute = []
            for task in self._tasks:
                after = [self.events[key] for key in task.after if key in self.events] or [begun]
                if task.stream is Stream.COMPUTE:
                    compute.append((task, after))
                else:
                    self._device.streams[task.stream].run(partial(self._perform, task), after, self.events[task.key])
                    queued.append(self.events[task.key])
            with own_random_numbers(self._device.torch_device), self._work.replayer.ready(self._device.torch_device):
                for task, after in compute:
                    self._device.do(partial(self._perform, task), after, self.events[task.key])
            for task in self._tasks:
                self.events[task.key].result()
            # What the device still reads from DRAM, its owner frees as soon as this rank comes to the next gather.
            self._device.streams[Stream.LOAD].synchronize()
            self._device.wait_for(self.events.values())
        except BaseException as error:
            is_of_task = self._errors and isinstance(error, Exception)
            failure, place = self._errors[0] if is_of_task else (error, error.__traceback__)
            self._mailbox.fail(failure)
            self._abandon(queued)
        finally:
            self._device.release(self._held)
        if failure is not None:
            # Without the frames of every task that waited for it, on every thread.
            raise failure.with_traceback(place)

    def _abandon(self, queued: List[Event]) -> None:
        """Returns when nothing of this sweep runs any more: only then may the error reach the script."""
        for task in self._tasks:
            self.events[task.key].abandon(is_callers=task.stream is Stream.COMPUTE)
        for event in queued:
            with suppress(CancelledError):
                event.future.exception()

    # One task.

    def _perform(self, task: Task) -> Result:
        """Does what a task does, once what it waits for is done, and tells those that wait for it on other ranks."""
        try:
            given = self._given(task)
            start = None if self._recorder is None else self._recorder.mark()
            result = ACTIONS[task.key.kind].do(self._work, task, given)
            if self._recorder is not None:
                self._spans.append((task, start, self._recorder.mark()))
            self._tell(task, result)
            return result
        except Exception as error:
            where = self._describe(task.key)
            if is_out_of_memory(error):
                failure = self._exhausted(error, where)
                self._errors.append((failure, None))
                self._mailbox.fail(failure)
                raise failure from error
            error.add_note(f"mobius: rank {self._rank}, {where}")
            self._errors.append((error, error.__traceback__))
            self._mailbox.fail(error, where)
            raise

    def _given(self, task: Task) -> Result:
        """What the tasks this one waits for give it; for those of other ranks, it is waited for here."""
        results = [self.events[key].result() if key in self.events
                   else self._mailbox.take(self._gpu_of[key], self._message(key, task.key), self._describe(key))
                   for key in task.after]
        takes = ACTIONS[task.key.kind].takes
        return next((result for result in results if isinstance(result, takes)), None)

    def _tell(self, task: Task, result: Result) -> None:
        if task.key not in self._messages:
            return
        # What a message speaks of must lie in DRAM before the message does.
        if task.stream is not Stream.COMPUTE:
            self._device.streams[task.stream].synchronize()
        for gpu, waiter in self._messages[task.key]:
            self._mailbox.post(gpu, self._message(task.key, waiter), result)

    def _message(self, key: Key, waiter: Key) -> Message:
        return Message(self._work.sweep.number, self._schedule.name, key, waiter)

    def _describe(self, key: Key) -> str:
        kind, stage, microbatch = key
        name = kind.name.lower().replace("_", " ")
        parts = [name.removeprefix("give ")]
        if stage is not None:
            first = self._work.sweep.microbatches[0]
            units = [call.unit for call in first.program.calls[slice(*first.spans[stage])]]
            layers = f" ({units[0]} to {units[-1]})" if len(units) > 1 else f" ({units[0]})" if units else ""
            parts.append(f"{'out of' if name.startswith('give ') else 'of'} stage {stage}{layers}")
        if microbatch is not None:
            parts.append(f"for microbatch {microbatch} of rank {self._work.sweep.microbatches[microbatch].home}")
        return " ".join(parts)

    # Memory.

    def _reserve_memory(self) -> None:
        try:
            self._reserve_slots()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            layout, names = self._work.holdings.store.layout, self._work.sweep.stage_parameters
            largest = max(self._work.stages, default=None, key=lambda stage: layout.weights(names[stage]).nbytes)
            what = "inputs" if largest is None else \
                f"its stages, most of it for the {self._describe(Key(Kind.WEIGHTS, largest))}"
            raise self._exhausted(error, f"reserving room for {what}") from error

    def _reserve_slots(self) -> None:
        layout = self._work.holdings.store.layout
        names = [self._work.sweep.stage_parameters[stage] for stage in self._work.stages]
        self._work.holdings.slots.reserve(
            max((layout.weights(stage).nbytes for stage in names), default=0),
            max((sum(4 * group.elements for group in gradient_groups(layout, stage)) for stage in names), default=0)
            if self._schedule.is_backward else 0)
        # What a GPU holds besides: the inputs, and two microbatches' boundary activations each way.
        widest = [max((task.nbytes for task in self._tasks if task.key.kind is kind), default=0)
                  for kind in (Kind.ACTIVATIONS, Kind.GRADIENTS, Kind.GIVE_ACTIVATIONS, Kind.GIVE_GRADIENTS)]
        inputs = sum(task.nbytes for task in self._tasks if task.key.kind is Kind.INPUTS)
        held = DEPTH * sum(widest) + inputs
        self._device.hold(held, "boundary activations of two microbatches")
        self._held = held

    def _exhausted(self, error: Exception, where: str) -> DeviceOutOfMemory:
        """What an allocation's failure becomes: with the place, what is held, and what helps."""
        return DeviceOutOfMemory(
            f"the device of rank {self._rank} is out of memory. In {where}: {error} {self._device.memory()}. Use "
            "smaller micro-batches (train_micro_batch_size_per_gpu) for smaller activations, more stages (\"mobius\": "
            "{\"stages\": ...}) for smaller slots, or another budget (\"mobius\": {\"device_memory_gb\": ...}): higher "
            "where the device has more, lower to leave more of it to what layers work in.")

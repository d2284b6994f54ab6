"""The executor: runs one rank's tasks of a schedule with real tensors.

Every task of the schedule has one method here. A method moves exactly the bytes its task names and returns
its *content*: what tasks that wait for it need to know, such as where a tensor lies in DRAM. On the same
rank they read it from the task's event, on another rank they get it as a message.
"""

import mmap
from collections import defaultdict
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from mobius_ds.model.discovery import Units
from mobius_ds.model.program import TensorSpec, Value, plain
from mobius_ds.model.replay import Handover, Replayer, own_random_numbers
from mobius_ds.model.structures import unflatten
from mobius_ds.runtime.device.device import Device, Event, is_out_of_memory
from mobius_ds.runtime.device.random import reseed_from
from mobius_ds.runtime.dram.shared_memory import ActivationStore, Placed
from mobius_ds.runtime.dram.slots import Slots, StageMemory, gradient_groups
from mobius_ds.runtime.dram.store import ParameterStore
from mobius_ds.runtime.ranks.errors import DeviceOutOfMemory, PeerLost
from mobius_ds.runtime.ranks.mailbox import Mailbox
from mobius_ds.runtime.record.trace import Recorder
from mobius_ds.runtime.sweeps.sweep import Sweep, TensorSlot
from mobius_ds.schedule.plan import Plan
from mobius_ds.schedule.tasks import DEPTH, Key, Kind, Schedule, Stream, Task

_ADDED_AT_ONCE = 2**18  # elements
Outputs = Tuple[List[Any], Any]
"""A microbatch's output at home: its leaves (what did not come home is its ``TensorSpec``) and their structure."""


class Executor:
    """Runs schedules on one rank."""

    def __init__(self, rank: int, plan: Plan, units: Units, device: Device, mailbox: Mailbox,
                 activations: ActivationStore, store: ParameterStore, recorder: Optional[Recorder] = None):
        self.rank = rank
        self.plan = plan
        self.units = units
        self.device = device
        self.mailbox = mailbox
        self.activations = activations
        self.store = store
        self.recorder = recorder
        self.slots = Slots(device, store)
        self.staging: Dict[torch.dtype, torch.Tensor] = {}

    def replayer(self, sweep: Sweep) -> Replayer:
        """What runs the layers of a sweep's stages."""
        return Replayer(sweep.entry, self.units, sweep.parts)

    def forward(self, sweep: Sweep, schedule: Schedule,
                inputs: Sequence[Sequence[torch.Tensor]]) -> List[Outputs]:
        """Runs a forward sweep.

        Args:
            inputs: the input tensors of this rank's microbatches, on the device.

        Returns:
            The outputs of this rank's microbatches.
        """
        run = _Run(self, sweep, schedule)
        run.own_inputs = dict(zip(run.own, inputs))
        run.run()
        return [run.events[Key(Kind.OUTPUTS, None, microbatch)].result() for microbatch in run.own]

    def backward(self, sweep: Sweep, schedule: Schedule, output_gradients: Sequence[Dict[int, torch.Tensor]],
                 added_to: frozenset, update: Callable[[int], None]) -> List[Placed]:
        """Runs a backward sweep; the gradients add up in the store.

        Args:
            output_gradients: for each of this rank's microbatches, gradients by output leaf.
            added_to: parameters whose gradient in the store is to be added to, not overwritten.
            update: runs the optimizer for the parameters a stage updates, where the schedule says so.

        Returns:
            What this rank placed in DRAM for it; it may be freed once every rank is done.
        """
        run = _Run(self, sweep, schedule)
        run.own_gradients = dict(zip(run.own, output_gradients))
        run.added_to = added_to
        run.update = update
        run.run()
        return run.placed


class _Message(NamedTuple):
    """Names what one task has to say to another one; prints as ``3S0 of forward 12``, its sweep's."""

    sweep: int
    schedule: str
    task: Key
    waiter: Key

    def __str__(self) -> str:
        return f"{self.task} of {self.schedule} {self.sweep}"


class _Run:
    """One sweep on one rank: the state its tasks share."""

    def __init__(self, executor: Executor, sweep: Sweep, schedule: Schedule):
        self.executor = executor
        self.device = executor.device
        self.sweep = sweep
        self.schedule = schedule
        self.is_backward = schedule.name == "backward"
        self.own = [m for m, microbatch in enumerate(sweep.microbatches) if microbatch.home == executor.rank]
        self.replayer = executor.replayer(sweep)
        self.own_inputs: Dict[int, Sequence[torch.Tensor]] = {}
        self.own_gradients: Dict[int, Dict[int, torch.Tensor]] = {}
        self.added_to: frozenset = frozenset()
        self.update: Callable[[int], None] = lambda stage: None
        self.placed: List[Placed] = []
        self.tasks = schedule.of(executor.rank)
        self.events = {task.key: Event() for task in self.tasks}
        self.gpu_of = schedule.gpu_of()
        self.stages = [task.key.stage for task in self.tasks if task.key.kind is Kind.WEIGHTS]
        self.memory: Dict[int, StageMemory] = {}
        self.inputs: Dict[int, Tuple[tuple, dict]] = {}
        self.received: Dict[Tuple[int, int], Dict[Value, torch.Tensor]] = {}
        self.gradients: Dict[Tuple[int, int], Dict[Any, torch.Tensor]] = {}
        self.handovers: Dict[Tuple[int, int], Any] = {}
        self.errors: List[Tuple[Exception, Optional[TracebackType]]] = []
        self._held = 0
        self._messages = self._listeners()
        if executor.recorder is not None:
            self._spans = executor.recorder.begin(schedule.name, sweep.number)

    def _listeners(self) -> Dict[Key, List[Tuple[int, Key]]]:
        """Other ranks' tasks that wait for this rank's, with their ranks; each takes a message of its own."""
        listeners = defaultdict(list)
        for task in self.schedule.tasks:
            for key in task.after:
                if task.gpu != self.executor.rank and self.gpu_of[key] == self.executor.rank:
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
            begun = self.device.begin()
            compute = []
            for task in self.tasks:
                after = [self.events[key] for key in task.after if key in self.events] or [begun]
                if task.stream is Stream.COMPUTE:
                    compute.append((task, after))
                else:
                    self.device.streams[task.stream].run(self._work(task), after, self.events[task.key])
                    queued.append(self.events[task.key])
            with own_random_numbers(self.device.torch_device), self.replayer.ready(self.device.torch_device):
                for task, after in compute:
                    self.device.do(self._work(task), after, self.events[task.key])
            for task in self.tasks:
                self.events[task.key].result()
            # What the device still reads from DRAM, its owner frees as soon as this rank comes to the next gather.
            self.device.streams[Stream.LOAD].synchronize()
            self.device.wait_for(self.events.values())
        except BaseException as error:
            is_of_task = self.errors and isinstance(error, Exception)
            failure, place = self.errors[0] if is_of_task else (error, error.__traceback__)
            self.executor.mailbox.fail(failure)
            self._abandon(queued)
        finally:
            self.device.release(self._held)
        if failure is not None:
            # Without the frames of every task that waited for it, on every thread.
            raise failure.with_traceback(place)

    def _abandon(self, queued: List[Event]) -> None:
        """Returns when nothing of this sweep runs any more: only then may the error reach the script."""
        for task in self.tasks:
            future = self.events[task.key].future
            if task.stream is Stream.COMPUTE and not future.done():  # an interrupt left the rest of compute undone
                future.set_exception(CancelledError())
        for event in queued:
            event.future.exception()

    def _reserve_memory(self) -> None:
        try:
            self._reserve_slots()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            layout = self.executor.store.layout
            largest = max(self.stages, default=None,
                          key=lambda stage: layout.weights(self.sweep.stage_parameters[stage]).nbytes)
            what = "inputs" if largest is None else \
                f"its stages, most of it for the {self._describe(Key(Kind.WEIGHTS, largest))}"
            raise self._exhausted(error, f"reserving room for {what}") from error

    def _reserve_slots(self) -> None:
        layout = self.executor.store.layout
        names = [self.sweep.stage_parameters[stage] for stage in self.stages]
        self.executor.slots.reserve(
            max((layout.weights(stage).nbytes for stage in names), default=0),
            max((sum(4 * group.elements for group in gradient_groups(layout, stage)) for stage in names), default=0)
            if self.is_backward else 0)
        # What a GPU holds besides: the inputs, and two microbatches' boundary activations each way.
        widest = [max((task.nbytes for task in self.tasks if task.key.kind is kind), default=0)
                  for kind in (Kind.ACTIVATIONS, Kind.GRADIENTS, Kind.GIVE_ACTIVATIONS, Kind.GIVE_GRADIENTS)]
        inputs = sum(task.nbytes for task in self.tasks if task.key.kind is Kind.INPUTS)
        held = DEPTH * sum(widest) + inputs
        self.device.hold(held, "boundary activations of two microbatches")
        self._held = held

    def _work(self, task: Task) -> Callable[[], Any]:
        def work() -> Any:
            try:
                contents = self._contents(task)
                recorder = self.executor.recorder
                start = None if recorder is None else recorder.mark()
                result = _METHODS[task.key.kind](self, task, contents)
                if recorder is not None:
                    self._spans.append((task, start, recorder.mark()))
                if task.key in self._messages:
                    # What a message speaks of must lie in DRAM before the message does.
                    if task.stream is not Stream.COMPUTE:
                        self.device.streams[task.stream].synchronize()
                    for gpu, waiter in self._messages[task.key]:
                        self.executor.mailbox.post(gpu, self._message(task.key, waiter), result)
                return result
            except Exception as error:
                where = self._describe(task.key)
                if is_out_of_memory(error):
                    failure = self._exhausted(error, where)
                    self.errors.append((failure, None))
                    self.executor.mailbox.fail(failure)
                    raise failure from error
                error.add_note(f"mobius: rank {self.executor.rank}, {where}")
                self.errors.append((error, error.__traceback__))
                self.executor.mailbox.fail(error, where)
                raise

        return work

    def _exhausted(self, error: Exception, where: str) -> DeviceOutOfMemory:
        """What an allocation's failure becomes: with the place, what is held, and what helps."""
        return DeviceOutOfMemory(
            f"the device of rank {self.executor.rank} is out of memory. In {where}: {error} {self.device.memory()}. Use "
            "smaller micro-batches (train_micro_batch_size_per_gpu) for smaller activations, more stages (\"mobius\": "
            "{\"stages\": ...}) for smaller slots, or another budget (\"mobius\": {\"device_memory_gb\": ...}): higher "
            "where the device has more, lower to leave more of it to what layers work in.")

    def _contents(self, task: Task) -> Dict[Kind, Any]:
        """What the tasks this one waits for have to say, by their kind; from other ranks, it is waited for here."""
        contents = {}
        for key in task.after:
            if key in self.events:
                contents[key.kind] = self.events[key].result()
            else:
                contents[key.kind] = self.executor.mailbox.take(
                    self.gpu_of[key], self._message(key, task.key), self._describe(key))
        return contents

    def _message(self, key: Key, waiter: Key) -> "_Message":
        return _Message(self.sweep.number, self.schedule.name, key, waiter)

    def _describe(self, key: Key) -> str:
        kind, stage, microbatch = key
        name = kind.name.lower().replace("_", " ")
        parts = [name.removeprefix("give ")]
        if stage is not None:
            first = self.sweep.microbatches[0]
            units = [call.unit for call in first.program.calls[slice(*first.spans[stage])]]
            layers = f" ({units[0]} to {units[-1]})" if len(units) > 1 else f" ({units[0]})" if units else ""
            parts.append(f"{'out of' if name.startswith('give ') else 'of'} stage {stage}{layers}")
        if microbatch is not None:
            parts.append(f"for microbatch {microbatch} of rank {self.sweep.microbatches[microbatch].home}")
        return " ".join(parts)

    # Weights and inputs.

    def _weights(self, task: Task, contents: Dict) -> None:
        stage = task.key.stage
        number = self.stages.index(stage)
        names = self.sweep.stage_parameters[stage]
        groups = gradient_groups(self.executor.store.layout, names)
        parameters = self.executor.slots.weights(number, names, task.category, self.sweep.mode.frozen)
        accumulators = self.executor.slots.accumulators(number, groups) if self.is_backward else []
        self.memory[stage] = StageMemory(parameters, groups, accumulators)

    def _give_inputs(self, task: Task, contents: Dict) -> List[Placed]:
        placed = [self._download(tensor, task.category) for tensor in self.own_inputs[task.key.microbatch]]
        self.sweep.placed_here += placed
        return placed

    def _inputs(self, task: Task, contents: Dict) -> None:
        m = task.key.microbatch
        if Kind.GIVE_INPUTS in contents:
            self.sweep.inputs[m] = contents[Kind.GIVE_INPUTS]
        tensors = [self._upload(placed, task.category) for placed in self.sweep.inputs[m]]
        microbatch = self.sweep.microbatches[m]
        leaves = [tensors[leaf.index] if isinstance(leaf, TensorSlot) else leaf for leaf in microbatch.leaves]
        self.inputs[m] = unflatten(leaves, microbatch.structure)

    # Boundary activations.

    def _activations(self, task: Task, contents: Dict) -> None:
        _, stage, m = task.key
        for value, placed in contents.get(Kind.GIVE_ACTIVATIONS, {}).items():
            self.sweep.boundary[m, value] = placed
        microbatch = self.sweep.microbatches[m]
        self.received[stage, m] = {value: self._upload(self.sweep.boundary[m, value], task.category)
                                   for value in microbatch.program.live(microbatch.spans[stage].start)}

    def _forward(self, task: Task, contents: Dict) -> None:
        _, stage, m = task.key
        # In the script's own grad mode, which is the caller's: a kernel may be chosen by whether a gradient is
        # needed, and what is computed here must be what the backward computes again.
        with self._replayed(stage, m, self._leaves(stage, m)) as handover:
            self.handovers[stage, m] = handover.detached()

    def _leaves(self, stage: int, m: int) -> Dict[Value, torch.Tensor]:
        """What a stage received for a microbatch, as leaves that need a gradient where it was made with one."""
        program = self.sweep.microbatches[m].program
        return {value: tensor.requires_grad_(program.spec(value).requires_grad)
                for value, tensor in self.received.pop((stage, m), {}).items()}

    def _replayed(self, stage: int, m: int, received: Dict[Value, torch.Tensor]):
        microbatch = self.sweep.microbatches[m]
        args, kwargs = self.inputs[m]
        return self.replayer.replayed(microbatch.program, microbatch.spans[stage], self.memory[stage].parameters, received,
                                      args, kwargs, reseed_from(microbatch.seed, self.device))

    def _give_activations(self, task: Task, contents: Dict) -> Any:
        _, stage, m = task.key
        handover: Handover = self.handovers.pop((stage, m))
        microbatch = self.sweep.microbatches[m]
        if stage == self.executor.plan.stages - 1:
            return self._give_outputs(handover, microbatch, task)
        for value, tensor in handover.values.items():
            placed = self._download(tensor, task.category)
            self.sweep.boundary[m, value] = placed
            self.sweep.placed_here.append(placed)
        # The next stage learns of what this one only passes through as well.
        return {value: self.sweep.boundary[m, value] for value in microbatch.program.live(microbatch.spans[stage].stop)}

    def _give_outputs(self, handover: Handover, microbatch, task: Task) -> Outputs:
        leaves, structure = handover.outputs
        given = []
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                given.append(plain(leaf))
            elif index in microbatch.returned:
                placed = self._download(leaf, task.category)
                self.sweep.placed_here.append(placed)
                given.append(placed)
            else:
                given.append(TensorSpec.of(leaf)._replace(requires_grad=microbatch.program.outputs.returns[index]
                                                          .requires_grad))
        return given, structure

    def _outputs(self, task: Task, contents: Dict) -> Outputs:
        leaves, structure = contents[Kind.GIVE_ACTIVATIONS]
        return [self._upload(leaf, task.category) if isinstance(leaf, Placed) else leaf for leaf in leaves], structure

    # Gradients.

    def _give_output_gradients(self, task: Task, contents: Dict) -> Dict[int, Placed]:
        return {leaf: self._download(gradient, task.category, temporary=True)
                for leaf, gradient in self.own_gradients[task.key.microbatch].items()}

    def _gradients(self, task: Task, contents: Dict) -> None:
        _, stage, m = task.key
        given = contents.get(Kind.GIVE_OUTPUT_GRADIENTS, contents.get(Kind.GIVE_GRADIENTS))
        self.gradients[stage, m] = {key: self._upload(placed, task.category) for key, placed in given.items()}

    def _backward(self, task: Task, contents: Dict) -> None:
        _, stage, m = task.key
        received = self._leaves(stage, m)
        gradients = self.gradients.pop((stage, m))
        memory = self.memory[stage]
        memory.accumulate()
        # Running statistics count a microbatch once, in the forward sweep.
        kept = self.sweep.parts.scratch_buffers(self.sweep.microbatches[m].program.written_buffers)
        with torch.enable_grad(), kept, self._replayed(stage, m, received) as handover:
            # The forward's autocast is for the recomputation; a backward runs without, as the script's own would.
            with torch.autocast(self.device.torch_device.type, enabled=False):
                handover.backward(received, gradients)
        # By the program: a hook may have told an activation to require a gradient that its maker has no use for.
        program = self.sweep.microbatches[m].program
        self.handovers[stage, m] = {
            value: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for value, tensor in received.items() if program.spec(value).requires_grad}

    def _give_gradients(self, task: Task, contents: Dict) -> Dict[Value, Placed]:
        return {value: self._download(gradient, task.category, temporary=True)
                for value, gradient in self.handovers.pop((task.key.stage, task.key.microbatch)).items()}

    def _weight_gradients(self, task: Task, contents: Dict) -> None:
        stage = task.key.stage
        memory = self.memory[stage]
        added_to = self.added_to | self._added_by_later_stages(stage)
        for group, wire in zip(memory.groups, memory.wire(self.sweep.replicas)):
            staging = self._staging(group.dtype, group.elements)
            self.device.download(wire, task.category, into=staging)
            self.device.streams[Stream.OFFLOAD].synchronize()
            for name, start in group.offsets:
                gradient = self.executor.store.gradient(name)
                arrived = staging[start:start + gradient.numel()].view(gradient.shape)
                if name in added_to:
                    _add(gradient, arrived)
                else:
                    gradient.copy_(arrived)

    def _update(self, task: Task, contents: Dict) -> None:
        self.update(task.key.stage)

    def _added_by_later_stages(self, stage: int) -> frozenset:
        given = {key.stage for key in self.gpu_of if key.kind is Kind.WEIGHT_GRADIENTS and key.stage > stage}
        return frozenset(name for later in given for name in self.sweep.stage_parameters[later])

    def _staging(self, dtype: torch.dtype, elements: int) -> torch.Tensor:
        staging = self.executor.staging.get(dtype)
        if staging is None or staging.numel() < elements:
            if staging is not None:
                self.device.pinning.unpin(staging)
            memory = mmap.mmap(-1, max(elements * dtype.itemsize, mmap.PAGESIZE))
            staging = self.executor.staging[dtype] = torch.frombuffer(memory, dtype=dtype)
            self.device.register(staging)
        return staging[:elements]

    # Copies.

    def _upload(self, placed: Placed, category: str) -> torch.Tensor:
        try:
            host = self.executor.activations.view(placed)
        except PeerLost as lost:
            self.executor.mailbox.raise_told(lost.rank, "its activations")
            raise
        return self.device.used_by(self.device.upload(host, category), Stream.COMPUTE)

    def _download(self, tensor: torch.Tensor, category: str, temporary: bool = False) -> Placed:
        placed = self.executor.activations.place(tensor)
        self.device.download(self.device.used_by(tensor, Stream.STORE), category, self.executor.activations.view(placed))
        if temporary:
            self.placed.append(placed)
        return placed


def _add(gradient: torch.Tensor, arrived: torch.Tensor) -> None:
    """Adds in the gradient's fp32. Torch adds numbers of another dtype one by one; converted first, and in pieces that
    stay in the processor's cache, they are added several times faster, to the same bits."""
    for total, part in zip(gradient.view(-1).split(_ADDED_AT_ONCE), arrived.view(-1).split(_ADDED_AT_ONCE)):
        total.add_(part.to(total.dtype))


_METHODS = {
    Kind.WEIGHTS: _Run._weights, Kind.GIVE_INPUTS: _Run._give_inputs, Kind.INPUTS: _Run._inputs,
    Kind.ACTIVATIONS: _Run._activations, Kind.FORWARD: _Run._forward, Kind.GIVE_ACTIVATIONS: _Run._give_activations,
    Kind.OUTPUTS: _Run._outputs, Kind.GIVE_OUTPUT_GRADIENTS: _Run._give_output_gradients,
    Kind.GRADIENTS: _Run._gradients, Kind.BACKWARD: _Run._backward, Kind.GIVE_GRADIENTS: _Run._give_gradients,
    Kind.WEIGHT_GRADIENTS: _Run._weight_gradients, Kind.UPDATE: _Run._update,
}

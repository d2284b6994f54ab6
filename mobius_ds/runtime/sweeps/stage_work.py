"""What each kind of task does: one sweep's weights, tensors and gradients on one rank.

A task has one method here. It moves exactly the bytes that the task names.
"""

import mmap
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type

import torch

from mobius_ds.model.program import TensorSpec, Value, plain
from mobius_ds.model.replay import Handover, Replayer
from mobius_ds.model.structures import unflatten
from mobius_ds.runtime.device.device import Device
from mobius_ds.runtime.device.random import reseed_from
from mobius_ds.runtime.dram.activations import ActivationStore, Placed
from mobius_ds.runtime.dram.slots import Slots, StageMemory, gradient_groups
from mobius_ds.runtime.dram.store import ParameterStore
from mobius_ds.runtime.ranks.errors import PeerLost
from mobius_ds.runtime.ranks.mailbox import Mailbox
from mobius_ds.runtime.sweeps.results import (Outputs, PlacedActivations, PlacedGradients, PlacedInputs, PlacedOutputs,
                                              Result)
from mobius_ds.runtime.sweeps.sweep import Microbatch, Sweep, TensorLeaf
from mobius_ds.schedule.plan import Plan
from mobius_ds.schedule.schedule import Schedule
from mobius_ds.schedule.tasks import Kind, Stream, Task

_ADDED_AT_ONCE = 2**18  # elements


class Holdings:
    """What one rank holds from sweep to sweep, and where."""

    def __init__(self, rank: int, plan: Plan, device: Device, mailbox: Mailbox, activations: ActivationStore,
                 store: ParameterStore):
        self.rank = rank
        self.plan = plan
        self.device = device
        self.mailbox = mailbox
        self.activations = activations
        self.store = store
        self.slots = Slots(device, store)
        self.staging: Dict[torch.dtype, torch.Tensor] = {}

    def staged(self, dtype: torch.dtype, elements: int) -> torch.Tensor:
        """A pinned buffer of so many elements, for gradients on their way into the store."""
        staging = self.staging.get(dtype)
        if staging is None or staging.numel() < elements:
            if staging is not None:
                self.device.pinning.unpin(staging)
            memory = mmap.mmap(-1, max(elements * dtype.itemsize, mmap.PAGESIZE))
            staging = self.staging[dtype] = torch.frombuffer(memory, dtype=dtype)
            self.device.register(staging)
        return staging[:elements]


class StageWork:
    """One sweep on one rank: the state its tasks share, and what they do.

    Args:
        replayer: runs the layers.
    """

    def __init__(self, holdings: Holdings, sweep: Sweep, schedule: Schedule, replayer: Replayer):
        self.holdings = holdings
        self.device = holdings.device
        self.sweep = sweep
        self.replayer = replayer
        self.is_backward = schedule.is_backward
        self.own = [m for m, microbatch in enumerate(sweep.microbatches) if microbatch.home == holdings.rank]
        self.own_inputs: Dict[int, Sequence[torch.Tensor]] = {}
        self.own_gradients: Dict[int, Dict[int, torch.Tensor]] = {}
        """Of this rank's microbatches, by output leaf."""
        self.added_to: frozenset = frozenset()
        """Parameters whose gradient in the store is to be added to, not overwritten."""
        self.update: Callable[[int], None] = lambda stage: None
        self.placed: List[Placed] = []
        """In DRAM for this sweep alone."""
        self.stages = [task.key.stage for task in schedule.of(holdings.rank) if task.key.kind is Kind.WEIGHTS]
        self._giving_stages = {task.key.stage for task in schedule.tasks if task.key.kind is Kind.WEIGHT_GRADIENTS}
        self._memory: Dict[int, StageMemory] = {}
        self._inputs: Dict[int, Tuple[tuple, dict]] = {}
        self._received: Dict[Tuple[int, int], Dict[Value, torch.Tensor]] = {}
        self._gradients: Dict[Tuple[int, int], Dict[Any, torch.Tensor]] = {}
        self._handovers: Dict[Tuple[int, int], Handover] = {}
        self._made_gradients: Dict[Tuple[int, int], Dict[Value, torch.Tensor]] = {}

    # Weights and inputs.

    def copy_weights(self, task: Task, given: None) -> None:
        """Copies a stage's weights into its slot."""
        stage = task.key.stage
        number = self.stages.index(stage)
        names = self.sweep.stage_parameters[stage]
        groups = gradient_groups(self.holdings.store.layout, names)
        parameters = self.holdings.slots.weights(number, names, task.category, self.sweep.mode.frozen)
        accumulators = self.holdings.slots.accumulators(number, groups) if self.is_backward else []
        self._memory[stage] = StageMemory(parameters, groups, accumulators)

    def give_inputs(self, task: Task, given: None) -> PlacedInputs:
        """Copies the inputs of a microbatch of this rank to DRAM."""
        placed = [self._download(tensor, task.category) for tensor in self.own_inputs[task.key.microbatch]]
        self.sweep.placed_here += placed
        return PlacedInputs(tuple(placed))

    def copy_inputs(self, task: Task, given: Optional[PlacedInputs]) -> None:
        """Copies a microbatch's inputs in, for all stages of this rank."""
        m = task.key.microbatch
        if given is not None:  # else they lie in DRAM since the sweep before
            self.sweep.inputs[m] = given.tensors
        tensors = [self._upload(placed, task.category) for placed in self.sweep.inputs[m]]
        microbatch = self.sweep.microbatches[m]
        leaves = [tensors[leaf.index] if isinstance(leaf, TensorLeaf) else leaf for leaf in microbatch.leaves]
        self._inputs[m] = unflatten(leaves, microbatch.structure)

    # Boundary activations.

    def copy_activations(self, task: Task, given: Optional[PlacedActivations]) -> None:
        """Copies in what a stage starts from."""
        _, stage, m = task.key
        for value, placed in given.values.items() if given is not None else ():
            self.sweep.boundary[m, value] = placed
        microbatch = self.sweep.microbatches[m]
        self._received[stage, m] = {value: self._upload(self.sweep.boundary[m, value], task.category)
                                    for value in microbatch.program.live(microbatch.spans[stage].start)}

    def forward(self, task: Task, given: None) -> None:
        """Runs a stage's layers."""
        _, stage, m = task.key
        # In the script's own grad mode, which is the caller's: a kernel may be chosen by whether a gradient is
        # needed, and what is computed here must be what the backward computes again.
        with self._replayed(stage, m, self._leaves(stage, m)) as handover:
            self._handovers[stage, m] = handover.detached()

    def _leaves(self, stage: int, m: int) -> Dict[Value, torch.Tensor]:
        """What a stage received for a microbatch, as leaves that need a gradient where it was made with one."""
        program = self.sweep.microbatches[m].program
        return {value: tensor.requires_grad_(program.spec(value).requires_grad)
                for value, tensor in self._received.pop((stage, m), {}).items()}

    def _replayed(self, stage: int, m: int, received: Dict[Value, torch.Tensor]):
        microbatch = self.sweep.microbatches[m]
        args, kwargs = self._inputs[m]
        return self.replayer.replayed(microbatch.program, microbatch.spans[stage], self._memory[stage].parameters, received,
                                      args, kwargs, reseed_from(microbatch.seed, self.device))

    def give_activations(self, task: Task, given: None) -> "PlacedActivations | PlacedOutputs":
        """Copies out what a stage made; the next stage learns of what this one only passes through as well."""
        _, stage, m = task.key
        handover = self._handovers.pop((stage, m))
        microbatch = self.sweep.microbatches[m]
        if stage == self.holdings.plan.last_stage:
            return self._give_outputs(handover, microbatch, task)
        for value, tensor in handover.values.items():
            placed = self._download(tensor, task.category)
            self.sweep.boundary[m, value] = placed
            self.sweep.placed_here.append(placed)
        return PlacedActivations({value: self.sweep.boundary[m, value]
                                  for value in microbatch.program.live(microbatch.spans[stage].stop)})

    def _give_outputs(self, handover: Handover, microbatch: Microbatch, task: Task) -> PlacedOutputs:
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
        return PlacedOutputs(given, structure)

    def copy_outputs(self, task: Task, given: PlacedOutputs) -> Outputs:
        """Copies a microbatch's outputs home."""
        return Outputs([self._upload(leaf, task.category) if isinstance(leaf, Placed) else leaf for leaf in given.leaves],
                       given.structure)

    # Gradients.

    def give_output_gradients(self, task: Task, given: None) -> PlacedGradients:
        """Copies out the gradients that the script gave a microbatch's outputs."""
        return PlacedGradients({leaf: self._download(gradient, task.category, temporary=True)
                                for leaf, gradient in self.own_gradients[task.key.microbatch].items()})

    def copy_gradients(self, task: Task, given: PlacedGradients) -> None:
        """Copies in the gradients of what a stage handed over."""
        _, stage, m = task.key
        self._gradients[stage, m] = {key: self._upload(placed, task.category) for key, placed in given.of.items()}

    def backward(self, task: Task, given: None) -> None:
        """Runs a stage's layers again, and back."""
        _, stage, m = task.key
        received = self._leaves(stage, m)
        gradients = self._gradients.pop((stage, m))
        self._memory[stage].accumulate()
        # Running statistics count a microbatch once, in the forward sweep.
        kept = self.sweep.parts.scratch_buffers(self.sweep.microbatches[m].program.written_buffers)
        with torch.enable_grad(), kept, self._replayed(stage, m, received) as handover:
            # The forward's autocast is for the recomputation; a backward runs without, as the script's own would.
            with torch.autocast(self.device.torch_device.type, enabled=False):
                handover.backward(received, gradients)
        # By the program: a hook may have told an activation to require a gradient that its maker has no use for.
        program = self.sweep.microbatches[m].program
        self._made_gradients[stage, m] = {
            value: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for value, tensor in received.items() if program.spec(value).requires_grad}

    def give_gradients(self, task: Task, given: None) -> PlacedGradients:
        """Copies out the gradients of what a stage started from."""
        made = self._made_gradients.pop((task.key.stage, task.key.microbatch))
        return PlacedGradients({value: self._download(gradient, task.category, temporary=True)
                                for value, gradient in made.items()})

    def give_weight_gradients(self, task: Task, given: None) -> None:
        """Copies the gradients of a stage's weights out, and puts or adds them into the store."""
        memory = self._memory[task.key.stage]
        added_to = self.added_to | self._added_by_later_stages(task.key.stage)
        for group, wire in zip(memory.groups, memory.wire(self.sweep.replicas)):
            staging = self.holdings.staged(group.dtype, group.elements)
            self.device.download(wire, task.category, into=staging)
            self.device.streams[Stream.OFFLOAD].synchronize()
            for name, start in group.offsets:
                gradient = self.holdings.store.gradient(name)
                arrived = staging[start:start + gradient.numel()].view(gradient.shape)
                if name in added_to:
                    _add(gradient, arrived)
                else:
                    gradient.copy_(arrived)

    def _added_by_later_stages(self, stage: int) -> frozenset:
        return frozenset(name for later in self._giving_stages if later > stage
                         for name in self.sweep.stage_parameters[later])

    def run_optimizer(self, task: Task, given: None) -> None:
        """Updates the parameters that are complete with this stage."""
        self.update(task.key.stage)

    # Copies.

    def _upload(self, placed: Placed, category: str) -> torch.Tensor:
        try:
            host = self.holdings.activations.view(placed)
        except PeerLost as lost:
            self.holdings.mailbox.raise_told(lost.rank, "its activations")
            raise
        return self.device.used_by(self.device.upload(host, category), Stream.COMPUTE)

    def _download(self, tensor: torch.Tensor, category: str, temporary: bool = False) -> Placed:
        placed = self.holdings.activations.place(tensor)
        self.device.download(self.device.used_by(tensor, Stream.STORE), category, self.holdings.activations.view(placed))
        if temporary:
            self.placed.append(placed)
        return placed


def _add(gradient: torch.Tensor, arrived: torch.Tensor) -> None:
    """Adds in the gradient's fp32. Torch adds numbers of another dtype one by one; converted first, and in pieces that
    stay in the processor's cache, they are added several times faster, to the same bits."""
    for total, part in zip(gradient.view(-1).split(_ADDED_AT_ONCE), arrived.view(-1).split(_ADDED_AT_ONCE)):
        total.add_(part.to(total.dtype))


class Action(NamedTuple):
    """What tasks of a kind do."""

    do: Callable[[StageWork, Task, Any], Result]
    """Gets the task and what was given to it."""
    takes: Tuple[Type, ...] = ()
    """The results it is given, of the one task among those it waits for that has one; None if none has."""


ACTIONS: Dict[Kind, Action] = {
    Kind.WEIGHTS: Action(StageWork.copy_weights),
    Kind.GIVE_INPUTS: Action(StageWork.give_inputs),
    Kind.INPUTS: Action(StageWork.copy_inputs, (PlacedInputs,)),
    Kind.ACTIVATIONS: Action(StageWork.copy_activations, (PlacedActivations,)),
    Kind.FORWARD: Action(StageWork.forward),
    Kind.GIVE_ACTIVATIONS: Action(StageWork.give_activations),
    Kind.OUTPUTS: Action(StageWork.copy_outputs, (PlacedOutputs,)),
    Kind.GIVE_OUTPUT_GRADIENTS: Action(StageWork.give_output_gradients),
    Kind.GRADIENTS: Action(StageWork.copy_gradients, (PlacedGradients,)),
    Kind.BACKWARD: Action(StageWork.backward),
    Kind.GIVE_GRADIENTS: Action(StageWork.give_gradients),
    Kind.WEIGHT_GRADIENTS: Action(StageWork.give_weight_gradients),
    Kind.UPDATE: Action(StageWork.run_optimizer),
}

"""The pipeline: turns the ranks' forwards and backwards into sweeps.

Every method that is a step of the pipeline is called by all ranks in the same order. It starts with a gather,
which tells everyone what the sweep is made of, and shows that every rank has finished the sweep before: what
that one left in DRAM can be freed.
"""

from typing import Any, Callable, Dict, FrozenSet, List, Optional, Sequence, Tuple

import torch
from deepspeed.utils import logger
from torch import nn

from mobius_ds.config import MobiusConfig
from mobius_ds.inputs.units import GIB
from mobius_ds.model.discovery import declared_layers, find_units
from mobius_ds.model.intercept import Entry
from mobius_ds.model.mode import Mode
from mobius_ds.model.parts import Parts
from mobius_ds.model.program import Program, spans
from mobius_ds.model.replay import own_random_numbers
from mobius_ds.model.structures import flatten
from mobius_ds.model.trace import trace
from mobius_ds.model.wrappers import forward_of
from mobius_ds.profiling.traced_model import TracedModel
from mobius_ds.runtime.device.device import Device
from mobius_ds.runtime.device.ledger import Bytes, Ledger, no_bytes
from mobius_ds.runtime.device.random import mixed
from mobius_ds.runtime.dram.activations import SEGMENT_BYTES, ActivationStore
from mobius_ds.runtime.dram.adoption import move_into_store
from mobius_ds.runtime.dram.memory_estimate import Dram, OptimizerMemory, activation_bytes, check_dram, training_parts
from mobius_ds.runtime.dram.store import ParameterStore
from mobius_ds.runtime.job.job import Chosen, Job
from mobius_ds.runtime.job.job_check import check_config
from mobius_ds.runtime.job.job_memory import gpu_needs
from mobius_ds.runtime.job.job_plan import plan_job
from mobius_ds.runtime.ranks.errors import OutOfMemory, OutOfStep
from mobius_ds.runtime.ranks.mailbox import Mailbox
from mobius_ds.runtime.record.trace import Description, DeviceClock, HostClock, Recorder
from mobius_ds.runtime.record.trace_file import open_trace
from mobius_ds.runtime.sweeps.announcement import Announcement, Announcer, Batch
from mobius_ds.runtime.sweeps.buffers import Buffers
from mobius_ds.runtime.sweeps.executor import Executor
from mobius_ds.runtime.sweeps.kept import Kept
from mobius_ds.runtime.sweeps.lifetimes import Lifetimes
from mobius_ds.runtime.sweeps.results import Outputs
from mobius_ds.runtime.sweeps.sweep import Microbatch, Sweep, stage_parameters
from mobius_ds.runtime.sweeps.sweep_schedules import SweepSchedules
from mobius_ds.schedule.mobius import Volumes
from mobius_ds.schedule.plan import Plan
from mobius_ds.schedule.tasks import DEPTH, Kind

_STAGING = "gradients on their way"
_SLOTS = "slots, the device being the CPU"


class Pipeline:
    """One rank's end of the pipeline.

    Args:
        model: the user's module, its parameters already in compute dtype, the same on every rank. Their data
            moves into the node's shared store.
        exchange: gathers one object from every rank, in rank order; used while nothing else connects them.
        optimizer: what the job's optimizer takes of DRAM.
        layers: the layers themselves, for models that list them.
        figures: whether the recorder's ``last_step`` is asked for.

    Raises:
        NotSplittable: the model has no layers.
        InfeasiblePlan: the config asks for more stages than it has.
        OutOfMemory: DRAM does not hold the model.
        ValueError: the config's plan or topology cannot be one for this job, or the trace cannot be written.
    """

    def __init__(self, model: nn.Module, config: MobiusConfig, rank: int, world_size: int, device: torch.device,
                 exchange: Callable[[Any], List[Any]], optimizer: OptimizerMemory,
                 layers: Optional[Sequence[nn.Module]] = None, figures: bool = False):
        self.rank = rank
        self.world_size = world_size
        self.config = config
        self.plan: Optional[Plan] = None
        self.units = find_units(model, config.layers, layers)
        self.device = self._make_device(device)
        self.mailbox = Mailbox(rank, world_size, exchange, config.timeout_seconds)
        self._check_config(model)
        self.recorder = self._make_recorder(figures)
        self.activations = ActivationStore(rank, self.device.register)
        with self.mailbox.told():
            self.device.budget = self._common_budget()
            self.store = self._make_store(model, optimizer)
        self.seed = self.mailbox.gather("initialize", torch.initial_seed())[0]
        self._optimizer = optimizer
        self._slot_bytes = 0
        self._largest_sweep = 0
        self._model = model
        self._forward = forward_of(model)
        self._entries: Dict[Callable, Entry] = {}
        self._announcer = Announcer(self.device.torch_device, self._trace)
        self._reference: Optional[Program] = None
        self._owner: Dict[str, int] = {}
        self._updated_by: Dict[int, List[str]] = {}
        self._executor: Optional[Executor] = None
        self._schedules: Optional[SweepSchedules] = None
        self._lifetimes = Lifetimes(world_size, self.activations)
        self._buffers = Buffers(model)
        self._contributed: FrozenSet[str] = frozenset()
        self._kept = Kept()
        self.keep_outputs = False
        self.slots = DEPTH
        """Stages whose weights a device holds at once; see the schedule."""

    def _check_config(self, model: nn.Module) -> None:
        """Refuses, on all ranks alike, a config that the first rank can tell is wrong before any forward."""
        fault = None
        if self.rank == 0:
            try:
                check_config(self.config, declared_layers(model, self.units), self.world_size)
            except ValueError as error:
                fault = error
        [fault, *_] = self.mailbox.gather("initialize", fault)
        if fault is not None:
            raise fault

    # What a rehearsal makes otherwise.

    def _make_device(self, device: torch.device) -> Device:
        return Device(device, Ledger(), _budget(self.config, device))

    def _make_store(self, model: nn.Module, optimizer: OptimizerMemory) -> ParameterStore:
        return move_into_store(model, self.mailbox, self.device, optimizer.tensors)

    def _make_executor(self, plan: Plan) -> Executor:
        return Executor(self.rank, plan, self.units, self.device, self.mailbox, self.activations, self.store, self.recorder)

    def _choose_plan(self, job: Job) -> Chosen:
        return plan_job(job)

    def _make_recorder(self, figures: bool) -> Optional[Recorder]:
        """What notes when tasks run, where that is asked for."""
        path = self.config.trace
        if path is None and not figures:
            return None
        file = None if path is None else open_trace(path, self.rank, self.world_size, self.mailbox.gather)
        return Recorder(self.rank, HostClock() if self.device.is_cpu else DeviceClock(), file, figures)

    def _common_budget(self) -> Optional[int]:
        """The smallest budget of any rank: all must come to the same plan."""
        budgets = self.mailbox.gather("initialize", self.device.budget)
        return min((budget for budget in budgets if budget is not None), default=None)

    # Sweeps.

    def forward(self, batches: Sequence[Batch], seeds: Sequence[Tuple[int, int]],
                function: Optional[Callable] = None) -> Tuple[Sweep, List[Outputs]]:
        """Runs this rank's microbatches, and everybody else's, through all stages.

        Args:
            batches: this rank's microbatches; every rank that gives any gives equally many, and the first one does.
            seeds: (step, number within the step over all ranks) of each, for its random numbers.
            function: what to run instead of the model's own forward.

        Returns:
            The sweep, for its backward, and this rank's outputs.
        """
        function = function or self._forward
        if function not in self._entries:
            self._entries[function] = Entry(self._model, function)
        entry = self._entries[function]
        flat = [flatten(batch) for batch in batches]
        tensors = [[leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] for leaves, _ in flat]
        mode = Mode(self._model)
        with self.mailbox.told():
            announced = [self._announcer.announce(entry, mode, batch, leaves, structure, mixed(self.seed, *seed))
                         for batch, (leaves, structure), seed in zip(batches, flat, seeds)]
        modes, gathered = zip(*self._gather("forward", (mode.digest, announced)))
        if len(set(modes)) > 1:
            raise OutOfStep("the ranks call the model in different modes: some of its modules train on one rank and "
                            "evaluate on another, or a parameter is frozen (an adapter switched off) on some ranks only. "
                            "Switch on all ranks alike.")
        givers = [home for home, announcements in enumerate(gathered) if announcements]
        count = len(gathered[0])
        if any(len(gathered[home]) != count for home in givers):
            raise OutOfStep(f"the ranks gave {[len(a) for a in gathered]} microbatches to one forward; give equally many")
        self._announcer.learn(gathered)
        # Microbatch i of the r-th of N givers is number i*N + r: the order in which N times as many would have them.
        ordered = [(home, gathered[home][i]) for i in range(count) for home in givers]
        if self.plan is None:
            self._make_plan(entry, batches, ordered)
        sweep = self._sweep(entry, mode, ordered)
        self._check_dram(sweep, self._schedules.volumes(sweep))
        schedule = self._schedules.count(self._schedules.forward(sweep))
        return sweep, self._executor.forward(sweep, schedule, tensors)

    def outputs(self, sweep: Sweep) -> List[Outputs]:
        """Runs the last stage of a forward again, for the outputs that were left behind; from now on they are kept."""
        if not self._lifetimes.revive(sweep):
            raise RuntimeError("this forward's outputs were left behind and are gone by now. Read them before the "
                               "optimizer step once; from then on every forward keeps them.")
        self._gather("reading the outputs of a forward", sweep.number)
        self.keep_outputs = True
        for microbatch in sweep.microbatches:
            microbatch.returned = microbatch.program.returned(everything=True)
        schedule = self._schedules.count(self._schedules.outputs(sweep))
        with sweep.mode.restored():
            return self._executor.forward(sweep, schedule, [])

    def backward(self, sweep: Sweep, gradients: Sequence[Dict[int, torch.Tensor]],
                 update: Optional[Callable[[List[str]], None]] = None) -> None:
        """Runs a forward's backward; weight gradients add up in the store until ``start_accumulation``.

        Args:
            gradients: for each of this rank's microbatches, gradients by output leaf.
            update: runs the optimizer for some parameters of this rank, beside the sweep and as soon as their
                gradients are complete. Given on all ranks or on none.
        """
        gathered = self._gather("backward", (sweep.number, [frozenset(given) for given in gradients]))
        if {number for number, _ in gathered} != {sweep.number}:
            raise OutOfStep("the ranks run the backward of different forwards: "
                            + ", ".join(f"rank {rank} of forward {number}" for rank, (number, _) in enumerate(gathered)))
        given = [leaves[i] for i in range(len(gathered[0][1])) for _, leaves in gathered if leaves]
        schedule = self._schedules.count(self._schedules.backward(sweep, given, self._updated_by if update else {}))
        reached = self._contributed.union(*(self.store.layout.trained(sweep.stage_parameters[key.stage])
                                            for key in schedule.gpu_of() if key.kind is Kind.WEIGHT_GRADIENTS))
        with sweep.mode.restored():
            self._lifetimes.drop(self._executor.backward(
                sweep, schedule, gradients, self._contributed,
                lambda stage: update([name for name in self._updated_by[stage] if name in reached])))
        self._contributed = reached

    def release(self, sweep: Sweep) -> None:
        """Says that this rank needs nothing of a forward any more. It is freed once every rank has said so."""
        self._lifetimes.release(sweep)

    def step(self, call: str, content: Any) -> List[Any]:
        """Gathers one object from every rank, in rank order, between sweeps."""
        return self._gather(call, content)

    def finish_step(self) -> None:
        """Ends a step: when it returns, every rank has updated its parameters, and buffers are everywhere what the
        rank that ran their layer made of them."""
        programs = self._announcer.programs.values()
        ended = None if self.recorder is None else self.recorder.end_step()
        everyones, noted = zip(*self._gather("engine.step", (self._buffers.changed(programs), ended)))
        if ended is not None:
            self.recorder.take(noted)
        self._buffers.take(self.rank, everyones, programs)

    def accept_buffers(self) -> None:
        """Takes the buffers for the same on every rank, as the script or a checkpoint has made them."""
        self._buffers.accept()

    # Gradients and parameters, for the optimizer.

    def owned(self) -> Tuple[str, ...]:
        """The trained parameters this rank updates: those whose first stage is one of its own."""
        return tuple(name for name in self.store.layout.trained(self.store.layout.entries)
                     if self._owner.get(name, 0) == self.rank)

    def gradient(self, name: str) -> torch.Tensor:
        """An owned parameter's accumulated fp32 gradient; zeros where no backward reached it, as under ZeRO-3."""
        gradient = self.store.gradient(name)
        return gradient if name in self._contributed else gradient.zero_()

    def gave_gradient(self, name: str) -> None:
        """Says that a parameter's gradient in the store counts, though no backward has reached it."""
        self._contributed |= {name}

    def start_accumulation(self) -> None:
        """Forgets the accumulated gradients: the next backward overwrites them."""
        self._contributed = frozenset()

    # Figures.

    def take_predicted(self) -> Bytes:
        """The bytes of this rank's tasks in the schedules run since the last call."""
        return self._schedules.take_predicted() if self._schedules else no_bytes()

    def host_bytes(self) -> int:
        """DRAM of this node's store and of this rank's activations."""
        return self.store.nbytes + self.activations.nbytes

    def close(self) -> None:
        """Leaves the pipeline. The module keeps its parameters."""
        if self.recorder is not None:
            self.recorder.close()
        self._executor = None  # and with it the slots, whoever still holds this object
        self.mailbox.close()
        self.device.close()
        self.activations.close()
        self.store.close()

    # How.

    def _gather(self, call: str, content: Any) -> List[Any]:
        # Being here tells the others that this rank reads nothing of an earlier sweep any more.
        self.device.finish_copies()
        released, contents = zip(*self.mailbox.gather(call, (self._lifetimes.take_released(), content)))
        self._lifetimes.gathered(released)
        return list(contents)

    def _trace(self, entry: Entry, args: tuple, kwargs: dict) -> Program:
        with own_random_numbers(self.device.torch_device):
            return trace(entry, self.units, args, kwargs, self.device.torch_device)

    def _sweep(self, entry: Entry, mode: Mode, ordered: Sequence[Tuple[int, Announcement]]) -> Sweep:
        everything = self.keep_outputs or not torch.is_grad_enabled()
        form = everything, tuple((home, announcement.signature) for home, announcement in ordered)
        microbatches = []
        for home, announcement in ordered:
            program = self._announcer.programs[announcement.signature]
            its_spans = self._kept.once(("spans", announcement.signature),
                                        lambda: spans(self._reference, self.plan.first_layers(), program))
            microbatches.append(Microbatch(
                home, announcement.leaves, announcement.structure, announcement.input_bytes, announcement.seed, program,
                its_spans, program.returned(everything)))
        names = self._kept.once(("parameters", form),
                                lambda: stage_parameters(self.plan, microbatches, self.units.parameters))
        sweep = Sweep(self._lifetimes.next_number(), form, entry, mode, Parts(self._model), microbatches, names)
        self._lifetimes.begin(sweep)
        return sweep

    def _check_dram(self, sweep: Sweep, moved: Volumes) -> None:
        """Refuses a forward, on all ranks alike, whose activations DRAM does not hold: asked when there are more of them
        than ever before."""
        activations = activation_bytes(moved)
        if activations <= self._largest_sweep:
            return
        mine = {"optimizer state": self._optimizer.present(), "activations": self.activations.nbytes,
                _STAGING: sum(buffer.nbytes for buffer in self._executor.holdings.staging.values()),
                _SLOTS: self._executor.holdings.slots.nbytes}
        drams, presents = zip(*self._gather("forward", (Dram.here(), mine)))
        present = {**self.store.present, **{name: sum(present[name] for present in presents) for name in mine}}
        parts = {**training_parts(self.store.layout, self._optimizer.tensors),
                 "activations": activations + (0 if self.device.is_cpu else self.world_size * SEGMENT_BYTES),  # pinned whole
                 _STAGING: sum(max((moved.weight_gradients[stage] for stage in self.plan.stages_of(gpu)), default=0)
                               for gpu in range(self.world_size)),
                 _SLOTS: self._slot_bytes}
        try:
            check_dram(parts, present, drams[0], f"The activations are those of {len(sweep.microbatches)} microbatches: use "
                       "smaller ones (train_micro_batch_size_per_gpu), or fewer in one train_batch.")
        except OutOfMemory:
            self.release(sweep)
            raise
        self._largest_sweep = activations

    # The plan.

    def _make_plan(self, entry: Entry, batches: Sequence[Batch], ordered: Sequence[Tuple[int, Announcement]]) -> None:
        """Takes the first rank's plan for the first forward's program."""
        self._reference = self._announcer.programs[ordered[0][1].signature]
        job = Job(self._reference, self.units, self.store.layout, self.config, self.world_size, self.device.budget,
                  sum(announcement.input_bytes for _, announcement in ordered), len(ordered),
                  lambda: TracedModel(entry, self.units, self._reference, *batches[0], self.device.torch_device),
                  {name: parameter.data for name, parameter in self._model.named_parameters()})
        answer = chosen = None
        if self.rank == 0:
            with self.mailbox.told(), own_random_numbers(self.device.torch_device):
                try:
                    chosen = self._choose_plan(job)
                    answer = chosen.plan, chosen.how
                except ValueError as error:  # no plan: everyone's error, not this rank's alone
                    answer = error
        answer = self.mailbox.gather("planning", answer)[0]
        if isinstance(answer, ValueError):
            raise answer
        plan, how = answer
        self.plan = plan
        if self.device.is_cpu:
            self._slot_bytes = sum(need.weights + need.gradients for need in gpu_needs(job, plan))
        for stage, span in enumerate(spans(self._reference, plan.first_layers(), self._reference)):
            for name in self._reference.parameters_of(*span, self.units.parameters):
                if name not in self._owner:
                    self._owner[name] = plan.gpu_of_stage[stage]
                    self._updated_by.setdefault(stage, []).append(name)
        self._executor = self._make_executor(plan)
        self._schedules = SweepSchedules(plan, self.store.layout, self.rank, self.mailbox, self.slots)
        if self.rank == 0:
            logger.info(f"Mobius: {how}")
            if self.recorder is not None and self.recorder.writes:
                self._describe(chosen, len(ordered))
            compiled = Parts(self._model).compiled
            if compiled:
                kinds = ", ".join(sorted({type(module).__name__ for module in compiled}))
                logger.warning(f"Mobius runs a model's modules as they are written: torch.compile has no effect on the "
                               f"{len(compiled)} that were compiled ({kinds}).")

    def _describe(self, chosen: Chosen, microbatches: int) -> None:
        """Tells the trace what is run."""
        plan, topology = chosen.plan, chosen.request and chosen.request.topology
        layers = [self._reference.calls[start].unit for start in self._reference.layer_starts()]
        predicted, link = chosen.predicted(microbatches, self.slots), self.device.link
        slowdown = link.slowdown if link else None
        about = Description(plan.gpus, plan.layers_per_stage, plan.gpu_of_stage, layers, chosen.how,
                            topology and topology.root_of, slowdown)
        self.recorder.describe(about, predicted and predicted.step, topology.name if topology else "")


def _budget(config: MobiusConfig, device: torch.device) -> Optional[int]:
    if config.device_memory_gb is not None:
        return int(config.device_memory_gb * GIB)
    if device.type == "cpu":
        return None
    free, _ = getattr(torch, device.type).mem_get_info(device)
    return int(free * 0.9)  # the rest is for the framework's own context and fragments

"""A rehearsal: the pipeline as it is, on GPUs that are not there.

Processes, messages, schedules, streams, slots and stores are those of a training job. Layers take the seconds that the
plan expects of them, and compute nothing: the model's own Python, which a replay runs around a stage's layers, is left
out. Copies cross emulated wires, which all ranks share, and copy nothing. Device tensors are meta tensors, and DRAM is
never written, so that neither takes memory; adding up gradients there takes no time either.
"""

import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import psutil
import torch
from torch import nn

from mobius_ds.config import MobiusConfig
from mobius_ds.emulation.rehearsal import RankReport, RankStep, Rehearsal
from mobius_ds.emulation.wires import WiredLink, Wires
from mobius_ds.inputs.topology import Topology
from mobius_ds.model.program import Program, Span, TensorSpec, Value, spans
from mobius_ds.model.replay import Handover
from mobius_ds.profiling.describe import describe
from mobius_ds.runtime.device.device import Device
from mobius_ds.runtime.device.ledger import Ledger
from mobius_ds.runtime.dram.memory_estimate import OptimizerMemory
from mobius_ds.runtime.dram.store import Layout, ParameterStore
from mobius_ds.runtime.job.job import Chosen, Job
from mobius_ds.runtime.sweeps.announcement import Batch
from mobius_ds.runtime.sweeps.executor import Executor
from mobius_ds.runtime.sweeps.pipeline import Pipeline
from mobius_ds.runtime.sweeps.sweep import Sweep
from mobius_ds.schedule.mobius import Volumes
from mobius_ds.schedule.plan import Plan
from mobius_ds.simulation.costs import bandwidths, speed, stages_of

CPU, META = torch.device("cpu"), torch.device("meta")


def rehearse(rehearsal: Rehearsal, rank: int, wires: Path, exchange: Callable[[Any], List[Any]]) -> RankReport:
    """Runs one rank's part of a rehearsal.

    Args:
        wires: the job's file for them; see ``Wires``.
        exchange: gathers one object from every rank, in rank order.
    """
    described = describe(rehearsal.source, rehearsal.samples, rehearsal.sequence)
    rounds, left = divmod(rehearsal.planned.request.microbatches, rehearsal.topology.size)
    mine: List[Batch] = [((), described.inputs)] * (rounds + (rank < left))
    with closing(Wires(wires, bandwidths(rehearsal.topology))) as carrying, \
            closing(RehearsedPipeline(described.model, rehearsal, rank, carrying, exchange)) as pipeline:
        steps = [_step(pipeline, mine, number) for number in range(rehearsal.steps)]
        return RankReport(steps, pipeline.recorder.last_step, psutil.Process().memory_info().rss,
                          pipeline.store.resident_bytes)


def _step(pipeline: "RehearsedPipeline", batches: List[Batch], number: int) -> RankStep:
    pipeline.step("rehearsal", None)
    begun, processor_begun = time.perf_counter(), time.process_time()
    sweep, outputs = pipeline.forward(batches, [(number, place) for place in range(len(batches))])
    forward_done = time.perf_counter()
    gradients = [{index: torch.empty_like(leaf) for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
                 for leaves, _ in outputs]
    pipeline.backward(sweep, gradients)
    pipeline.release(sweep)
    pipeline.start_accumulation()
    backward_done, processor_seconds = time.perf_counter(), time.process_time() - processor_begun
    pipeline.finish_step()
    return RankStep(begun, forward_done, backward_done, processor_seconds, pipeline.device.ledger.take(),
                    pipeline.take_predicted())


class RehearsedPipeline(Pipeline):
    """One rank's end of a pipeline that computes and copies nothing."""

    def __init__(self, model: nn.Module, rehearsal: Rehearsal, rank: int, wires: Wires,
                 exchange: Callable[[Any], List[Any]]):
        self._rehearsal = rehearsal
        self._wires = wires
        config = MobiusConfig(enabled=True, timeout_seconds=rehearsal.timeout_seconds,
                              trace=rehearsal.trace and str(rehearsal.trace))
        super().__init__(model, config, rank, rehearsal.topology.size, CPU, exchange,
                         OptimizerMemory(0, lambda: 0), figures=True)
        self.slots = rehearsal.slots

    def _make_device(self, device: torch.device) -> Device:
        return RehearsedDevice(self._rehearsal.topology, self.rank, self._wires)

    def _make_store(self, model: nn.Module, optimizer: OptimizerMemory) -> ParameterStore:
        store, offer = None, None
        if self.rank == 0:
            layout = Layout(model.named_parameters())
            store = RehearsedStore(layout)
            offer = layout, store.handles
        layout, handles = self.mailbox.gather("initialize", offer)[0]
        store = store or RehearsedStore(layout, handles)
        self.mailbox.gather("initialize", None)  # the first rank's files are open until all have opened them
        return store

    def _make_executor(self, plan: Plan) -> Executor:
        return RehearsedExecutor(self._rehearsal, self._reference, self.rank, plan, self.units, self.device, self.mailbox,
                                 self.activations, self.store, self.recorder)

    def _choose_plan(self, job: Job) -> Chosen:
        planned = self._rehearsal.planned
        return Chosen(planned.plan, f"rehearsed on emulated wires: {planned.plan}", planned.request)

    def _trace(self, entry: Any, args: tuple, kwargs: dict) -> Program:
        return self._rehearsal.program

    def _check_dram(self, sweep: Sweep, moved: Volumes) -> None:
        """Nothing: this machine's DRAM is not used, and planning has asked whether the model fits the emulated one's."""


class RehearsedDevice(Device):
    """An emulated GPU: its streams are the CPU's, its memory is counted, its copies only take their time on the wires."""

    def __init__(self, topology: Topology, gpu: int, wires: Wires):
        super().__init__(CPU, Ledger(), topology.gpus[gpu].memory_bytes, WiredLink(wires, topology, gpu))
        self.memory_device = META

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Copies nothing."""


class RehearsedStore(ParameterStore):
    """A store that is mapped and never touched."""

    def gradient(self, name: str) -> torch.Tensor:
        """A trained parameter's gradient, without values."""
        return torch.empty(self.layout.entries[name].shape, device=META)

    @property
    def resident_bytes(self) -> int:
        """What of it is in memory: nothing."""
        return self.home.resident + sum(region.resident for region in self._regions.values())


class RehearsedExecutor(Executor):
    """An executor whose layers take their seconds."""

    def __init__(self, rehearsal: Rehearsal, reference: Program, *rest: Any):
        super().__init__(*rest)
        stages = stages_of(rehearsal.planned.request.profile, self.plan)
        relative = speed(rehearsal.topology, self.rank)
        self._seconds = {span: (sum(layer.forward_seconds for layer in stage) / relative,
                                sum(layer.backward_seconds for layer in stage) / relative)
                         for span, stage in zip(spans(reference, self.plan.first_layers(), reference), stages)}

    def replayer(self, sweep: Sweep) -> "RehearsedReplayer":
        """What takes the time of the layers of a sweep's stages."""
        return RehearsedReplayer(self._seconds)


class RehearsedReplayer:
    """Stands in for ``Replayer``.

    Args:
        seconds: what the forward and the backward of each stage take, the latter with its recomputation.
    """

    def __init__(self, seconds: Dict[Span, Tuple[float, float]]):
        self._seconds = seconds

    @contextmanager
    def ready(self, device: torch.device) -> Iterator[None]:
        """There is nothing to make ready."""
        yield

    @contextmanager
    def replayed(self, program: Program, span: Span, *inputs: Any) -> Iterator["RehearsedHandover"]:
        """Waits as long as the stage's forward takes, and yields what it would hand over, without values."""
        begun = time.perf_counter()
        forward, backward = self._seconds[span]
        made = {value: _empty(program.spec(value)) for value in program.live(span.stop) if value.call >= span.start}
        outputs = None
        if span.stop == program.end:
            leaves = [_empty(leaf) if isinstance(leaf, TensorSpec) else leaf for leaf in program.outputs.returns]
            outputs = leaves, program.outputs.structure
        _sleep_until(begun + forward)
        yield RehearsedHandover(made, outputs, begun + backward)


@dataclass
class RehearsedHandover(Handover):
    """What one stage's rehearsal hands over."""

    backward_done: float = 0.0
    """When a backward that has begun by recomputing this will be over."""

    def backward(self, received: Dict[Value, torch.Tensor], gradients: Dict[Any, torch.Tensor]) -> None:
        """Waits until then, and gives everything a gradient."""
        for tensor in received.values():
            tensor.grad = _empty(TensorSpec.of(tensor)) if tensor.requires_grad else None
        _sleep_until(self.backward_done)


def _sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


def _empty(spec: TensorSpec) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=META, requires_grad=spec.requires_grad)

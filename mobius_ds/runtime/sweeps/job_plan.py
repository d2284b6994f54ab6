"""How a running job gets its plan: from a file, by hand, by the planner, or even.

Only what the job knows (its program, its device, its config) is brought together here; what makes a plan good is
decided in ``mobius_ds.planner``.
"""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Callable, List, Mapping, NamedTuple, Optional

import torch
from deepspeed.utils import logger

from mobius_ds.config import MobiusConfig
from mobius_ds.inputs.topology import Gpu, Topology, TopologyError
from mobius_ds.inputs.units import readable
from mobius_ds.machine.topology_detection import detect_topology, topology_by_name
from mobius_ds.model.discovery import Units
from mobius_ds.model.program import Program, spans
from mobius_ds.names import CACHE_VARIABLE, PROFILE_VARIABLE
from mobius_ds.planner.plan_files import cached_plan, check_plan, from_json
from mobius_ds.planner.planner import Request, explained, fingerprint
from mobius_ds.prediction.mobius import predict_mobius
from mobius_ds.prediction.prediction import Prediction
from mobius_ds.profiling.computed import computed_profile
from mobius_ds.profiling.measured import measured_profile
from mobius_ds.profiling.traced_model import TracedModel
from mobius_ds.runtime.dram.slots import gradient_groups
from mobius_ds.runtime.dram.store import Layout
from mobius_ds.schedule.plan import InfeasiblePlan, Plan, make_plan
from mobius_ds.schedule.tasks import DEPTH


class Job(NamedTuple):
    """What planning has to know of a job."""

    reference: Program
    """The first forward's program, whose layers are planned."""
    units: Units
    layout: Layout
    config: MobiusConfig
    gpus: int
    budget: Optional[int]
    """Device memory each rank may use, bytes."""
    input_bytes: int
    """Of one sweep's inputs, which every device holds."""
    microbatches: int
    traced: Callable[[], TracedModel]
    """The model with the microbatch of the first forward, on the rank that plans."""
    weights: Mapping[str, torch.Tensor]


class Chosen(NamedTuple):
    """A job's plan."""

    plan: Plan
    how: str
    """A paragraph that says how it came about."""
    request: Optional[Request] = None
    """What it was planned for; None for a partition by hand or an even one."""

    def predicted(self, microbatches: int, slots: int = DEPTH) -> Optional[Prediction]:
        """What a step of so many micro-batches would take on the topology it was planned for."""
        if self.request is None:
            return None
        return predict_mobius(self.request.profile, self.request.topology, self.plan, microbatches, slots)


def plan_job(job: Job) -> Chosen:
    """Plans a job.

    Raises:
        InfeasiblePlan: the device memory does not allow it.
        ValueError: the config's plan or topology is not one for this job.
    """
    if os.environ.get(PROFILE_VARIABLE):
        traced = job.traced()
        profile = computed_profile(traced, Gpu("of 1 FLOP/s", 1, 1.0), type(traced.entry.model).__name__)
        Path(os.environ[PROFILE_VARIABLE]).write_text(json.dumps(asdict(profile)))
        raise SystemExit(0)
    layers = len(job.reference.layer_starts())
    if layers < 1:
        raise InfeasiblePlan("the first forward ran none of the model's layers, so there is nothing to cut into stages. "
                             "Start with a forward that runs them.")
    config, request = job.config, None
    if config.plan is not None:
        planned = from_json(config.plan)
        check_plan(planned.plan, layers, job.gpus, config.plan)
        plan, how, request = planned.plan, f"plan of {config.plan}", planned.request
    elif config.stages is not None or config.layers_per_stage is not None:
        plan, how = make_plan(layers, job.gpus, config.stages, config.layers_per_stage), "partition given by hand"
    else:
        topology = _topology(job)
        if topology is not None:
            plan, how, request = _best(job, topology)
        else:
            plan = make_plan(layers, job.gpus, shortfall=lambda partition: _missing(
                job, make_plan(layers, job.gpus, layers_per_stage=partition)))
            how = "even partition, as there is no topology to plan for"
    _check_memory(job, plan)
    return Chosen(plan, f"{layers} layers in {plan.stages} stages on {plan.gpus} GPUs ({how}): {plan}", request)


def _topology(job: Job) -> Optional[Topology]:
    """The job's topology: what the config names, or what is detected where there is a GPU."""
    if job.config.topology is not None:
        topology = topology_by_name(job.config.topology)
    elif torch.cuda.is_available():
        try:
            topology = detect_topology().topology
        except TopologyError as error:  # a container may hide everything; an even cut still trains
            logger.warning(f"Mobius: the topology of this machine is not known ({error}); the cut will be even. Name one "
                           "with \"mobius\": {\"topology\": ...} to have it planned.")
            return None
    else:
        return None
    if topology.size < job.gpus:
        raise TopologyError(f"topology {topology.name!r} has {topology.size} GPUs, but the job has {job.gpus} ranks. Start "
                            f"{topology.size} at most, or name a larger one in \"mobius\": {{\"topology\": ...}}")
    topology = topology.select(range(job.gpus))
    if job.budget is None:
        return topology
    return replace(topology, gpus=tuple(replace(gpu, memory_bytes=min(gpu.memory_bytes, job.budget))
                                        for gpu in topology.gpus))


def _best(job: Job, topology: Topology) -> Chosen:
    def request() -> Request:
        traced = job.traced()
        name = type(traced.entry.model).__name__
        # Measured where the job runs on what it plans for; a stand-in device would give its own times.
        profile = measured_profile(traced, job.weights, name) if traced.device.type != "cpu" \
            else computed_profile(traced, topology.gpus[0], name)
        return Request(profile, topology, job.microbatches)

    folder = Path(os.environ.get(CACHE_VARIABLE, Path.home() / ".cache" / "mobius_ds" / "plans"))
    planned, read = cached_plan(_question(job, topology), request, folder, lambda text: logger.warning(f"Mobius: {text}"))
    how = f"planned for {topology.name}{', read from the cache' if read else ''}; {explained(planned)}"
    return Chosen(planned.plan, how, planned.request)


def _question(job: Job, topology: Topology) -> str:
    """A name for all that a job's plan depends on."""
    calls = [(call.unit, sorted(map(str, call.needs)), call.returns) for call in job.reference.calls]
    return fingerprint([repr(calls), repr(job.layout.entries), topology.to_json(), job.microbatches])


# Memory, as the slots and buffers of the runtime take it.


class Need(NamedTuple):
    """The device memory one GPU's stages take, in bytes: what the runtime reserves before a sweep, at most.

    It holds for microbatches like the first one, evaluation and outputs that are read included. What a layer works in
    while it computes comes on top; only a planned partition, which has a profile, leaves room for that.
    """

    weights: int
    gradients: int
    boundary: int
    inputs: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def gpu_needs(job: Job, plan: Plan) -> List[Need]:
    """What each GPU must hold: slots and buffers as large as the largest of its stages needs, each by itself."""
    needs = [Need(0, 0, 0, 0)] * job.gpus
    for gpu, stage in zip(plan.gpu_of_stage, _stage_needs(job, plan)):
        needs[gpu] = Need(*map(max, needs[gpu], stage))
    return needs


def _missing(job: Job, plan: Plan) -> int:
    """Bytes by which a plan exceeds the budget; zero or less if it fits."""
    return 0 if job.budget is None else max(need.total for need in gpu_needs(job, plan)) - job.budget


def _check_memory(job: Job, plan: Plan) -> None:
    missing = _missing(job, plan)
    if missing <= 0:
        return
    needs, stages = gpu_needs(job, plan), _stage_needs(job, plan)
    gpu = max(range(job.gpus), key=lambda gpu: needs[gpu].total)
    largest = max(plan.stages_of(gpu), key=lambda stage: stages[stage].total)
    span = spans(job.reference, plan.first_layers(), job.reference)[largest]
    units = [call.unit for call in job.reference.calls[span.start:span.stop]]
    raise InfeasiblePlan(
        f"rank {gpu} needs {readable(needs[gpu].total)} of device memory, most of it for stage {largest} ({units[0]} to "
        f"{units[-1]}): {readable(needs[gpu].weights)} for two slots, {readable(needs[gpu].gradients)} for their "
        f"gradients, {readable(needs[gpu].boundary)} for boundary activations and {readable(needs[gpu].inputs)} for "
        f"inputs. But the budget is {readable(job.budget)}: {readable(missing)} are missing. Use more stages or fewer "
        "layers_per_stage, smaller micro-batches, or raise \"mobius\": {\"device_memory_gb\": ...}.")


def _stage_needs(job: Job, plan: Plan) -> List[Need]:
    """What each stage needs, while another one of its size is being copied in."""
    reference = job.reference
    outputs = sum(reference.outputs.returns[leaf].nbytes for leaf in reference.returned(everything=True))
    needs = []
    for span in spans(reference, plan.first_layers(), reference):
        names = reference.parameters_of(*span, job.units.parameters)
        received, made = reference.boundary_bytes(span.start), reference.boundary_bytes(span.stop)
        # In a backward: what a stage starts from, its gradient, and the gradient of what the stage made.
        needs.append(Need(DEPTH * job.layout.weights(names).nbytes,
                          DEPTH * sum(4 * group.elements for group in gradient_groups(job.layout, names)),
                          DEPTH * (2 * received + (outputs if span.stop == reference.end else made)), job.input_bytes))
    return needs

"""What a plan takes of a job's device memory, as the slots and buffers of the runtime take it."""

from typing import List, NamedTuple

from mobius_ds.inputs.units import readable
from mobius_ds.model.program import spans
from mobius_ds.runtime.dram.slots import gradient_groups
from mobius_ds.runtime.job.job import Job
from mobius_ds.schedule.plan import InfeasiblePlan, Plan
from mobius_ds.schedule.tasks import DEPTH


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


def missing_bytes(job: Job, plan: Plan) -> int:
    """Bytes by which a plan exceeds the budget; zero or less if it fits."""
    return 0 if job.budget is None else max(need.total for need in gpu_needs(job, plan)) - job.budget


def check_memory(job: Job, plan: Plan) -> None:
    """Raises InfeasiblePlan if a plan exceeds the budget; the message names the stage that takes most."""
    missing = missing_bytes(job, plan)
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

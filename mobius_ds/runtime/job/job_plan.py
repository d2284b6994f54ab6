"""How a running job gets its plan: from a file, by hand, by the planner, or even.

Only what the job knows (its program, its device, its config) is brought together here; what makes a plan good is
decided in ``mobius_ds.planner``.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Optional

import torch
from deepspeed.utils import logger

from mobius_ds.inputs.topology import Topology, TopologyError
from mobius_ds.machine.topology_detection import detect_topology, topology_by_name
from mobius_ds.names import CACHE_VARIABLE
from mobius_ds.planner.plan_files import cached_plan, check_plan, from_json
from mobius_ds.planner.planner import Request, explained, fingerprint
from mobius_ds.profiling.computed import computed_profile
from mobius_ds.profiling.measured import measured_profile
from mobius_ds.runtime.job.job import Chosen, Job
from mobius_ds.runtime.job.job_check import check_size
from mobius_ds.runtime.job.job_memory import check_memory, missing_bytes
from mobius_ds.schedule.plan import InfeasiblePlan, make_plan


def plan_job(job: Job) -> Chosen:
    """Plans a job.

    Raises:
        InfeasiblePlan: the device memory does not allow it.
        ValueError: the config's plan or topology is not one for this job.
    """
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
            plan = make_plan(layers, job.gpus, shortfall=lambda partition: missing_bytes(
                job, make_plan(layers, job.gpus, layers_per_stage=partition)))
            how = "even partition, as there is no topology to plan for"
    check_memory(job, plan)
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
    check_size(topology, job.gpus)
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

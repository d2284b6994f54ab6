"""What can be said of a job's config before its first forward: all that does not depend on which layers a forward runs."""

from mobius_ds.config import MobiusConfig
from mobius_ds.inputs.topology import Topology, TopologyError
from mobius_ds.machine.topology_detection import topology_by_name
from mobius_ds.planner.plan_files import check_plan, from_json
from mobius_ds.schedule.plan import InfeasiblePlan, even_partition


def check_config(config: MobiusConfig, layers: int, ranks: int) -> None:
    """Refuses a config by what is known before any forward.

    Args:
        layers: that the model declares. One that runs several times in a forward counts once here, so ``stages`` cannot
            exceed them; ``layers_per_stage`` and a plan, which list every run, are held against the first forward.

    Raises:
        InfeasiblePlan: there are more stages than layers.
        TopologyError: the topology cannot be read, or has fewer GPUs than the job has ranks.
        ValueError: the plan cannot be read, or is for another number of GPUs.
    """
    if config.plan is not None:
        plan = from_json(config.plan).plan
        check_plan(plan, sum(plan.layers_per_stage), ranks, config.plan)
    elif config.stages is not None:
        try:
            even_partition(layers, config.stages)
        except InfeasiblePlan as error:
            raise InfeasiblePlan(f"{error}. If its layers run several times in a forward, list layers_per_stage "
                                 "instead") from None
    elif config.topology not in (None, "detect"):  # what is detected is detected once, for the plan
        check_size(topology_by_name(config.topology), ranks)


def check_size(topology: Topology, ranks: int) -> None:
    """Raises TopologyError if there are fewer GPUs than ranks."""
    if topology.size < ranks:
        raise TopologyError(f"topology {topology.name!r} has {topology.size} GPUs, but the job has {ranks} ranks. Start "
                            f"{topology.size} at most, or name a larger one in \"mobius\": {{\"topology\": ...}}")

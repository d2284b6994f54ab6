"""What a task costs on a topology: compute seconds from the profile, bytes over the links they cross.

Links are named: ``("in", gpu)`` and ``("out", gpu)`` are a GPU's own link towards and away from it,
``("root in", root)`` and ``("root out", root)`` what a root complex's GPUs share, and ``("peer", gpu)`` a GPU's
connection to the others where there is one.
"""

from typing import Callable, Dict, List, Optional, Sequence, Tuple

from mobius_ds.inputs.profile import LayerProfile, ModelProfile
from mobius_ds.inputs.topology import Topology
from mobius_ds.schedule.plan import Plan
from mobius_ds.schedule.tasks import Kind, Task
from mobius_ds.simulation.simulator import Cost, Link

Costs = Callable[[Task], Cost]


def bandwidths(topology: Topology) -> Dict[Link, float]:
    """Bytes/s of every link of a topology."""
    links: Dict[Link, float] = {}
    for gpu, bandwidth in enumerate(topology.link_bandwidth):
        links["in", gpu] = links["out", gpu] = bandwidth
        if topology.peer_bandwidth is not None:
            links["peer", gpu] = topology.peer_bandwidth
    for root, bandwidth in enumerate(topology.root_bandwidth):
        links["root in", root] = links["root out", root] = bandwidth
    return links


def to_gpu(topology: Topology, gpu: int, nbytes: float) -> Tuple[Tuple[Link, float], ...]:
    """The links from DRAM to a GPU."""
    return (("in", gpu), nbytes), (("root in", topology.root_of[gpu]), nbytes)


def to_dram(topology: Topology, gpu: int, nbytes: float) -> Tuple[Tuple[Link, float], ...]:
    """The links from a GPU to DRAM."""
    return (("out", gpu), nbytes), (("root out", topology.root_of[gpu]), nbytes)


def between_gpus(topology: Topology, gpu: int, nbytes: float) -> Tuple[Tuple[Link, float], ...]:
    """The links of a GPU's part in a collective that brings it bytes of the others and them as many of its own."""
    if topology.peer_bandwidth is not None:
        return ((("peer", gpu), nbytes),)
    return to_gpu(topology, gpu, nbytes) + to_dram(topology, gpu, nbytes)


def speed(topology: Topology, gpu: int) -> float:
    """How fast a GPU is, relative to the topology's first one, for which profiles are made."""
    return topology.gpus[gpu].flops / topology.gpus[0].flops


def stages_of(profile: ModelProfile, plan: Plan) -> List[Sequence[LayerProfile]]:
    """The layers of each stage."""
    return [profile.layers[first:first + count] for first, count in zip(plan.first_layers(), plan.layers_per_stage)]


def compute_cost(task: Task, stages: Sequence[Sequence[LayerProfile]], topology: Topology) -> Optional[Cost]:
    """The cost of a stage's forward or backward of one microbatch on the task's GPU; None for any other task."""
    if task.key.kind is Kind.FORWARD:
        seconds = sum(layer.forward_seconds for layer in stages[task.key.stage])
    elif task.key.kind is Kind.BACKWARD:
        seconds = sum(layer.backward_seconds for layer in stages[task.key.stage])
    else:
        return None
    return Cost(seconds / speed(topology, task.gpu))


def mobius_costs(profile: ModelProfile, topology: Topology, plan: Plan) -> Costs:
    """Costs of the tasks of Mobius' sweeps. Each transfer's bytes are the task's own."""
    stages = stages_of(profile, plan)

    def cost(task: Task) -> Cost:
        return compute_cost(task, stages, topology) \
            or Cost(0.0, (to_dram if task.is_outward else to_gpu)(topology, task.gpu, task.nbytes))

    return cost


def zero3_costs(layers: Sequence[LayerProfile], topology: Topology) -> Costs:
    """Costs of ZeRO-3 offload's tasks.

    A gather brings a GPU its own shard from DRAM and the others' from them, and makes it forward what the ring
    asks of it; a reduction the other way round. Between GPUs bytes cross the direct connection where there is one,
    and otherwise the links of both GPUs through DRAM.
    """
    others = (topology.size - 1) / topology.size
    single = [[layer] for layer in layers]

    def cost(task: Task) -> Cost:
        shard = (to_gpu if task.key.kind is Kind.GATHER else to_dram)(topology, task.gpu, task.nbytes / topology.size)
        return compute_cost(task, single, topology) \
            or Cost(0.0, _summed(shard + between_gpus(topology, task.gpu, others * task.nbytes)))

    return cost


def collective_costs(layers: Sequence[LayerProfile], topology: Topology) -> Costs:
    """Costs of the same tasks where the GPUs' memory holds everything: all their bytes go from GPU to GPU."""
    single = [[layer] for layer in layers]

    def cost(task: Task) -> Cost:
        return compute_cost(task, single, topology) or Cost(0.0, between_gpus(topology, task.gpu, task.nbytes))

    return cost


def pipeline_costs(profile: ModelProfile, topology: Topology, plan: Plan) -> Costs:
    """Costs of a pipeline whose stages stay on their GPUs: a hop goes out to DRAM and in again, or directly."""
    stages = stages_of(profile, plan)

    def cost(task: Task) -> Cost:
        computing = compute_cost(task, stages, topology)
        if computing is not None:
            return computing
        if topology.peer_bandwidth is not None:
            return Cost(0.0, ((("peer", task.gpu), task.nbytes),))
        target = task.key.stage + (1 if task.key.kind is Kind.GIVE_ACTIVATIONS else -1)
        return Cost(0.0, to_dram(topology, task.gpu, task.nbytes)
                    + to_gpu(topology, plan.gpu_of_stage[target], task.nbytes))

    return cost


def _summed(crossing: Sequence[Tuple[Link, float]]) -> Tuple[Tuple[Link, float], ...]:
    total: Dict[Link, float] = {}
    for link, nbytes in crossing:
        total[link] = total.get(link, 0.0) + nbytes
    return tuple(total.items())

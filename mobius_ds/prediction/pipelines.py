"""What a step of other pipelines would take: GPipe's and RoundPipe's."""

from dataclasses import replace
from typing import List, Optional, Sequence

from mobius_ds.inputs.profile import LayerProfile, ModelProfile
from mobius_ds.inputs.topology import Topology
from mobius_ds.partition.problem import problem_of
from mobius_ds.prediction.prediction import Prediction, predicted
from mobius_ds.prediction.zero import ON_GPU_BYTES_PER_PARAMETER
from mobius_ds.schedule.peers import gpipe_schedule, roundpipe_schedule
from mobius_ds.schedule.plan import Plan, even_partition
from mobius_ds.schedule.tasks import DEPTH, Kind, Task
from mobius_ds.simulation.costs import bandwidths, pipeline_costs, stages_of
from mobius_ds.simulation.simulator import Cost


def predict_gpipe(profile: ModelProfile, topology: Topology, microbatches: Optional[int] = None) -> Prediction:
    """GPipe: one stage per GPU, everything in GPU memory, activations recomputed."""
    microbatches = microbatches or topology.size
    plan = Plan(topology.size, even_partition(len(profile.layers), topology.size), tuple(range(topology.size)))
    memory, stages = [], stages_of(profile, plan)
    for stage in stages:
        parameters = sum(layer.weight_bytes for layer in stage) / 2
        kept = microbatches * stage[0].boundary_bytes
        memory.append(int(ON_GPU_BYTES_PER_PARAMETER * parameters) + kept + max(layer.working_bytes for layer in stage))
    schedule = gpipe_schedule(topology.size, microbatches, [stage[-1].boundary_bytes for stage in stages])
    return predicted("gpipe", [schedule], pipeline_costs(profile, topology, plan), bandwidths(topology), topology, 0.0,
                     memory)


def predict_roundpipe(profile: ModelProfile, topology: Topology, microbatches: Optional[int] = None,
                      hop_seconds: float = 0.0) -> Prediction:
    """RoundPipe, its transfers hidden as it promises: what is left is compute, its order, and hops.

    The last layer is its fused head. Stages are cut so that a forward stage takes as long as a backward one; of
    backward stages of one to four layers, the size with the shortest step.

    Args:
        microbatches: default as many as GPUs, which is also what one of its rounds takes.
        hop_seconds: what a boundary activation takes from one stage to the next.
    """
    rounds, left = divmod(microbatches or topology.size, topology.size)
    if left:
        raise ValueError(f"RoundPipe's rounds have {topology.size} micro-batches, which do not divide {microbatches}")
    candidates = [_roundpipe(profile, topology, size, rounds, hop_seconds) for size in (1, 2, 3, 4)]
    return min(candidates, key=lambda candidate: candidate.sweep_seconds)


def _roundpipe(profile: ModelProfile, topology: Topology, size: int, rounds: int, hop_seconds: float) -> Prediction:
    body, head = profile.layers[:-1], profile.layers[-1]
    again = sum(layer.backward_seconds for layer in body) / sum(layer.forward_seconds for layer in body)
    forward, backward = _cut(body, max(1, round(size * again))), _cut(body, size)[::-1]
    per_round = len(forward) + 1 + len(backward)

    def cost(task: Task) -> Cost:
        kind, number = task.key.kind, task.key.stage % per_round
        if kind is Kind.FORWARD:
            return Cost(sum(layer.forward_seconds for layer in forward[number]))
        if kind is Kind.GIVE_ACTIVATIONS:
            return Cost(hop_seconds)
        if number == len(forward):  # forward and backward at once, nothing recomputed
            return Cost(head.backward_seconds)
        stage = backward[number - len(forward) - 1]
        if kind is Kind.RECOMPUTE:
            return Cost(sum(layer.forward_seconds for layer in stage))
        return Cost(sum(layer.backward_seconds - layer.forward_seconds for layer in stage))

    schedule = roundpipe_schedule(topology.size, len(forward), len(backward) + 1, topology.size, rounds)
    largest = max(sum(layer.weight_bytes for layer in stage) for stage in (*forward, *backward, [head]))
    memory = DEPTH * largest + max(layer.working_bytes for layer in profile.layers)
    update = sum(map(problem_of(profile, topology, topology.size).update_seconds, profile.layers)) / topology.size
    prediction = predicted("roundpipe", [schedule], cost, {}, topology, update, [memory] * topology.size)
    # Every round copies the weights in for forward and backward; gradients leave once.
    moved = {"parameters_in": 2 * rounds * profile.weight_bytes,
             "gradients_out": sum(layer.gradient_bytes for layer in profile.layers)}
    return replace(prediction, bytes_by_category=moved)


def _cut(layers: Sequence[LayerProfile], size: int) -> List[Sequence[LayerProfile]]:
    return [layers[start:start + size] for start in range(0, len(layers), size)]

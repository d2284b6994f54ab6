"""What a step will take on a topology: time, bytes, memory, under Mobius and under its peers, by one simulator.

Every prediction is of one optimizer step with as many samples for everybody: N ranks with one micro-batch each.
The CPU optimizer follows the step where one is used (Mobius, ZeRO-3 offload, RoundPipe), at the same speed for all;
the others keep their optimizer state on the GPUs and update there, in no time.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from mobius_ds.planning.costs import bandwidths, collective_costs, mobius_costs, pipeline_costs, stages_of, zero3_costs
from mobius_ds.planning.exposure import Distribution, Figures, distribution, figures
from mobius_ds.planning.partition_cost import gpu_memory, problem_of, step_seconds
from mobius_ds.planning.peers import gpipe_schedule, roundpipe_schedule, zero3_offload_schedule
from mobius_ds.planning.plan import Plan, even_partition
from mobius_ds.planning.profile import LayerProfile, ModelProfile
from mobius_ds.planning.schedule import DEPTH, Kind, Task, Volumes, backward_schedule, forward_schedule
from mobius_ds.planning.simulator import Cost, Timeline, simulate
from mobius_ds.planning.steps import Step, in_turn
from mobius_ds.planning.topology import Topology

STATE_BYTES_PER_PARAMETER = 14
"""What a trained parameter takes on GPUs that hold its training state: 16-bit gradient, fp32 master, two moments."""
ON_GPU_BYTES_PER_PARAMETER = 2 + STATE_BYTES_PER_PARAMETER
"""What a trained parameter takes on a GPU that holds everything: its 16-bit weight as well."""


@dataclass(frozen=True)
class Prediction:
    """One predicted step."""

    name: str
    sweeps: Tuple[Tuple[str, Timeline], ...]
    """Its parts, one after the other."""
    update_seconds: float
    """Of the CPU optimizer, after them."""
    bytes_by_category: Dict[str, int]
    """Over all GPUs."""
    memory_bytes: Tuple[int, ...]
    """The most each GPU holds."""
    missing_bytes: int
    """By how much the fullest GPU's memory is exceeded; zero if the step fits."""
    gpus: int

    @property
    def sweep_seconds(self) -> float:
        """Without the optimizer."""
        return sum(timeline.makespan for _, timeline in self.sweeps)

    @property
    def step_seconds(self) -> float:
        """The whole step."""
        return self.sweep_seconds + self.update_seconds

    @property
    def busiest_compute_seconds(self) -> float:
        """Compute of the GPU that computes most."""
        return max(sum(timeline.compute_seconds(gpu) for _, timeline in self.sweeps) for gpu in range(self.gpus))

    @property
    def exposed_share(self) -> float:
        """The share of the sweeps in which the busiest GPU does not compute: exposed communication and bubbles."""
        return 1 - self.busiest_compute_seconds / self.sweep_seconds

    @property
    def step(self) -> Step:
        """The step as it was played."""
        return in_turn(self.sweeps, self.update_seconds)

    @cached_property
    def figures(self) -> Figures:
        """Where its time goes."""
        return figures(self.step, self.gpus)

    @property
    def bubble(self) -> float:
        """The share of all GPUs' time in which they do not compute."""
        return self.figures.bubble

    @property
    def fits(self) -> bool:
        """Whether every GPU's memory suffices."""
        return self.missing_bytes <= 0

    def bandwidth_distribution(self) -> Distribution:
        """At which rates weights and gradients moved."""
        return distribution((timeline for _, timeline in self.sweeps), ("parameters_in", "gradients_out"))

    def share_of_bytes_below(self, rate: float) -> float:
        """The share of weight and gradient bytes that moved at less than ``rate`` bytes/s."""
        return max((share for speed, share in self.bandwidth_distribution() if speed < rate), default=0.0)


def profile_volumes(profile: ModelProfile, plan: Plan, microbatches: int) -> Volumes:
    """The bytes of a sweep, from the profile. Inputs are too small to matter here."""
    stages = stages_of(profile, plan)
    made = [stage[-1].boundary_bytes for stage in stages]
    received = [0] + made[:-1]

    def each(values: List[int]) -> List[List[int]]:
        return [[value] * microbatches for value in values]

    return Volumes([sum(layer.weight_bytes for layer in stage) for stage in stages],
                   [sum(layer.gradient_bytes for layer in stage) for stage in stages],
                   [0] * microbatches, each(received), each(made), each(made), each(received))


def predict_mobius(profile: ModelProfile, topology: Topology, plan: Plan,
                   microbatches: Optional[int] = None, slots: int = DEPTH) -> Prediction:
    """A Mobius step under a plan.

    Args:
        microbatches: default as many as GPUs, as in the paper.
        slots: how many stages' weights a GPU holds at once; with one, nothing is prefetched.
    """
    microbatches = microbatches or topology.size
    home = [microbatch % topology.size for microbatch in range(microbatches)]
    volumes, costs, links = profile_volumes(profile, plan, microbatches), mobius_costs(profile, topology, plan), \
        bandwidths(topology)
    schedules = [forward_schedule(plan, home, volumes, slots), backward_schedule(plan, home, volumes, {}, slots=slots)]
    problem = problem_of(profile, topology, microbatches, mapping=lambda stages: plan.gpu_of_stage)
    return _prediction("mobius", schedules, costs, links, topology,
                       step_seconds(problem, plan.layers_per_stage).update,
                       [need.total for need in gpu_memory(problem, plan.layers_per_stage)])


def predict_zero3_offload(profile: ModelProfile, topology: Topology) -> Prediction:
    """A ZeRO-3 step with everything offloaded: each GPU runs the whole model on its own micro-batch."""
    memory = _gathered_bytes(profile) + _activation_bytes(profile)
    problem = problem_of(profile, topology, topology.size)
    update = sum(map(problem.update_seconds, profile.layers)) / topology.size  # every rank its shard, all at once
    return _prediction("zero3-offload", [zero3_offload_schedule(profile.layers, topology.size)],
                       zero3_costs(profile.layers, topology), bandwidths(topology), topology, update,
                       [memory] * topology.size)


def offloaded_bytes(profile: ModelProfile) -> int:
    """DRAM for weights, and for fp32 masters, gradients and two moments of what is trained; of ZeRO-3 and Mobius alike."""
    return profile.weight_bytes + 16 * _trained(profile)


def predict_zero3_on_gpu(profile: ModelProfile, topology: Topology) -> Prediction:
    """A ZeRO-3 step without offload: the GPUs' memory holds the model and its training state, a share each.

    Assumes that ring collectives carry all bytes and reach the full rate of the direct connection (or of PCIe, through
    DRAM, without one); that a layer is gathered while the one before runs; that activations are checkpointed.
    """
    shards = (2 * profile.parameters + STATE_BYTES_PER_PARAMETER * _trained(profile)) // topology.size
    return _on_gpu("zero3-on-gpu", _of_others(profile, topology, gathered=1, reduced=1), profile, topology,
                   shards + _gathered_bytes(profile))


def predict_zero2_on_gpu(profile: ModelProfile, topology: Topology) -> Prediction:
    """A ZeRO-2 step without offload: every GPU holds the weights, and a share of gradients and optimizer state.

    Assumes what ``predict_zero3_on_gpu`` does, and that new weights are gathered as gradients are reduced, beside the
    backward: as many bytes as DDP moves.
    """
    memory = 2 * profile.parameters + STATE_BYTES_PER_PARAMETER * _trained(profile) // topology.size
    return _on_gpu("zero2-on-gpu", _of_others(profile, topology, gathered=0, reduced=2), profile, topology, memory)


def predict_ddp(profile: ModelProfile, topology: Topology) -> Prediction:
    """A step of plain data parallelism: every GPU holds everything and averages the gradients.

    Assumes that a layer's gradient is averaged, which moves it twice, while the layers below run backward; that
    activations are checkpointed.
    """
    memory = 2 * profile.parameters + STATE_BYTES_PER_PARAMETER * _trained(profile)
    return _on_gpu("ddp", _of_others(profile, topology, gathered=0, reduced=2), profile, topology, memory)


def accumulated(prediction: Prediction, micro_batches: int) -> Prediction:
    """The step of so many micro-batches per rank, where each is swept by itself, as a loop over forward and backward does.

    For DDP it is an upper bound: DDP can wait with its reduction for the last one.
    """
    moved = {category: micro_batches * nbytes for category, nbytes in prediction.bytes_by_category.items()}
    return replace(prediction, sweeps=micro_batches * prediction.sweeps, bytes_by_category=moved)


def _trained(profile: ModelProfile) -> int:
    """Parameters that are trained; tied ones once."""
    return min(sum(layer.gradient_bytes for layer in profile.layers) // 2, profile.parameters)


def _gathered_bytes(profile: ModelProfile) -> int:
    """What a GPU holds of layers that come and go: two layers' weights and one's gradients."""
    weights, gradients = zip(*((layer.weight_bytes, layer.gradient_bytes) for layer in profile.layers))
    return DEPTH * max(weights) + max(gradients)


def _activation_bytes(profile: ModelProfile) -> int:
    """What a GPU holds that runs the whole model on one micro-batch: checkpoints, and what one layer works in."""
    return sum(layer.boundary_bytes for layer in profile.layers) + max(layer.working_bytes for layer in profile.layers)


def _of_others(profile: ModelProfile, topology: Topology, gathered: int, reduced: int) -> List[LayerProfile]:
    """The layers with the bytes that one GPU gets of the others: times a weight is gathered, and a gradient moved."""
    others = (topology.size - 1) / topology.size
    return [replace(layer, weight_bytes=int(gathered * others * layer.weight_bytes),
                    gradient_bytes=int(reduced * others * layer.gradient_bytes)) for layer in profile.layers]


def _on_gpu(name: str, layers: Sequence[LayerProfile], profile: ModelProfile, topology: Topology,
            state_bytes: int) -> Prediction:
    return _prediction(name, [zero3_offload_schedule(layers, topology.size)], collective_costs(layers, topology),
                       bandwidths(topology), topology, 0.0, [state_bytes + _activation_bytes(profile)] * topology.size)


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
    return _prediction("gpipe", [schedule], pipeline_costs(profile, topology, plan), bandwidths(topology), topology, 0.0,
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
    prediction = _prediction("roundpipe", [schedule], cost, {}, topology, update, [memory] * topology.size)
    # Every round copies the weights in for forward and backward; gradients leave once.
    moved = {"parameters_in": 2 * rounds * profile.weight_bytes,
             "gradients_out": sum(layer.gradient_bytes for layer in profile.layers)}
    return replace(prediction, bytes_by_category=moved)


def _cut(layers: Sequence[LayerProfile], size: int) -> List[Sequence[LayerProfile]]:
    return [layers[start:start + size] for start in range(0, len(layers), size)]


def _prediction(name: str, schedules: Sequence, costs: Callable, links: Dict, topology: Topology, update: float,
                memory: Sequence[int]) -> Prediction:
    moved: Dict[str, int] = {}
    for schedule in schedules:
        for category, nbytes in schedule.bytes_by_category().items():
            moved[category] = moved.get(category, 0) + nbytes
    sweeps = tuple((schedule.name, simulate(schedule, costs, links)) for schedule in schedules)
    missing = max(need - gpu.memory_bytes for need, gpu in zip(memory, topology.gpus))
    return Prediction(name, sweeps, update, moved, tuple(memory), max(0, missing), topology.size)

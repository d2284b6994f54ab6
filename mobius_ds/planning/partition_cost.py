"""What a partition costs: the end of its step and its memory, from the rules that the schedule follows.

One evaluator judges every partition, whoever proposes it; the MIP states the same rules as linear constraints.

Note [first and last]. All microbatches cost the same and a stage takes them in order, so of its M starts only the
first and the last are needed. A start is the length of the longest chain of tasks before it. A chain to the last
microbatch advances M - 1 times from one microbatch to the next, each time at the cost of the stage (or transfer) it
is at, and so is longest when it advances at its slowest one only: either here, all M - 1 times after this stage's
first start, or wholly before, and then it comes from the last start of the stage before. This holds as long as no
stage waits for its two boundary buffers, that is as long as a boundary activation's transfers take less than a
microbatch's compute and than the copy of a stage's weights.
"""

from dataclasses import dataclass
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

from mobius_ds.planning.mapping import sequential
from mobius_ds.planning.profile import LayerProfile, ModelProfile
from mobius_ds.planning.schedule import DEPTH
from mobius_ds.planning.topology import Topology

FP32_BYTES = 4
BOUNDARY_BUFFERS = 3 * DEPTH
"""Two of each that a stage has at once: activations and gradients on the way in, and gradients on the way out."""


class GpuCost(NamedTuple):
    """What partitioning has to know of a GPU."""

    memory_bytes: int
    bandwidth: float
    """Bytes/s between it and DRAM, in each direction, that its transfers can count on."""
    slowdown: float = 1.0
    """Its compute seconds over those of the GPU that was profiled."""


Mapping = Callable[[int], Tuple[int, ...]]
"""Gives the GPU of each stage, for a number of stages."""


@dataclass(frozen=True)
class Problem:
    """A model to be partitioned, and where it runs."""

    layers: Tuple[LayerProfile, ...]
    gpus: Tuple[GpuCost, ...]
    microbatches: int
    mapping: Mapping
    hop_seconds: float = 0.0
    """What a boundary activation takes from one stage to the next beside the time of its bytes."""
    gradient_itemsize: int = 2
    """Bytes of a parameter's gradient as copied to DRAM. On the GPU it is accumulated in fp32."""
    update_bandwidth: float = float("inf")
    """DRAM bytes/s at which all CPU cores together run the optimizer; each GPU's rank has its share of the cores."""
    update_bytes_per_parameter: float = 30.0
    """DRAM traffic of Adam: reads fp32 master, gradient and two moments, writes master, moments and 16-bit weight."""

    def __post_init__(self):
        if not self.layers or not self.gpus or self.microbatches < 1:
            raise ValueError(f"nothing to partition: {len(self.layers)} layers, {len(self.gpus)} GPUs, "
                             f"{self.microbatches} microbatches; each must be at least one")
        for number, gpu in enumerate(self.gpus):
            if not (gpu.bandwidth > 0 and gpu.slowdown > 0):
                raise ValueError(f"GPU {number} has a bandwidth of {gpu.bandwidth} bytes/s and a slowdown of "
                                 f"{gpu.slowdown}; both must be positive")

    @property
    def fewest_stages(self) -> int:
        """Every GPU runs a stage, if there are layers enough."""
        return min(len(self.gpus), len(self.layers))

    def update_seconds(self, layer: LayerProfile) -> float:
        """Seconds one rank's share of the CPU takes to update a layer's trained parameters."""
        traffic = self.update_bytes_per_parameter * layer.gradient_bytes / self.gradient_itemsize
        return traffic * len(self.gpus) / self.update_bandwidth

    def accumulator_bytes(self, layer: LayerProfile) -> int:
        """Bytes of a layer's weight gradients on the GPU."""
        return layer.gradient_bytes * FP32_BYTES // self.gradient_itemsize


def problem_of(model: ModelProfile, topology: Topology, microbatches: int, mapping: Optional[Mapping] = None,
               bandwidth: Optional[Callable[[int], float]] = None, **rest) -> Problem:
    """The problem of partitioning a model, profiled on the topology's GPU 0, over that topology's GPUs.

    Args:
        mapping: the GPU of each stage; by default stage i runs on GPU i mod N.
        bandwidth: bytes/s a GPU's transfers can count on; by default what is left when its whole root complex is busy.
        rest: other fields of the problem.
    """
    bandwidth = bandwidth or topology.share_of_root
    gpus = tuple(GpuCost(gpu.memory_bytes, bandwidth(number), topology.gpus[0].flops / gpu.flops)
                 for number, gpu in enumerate(topology.gpus))
    mapping = mapping or (lambda stages: sequential(stages, topology.size))
    return Problem(model.layers, gpus, microbatches, mapping, update_bandwidth=topology.update_bandwidth, **rest)


class StepSeconds(NamedTuple):
    """The parts of a step."""

    forward: float
    backward: float
    """With the copies of weight gradients to DRAM."""
    update: float

    @property
    def total(self) -> float:
        """Seconds from the first weight copied in to the last parameter updated."""
        return sum(self)


class _Stage(NamedTuple):
    gpu: int
    layers: Sequence[LayerProfile]
    received_bytes: int
    made_bytes: int


def _stages(problem: Problem, partition: Sequence[int], of: Optional[int] = None) -> List[_Stage]:
    stages, start = [], 0
    for gpu, count in zip(problem.mapping(of or len(partition)), partition):
        layers = problem.layers[start:start + count]
        received = problem.layers[start - 1].boundary_bytes if start else 0
        stages.append(_Stage(gpu, layers, received, layers[-1].boundary_bytes))
        start += count
    return stages


class Arrival(NamedTuple):
    """How boundary activations, or their gradients, come from one stage to the next: out to DRAM, then in again."""

    delay: float
    """Seconds on the way."""
    pace: float
    """Seconds between two microbatches at least: the slower of the two streams that carry them."""


NOWHERE = Arrival(0.0, 0.0)


class _Task(NamedTuple):
    """What a stage does in a sweep, in seconds: its copy in, its compute per microbatch, its copy out."""

    gpu: int
    copy: float
    compute: float
    offload: float
    arrival: Arrival


def step_seconds(problem: Problem, partition: Sequence[int]) -> StepSeconds:
    """The step of a partition, as the schedule runs it when every GPU has the bandwidth that the problem says.

    Args:
        partition: the number of layers in each stage.
    """
    stages = _stages(problem, partition)
    forward, backward = [], []
    for number, stage in enumerate(stages):
        gpu = problem.gpus[stage.gpu]
        weights = sum(layer.weight_bytes for layer in stage.layers) / gpu.bandwidth
        compute = gpu.slowdown * sum(layer.forward_seconds for layer in stage.layers)
        arrival = NOWHERE
        if number > 0:
            source = problem.gpus[stages[number - 1].gpu]
            out, into = stage.received_bytes / source.bandwidth, stage.received_bytes / gpu.bandwidth
            arrival = Arrival(problem.hop_seconds + out + into, max(out, into))
        forward.append(_Task(stage.gpu, weights, compute, 0.0, arrival))

        compute = gpu.slowdown * sum(layer.backward_seconds for layer in stage.layers)
        gradients = sum(layer.gradient_bytes for layer in stage.layers) / gpu.bandwidth
        arrival = NOWHERE
        if number < len(stages) - 1:
            source = problem.gpus[stages[number + 1].gpu]
            out, into = stage.made_bytes / source.bandwidth, stage.made_bytes / gpu.bandwidth
            # One stream loads gradients and, for the recomputation, boundary activations.
            arrival = Arrival(problem.hop_seconds + out + into, max(out, into + stage.received_bytes / gpu.bandwidth))
        backward.append(_Task(stage.gpu, weights, compute, gradients, arrival))
    update = [0.0] * len(problem.gpus)
    for stage in stages:
        update[stage.gpu] += sum(problem.update_seconds(layer) for layer in stage.layers)
    return StepSeconds(_sweep(forward, problem.microbatches), _sweep(backward[::-1], problem.microbatches), max(update))


def _sweep(tasks: Sequence[_Task], microbatches: int) -> float:
    """Seconds until a sweep is over on all GPUs."""
    computed = {task.gpu: [0.0] * DEPTH for task in tasks}  # when each GPU's stages were done, latest last
    offloaded = {task.gpu: [0.0] * DEPTH for task in tasks}
    copied = {task.gpu: 0.0 for task in tasks}
    first_left = last_left = 0.0  # when the first and last microbatch left the stage before
    for task in tasks:
        done, drained = computed[task.gpu], offloaded[task.gpu]
        copied[task.gpu] = max(copied[task.gpu], done[-DEPTH]) + task.copy
        arrived = first_left + task.arrival.delay
        first = max(copied[task.gpu], done[-1], drained[-DEPTH], arrived)
        last = max(first + (microbatches - 1) * task.compute, arrived + (microbatches - 1) * task.arrival.pace,
                   last_left + task.arrival.delay)
        first_left, last_left = first + task.compute, last + task.compute
        done.append(last_left)
        drained.append(max(drained[-1], last_left) + task.offload)
    return max([last_left] + [drained[-1] for drained in offloaded.values()])


class GpuMemory(NamedTuple):
    """The device memory a GPU's stages need, in bytes: largest weights, gradients, boundary activations, working memory."""

    weights: int
    gradients: int
    boundary: int
    working: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def gpu_memory(problem: Problem, partition: Sequence[int], of: Optional[int] = None) -> List[GpuMemory]:
    """What each GPU must hold: two slots, two gradient buffers, boundary buffers, and what the largest layer works in.

    Slots and buffers are as large as the largest stage of the GPU needs, each by itself.

    Args:
        of: the number of stages, if ``partition`` is only the first of them.
    """
    need = [GpuMemory(0, 0, 0, 0)] * len(problem.gpus)
    for stage in _stages(problem, partition, of):
        own = GpuMemory(DEPTH * sum(layer.weight_bytes for layer in stage.layers),
                        DEPTH * sum(problem.accumulator_bytes(layer) for layer in stage.layers),
                        BOUNDARY_BUFFERS * max(stage.received_bytes, stage.made_bytes),
                        max(layer.working_bytes for layer in stage.layers))
        need[stage.gpu] = GpuMemory(*map(max, need[stage.gpu], own))
    return need


def shortfall(problem: Problem, partition: Sequence[int], of: Optional[int] = None) -> int:
    """Bytes missing on the GPU that a partition overfills most; zero or less if it fits. Arguments as for `gpu_memory`."""
    return max(need.total - gpu.memory_bytes for need, gpu in zip(gpu_memory(problem, partition, of), problem.gpus))


def describe_shortfall(problem: Problem, partition: Sequence[int]) -> str:
    """Which GPU a partition overfills most, with which of its stages, and by how many bytes."""
    needs = gpu_memory(problem, partition)
    number = max(range(len(needs)), key=lambda gpu: needs[gpu].total - problem.gpus[gpu].memory_bytes)
    need, memory = needs[number], problem.gpus[number].memory_bytes
    heaviest, start, largest = -1, 0, ""
    for stage, (count, gpu) in enumerate(zip(partition, problem.mapping(len(partition)))):
        layers = problem.layers[start:start + count]
        weight = sum(layer.weight_bytes + problem.accumulator_bytes(layer) for layer in layers)
        if gpu == number and weight > heaviest:
            heaviest = weight
            names = " to ".join(dict.fromkeys((layers[0].name, layers[-1].name)))
            numbers = f"layer {start}" if count == 1 else f"layers {start} to {start + count - 1}"
            largest = f"stage {stage} ({numbers}, {names})"
        start += count
    return (f"with {len(partition)} stages, {need.total - memory} bytes are missing on GPU {number}, whose largest is "
            f"{largest}. It needs {need.weights} bytes for two slots of weights, {need.gradients} for two fp32 gradients, "
            f"{need.boundary} for boundary activations and {need.working} to work in, {need.total} together, but has "
            f"{memory}. Use smaller micro-batches, smaller layers, frozen parameters, or a GPU with more memory.")

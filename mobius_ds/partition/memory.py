"""The device memory a partition needs, and which GPU it overfills."""

from typing import List, NamedTuple, Optional, Sequence

from mobius_ds.partition.problem import Problem, cut
from mobius_ds.schedule.tasks import DEPTH

BOUNDARY_BUFFERS = 3 * DEPTH
"""Two of each that a stage has at once: activations and gradients on the way in, and gradients on the way out."""


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
    for stage in cut(problem, partition, of):
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

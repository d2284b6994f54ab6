"""The problem of partitioning: a model's layers, and what partitioning has to know of the GPUs that run them."""

from dataclasses import dataclass
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

from mobius_ds.inputs.profile import LayerProfile, ModelProfile
from mobius_ds.inputs.topology import Topology
from mobius_ds.partition.mapping import sequential

FP32_BYTES = 4


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


class CutStage(NamedTuple):
    """One stage of a partition."""

    gpu: int
    layers: Sequence[LayerProfile]
    received_bytes: int
    """Of the boundary activation it starts from, for one microbatch."""
    made_bytes: int
    """Of the one it makes."""


def cut(problem: Problem, partition: Sequence[int], of: Optional[int] = None) -> List[CutStage]:
    """The stages of a partition.

    Args:
        partition: the number of layers in each stage.
        of: the number of stages, if ``partition`` is only the first of them.
    """
    stages, start = [], 0
    for gpu, count in zip(problem.mapping(of or len(partition)), partition):
        layers = problem.layers[start:start + count]
        received = problem.layers[start - 1].boundary_bytes if start else 0
        stages.append(CutStage(gpu, layers, received, layers[-1].boundary_bytes))
        start += count
    return stages

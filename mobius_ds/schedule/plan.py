"""The plan: how many layers each stage has, and which GPU runs which stage."""

from dataclasses import dataclass
from typing import Callable, List, Optional, Sequence, Tuple, Union

STAGES_PER_GPU = 2
"""Stages per GPU when nothing else decides. Two are the fewest that let one be copied in while another runs."""


class InfeasiblePlan(ValueError):
    """No partition satisfies the request; the message says by how much it fails."""


@dataclass(frozen=True)
class Plan:
    """A partition of layers into stages, and their mapping to GPUs.

    Stage ``i`` holds ``layers_per_stage[i]`` consecutive layers and runs on GPU ``gpu_of_stage[i]``.
    """

    gpus: int
    layers_per_stage: Tuple[int, ...]
    gpu_of_stage: Tuple[int, ...]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.layers_per_stage)

    @property
    def last_stage(self) -> int:
        """The stage whose forward makes the model's outputs."""
        return self.stages - 1

    def first_layers(self) -> Tuple[int, ...]:
        """The number of each stage's first layer."""
        return tuple(sum(self.layers_per_stage[:stage]) for stage in range(self.stages))

    def stages_of(self, gpu: int) -> Tuple[int, ...]:
        """The stages of one GPU, in order."""
        return tuple(stage for stage, owner in enumerate(self.gpu_of_stage) if owner == gpu)

    def __str__(self) -> str:
        return " | ".join(f"stage {stage}: {count} layer{'s' * (count > 1)} on GPU {gpu}"
                          for stage, (count, gpu) in enumerate(zip(self.layers_per_stage, self.gpu_of_stage)))


def even_partition(layers: int, stages: int) -> Tuple[int, ...]:
    """Cuts ``layers`` into ``stages`` stages whose sizes differ by at most one layer.

    Raises:
        InfeasiblePlan: there are fewer layers than stages.
    """
    if stages > layers:
        raise InfeasiblePlan(f"{stages} stages were asked for, but the model has only {layers} layers. Ask for {layers} "
                             "at most")
    small, larger = divmod(layers, stages)
    return tuple(small + (stage < larger) for stage in range(stages))


def make_plan(layers: int, gpus: int, stages: Optional[int] = None,
              layers_per_stage: Optional[Union[int, Sequence[int]]] = None,
              shortfall: Callable[[Tuple[int, ...]], int] = lambda partition: 0) -> Plan:
    """Partitions evenly, or as given by hand, and maps stage i to GPU i mod N.

    Args:
        layers: layers of the model.
        gpus: GPUs on this node.
        stages: number of stages, if fixed.
        layers_per_stage: layers in every stage, or in each, if fixed.
        shortfall: bytes by which a partition exceeds the device memory. While the number of stages is free
            it is raised until this is zero or every layer is a stage of its own.

    Raises:
        InfeasiblePlan: the numbers given by hand do not add up to the model's layers.
    """
    if isinstance(layers_per_stage, int):
        stages = -(-layers // layers_per_stage)
        partition = tuple(min(layers_per_stage, layers - start) for start in range(0, layers, layers_per_stage))
    elif layers_per_stage is not None:
        partition = tuple(layers_per_stage)
        if sum(partition) != layers:
            raise InfeasiblePlan(f"layers_per_stage adds up to {sum(partition)} layers, but the model has {layers} "
                                 "(counting what comes before, between and after its blocks). Make the numbers add up")
    elif stages is not None:
        partition = even_partition(layers, stages)
    else:
        partition = next(_growing(layers, min(layers, STAGES_PER_GPU * gpus), shortfall))
    return Plan(gpus, partition, tuple(stage % gpus for stage in range(len(partition))))


def _growing(layers: int, fewest: int, shortfall: Callable[[Tuple[int, ...]], int]):
    candidates: List[Tuple[int, ...]] = [even_partition(layers, stages) for stages in range(fewest, layers + 1)]
    yield from (partition for partition in candidates if shortfall(partition) <= 0)
    yield candidates[-1]

"""What a step will take on a topology: time, bytes, memory, under Mobius and under its peers, by one simulator.

Every prediction is of one optimizer step with as many samples for everybody: N ranks with one micro-batch each.
The CPU optimizer follows the step where one is used (Mobius, ZeRO-3 offload, RoundPipe), at the same speed for all;
the others keep their optimizer state on the GPUs and update there, in no time.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Callable, Dict, Sequence, Tuple

from mobius_ds.inputs.topology import Topology
from mobius_ds.simulation.exposure import Distribution, Figures, distribution, figures
from mobius_ds.simulation.simulator import Timeline, simulate
from mobius_ds.simulation.steps import Step, in_turn


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


def predicted(name: str, schedules: Sequence, costs: Callable, links: Dict, topology: Topology, update: float,
              memory: Sequence[int]) -> Prediction:
    """Plays an engine's schedules, one after the other.

    Args:
        costs: a task's cost.
        links: bytes/s of each.
        update: seconds of the CPU optimizer after them.
        memory: bytes that each GPU holds at most.
    """
    moved: Dict[str, int] = {}
    for schedule in schedules:
        for category, nbytes in schedule.bytes_by_category().items():
            moved[category] = moved.get(category, 0) + nbytes
    sweeps = tuple((schedule.name, simulate(schedule, costs, links)) for schedule in schedules)
    missing = max(need - gpu.memory_bytes for need, gpu in zip(memory, topology.gpus))
    return Prediction(name, sweeps, update, moved, tuple(memory), max(0, missing), topology.size)

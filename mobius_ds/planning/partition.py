"""The partition: how many layers each stage has (paper, section 3.2).

Heuristics propose partitions, the MIP improves on the best of them for every number of stages worth trying, and
`step_seconds` judges them all.
"""

import time
from dataclasses import dataclass
from typing import Dict, List, NamedTuple, Optional, Tuple

from mobius_ds.planning.partition_cost import Problem, StepSeconds, describe_shortfall, shortfall, step_seconds
from mobius_ds.planning.partition_mip import PartitionMip
from mobius_ds.planning.plan import InfeasiblePlan, even_partition

FIRST_SLICE = 2.0
"""Seconds the solver gets for one number of stages before others have their turn; twice as many each time after."""
ROUNDING = 1e-9
"""Relative: how far the solver's sums may be from the evaluator's."""


class Heuristic(NamedTuple):
    """A partition made by a simple rule."""

    name: str
    layers_per_stage: Optional[Tuple[int, ...]]
    """None if the rule finds none that fits the GPUs' memory."""
    seconds: float
    """Of a step; infinite without a partition."""


@dataclass(frozen=True)
class Partition:
    """The best partition found, and how it was found."""

    layers_per_stage: Tuple[int, ...]
    gpu_of_stage: Tuple[int, ...]
    step: StepSeconds
    """Predicted."""
    gap: float
    """No partition takes less than 1 - gap of this one's step."""
    solver_seconds: float
    heuristics: Tuple[Heuristic, ...]

    @property
    def beaten(self) -> Heuristic:
        """The best heuristic."""
        return min(self.heuristics, key=lambda heuristic: heuristic.seconds)

    @property
    def improvement(self) -> float:
        """The share of the best heuristic's step that this partition saves; 1 if none of them fits."""
        return 1 - self.step.total / self.beaten.seconds if self.beaten.seconds else 0.0


def max_stage(problem: Problem) -> Heuristic:
    """Every stage takes as many layers as its GPU can hold, though none of the first N leaves others without.

    A stage that fits in memory whole is cut into N all the same: a GPU without one would idle.
    """
    found = None
    for stages in range(problem.fewest_stages, len(problem.layers) + 1):
        filled = _fill(problem, stages)
        if len(filled) == stages and sum(filled) == len(problem.layers):
            found = filled
            break
    return _judge(problem, "max-stage", found)


def _fill(problem: Problem, stages: int) -> Tuple[int, ...]:
    """As many of ``stages`` stages as it takes, or as fit, filled one after another."""
    partition: Tuple[int, ...] = ()
    while len(partition) < stages and sum(partition) < len(problem.layers):
        left = len(problem.layers) - sum(partition)
        for count in range(-(-left // max(1, problem.fewest_stages - len(partition))), 0, -1):
            # Whatever the stages to come hold, this much is needed: a stage of a partition's beginning.
            if shortfall(problem, partition + (count,), stages) <= 0:
                partition += (count,)
                break
        else:
            return partition
    return partition


def min_stage(problem: Problem) -> Heuristic:
    """Every layer is a stage of its own."""
    return _judge(problem, "min-stage", (1,) * len(problem.layers))


def even(problem: Problem) -> Heuristic:
    """Stages differ by at most one layer; of all numbers of stages, the one with the shortest step."""
    candidates = [_judge(problem, "even", even_partition(len(problem.layers), stages))
                  for stages in range(problem.fewest_stages, len(problem.layers) + 1)]
    return min(candidates, key=lambda candidate: candidate.seconds)


def _judge(problem: Problem, name: str, partition: Optional[Tuple[int, ...]]) -> Heuristic:
    if partition is None or shortfall(problem, partition) > 0:
        return Heuristic(name, None, float("inf"))
    return Heuristic(name, partition, step_seconds(problem, partition).total)


def best_partition(problem: Problem, time_limit: float = 30.0, tolerance: float = 0.005) -> Partition:
    """Searches all partitions into N or more stages for the one with the shortest step.

    Args:
        time_limit: seconds after which the best found so far is returned.
        tolerance: the gap at which to stop searching; zero for the optimum.

    Raises:
        InfeasiblePlan: no partition fits the GPUs' memory, or none was found in time.
    """
    search = _Search(problem, time_limit, tolerance)
    search.run()
    if search.best is None:
        raise InfeasiblePlan(_why_none(problem, search.bound() == float("inf"), time_limit))
    return Partition(search.best, problem.mapping(len(search.best)), step_seconds(problem, search.best), search.gap(),
                     time.monotonic() - search.started, search.heuristics)


def _why_none(problem: Problem, proven: bool, time_limit: float) -> str:
    layers = len(problem.layers)
    closest = min((even_partition(layers, stages) for stages in range(problem.fewest_stages, layers + 1)),
                  key=lambda partition: shortfall(problem, partition))
    outcome = "no partition fits the GPUs' memory" if proven else \
        f"no partition that fits the GPUs' memory was found in {time_limit:g} seconds"
    return f"{outcome}. Of those with stages of even size, the closest: {describe_shortfall(problem, closest)}"


class _Search:
    """Gives the solver's time to the numbers of stages that may still hold a better partition, most promising first."""

    def __init__(self, problem: Problem, time_limit: float, tolerance: float):
        self.started = time.monotonic()
        self.heuristics = (max_stage(problem), min_stage(problem), even(problem))
        best = min(self.heuristics, key=lambda heuristic: heuristic.seconds)
        self.best, self.seconds = best.layers_per_stage, best.seconds
        self._problem, self._limit, self._tolerance = problem, time_limit, tolerance
        self._bounds: Dict[int, float] = dict.fromkeys(range(problem.fewest_stages, len(problem.layers) + 1), 0.0)
        self._programs: Dict[int, PartitionMip] = {}
        self._slices: Dict[int, float] = {}

    def bound(self) -> float:
        """Seconds below which no partition can be."""
        return min(self.seconds, min(self._bounds.values()))

    def gap(self) -> float:
        """The share of the best step that a better partition could save at most."""
        return 1 - self.bound() / self.seconds if self.seconds else 0.0

    def run(self) -> None:
        for stages in self._bounds:
            if self._left() <= 0:
                return
            self._programs[stages] = PartitionMip(self._problem, stages)
            self._bounds[stages] = self._programs[stages].relaxation()
        while self._left() > 0 and (promising := self._promising()):
            self._solve(min(promising, key=self._bounds.get))

    def _left(self) -> float:
        return self._limit - (time.monotonic() - self.started)

    def _target(self) -> float:
        """What a partition must take less than to be of interest."""
        return self.seconds * (1 - self._tolerance)

    def _promising(self) -> List[int]:
        return [stages for stages, bound in self._bounds.items() if bound < self._target() * (1 - ROUNDING)]

    def _solve(self, stages: int) -> None:
        slice_seconds = self._slices.get(stages, FIRST_SLICE)
        self._slices[stages] = 2 * slice_seconds
        # The best partition known is a start for its own number of stages; others must beat it by the tolerance.
        start = self.best if self.best is not None and len(self.best) == stages else None
        cutoff = self._target() if start is None else self.seconds * (1 + ROUNDING)
        outcome = self._programs[stages].solve(min(slice_seconds, self._left()), cutoff, self._tolerance, start)
        if outcome.partition is not None and shortfall(self._problem, outcome.partition) <= 0:
            seconds = step_seconds(self._problem, outcome.partition).total
            if seconds < self.seconds:
                self.best, self.seconds = outcome.partition, seconds
        # Finished, it cannot do better by more than the tolerance, whatever rounding says.
        self._bounds[stages] = max(self._bounds[stages], outcome.bound, self._target() if outcome.finished else 0.0)

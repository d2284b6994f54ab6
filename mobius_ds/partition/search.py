"""The partition: how many layers each stage has (paper, section 3.2).

Heuristics propose partitions, exchanges of layers improve them, and the MIP finds better ones, or proves that there are
none, for every number of stages that may still have any. `step_seconds` judges them all.
"""

import time
from dataclasses import dataclass
from itertools import cycle, permutations
from typing import Dict, List, NamedTuple, Optional, Tuple

from mobius_ds.partition.memory import describe_shortfall, shortfall
from mobius_ds.partition.mip import PartitionMip
from mobius_ds.partition.problem import Problem
from mobius_ds.partition.step_time import StepSeconds, step_seconds
from mobius_ds.schedule.plan import InfeasiblePlan, even_partition

FIRST_SLICE = 2.0
"""Seconds the solver gets for one number of stages before others have their turn; twice as many each time after."""
RELAXATION_SHARE = 0.5
"""Of the time limit, the most that goes into bounds for all numbers of stages."""
DESCENT_SHARE = 0.2
"""Of the time limit, the most that goes into exchanges of layers."""
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
        most = -(-left // max(1, problem.fewest_stages - len(partition)))
        count = 0
        while count < most and shortfall(problem, partition + (count + 1,), stages) <= 0:
            count += 1
        if not count:
            break
        partition += (count,)
    return partition


def min_stage(problem: Problem) -> Heuristic:
    """Every layer is a stage of its own."""
    return _judge(problem, "min-stage", (1,) * len(problem.layers))


def even(problem: Problem) -> Heuristic:
    """Stages differ by at most one layer; of all numbers of stages, the one with the shortest step."""
    candidates = [_judge(problem, "even", even_partition(len(problem.layers), stages))
                  for stages in range(problem.fewest_stages, len(problem.layers) + 1)]
    return min(candidates, key=lambda candidate: candidate.seconds)


def descend(problem: Problem, partition: Tuple[int, ...], until: float = float("inf")) -> Tuple[int, ...]:
    """Makes one stage a layer smaller and another one larger, whichever they are, while that shortens the step.

    Args:
        until: time (of ``time.monotonic``) at which to stop in any case.
    """
    shortest = step_seconds(problem, partition).total
    moves = list(permutations(range(len(partition)), 2))
    in_vain = 0
    for source, target in cycle(moves):
        if in_vain == len(moves) or time.monotonic() > until:
            break
        in_vain += 1
        if partition[source] > 1:
            moved = tuple(count - (stage == source) + (stage == target) for stage, count in enumerate(partition))
            seconds = step_seconds(problem, moved).total
            if seconds < shortest * (1 - ROUNDING) and shortfall(problem, moved) <= 0:
                partition, shortest, in_vain = moved, seconds, 0
    return partition


def _judge(problem: Problem, name: str, partition: Optional[Tuple[int, ...]]) -> Heuristic:
    if partition is None or shortfall(problem, partition) > 0:
        return Heuristic(name, None, float("inf"))
    return Heuristic(name, partition, step_seconds(problem, partition).total)


def best_partition(problem: Problem, time_limit: float = 30.0, tolerance: float = 0.01) -> Partition:
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
        # Nothing is shorter than the compute alone, spread over all GPUs.
        seconds = problem.microbatches * sum(layer.forward_seconds + layer.backward_seconds for layer in problem.layers)
        floor = seconds / sum(1 / gpu.slowdown for gpu in problem.gpus)
        numbers = range(problem.fewest_stages, len(problem.layers) + 1)
        self._even = {stages: _judge(problem, "even", even_partition(len(problem.layers), stages)) for stages in numbers}
        self._bounds: Dict[int, float] = dict.fromkeys(numbers, floor)
        self._open = set(numbers)
        self._programs: Dict[int, PartitionMip] = {}
        self._slices: Dict[int, float] = {}

    def bound(self) -> float:
        """Seconds below which no partition can be."""
        return min(self.seconds, min(self._bounds.values()))

    def gap(self) -> float:
        """The share of the best step that a better partition could save at most."""
        return 1 - self.bound() / self.seconds if self.seconds else 0.0

    def run(self) -> None:
        """Searches until the time is over or the gap is closed."""
        order = sorted(self._even, key=lambda stages: self._even[stages].seconds)
        for stages in order:
            if self._used() > RELAXATION_SHARE:
                break
            self._bounds[stages] = max(self._bounds[stages], self._program(stages).relaxation())
        deadline = time.monotonic() + DESCENT_SHARE * self._limit
        for stages in order:
            if time.monotonic() > deadline:
                break
            if self._even[stages].layers_per_stage is not None and stages in self._promising():
                self._consider(descend(self._problem, self._even[stages].layers_per_stage, deadline))
        while self._used() < 1 and (promising := self._promising()):
            self._solve(min(promising, key=self._bounds.get))

    def _program(self, stages: int) -> PartitionMip:
        if stages not in self._programs:
            self._programs[stages] = PartitionMip(self._problem, stages)
        return self._programs[stages]

    def _consider(self, partition: Tuple[int, ...]) -> None:
        seconds = step_seconds(self._problem, partition).total
        if seconds < self.seconds and shortfall(self._problem, partition) <= 0:
            self.best, self.seconds = partition, seconds

    def _used(self) -> float:
        """The share of the time limit that is over."""
        return (time.monotonic() - self.started) / self._limit if self._limit > 0 else 1.0

    def _target(self) -> float:
        """What a partition must take less than to be of interest."""
        return self.seconds * (1 - self._tolerance)

    def _promising(self) -> List[int]:
        return [stages for stages in sorted(self._open) if self._bounds[stages] < self._target() * (1 - ROUNDING)]

    def _solve(self, stages: int) -> None:
        slice_seconds = self._slices.get(stages, FIRST_SLICE)
        self._slices[stages] = 2 * slice_seconds
        seconds = min(slice_seconds, self._limit * (1 - self._used()))
        outcome = self._program(stages).solve(seconds, self._target(), self._tolerance)
        if outcome.partition is not None:
            self._consider(outcome.partition)
        if outcome.finished:
            self._open.discard(stages)
        self._bounds[stages] = max(self._bounds[stages], outcome.bound)

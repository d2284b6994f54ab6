"""The partition as a mixed-integer program for one number of stages, solved by HiGHS (paper, section 3.2).

Units are ms and GiB: HiGHS ignores coefficients below 1e-9.

Layers come in runs of identical ones. Which of them a stage has does not matter, only how many: an integer for each
run and stage instead of a binary for each layer and stage. Binaries say only where a run ends.

The step is a longest path, so every "starts after" is one inequality, and minimising the end makes the right ones
tight: no big M. Two starts of each stage stand for those of all microbatches; see Note [first and last] in
step_time.py, whose `step_seconds` computes the same for a partition that is given.
"""

from itertools import groupby
from typing import List, NamedTuple, Optional, Sequence, Tuple

import highspy
import numpy as np

from mobius_ds.inputs.profile import LayerProfile
from mobius_ds.inputs.topology import GIB
from mobius_ds.partition.memory import BOUNDARY_BUFFERS
from mobius_ds.partition.problem import Problem
from mobius_ds.schedule.tasks import DEPTH

MS = 1e-3
"""Seconds in the unit of time."""
SMALLEST = 1e-9
"""Coefficients up to this HiGHS ignores, with a warning: a byte, or a picosecond. Constraints hold to within as much."""
THREADS = 1
"""Of the solver. It keeps one scheduler for the whole process and refuses any other number of threads later on; two
threads solve these programs no faster."""


class Outcome(NamedTuple):
    """What the solver found."""

    partition: Optional[Tuple[int, ...]]
    """The best partition, if it beats the cutoff."""
    bound: float
    """Seconds below which no partition into this many stages can be; the cutoff if there is none below it, infinite if
    memory allows none at all."""
    finished: bool
    """None below the cutoff is better by more than the gap asked for."""


class Run(NamedTuple):
    """Consecutive layers that are all alike."""

    layer: LayerProfile
    first: int
    count: int


def runs_of(layers: Sequence[LayerProfile]) -> List[Run]:
    """The runs of a model, in order."""
    runs: List[Run] = []
    for layer, alike in groupby(layers):
        runs.append(Run(layer, runs[-1].first + runs[-1].count if runs else 0, len(list(alike))))
    return runs


def cut_bounds(problem: Problem, stages: int) -> Optional[Tuple[List[int], List[int]]]:
    """The fewest and the most layers that the stages up to each one can have; None if memory allows no partition.

    Every stage has a layer, and none has more than its GPU holds even without boundary activations.
    """
    layers, mapping = problem.layers, problem.mapping(stages)
    heavy = [DEPTH * (layer.weight_bytes + problem.accumulator_bytes(layer)) for layer in layers]

    def reach(start: int, step: int, gpu: int) -> int:
        """Layers from ``start`` on, in steps of one forward or backward, that fit a GPU as one stage."""
        held, working, count = 0, 0, 0
        while 0 <= start + count * step < len(layers):
            layer = start + count * step
            held, working = held + heavy[layer], max(working, layers[layer].working_bytes)
            if held + working > problem.gpus[gpu].memory_bytes:
                break
            count += 1
        return count

    most, fewest = [], [len(layers)]
    for stage, gpu in enumerate(mapping):
        start = most[-1] if most else 0
        most.append(min(start + reach(start, 1, gpu), len(layers) - (stages - 1 - stage)))
    for stage in reversed(range(1, stages)):
        fewest.append(max(fewest[-1] - reach(fewest[-1] - 1, -1, mapping[stage]), stage))
    fewest.reverse()
    possible = most[-1] == len(layers) and reach(fewest[0] - 1, -1, mapping[0]) == fewest[0]
    return (fewest, most) if possible and all(low <= high for low, high in zip(fewest, most)) else None


class SolverError(RuntimeError):
    """HiGHS refused to solve."""


class _QuietHighs(highspy.Highs):
    """HiGHS without its banner, which the first call prints before anything can be set."""

    def enableCallbacks(self):
        self.silent()
        super().enableCallbacks()


class PartitionMip:
    """The program for one problem and number of stages."""

    def __init__(self, problem: Problem, stages: int):
        self.problem, self.stages = problem, stages
        self.runs = runs_of(problem.layers)
        self.mapping = problem.mapping(stages)
        self.bounds = cut_bounds(problem, stages)
        if self.bounds is None:
            return
        self.model = _QuietHighs()
        self.model.setOptionValue("threads", THREADS)
        for tolerance in ("primal_feasibility_tolerance", "mip_feasibility_tolerance"):
            self.model.setOptionValue(tolerance, SMALLEST)
        self._layers()
        self._memory()
        forward_end = self._forward()
        backward_end = self._backward()
        self._objective(forward_end + backward_end + self._update())

    # Variables.

    def _layers(self) -> None:
        """Every layer in one stage, stages contiguous, none empty."""
        model, runs = self.model, self.runs
        fewest, most = self.bounds
        # until[j][r]: how many of run r's layers the stages up to j have. It stands for "the layers of a run in a
        # stage", which is the difference of two, and makes "every layer in one stage" a bound: until[S-1][r] is all.
        self.until = [[model.addIntegral(float(np.clip(fewest[j] - run.first, 0, run.count)),
                                         float(np.clip(most[j] - run.first, 0, run.count)))
                       for run in runs] for j in range(self.stages)]
        # begun[j][r]: 1 if the stages up to j have any layer of run r. For a run of one layer that is until itself.
        self.begun = [[1.0 if r == 0 else self.until[j][r] if run.count == 1 else model.addBinary()
                       for r, run in enumerate(runs)] for j in range(self.stages)]
        for j in range(self.stages):
            for r, run in enumerate(runs):
                if r > 0 and run.count > 1:
                    model.addConstr(self.until[j][r] <= run.count * self.begun[j][r])
                    model.addConstr(self.until[j][r] >= self.begun[j][r])
                # Contiguous: a run begins only when the run before it has all its layers placed.
                if r > 0:
                    model.addConstr(self.until[j][r - 1] >= runs[r - 1].count * self.begun[j][r])
                # A stage cannot give layers back.
                if j > 0:
                    model.addConstr(self.until[j][r] >= self.until[j - 1][r])
            # Every stage has a layer.
            if j > 0:
                model.addConstr(model.qsum(self.until[j]) - model.qsum(self.until[j - 1]) >= 1)

    def _sum(self, stage: int, values: Sequence[float]):
        """The sum over a stage's layers of a value that each run's layers have; None if that is zero."""
        terms = [value * self.until[stage][r] for r, value in enumerate(values) if value > SMALLEST]
        if stage > 0:
            terms += [-value * self.until[stage - 1][r] for r, value in enumerate(values) if value > SMALLEST]
        return self.model.qsum(terms) if terms else None

    def _stage_column(self, stage: int, values: Sequence[float]):
        """A column that equals such a sum: dense rows would be repeated wherever it is used."""
        column = self.model.addVariable(0.0)
        total = self._sum(stage, values)
        self.model.addConstr(column == (0.0 if total is None else total))
        return column

    def _boundary(self, stage: int):
        """GiB of the boundary activation that a stage makes: that of the last run begun."""
        values = [run.layer.boundary_bytes / GIB for run in self.runs]
        column = self.model.addVariable(0.0)
        steps = [(values[r] - values[r - 1]) * self.begun[stage][r] for r in range(1, len(values))
                 if abs(values[r] - values[r - 1]) > SMALLEST]
        self.model.addConstr(column == (self.model.qsum(steps) + values[0] if steps else values[0]))
        return column

    # Constraints: memory.

    def _memory(self) -> None:
        """A stage, its gradients and activations, and the stage prefetched beside it fit the GPU."""
        model, problem = self.model, self.problem
        self.made = [self._boundary(j) for j in range(self.stages)]
        layers = [run.layer for run in self.runs]
        self.weights = [self._stage_column(j, [layer.weight_bytes / GIB for layer in layers]) for j in range(self.stages)]
        for number, gpu in enumerate(problem.gpus):
            own = [j for j in range(self.stages) if self.mapping[j] == number]
            slot, accumulator, boundary, working = (model.addVariable(0.0) for _ in range(4))
            for j in own:
                # Slots and buffers are as large as the largest stage needs.
                model.addConstr(slot >= self.weights[j])
                gradients = self._sum(j, [problem.accumulator_bytes(layer) / GIB for layer in layers])
                if gradients is not None:
                    model.addConstr(accumulator >= gradients)
                model.addConstr(boundary >= self.made[j])
                if j > 0:
                    model.addConstr(boundary >= self.made[j - 1])
                self._working(j, working)
            model.addConstr(DEPTH * slot + DEPTH * accumulator + BOUNDARY_BUFFERS * boundary + working
                            <= gpu.memory_bytes / GIB)

    def _working(self, stage: int, working) -> None:
        """Working memory is that of the layer that needs most, if the stage has one of its run."""
        least = min(run.layer.working_bytes for run in self.runs)
        self.model.addConstr(working >= least / GIB)
        for r, run in enumerate(self.runs):
            if run.layer.working_bytes == least:
                continue
            present = self._sum(stage, [float(other == r) for other in range(len(self.runs))])
            if run.count > 1:
                layers, present = present, self.model.addBinary()
                self.model.addConstr(run.count * present >= layers)
            self.model.addConstr(working >= (run.layer.working_bytes / GIB) * present)

    # Constraints: time.

    def _forward(self):
        """The forward sweep; returns when it is over, in ms."""
        return self._sweep(range(self.stages), [run.layer.forward_seconds for run in self.runs], forward=True)

    def _backward(self):
        """The backward sweep, which starts when the forward sweep is over on all GPUs; returns how long it takes."""
        return self._sweep(range(self.stages)[::-1], [run.layer.backward_seconds for run in self.runs], forward=False)

    def _sweep(self, order: Sequence[int], seconds: Sequence[float], forward: bool):
        model, problem, again = self.model, self.problem, self.problem.microbatches - 1
        gradients = [run.layer.gradient_bytes / GIB for run in self.runs]
        copied, computed, drained = ([[] for _ in problem.gpus] for _ in range(3))
        before: Optional[int] = None
        left = None  # when the first and last microbatch left the stage before
        end = model.addVariable(0.0)
        for stage in order:
            number = self.mapping[stage]
            gpu = problem.gpus[number]
            link = GIB / gpu.bandwidth / MS
            compute = self._stage_column(stage, [gpu.slowdown * value / MS for value in seconds])
            first, last, copy, done = (model.addVariable(0.0) for _ in range(4))
            # A stage's weights are copied after those of the GPU's stage before it, and when the slot is free: the
            # stage before that one has been computed.
            for free in [0.0] + copied[number][-1:] + computed[number][-DEPTH:1 - DEPTH]:
                model.addConstr(copy >= free + link * self.weights[stage])
            # The first microbatch starts when the weights are there; what compute waits for them is exposed.
            model.addConstr(first >= copy)
            # A GPU computes one stage at a time, ...
            if computed[number]:
                model.addConstr(first >= computed[number][-1])
            # ... and only while a buffer for its gradients is free.
            if not forward and len(drained[number]) >= DEPTH:
                model.addConstr(first >= drained[number][-DEPTH])
            # Microbatch m starts after microbatch m - 1.
            model.addConstr(last >= first + again * compute)
            # Microbatch m starts after it left the stage before, out to DRAM and in again.
            if before is not None:
                crossing = self.made[before] if forward else self.made[stage]
                source = GIB / problem.gpus[self.mapping[before]].bandwidth / MS
                arrived = left[0] + (source + link) * crossing + problem.hop_seconds / MS
                model.addConstr(first >= arrived)
                model.addConstr(last >= left[1] + (source + link) * crossing + problem.hop_seconds / MS)
                # Either stream carries one microbatch at a time, and gradients come in beside boundary activations.
                loads = link * crossing if forward or stage == 0 else link * (crossing + self.made[stage - 1])
                model.addConstr(last >= arrived + again * source * crossing)
                model.addConstr(last >= arrived + again * loads)
            left = (first + compute, last + compute)
            model.addConstr(done == left[1])
            computed[number].append(done)
            copied[number].append(copy)
            # A stage's gradients are copied out after its last microbatch and after those of the GPU's stage before.
            if not forward:
                drain = model.addVariable(0.0)
                offload = self._sum(stage, [link * value for value in gradients])
                for free in [done] + drained[number][-1:]:
                    model.addConstr(drain >= (free if offload is None else free + offload))
                drained[number].append(drain)
            before = stage
        for stages in computed if forward else drained:
            if stages:
                model.addConstr(end >= stages[-1])
        return end

    def _update(self):
        """The optimizer, in ms: each rank updates the parameters of its stages."""
        slowest = self.model.addVariable(0.0)
        seconds = [self.problem.update_seconds(run.layer) / MS for run in self.runs]
        for gpu in range(len(self.problem.gpus)):
            parts = [self._sum(j, seconds) for j in range(self.stages) if self.mapping[j] == gpu]
            parts = [part for part in parts if part is not None]
            if parts:
                self.model.addConstr(slowest >= self.model.qsum(parts))
        return slowest

    # Objective.

    def _objective(self, end) -> None:
        """The end of the step."""
        self.end = self.model.addVariable(0.0)
        self.model.addConstr(self.end >= end)
        self.model.setObjective(self.end, highspy.ObjSense.kMinimize)

    # Solving.

    def relaxation(self) -> float:
        """Seconds below which no partition can be: the program's without whole numbers. Infinite if none fits.

        Call it before `solve`, whose cutoff stays in the program.
        """
        if self.bounds is None:
            return float("inf")
        self.model.setOptionValue("solve_relaxation", True)
        self._run()
        self.model.setOptionValue("solve_relaxation", False)
        status = self.model.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return float("inf")
        return self.model.getObjectiveValue() * MS if status == highspy.HighsModelStatus.kOptimal else 0.0

    def solve(self, seconds: float, cutoff: float = float("inf"), gap: float = 0.0) -> Outcome:
        """Looks for a partition that takes at most ``cutoff`` seconds, for ``seconds`` at most, until the gap is closed.

        What heuristics found comes in as the cutoff, not through setSolution: HiGHS 1.16 can map a start into its
        presolved program with a wrong objective, and then rejects partitions that are better than the start.
        """
        if self.bounds is None:
            return Outcome(None, float("inf"), True)
        model = self.model
        model.setOptionValue("time_limit", model.getRunTime() + seconds)
        model.setOptionValue("mip_rel_gap", gap)
        model.changeColBounds(self.end.index, 0.0, cutoff / MS)
        self._run()
        if model.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            # HiGHS 1.16's presolve has called programs infeasible that are not: what it says is asked again without.
            model.setOptionValue("presolve", "off")
            self._run()
            model.setOptionValue("presolve", "choose")
        status, info = model.getModelStatus(), model.getInfo()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Outcome(None, cutoff, True)
        partition = None
        if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            values = model.getSolution().col_value
            cuts = [round(sum(values[column.index] for column in row)) for row in self.until]
            partition = tuple(int(count) for count in np.diff([0] + cuts))
        return Outcome(partition, max(0.0, info.mip_dual_bound) * MS, status == highspy.HighsModelStatus.kOptimal)

    def _run(self) -> None:
        if self.model.run() == highspy.HighsStatus.kError:
            status = self.model.modelStatusToString(self.model.getModelStatus())
            raise SolverError(f"HiGHS {self.model.version()} failed on the partition into {self.stages} stages ({status}). "
                              f"If this process used HiGHS before, with other than {THREADS} threads, that is why.")

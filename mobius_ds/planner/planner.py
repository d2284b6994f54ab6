"""The planner: from a profile and a topology to a plan."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Optional, Tuple

from mobius_ds.inputs.profile import ModelProfile
from mobius_ds.inputs.topology import Topology
from mobius_ds.inputs.units import readable
from mobius_ds.partition.mapping import contention, cross, sequential
from mobius_ds.partition.memory import describe_shortfall
from mobius_ds.partition.problem import problem_of
from mobius_ds.partition.search import Heuristic, best_partition, even, max_stage, min_stage
from mobius_ds.prediction.mobius import predict_mobius
from mobius_ds.prediction.prediction import Prediction
from mobius_ds.prediction.zero import offloaded_bytes
from mobius_ds.schedule.plan import InfeasiblePlan, Plan

STRATEGIES = ("mip", "max", "min", "even")
MAPPINGS = ("cross", "sequential")
FORMAT = 1
"""Of plan files. A file of another format is planned again, or refused when it was asked for."""


def fingerprint(question: Any) -> str:
    """A name for plain data that a plan depends on, and for the format of plan files."""
    return hashlib.sha256(json.dumps([FORMAT, question], sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Request:
    """What is to be planned."""

    profile: ModelProfile
    topology: Topology
    microbatches: int
    strategy: str = "mip"
    mapping: str = "cross"
    time_limit: float = 30.0
    """Seconds for the solver."""

    def __post_init__(self):
        if self.strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {self.strategy!r}; choose from {', '.join(STRATEGIES)}")
        if self.mapping not in MAPPINGS:
            raise ValueError(f"unknown mapping {self.mapping!r}; choose from {', '.join(MAPPINGS)}")
        if type(self.microbatches) is not int or self.microbatches < 1:
            raise ValueError(f"a step of {self.microbatches!r} micro-batches cannot be planned; give a number from 1 on")
        if not self.time_limit > 0:
            raise ValueError(f"the solver cannot have {self.time_limit} s; give it more than 0")

    def content_hash(self) -> str:
        """A name for everything the answer depends on."""
        return fingerprint(asdict(self))


@dataclass(frozen=True)
class Planned:
    """The answer."""

    request: Request
    plan: Plan
    gap: Optional[float]
    """No partition takes less than 1 - gap of this one's step; None for a heuristic, which proves nothing."""
    solver_seconds: float
    heuristics: Tuple[Heuristic, ...]
    """The simple rules' partitions, for comparison."""

    def prediction(self) -> Prediction:
        """The step under this plan."""
        return predict_mobius(self.request.profile, self.request.topology, self.plan, self.request.microbatches)


def make_best_plan(request: Request) -> Planned:
    """Plans.

    Raises:
        InfeasiblePlan: the model fits neither the GPUs nor DRAM; the message says what is missing.
    """
    profile, topology = request.profile, request.topology
    check_dram(profile, topology)

    def mapping(stages: int) -> Tuple[int, ...]:
        return cross(topology, stages) if request.mapping == "cross" else sequential(stages, topology.size)

    problem = problem_of(profile, topology, request.microbatches, mapping)
    if request.strategy == "mip":
        found = best_partition(problem, request.time_limit)
        return Planned(request, Plan(topology.size, found.layers_per_stage, found.gpu_of_stage), found.gap,
                       found.solver_seconds, found.heuristics)
    rule = {"max": max_stage, "min": min_stage, "even": even}[request.strategy](problem)
    if rule.layers_per_stage is None:
        ones = (1,) * len(profile.layers)
        raise InfeasiblePlan(f"the {rule.name} rule finds no partition that fits. With one layer per stage: "
                             f"{describe_shortfall(problem, ones)}")
    return Planned(request, Plan(topology.size, rule.layers_per_stage, mapping(len(rule.layers_per_stage))), None, 0.0, (rule,))


def check_dram(profile: ModelProfile, topology: Topology) -> None:
    """Raises InfeasiblePlan if the model and its training state do not fit the topology's DRAM."""
    need = offloaded_bytes(profile)
    if need > topology.dram_bytes:
        raise InfeasiblePlan(f"{profile.name} needs {readable(need)} of DRAM for weights, fp32 masters, gradients and "
                             f"optimizer moments, but {topology.name} has {readable(topology.dram_bytes)}: "
                             f"{readable(need - topology.dram_bytes)} are missing")


def explained(planned: Planned) -> str:
    """One paragraph: stages, solver, mapping, memory."""
    request, plan_ = planned.request, planned.plan
    prediction = planned.prediction()
    words = [f"{plan_.stages} stages"]
    if planned.gap is not None:
        words.append(f"found in {planned.solver_seconds:.1f} s, at most {100 * planned.gap:.2f} % from the best possible")
        rules = [f"{rule.name} {rule.seconds:.3f} s" if rule.layers_per_stage else f"{rule.name} does not fit"
                 for rule in planned.heuristics]
        words.append(f"simple rules: {', '.join(rules)}")
    plain = contention(request.topology, sequential(plan_.stages, request.topology.size))
    words.append(f"contention {contention(request.topology, plan_.gpu_of_stage):.1f} (sequential mapping {plain:.1f})")
    words.append(f"step {prediction.step_seconds:.3f} s, of which the CPU optimizer {prediction.update_seconds:.3f} s")
    words.append(f"memory {readable(max(prediction.memory_bytes))} per GPU at most")
    return "; ".join(words) + "."

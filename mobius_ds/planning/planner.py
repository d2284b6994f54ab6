"""The planner: from a profile and a topology to a plan, and the plan as a file.

A plan file holds everything the plan depends on, with a hash of it, so that a run can be repeated from the file alone.
A folder of plan files is a cache, in which the same question is answered once.
"""

import hashlib
import json
import os
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Tuple, Union

from mobius_ds.planning.mapping import contention, cross, sequential
from mobius_ds.planning.partition import Heuristic, best_partition, even, max_stage, min_stage
from mobius_ds.planning.partition_cost import describe_shortfall, problem_of
from mobius_ds.planning.plan import InfeasiblePlan, Plan
from mobius_ds.planning.prediction import Prediction, offloaded_bytes, predict_mobius
from mobius_ds.planning.profile import ModelProfile, profile_from_json
from mobius_ds.planning.topology import Topology, topology_from_json
from mobius_ds.planning.units import readable

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


# Plan files.


def to_json(planned: Planned) -> Dict[str, Any]:
    """Plain data for a plan file: the request, the plan, and what is predicted."""
    prediction = planned.prediction()
    return {
        "format": FORMAT, "hash": planned.request.content_hash(),
        "plan": asdict(planned.plan), "gap": planned.gap, "solver_seconds": planned.solver_seconds,
        "contention": contention(planned.request.topology, planned.plan.gpu_of_stage),
        "heuristics": [heuristic._asdict() for heuristic in planned.heuristics],
        "predicted": {"step_seconds": prediction.step_seconds, "sweep_seconds": prediction.sweep_seconds,
                      "update_seconds": prediction.update_seconds, "bytes_by_category": prediction.bytes_by_category,
                      "memory_bytes": list(prediction.memory_bytes), "bubble": prediction.bubble},
        "request": asdict(planned.request)}


def from_json(source: Union[str, Path, Dict[str, Any]]) -> Planned:
    """Reads a plan file or its content.

    Raises:
        ValueError: it is no plan file, of another format, or its plan does not fit its own profile.
    """
    name = "the plan" if isinstance(source, dict) else str(source)
    try:
        data = source if isinstance(source, dict) else _read_json(Path(source))
        if data["format"] != FORMAT:
            raise ValueError(f"{name} is of format {data['format']}, and this mobius_ds reads format {FORMAT}. Make it "
                             "again with mobius-ds plan")
        asked = dict(data["request"])
        asked["profile"] = profile_from_json(asked["profile"])
        asked["topology"] = topology_from_json(asked["topology"])
        plan = Plan(data["plan"]["gpus"], tuple(data["plan"]["layers_per_stage"]), tuple(data["plan"]["gpu_of_stage"]))
        heuristics = tuple(Heuristic(h["name"], h["layers_per_stage"] and tuple(h["layers_per_stage"]), h["seconds"])
                           for h in data["heuristics"])
        planned = Planned(Request(**asked), plan, data["gap"], data["solver_seconds"], heuristics)
        check_plan(plan, len(planned.request.profile.layers), planned.request.topology.size, name)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _no_plan(name, error) from None
    return planned


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read the plan {path}: {error.strerror}. Make one with mobius-ds plan ... --out "
                         "FILE") from None
    except (ValueError, RecursionError) as error:  # not text, not JSON, a number of too many digits, lists nested too deep
        raise _no_plan(str(path), error) from None


def _no_plan(name: str, error: Exception) -> ValueError:
    return ValueError(f"{name} is not a plan file made by mobius-ds plan --out FILE, or it is damaged "
                      f"({type(error).__name__}: {error}). Make it again")


def check_plan(plan: Plan, layers: int, gpus: int, name: str) -> None:
    """Raises ValueError if a plan is not one for so many layers and GPUs."""
    if sum(plan.layers_per_stage) != layers or min(plan.layers_per_stage, default=0) < 1:
        raise ValueError(f"{name} has stages of {plan.layers_per_stage} layers, {sum(plan.layers_per_stage)} in all, but the "
                         f"model has {layers}. Make a plan of this model")
    if plan.gpus != gpus or len(plan.gpu_of_stage) != plan.stages or not set(plan.gpu_of_stage) <= set(range(gpus)):
        raise ValueError(f"{name} maps {len(plan.gpu_of_stage)} of {plan.stages} stages to GPUs {set(plan.gpu_of_stage)} of "
                         f"{plan.gpus}, but there are {gpus} GPUs. Make a plan for {gpus} GPUs")


def write(planned: Planned, path: Path) -> None:
    """Writes a plan file, whole or not at all.

    Raises:
        ValueError: it cannot be written.
    """
    temporary = None
    if path.exists() and not path.is_file():  # a device or a pipe would be replaced
        raise ValueError(f"cannot write the plan {path}: it is there and is no file. Name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w") as file:
            json.dump(to_json(planned), file, indent=1)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            os.unlink(temporary)
        raise ValueError(f"cannot write the plan {path}: {error.strerror}. Name a file in a folder that can be written and "
                         "has room") from None


def cached_plan(key: str, request: Callable[[], Request], folder: Path,
                warn: Callable[[str], None] = warnings.warn) -> Tuple[Planned, bool]:
    """Plans, or reads what was planned before under the same key.

    Args:
        key: names everything the answer depends on, but for measured times, which are never the same twice.
        request: what to plan; asked for only if there is no answer yet, as it may have to be measured.
        warn: is told of a cache that does not work: planning does without it.

    Returns:
        The plan, and whether it was read.
    """
    path = folder / f"{key}.json"
    if os.path.exists(path):
        try:
            return from_json(path), True
        except ValueError as error:  # of an older format, or damaged
            warn(f"a plan made before cannot be used, so this job is planned again: {error}")
    planned = make_best_plan(request())
    try:
        write(planned, path)
    except ValueError as error:
        warn(f"this job's plan is not kept for the next one: {error}")
    return planned, False

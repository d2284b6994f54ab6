"""Plans as files, and a folder of them as a cache in which the same question is answered once.

A plan file holds everything the plan depends on, with a hash of it, so that a run can be repeated from the file alone.
"""

import json
import os
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Dict, Tuple, Union

from mobius_ds.inputs.profile import profile_from_json
from mobius_ds.inputs.topology import topology_from_json
from mobius_ds.partition.mapping import contention
from mobius_ds.partition.search import Heuristic
from mobius_ds.planner.planner import FORMAT, Planned, Request, make_best_plan
from mobius_ds.schedule.plan import Plan


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

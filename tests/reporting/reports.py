"""Reports made by hand, with everything a report may have, for the tests of what is made of them."""

from typing import Any, Dict, List

from mobius_ds.inputs.topology import PRESETS
from mobius_ds.prediction.mobius import predict_mobius
from mobius_ds.prediction.prediction import Prediction
from mobius_ds.prediction.zero import predict_zero3_offload
from mobius_ds.profiling.computed import profile_description
from mobius_ds.schedule.plan import Plan
from mobius_ds.schedule.tasks import CATEGORIES

MODEL_SIZE = 100_000_000


def arm(step_seconds: float, multiple: float, losses: List[float]) -> Dict[str, Any]:
    """An arm whose steps all take ``step_seconds`` and move ``multiple`` times the model size."""
    moved = int(multiple * MODEL_SIZE)
    return {
        "losses": losses, "step_seconds": [3 * step_seconds] + [step_seconds] * (len(losses) - 1),
        "traffic": {"per_step_bytes": {**dict.fromkeys(CATEGORIES, 0), "parameters_in": moved - 1000, "other": 1000},
                    "delivered_bytes": moved, "link_bytes": moved, "delivered_over_model_size": multiple,
                    "link_over_model_size": multiple, "delivered_bytes_range": [moved] * 2, "link_bytes_range": [moved] * 2},
        "sweeps": 1, "peak_device_bytes": 5_000_000, "peak_device_measure": "a test's", "host_bytes_per_node": 700_000_000,
        "pinned_bytes": 0, "pageable_bytes": 0,
    }  # yapf: disable


def small(device: str = "cuda", zero3_seconds: float = 2.0, mobius_seconds: float = 0.5) -> Dict[str, Any]:
    """A comparison of ZeRO-3 and Mobius alone."""
    losses = [3.0, 2.5, 2.25, 2.125, 2.0]
    return {
        "machine": {"cpu": "Test CPU", "cores": 2, "memory_bytes": 2**34, "torch": "2.13.0", "deepspeed": "0.19.8",
                    "device": device},
        "model": {"parameters": MODEL_SIZE // 4, "model_size_bytes": MODEL_SIZE},
        "ranks": 4, "steps": len(losses), "dtype": "bf16", "failed": {},
        "arms": {"zero3": arm(zero3_seconds, 12.0, losses), "mobius": arm(mobius_seconds, 1.5, losses)},
        "comparison": {"problems": [], "notes": [], "loss_differences": {"mobius": 0.001}, "max_loss_difference": 0.001,
                       "loss_tolerance": 0.02, "measured_equals_predicted": True},
    }  # yapf: disable


def whole() -> Dict[str, Any]:
    """A comparison with all that a report may hold, its timelines simulated for a server of eight GPUs."""
    topology = PRESETS["3090ti-8-4+4"]
    profile = profile_description("gpt-8b", 1, 1024, topology.gpus[0]).profile
    stages = 2 * topology.size
    each, more = divmod(len(profile.layers), stages)
    plan = Plan(topology.size, tuple(each + (stage < more) for stage in range(stages)),
                tuple(stage % topology.size for stage in range(stages)))
    predictions = {"mobius": predict_mobius(profile, topology, plan), "zero3": predict_zero3_offload(profile, topology)}
    numbers = {"step_seconds": 0.5, "delivered_over_model_size": 1.5, "link_over_model_size": 1.5, "delivered_bytes": 1,
               "link_bytes": 1}
    return {
        **small(),
        "emulated": {"topology": "3090ti-8-4+4", "slowdown": 10.0, "says": "emulated 3090ti-8-4+4, 10 times slower"},
        "failed": {"pipeline": {"what": "OOM", "why": "rank 1 needs <12> GiB & has 10."}},
        "command": "mobius-ds compare --wires 3090ti-8-4+4",
        "plan": {"gpus": topology.size, "layers_per_stage": list(plan.layers_per_stage), "how": "Cut by a test.",
                 "gpu_of_stage": list(plan.gpu_of_stage), "layers": [f"layer.{i}" for i in range(len(profile.layers))]},
        "timelines": {name: {"step": 3, "seconds": made.sweep_seconds, "emulated": True, "tasks": _tasks(made)}
                      for name, made in predictions.items()},
        "figures": {name: _figures(made) for name, made in predictions.items()},
        "sweep": {"over": "ranks", "points": [
            {"value": ranks, "arms": {"mobius": numbers, "zero3": {**numbers, "delivered_over_model_size": 1.5 * ranks},
                                      "pipeline": {"why": "OOM: too big"}}} for ranks in (1, 2, 4)]},
    }  # yapf: disable


def _tasks(made: Prediction) -> List[List[Any]]:
    tasks, begin = [], 0.0
    for name, timeline in made.sweeps:
        tasks += [[task.gpu, task.stream.value, f"{task.key.kind.name.lower()} {task.key}", task.category or "compute",
                   task.key.stage, task.key.microbatch, task.nbytes, begin + start, begin + end, name]
                  for task, start, end in timeline.played]
        begin += timeline.makespan
    return tasks


def _figures(made: Prediction) -> Dict[str, Any]:
    computes = [sum(timeline.compute_seconds(gpu) for _, timeline in made.sweeps) for gpu in range(made.gpus)]
    return {"step_seconds": made.sweep_seconds, "compute_seconds": computes, "bubble": made.bubble,
            "exposed_seconds": [(made.sweep_seconds - seconds) / 2 for seconds in computes],
            "bandwidth": {f"in {gpu}": [[2e9, 0.25], [1e10, 1.0]] for gpu in range(made.gpus)},
            "stages": [{"stage": 0, "gpu": 0, "forward_exposed_s": 0.0125, "backward_exposed_s": 0.0}]}

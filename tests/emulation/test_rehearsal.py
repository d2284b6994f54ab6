"""One rank's rehearsal, in this process: the runtime's own steps, without memory, in the time that is planned."""

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, List, Tuple

import psutil
import pytest

from mobius_ds.emulation.rehearsal import RankReport, Rehearsal
from mobius_ds.emulation.rehearsed_pipeline import rehearse
from mobius_ds.inputs.hardware import GIB
from mobius_ds.inputs.topology import Topology, preset
from mobius_ds.planner.planner import Planned, Request
from mobius_ds.prediction.mobius import predict_mobius
from mobius_ds.prediction.prediction import Prediction
from mobius_ds.profiling.computed import Profiled, profile_description
from mobius_ds.runtime.ranks.errors import DeviceOutOfMemory
from mobius_ds.runtime.sweeps import pipeline, sweep_schedules
from mobius_ds.schedule.plan import Plan, even_partition
from mobius_ds.schedule.tasks import Kind, Stream

MODEL, SAMPLES, SEQUENCE, STAGES = "gpt-3b", 1, 1024, 8


@lru_cache(maxsize=None)
def planned() -> Tuple[Profiled, Planned]:
    """A model whose copies take about as long as its compute, on one fast GPU."""
    topology = Topology("one", (replace(preset("4090-1").gpus[0], flops=4e14),), (0,), (32e9,), (32e9,))
    profiled = profile_description(MODEL, SAMPLES, SEQUENCE, topology.gpus[0])
    plan = Plan(1, even_partition(len(profiled.profile.layers), STAGES), (0,) * STAGES)
    return profiled, Planned(Request(profiled.profile, topology, 4), plan, None, 0.0, ())


def rehearsed(folder: Path, of: Planned, **options: Any) -> Tuple[RankReport, Prediction]:
    """What the only rank reports, and what is simulated."""
    profiled, _ = planned()
    rehearsal = Rehearsal(MODEL, SAMPLES, SEQUENCE, profiled.program, of, 2, 60.0, **options)
    request = of.request
    return rehearse(rehearsal, 0, folder / "wires", lambda content: [content]), \
        predict_mobius(request.profile, request.topology, of.plan, request.microbatches, rehearsal.slots)


def seconds(report: RankReport) -> float:
    """Of both sweeps of the last step."""
    return report.steps[-1].backward_done - report.steps[-1].begun


def copies_beside_compute(report: RankReport) -> List[bool]:
    """Of each copy of a stage's weights in the last step, but for each sweep's first: whether it began before the stage
    whose weights were copied before had computed. However busy the machine is, that is a matter of slots."""
    found = []
    for part in report.last.parts:
        copies = sorted((one for one in part.timeline.played if one.task.key.kind is Kind.WEIGHTS), key=lambda one: one.start)
        ends = {}
        for one in part.timeline.of(0, Stream.COMPUTE):
            ends[one.task.key.stage] = max(one.end, ends.get(one.task.key.stage, 0.0))
        found += [copy.start < ends[before.task.key.stage] for before, copy in pairwise(copies)]
    return found


def test_a_step_takes_its_time_and_no_memory_and_moves_its_bytes(tmp_path):
    _, of = planned()
    before = psutil.Process().memory_info().rss
    report, prediction = rehearsed(tmp_path, of)
    assert report.stored_bytes == 0
    assert report.resident_bytes - before < GIB, "a model of 6 GiB is not in memory, only what is imported on the way"
    for step in report.steps:
        assert step.moved == step.predicted
        assert {**step.moved, "other": 0} == prediction.bytes_by_category
    assert prediction.sweep_seconds < seconds(report)
    assert report.steps[-1].processor_seconds < prediction.sweep_seconds, "it waits, and does not compute"
    beside = copies_beside_compute(report)
    assert len(beside) == 2 * (STAGES - 1) and sum(beside) > len(beside) / 2, beside
    assert report.last.parts[0].timeline.compute_seconds(0) >= 4 * sum(
        layer.forward_seconds for layer in of.request.profile.layers)


def test_steps_alike_are_scheduled_once(tmp_path, monkeypatch):
    built = []
    for module, name in ((sweep_schedules, "forward_schedule"), (sweep_schedules, "backward_schedule"),
                         (pipeline, "stage_parameters")):
        make = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, name=name, make=make: built.append(name) or make(*args))
    report, _ = rehearsed(tmp_path, planned()[1])
    assert len(report.steps) == 2 and sorted(built) == ["backward_schedule", "forward_schedule", "stage_parameters"]


def test_without_prefetching_copies_are_waited_for(tmp_path):
    _, of = planned()
    ahead = predict_mobius(of.request.profile, of.request.topology, of.plan, of.request.microbatches, 2)
    waited, behind = rehearsed(tmp_path, of, slots=1)
    assert behind.sweep_seconds > 1.2 * ahead.sweep_seconds
    assert not any(copies_beside_compute(waited))
    assert seconds(waited) > behind.sweep_seconds


def test_the_emulated_gpus_memory_is_enforced(tmp_path):
    _, of = planned()
    small = replace(of.request.topology, gpus=(replace(of.request.topology.gpus[0], memory_bytes=GIB),))
    with pytest.raises(DeviceOutOfMemory, match="weights of two stages needs"):
        rehearsed(tmp_path, replace(of, request=replace(of.request, topology=small)))

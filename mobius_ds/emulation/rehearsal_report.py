"""What a rehearsal says: figures of the emulated step beside those of the simulated one, as tables and as data."""

import os
import statistics
from dataclasses import asdict
from typing import Any, Dict, List, Sequence, Tuple

from rich.markup import escape
from rich.table import Table

from mobius_ds.emulation.rehearsal import RankReport
from mobius_ds.inputs.units import readable
from mobius_ds.planner.planner import Planned
from mobius_ds.prediction.prediction import Prediction
from mobius_ds.schedule.tasks import CATEGORIES
from mobius_ds.simulation.costs import bandwidths, speed, stages_of
from mobius_ds.simulation.exposure import Figures, Idle, figures, link_name, quartiles
from mobius_ds.simulation.steps import in_turn

SAYS = ("Emulated: the real runtime in real processes, with waits in place of compute and emulated wires in place of PCIe. "
        "Left out: the model's own Python around its layers, adding up gradients in DRAM, the optimizer, and the engine above "
        "the pipeline.")


class RehearsalOutcome:
    """One rehearsal and its simulation.

    Args:
        reports: of all ranks. Their first step warms up, and counts for nothing.
    """

    def __init__(self, planned: Planned, prediction: Prediction, reports: Sequence[RankReport]):
        self.planned = planned
        self.prediction = prediction
        self.reports = reports
        self.simulated: Tuple[float, ...] = tuple(timeline.makespan for _, timeline in prediction.sweeps)
        """Seconds of the forward and the backward sweep."""
        self.rehearsed: List[Tuple[float, ...]] = [_seconds(steps) for steps in zip(*(r.steps[1:] for r in reports))]
        """The same of each step that counts."""
        topology = planned.request.topology
        self.figures: Tuple[Figures, Figures] = tuple(figures(step, topology.size, topology.root_of) for step in (
            in_turn(prediction.sweeps, prediction.update_seconds), reports[0].last))
        """Of the simulated step, and of the last one that was rehearsed, which ends without the optimizer."""
        self.load = os.getloadavg()[0]
        """Processes that wanted to run in the last minute, those of others included."""

    @property
    def median(self) -> Tuple[float, ...]:
        """The sweeps of the step in the middle."""
        return sorted(self.rehearsed, key=sum)[len(self.rehearsed) // 2]

    @property
    def ratio(self) -> float:
        """Seconds of both sweeps, rehearsed over simulated."""
        return sum(self.median) / sum(self.simulated)

    @property
    def tasks(self) -> int:
        """Of one step, on all GPUs."""
        return sum(len(part.timeline.played) for part in self.reports[0].last.parts)

    @property
    def processor_seconds(self) -> float:
        """Of this machine, for one step of all ranks."""
        return statistics.median(sum(step.processor_seconds for step in steps)
                                 for steps in zip(*(report.steps[1:] for report in self.reports)))

    @property
    def moved(self) -> Dict[str, int]:
        """Bytes by category in one step, as counted where they were moved."""
        return {category: sum(report.steps[-1].moved[category] for report in self.reports) for category in CATEGORIES}

    @property
    def scheduled(self) -> Dict[str, int]:
        """Bytes by category that the schedules of the step name."""
        return {category: sum(report.steps[-1].predicted[category] for report in self.reports) for category in CATEGORIES}

    @property
    def stage_seconds(self) -> List[float]:
        """Of each stage's forward of one micro-batch, on its GPU."""
        request, plan = self.planned.request, self.planned.plan
        return [sum(layer.forward_seconds for layer in stage) / speed(request.topology, gpu)
                for stage, gpu in zip(stages_of(request.profile, plan), plan.gpu_of_stage)]

    def as_data(self) -> Dict[str, Any]:
        """Plain data for a JSON file; seconds, bytes, bytes/s."""
        request = self.planned.request
        return {
            "emulated": {"topology": request.topology.name, "slowdown": 1.0, "says": SAYS},
            "model": request.profile.name, "microbatches": request.microbatches, "plan": asdict(self.planned.plan),
            "strategy": request.strategy, "mapping": request.mapping, "ratio": self.ratio,
            "simulated": {"sweep_seconds": self.simulated, "update_seconds": self.prediction.update_seconds,
                          "bytes": self.prediction.bytes_by_category},
            "rehearsed": {"sweep_seconds": self.rehearsed, "bytes": self.moved, "scheduled_bytes": self.scheduled,
                          "tasks": self.tasks, "processor_seconds": self.processor_seconds},
            "figures": dict(zip(("simulated", "rehearsed"), (of.as_json() for of in self.figures))),
            "stage_seconds": self.stage_seconds, "load": self.load,
            "memory": {"resident": [report.resident_bytes for report in self.reports],
                       "stored": [report.stored_bytes for report in self.reports]}}


def _seconds(steps: Sequence[Any]) -> Tuple[float, float]:
    """A step's sweeps: from the first rank's start, to the last one's end of the forward, to the last one's end."""
    turn = max(step.forward_done for step in steps)
    return turn - min(step.begun for step in steps), max(step.backward_done for step in steps) - turn


# Tables.


def time_table(outcome: RehearsalOutcome) -> Table:
    """Seconds of the step."""
    request, update = outcome.planned.request, outcome.prediction.update_seconds
    table = Table(title=f"{escape(request.profile.name)} on {escape(request.topology.name)}, emulated")
    for name in ("seconds", "simulated", "rehearsed (emulated)", "ratio"):
        table.add_column(name, justify="left" if name == "seconds" else "right")
    rows = [("forward sweep", outcome.simulated[0], outcome.median[0]),
            ("backward sweep", outcome.simulated[1], outcome.median[1]),
            ("both sweeps", sum(outcome.simulated), sum(outcome.median)),
            ("with the CPU optimizer, the same in both", sum(outcome.simulated) + update, sum(outcome.median) + update)]
    for name, simulated, rehearsed in rows:
        table.add_row(name, f"{simulated:.3f}", f"{rehearsed:.3f}", f"{rehearsed / simulated:.3f}")
    table.add_section()
    for name, share in (("bubble", lambda of: of.bubble),
                        ("waiting for transfers", lambda of: _mean(of.exposed_seconds) / of.sweep_seconds),
                        ("waiting for the runtime", lambda of: _mean(of.idle_seconds[Idle.RUNTIME]) / of.sweep_seconds)):
        table.add_row(f"{name}, share of GPU time", *(f"{100 * share(of):.1f} %" for of in outcome.figures), "")
    return table


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds)


def bytes_table(outcome: RehearsalOutcome) -> Table:
    """Bytes of the step by category."""
    table = Table(title="bytes of a step, all GPUs")
    for name in ("", "simulated", "scheduled", "moved (emulated)"):
        table.add_column(name, justify="right" if name else "left")
    for category in CATEGORIES:
        simulated, scheduled = outcome.prediction.bytes_by_category.get(category, 0), outcome.scheduled[category]
        table.add_row(category, f"{simulated:,}", f"{scheduled:,}", f"{outcome.moved[category]:,}")
    return table


def link_table(outcome: RehearsalOutcome) -> Table:
    """What the transfers got of the links that GPUs share."""
    table = Table(title="transfers through the root complexes, GB/s: fastest / median by bytes")
    for name in ("", "bandwidth", "simulated", "rehearsed (emulated)"):
        table.add_column(name, justify="right" if name else "left")
    offered = {link_name(link): rate for link, rate in bandwidths(outcome.planned.request.topology).items()}
    for link in outcome.figures[0].bandwidth:
        if link.startswith("root"):
            moved = [of.bandwidth[link] for of in outcome.figures]
            table.add_row(link, f"{offered[link] / 1e9:.1f}",
                          *(f"{rates[-1][0] / 1e9:.1f} / {quartiles(rates)[1] / 1e9:.1f}" for rates in moved))
    return table


def sentences(outcome: RehearsalOutcome) -> List[str]:
    """What the tables do not say."""
    stages = [1e3 * seconds for seconds in outcome.stage_seconds]
    longer = 1e3 * (sum(outcome.median) - sum(outcome.simulated))
    per_gpu = outcome.tasks / len(outcome.reports)
    resident = max(report.resident_bytes for report in outcome.reports)
    stored = max(report.stored_bytes for report in outcome.reports)
    equal = "equal" if outcome.moved == outcome.scheduled else "DIFFER FROM"
    return [
        f"{len(stages)} stages, whose forward of a micro-batch takes {min(stages):.1f} to {max(stages):.1f} ms (median "
        f"{statistics.median(stages):.1f} ms).",
        f"The rehearsed sweeps take {longer:.1f} ms longer, {longer / per_gpu:.3f} ms for each of a GPU's {per_gpu:.0f} "
        f"tasks. A task took {1e3 * outcome.processor_seconds / outcome.tasks:.2f} ms of a processor, its emulation "
        "included.",
        f"Moved bytes {equal} scheduled bytes. A rank took {readable(resident)} of memory, the model's store "
        f"{readable(stored)}.",
        f"Median of {len(outcome.rehearsed)} steps after one that warmed up; load of this machine {outcome.load:.1f} on "
        f"{os.cpu_count()} processors."]


def ablation_table(outcomes: Dict[str, Any]) -> Table:
    """Rehearsals that differ from the first one in one thing each.

    Args:
        outcomes: by what is different; an outcome, or the reason why there is none.
    """
    base = next(iter(outcomes.values()))
    request = base.planned.request
    table = Table(title=f"one thing changed at a time: seconds of both sweeps, {escape(request.profile.name)} on "
                  f"{escape(request.topology.name)}, emulated")
    for name in ("", "stages", "simulated", "", "rehearsed (emulated)", "", "ratio"):
        table.add_column(name, justify="right" if table.columns else "left")
    for name, outcome in outcomes.items():
        if isinstance(outcome, str):
            table.add_row(name, "-", escape(outcome))
            continue
        pairs = [(sum(outcome.simulated), sum(base.simulated)), (sum(outcome.median), sum(base.median))]
        figures = [text for value, of_base in pairs for text in (f"{value:.3f}", f"{100 * (value / of_base - 1):+.1f} %")]
        table.add_row(name, str(outcome.planned.plan.stages), *figures, f"{outcome.ratio:.3f}")
    return table

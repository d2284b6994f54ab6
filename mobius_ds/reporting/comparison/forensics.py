"""What a comparison's Mobius arm recorded, as the report's timelines and figures."""

from pathlib import Path
from typing import Any, Dict, Iterator, List

from mobius_ds.names import TRACE_FILE
from mobius_ds.reporting.comparison.arms import MOBIUS
from mobius_ds.runtime.record.recorded_trace import Trace
from mobius_ds.simulation.steps import Step

SIMULATED_ARM = f"{MOBIUS} (simulated)"


def add_to_report(report: Dict[str, Any], folder: Path) -> None:
    """Adds the plan, and the timelines and figures of a representative step, measured and simulated.

    Args:
        report: of a comparison.
        folder: of the Mobius arm's run, with the trace.

    Raises:
        ValueError: there is no trace that can be read.
    """
    trace = Trace(folder / TRACE_FILE)
    number = trace.representative
    if number is None:
        raise ValueError(f"{folder / TRACE_FILE} holds no step that all ranks have finished")
    measured = trace.step(number)
    simulated, says = trace.simulated(measured)
    report["plan"] = {key: trace.plan[key] for key in ("gpus", "layers_per_stage", "gpu_of_stage", "layers", "how")}
    timelines, figures_of = report.setdefault("timelines", {}), report.setdefault("figures", {})
    for name, step, what in ((MOBIUS, measured, None), (SIMULATED_ARM, simulated, says)):
        timelines[name] = {"step": number, "seconds": step.seconds, "says": what,
                           "emulated": trace.emulated, "tasks": list(_rows(step))}
        figures_of[name] = trace.figures(step).as_json()


def _rows(step: Step) -> Iterator[List[Any]]:
    for part in step.parts:
        for task, start, end in part.timeline.played:
            yield [task.gpu, task.stream.value, f"{task.key.kind.name.lower()} {task.key}", task.category or "compute",
                   task.key.stage, task.key.microbatch, task.nbytes, part.begin + start, part.begin + end, part.name]

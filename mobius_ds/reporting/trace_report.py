"""``mobius-ds trace``: where the time of a recorded step went, in the terminal."""

import argparse
from pathlib import Path
from typing import Dict, List

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mobius_ds.inputs.units import readable
from mobius_ds.runtime.record.recorded_trace import Trace
from mobius_ds.simulation.exposure import Figures, Idle, quartiles

PERCENT, MILLISECONDS = 100, 1e3
HIDDEN, SIMULATED_ROW = "hidden", "simulated"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``trace``."""
    parser.add_argument("trace", type=Path, help='a file recorded by "mobius": {"trace": FILE}, or by simulate --trace')
    parser.add_argument("--step", type=int, help="which step to show (default: the one of the median time)")
    parser.add_argument("--png", type=Path, help="draw the step here")


def main(args: argparse.Namespace) -> int:
    """Prints the figures of a trace's step. Returns the exit status."""
    console = Console()
    try:
        trace = Trace(args.trace)
        number = trace.representative if args.step is None else args.step
        if args.step is not None and number not in trace.numbers:
            raise ValueError(f"step {number} is not in {args.trace}: it has {_range(trace.numbers)}")
        measured = None if number is None else trace.step(number)
        simulated, says = trace.simulated(measured)
        shown = {f"{SIMULATED_ROW} ({says})": simulated}
        if measured is not None:
            shown = {f"step {number}{', emulated' if trace.emulated else ''}": measured, **shown}
        show({name: trace.figures(step) for name, step in shown.items()}, console)
        if args.png:
            from mobius_ds.reporting.page import png  # here: Matplotlib loads only for a picture

            name, step = next(iter(shown.items()))
            png.draw_step(step, args.png, name)
            console.print(f"{escape(str(args.png))} written")
    except (ValueError, OSError) as error:
        said = f"cannot write {error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        console.print(f"[red]mobius-ds trace:[/] {escape(said)}", soft_wrap=True)
        return 1
    return 0


def _range(numbers: List[int]) -> str:
    return f"steps {numbers[0]} to {numbers[-1]}" if numbers else "a simulated one only"


def show(of: Dict[str, Figures], console: Console) -> None:
    """Prints figures side by side: what each GPU did, how its weights came, and how fast bytes moved."""
    for name, shown in of.items():
        console.print(f"{name}: {shown.step_seconds:.3f} s, of which sweeps {shown.sweep_seconds:.3f} s; bubble "
                      f"{shown.bubble * PERCENT:.0f} %; moved {readable(sum(shown.bytes_by_category.values()))}",
                      highlight=False, soft_wrap=True)
    order = " (measured / simulated)" if len(of) > 1 else ""
    # A table's own title would be wrapped to its width.
    for title, table in (("What each GPU computes and what it waits for in the sweeps, ms", _time_table(of)),
                         (f"Prefetch: copies of weights that were waited for, ms{order}", _stage_table(of)),
                         (f"GB/s of a link, below which 25, 50 and 75 % of its bytes move{order}", _bandwidth_table(of))):
        console.print(f"\n{title}")
        console.print(table)


def _time_table(of: Dict[str, Figures]) -> Table:
    table = Table(padding=0)
    for name in ("GPU", "compute", *_WAITS.values(), "exposed"):
        table.add_column(name, justify="right")
    for gpu in range(min(len(shown.compute_seconds) for shown in of.values())):
        for name, shown in of.items():
            seconds = (shown.compute_seconds, *(shown.idle_seconds[cause] for cause in _WAITS), shown.exposed_seconds)
            table.add_row(f"{gpu}{' sim.' if name.startswith(SIMULATED_ROW) else ''}",
                          *(f"{of_gpu[gpu] * MILLISECONDS:.1f}" for of_gpu in seconds))
    return table


_WAITS = {Idle.WEIGHTS: "weights", Idle.ACTIVATIONS: "activations", Idle.INPUTS: "inputs", Idle.OUTGOING: "copies\nout",
          Idle.RUNTIME: "runtime", Idle.NOTHING: "nothing\nto do"}


def _stage_table(of: Dict[str, Figures]) -> Table:
    table = Table()
    for name in ("stage", "GPU", "forward", "backward"):
        table.add_column(name, justify="right")
    hidden = 0
    for same in zip(*(shown.stages for shown in of.values())):
        cells = [[exposure_of(getattr(stage, sweep)) for stage in same] for sweep in ("forward", "backward")]
        if {*cells[0], *cells[1]} == {HIDDEN}:
            hidden += 1
        else:
            table.add_row(str(same[0].stage), str(same[0].gpu), *map(" / ".join, cells))
    if hidden:
        table.add_row(f"{hidden} more", "", HIDDEN, HIDDEN)
    return table


def _bandwidth_table(of: Dict[str, Figures]) -> Table:
    table = Table()
    table.add_column("link")
    for name in ("25 %", "50 %", "75 %"):
        table.add_column(name, justify="right")
    for link in next(iter(of.values())).bandwidth:
        rates = [quartiles(shown.bandwidth.get(link, [])) or [None] * 3 for shown in of.values()]
        table.add_row(link, *(" / ".join("-" if rate is None else f"{rate / 1e9:.2f}" for rate in same)
                              for same in zip(*rates)))
    return table


def exposure_of(seconds: float) -> str:
    """A copy's exposed time, in milliseconds, or that it is hidden."""
    return HIDDEN if seconds < 5e-5 else f"{seconds * MILLISECONDS:.1f}"

"""``mobius-ds compare``: one script and one config, run once per arm, alone, and held side by side.

The arms (``arms``) are jobs of their own (``job``), started one after the other with the same arguments.
"""

import argparse
import math
import shlex
import sys
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape

from mobius_ds.inputs.topology import TopologyError
from mobius_ds.observation.records import Record
from mobius_ds.reporting.comparison import forensics, job, observed_timeline, series
from mobius_ds.reporting.comparison.answer import answer
from mobius_ds.reporting.comparison.arms import (ARMS, DEFAULTS_ARM_STEPS, MOBIUS, ZERO3, Arm, CompareError, Failure,
                                                 choose_arms, explained, read_config, with_batch_per_rank, with_dtype,
                                                 with_micro_batch, with_mobius)
from mobius_ds.reporting.comparison.building import build_report, machine_description
from mobius_ds.reporting.comparison.config_file import batch_of
from mobius_ds.reporting.comparison.job import JobFailed, Jobs, Server
from mobius_ds.reporting.comparison.report import Report, findings
from mobius_ds.reporting.comparison.tables import measures, rich_table, write_report
from mobius_ds.reporting.interruption import INTERRUPTED, ended_by_signal
from mobius_ds.reporting.page import html_report, png

_PACKAGE = Path(__file__).resolve().parents[1]
_EXAMPLES = _PACKAGE if (_PACKAGE / "comparisons").is_dir() else _PACKAGE.parent  # installed, or a clone
DEFAULT_SCRIPT = _EXAMPLES / "comparisons" / "train_gpt.py"
DEFAULT_CONFIG = _EXAMPLES / "ds_configs" / "gpt_offload.json"
DEFAULT_RANKS = 4

_RUNS = "runs"  # in the output folder; each arm's own folder is in there


class Comparison(NamedTuple):
    """What is to be run."""

    arms: List[Arm]
    jobs: Jobs

    def value(self, over: str) -> Optional[int]:
        """Where it stands in a series over ``over``; None if the script decides it."""
        ranks = self.jobs.ranks
        return ranks if over == series.RANKS else batch_of(self.arms[0].config, ranks).micro_batch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options to ``parser``."""
    parser.add_argument("--script", type=Path, default=DEFAULT_SCRIPT,
                        help="training script; must accept --deepspeed_config and --steps (default: a small GPT)")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG,
                        help="DeepSpeed config (default: ZeRO-3 with CPU offload)")
    parser.add_argument("--ranks", type=int, help=f"processes, one per GPU (default: {DEFAULT_RANKS}, or as many as the "
                        "server of --wires has GPUs)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--arms", help=f"what to run, separated by commas. {explained(ARMS)} zero3-defaults takes "
                        f"{DEFAULTS_ARM_STEPS} steps at most. Default: the first two, and the third where it differs")
    parser.add_argument("--out", type=Path, default=Path("mobius_compare"), help="folder for report, plots and logs")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="precision (default: the config's)")
    parser.add_argument("--micro-batch", type=int, metavar="SAMPLES", help="of one rank (default: the config's)")
    parser.add_argument("--device-memory-gb", type=float, metavar="GIB", help="device memory one rank may use, in every arm "
                        "(default: mobius.device_memory_gb of the config, or what the device has)")
    parser.add_argument("--sweep", type=series.parse, metavar="WHAT=VALUES", help="after the comparison, run all arms again "
                        f"with ranks=1,2,4 or micro_batch=1,2,4, {series.STEPS} steps each at most, to see what grows")
    parser.add_argument("--wires", metavar="TOPOLOGY", help="let every arm's bytes cross the emulated links of this server, "
                        "a preset's name or a JSON file; needs --slowdown")
    parser.add_argument("--slowdown", type=float, metavar="TIMES", help="how many times slower than the server's GPUs this "
                        "machine computes: its links are emulated that much slower")
    parser.add_argument("script_args", nargs="*", metavar="-- SCRIPT_ARGS", help="passed on to the script")


def main(args: argparse.Namespace) -> int:
    """Runs the comparison.

    Returns:
        0 if every arm that has to ran and Mobius agrees with ZeRO-3; 1 if one of them failed, their losses differ, or
        Mobius' measured bytes are not the predicted ones; 130 when interrupted.
    """
    console = Console()
    page = None
    try:
        comparison = comparison_of(args, args.out / _RUNS)
        points = _points(args, comparison.jobs.ranks)  # now, so that what is wrong with one is said before anything is run
        with ended_by_signal():
            report = _compared(comparison, console)
            page = _write(report, args.out)
            if args.sweep is not None:
                report["sweep"] = _swept(args.sweep.over, comparison, points, report, console)
                _write(report, args.out)
    except CompareError as error:
        console.print(f"[red]mobius-ds compare:[/] {escape(str(error))}")
        return 1
    except OSError as error:
        console.print(f"[red]mobius-ds compare:[/] cannot write {escape(str(error.filename or args.out))}: "
                      f"{error.strerror}. Name a folder that can be written and has room with --out")
        return 1
    except KeyboardInterrupt:
        kept = f"; the comparison without its sweep is in {escape(str(page))}" if page else ""
        console.print(f"interrupted; all processes stopped{kept}", soft_wrap=True)
        return INTERRUPTED
    return _show(report, page, console)


def comparison_of(args: argparse.Namespace, folder: Path, batch_of_ranks: Optional[int] = None) -> Comparison:
    """What the command's arguments ask for.

    Args:
        folder: each arm gets a folder of its own in here.
        batch_of_ranks: the config's batch is that of so many ranks, each of which keeps its share. Default: of those
            that run.

    Raises:
        CompareError: a missing script or config, a config that ZeRO-3 cannot run, or a number that makes no sense.
    """
    for what, path in (("--script", args.script), ("--config", args.config)):
        if not path.is_file():
            raise CompareError(f"{what} {path} {'is not a file' if path.exists() else 'does not exist'}")
    for option in ("ranks", "steps", "micro_batch", "device_memory_gb", "slowdown"):
        value = getattr(args, option)
        if value is not None and not 0 < value < math.inf:
            raise CompareError(f"--{option.replace('_', '-')} must be positive and finite, got {value:g}")
    server = _server(args)
    ranks = args.ranks or (server.topology.size if server else DEFAULT_RANKS)
    config = with_dtype(read_config(args.config), args.dtype)
    if batch_of_ranks is not None:
        config = with_batch_per_rank(config, batch_of_ranks)
    config = with_micro_batch(config, args.micro_batch, ranks)
    config = with_mobius(config, device_memory_gb=args.device_memory_gb, topology=args.wires)
    arms = choose_arms(args.arms, config, args.script, ranks, args.steps)
    return Comparison(arms, Jobs(args.script, args.script_args, ranks, folder, server))


def _server(args: argparse.Namespace) -> Optional[Server]:
    if args.wires is None and args.slowdown is None:
        return None
    if args.wires is None or args.slowdown is None:
        raise CompareError("--wires and --slowdown go together: whose links to emulate, and how many times slower than its "
                           "GPUs this machine computes")
    if args.wires == "detect":
        raise CompareError("--wires emulates the links of a server that is not here: name a preset, such as 4090-2, or a "
                           "topology in a JSON file. Leave it out to use this machine's own")
    from mobius_ds.emulation.server import EmulatedServer  # only here, so that the package does without emulation
    from mobius_ds.machine.topology_detection import topology_by_name  # imports torch

    try:
        topology = topology_by_name(args.wires)
        return EmulatedServer(topology.select(range(args.ranks or topology.size)), args.slowdown)
    except TopologyError as error:
        raise CompareError(f"--wires {args.wires}: {error}") from None


def _points(args: argparse.Namespace, ranks: int) -> Dict[int, Comparison]:
    """By value of the series, what is to be run there.

    Args:
        ranks: of the comparison itself.
    """
    if args.sweep is None:
        return {}
    over, few_steps = args.sweep.over, {**vars(args), "steps": min(args.steps, series.STEPS)}
    return {value: comparison_of(argparse.Namespace(**{**few_steps, over: value}), args.out / _RUNS / f"{over}-{value}",
                                 batch_of_ranks=ranks if over == series.RANKS else None) for value in args.sweep.values}


def run_arms(comparison: Comparison, console: Console,
             any_may_fail: bool = False) -> Tuple[Dict[str, List[Record]], Dict[str, Failure]]:
    """Runs the arms one after the other.

    Args:
        any_may_fail: also an arm that there is nothing to compare without.

    Returns:
        By arm, the records of its ranks; and by arm without any, why.

    Raises:
        JobFailed: an arm failed without which there is nothing to compare.
    """
    records: Dict[str, List[Record]] = {}
    failed: Dict[str, Failure] = {}
    for arm in comparison.arms:
        if arm.unsuitable:
            failed[arm.name] = Failure("not run", arm.unsuitable)
            continue
        try:
            records[arm.name] = job.run(arm, comparison.jobs, console)
        except JobFailed as error:
            if arm.required and not any_may_fail:
                raise
            failed[arm.name] = error.failure
    return records, failed


def dtype_of(records: Mapping[str, Sequence[Record]]) -> str:
    """The precision the runs trained in: ``bf16``, ``fp16`` or ``fp32``. The config may have left it to the script."""
    first = next(iter(records.values()))[0]
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[first["dtype"]]


def _compared(comparison: Comparison, console: Console) -> Report:
    """The report of the comparison itself."""
    records, failed = run_arms(comparison, console)
    if not records:
        raise CompareError("no arm has run: " + "; ".join(f"{name}: {failure.why}" for name, failure in failed.items()))
    report = build_report(records, dtype_of(records), machine_description(), failed)
    server = comparison.jobs.server
    report["emulated"] = server.to_report() if server else None
    if MOBIUS in records:
        try:
            forensics.add_to_report(report, job.folder_of(MOBIUS, comparison.jobs))
        except ValueError as error:  # no reason to lose the rest
            report["comparison"]["notes"].append(f"{MOBIUS}: no timeline: {error}")
    observed_timeline.add_to_report(report, records, emulated=server is not None)
    report.update(command=shlex.join(["mobius-ds", *sys.argv[1:]]), answer=answer(report))
    return report


def _swept(over: str, comparison: Comparison, points: Mapping[int, Comparison], report: Report,
           console: Console) -> Dict[str, Any]:
    """The report's ``sweep``. Where the comparison itself stands, nothing is run again."""
    figures = []
    for value, there in points.items():
        if value == comparison.value(over):
            figures.append(series.point(value, report["arms"], report["failed"]))
            continue
        console.print(f"{over} = {value}")
        records, failed = run_arms(there, console, any_may_fail=True)
        arms = build_report(records, dtype_of(records), report["machine"])["arms"] if records else {}
        figures.append(series.point(value, arms, {name: failure._asdict() for name, failure in failed.items()}))
    return {"over": over, "points": figures}


def _write(report: Report, folder: Path) -> Path:
    """Writes all that a comparison leaves, and returns the page for a browser."""
    write_report(report, folder)
    png.draw_comparison(report, folder)
    return html_report.write_html(report, folder)


def _show(report: Report, page: Path, console: Console) -> int:
    problems, notes = findings(report)
    console.print(rich_table(report))
    console.print(report["answer"]["headline"], style="bold", highlight=False, markup=False)
    difference = report["comparison"].get("max_loss_difference")
    if difference is not None:
        console.print(f"largest loss difference of {ZERO3} and {MOBIUS} at any step: {difference:.3g} "
                      f"(allowed: {report['comparison']['loss_tolerance']:g})")
    for note in notes:
        console.print(f"note: {escape(note)}")
    for problem in problems:
        console.print(f"[bold red]{escape(problem)}[/]")
    console.print(Markdown(measures(report)), style="dim")
    console.print(f"report.md, report.json and plots are in {escape(str(page.parent))}. To read in a browser:")
    console.print(str(page.resolve()), soft_wrap=True, highlight=False, markup=False)
    return 1 if problems else 0

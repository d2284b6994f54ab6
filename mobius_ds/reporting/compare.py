"""``mobius-ds compare``: one script and one config, run once per arm, alone, and held side by side.

Each arm is a job of its own under ``torch.distributed.run``, started one after the other with the same arguments;
only the environment tells them apart (``MOBIUS_DS``, ``MOBIUS_DS_RECORD``). The script receives
``--deepspeed_config PATH`` (DeepSpeed's own convention) and ``--steps N``, then the arguments after ``--``.
"""

import argparse
import contextlib
import copy
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import psutil
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mobius_ds.plugin.hooks import RECORD_VARIABLE
from mobius_ds.reporting import plots
from mobius_ds.reporting.records import Record, read_progress, read_records
from mobius_ds.reporting.report import (MOBIUS, ZERO3, ZERO3_DEFAULTS, build_report, findings, machine_description,
                                        measures, rich_table, write_report)

ARMS = (ZERO3, MOBIUS, ZERO3_DEFAULTS)

# Left out, DeepSpeed chooses values that fit big models: a small one is then gathered once a step and never released.
SIZE_SETTINGS = ("stage3_max_reuse_distance", "stage3_max_live_parameters", "stage3_prefetch_bucket_size",
                 "stage3_param_persistence_threshold")

DEFAULTS_ARM_STEPS = 5  # enough to see the bytes of a step; the arm is there for nothing else

FLAG_VARIABLE = "MOBIUS_DS"
CHECKOUT = Path(__file__).resolve().parents[2]
DEFAULT_SCRIPT = CHECKOUT / "comparisons" / "train_gpt.py"
DEFAULT_CONFIG = CHECKOUT / "ds_configs" / "gpt_offload.json"
INTERRUPTED = 130  # a shell's status for ctrl-C

_RUNS = "runs"  # in the output folder; an arm's own folder in there holds
_CONFIG, _LAUNCHER_LOG, _RANK_LOGS = "ds_config.json", "launcher.log", "logs"
_LAST_LINES = 40
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 5.0


class CompareError(Exception):
    """A comparison that cannot be made; the message says why and what to do."""


@dataclass(frozen=True)
class Arm:
    """One run: a name and how it differs from the others."""

    name: str
    steps: int
    config: Dict[str, Any]

    @property
    def flag(self) -> str:
        """The value of ``MOBIUS_DS``."""
        return "1" if self.name == MOBIUS else "0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options to ``parser``."""
    parser.add_argument("--script", type=Path, default=DEFAULT_SCRIPT,
                        help="training script; must accept --deepspeed_config and --steps (default: a small GPT)")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG,
                        help="DeepSpeed config (default: ZeRO-3 with CPU offload)")
    parser.add_argument("--ranks", type=int, default=4, help="processes, one per GPU (default: 4)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--arms", help=f"what to run, of {', '.join(ARMS)}: the second is the config under Mobius, the "
                        f"first under ZeRO-3, the third under ZeRO-3 without {', '.join(SIZE_SETTINGS)} "
                        f"({DEFAULTS_ARM_STEPS} steps at most). Default: all that differ")
    parser.add_argument("--out", type=Path, default=Path("mobius_compare"), help="folder for report, plots and logs")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="precision (default: the config's)")
    parser.add_argument("script_args", nargs="*", metavar="-- SCRIPT_ARGS", help="passed on to the script")


def main(args: argparse.Namespace) -> int:
    """Runs the comparison.

    Returns:
        0 if every arm ran and the arms agree; 1 if an arm failed, the losses differ, or Mobius' measured bytes are
        not the predicted ones; 130 when interrupted.
    """
    console = Console()
    try:
        arms = choose_arms(args)
        # A job scheduler's SIGTERM has to take the ranks along as ctrl-C does.
        with _as_interrupt(signal.SIGTERM):
            records = {arm.name: _run(arm, args, console) for arm in arms}
        report = build_report(records, dtype_of(records[arms[0].name][0]), machine_description())
        write_report(report, args.out)
        plots.draw(report, args.out)
    except CompareError as error:
        console.print(f"[red]mobius-ds compare:[/] {escape(str(error))}")
        return 1
    except OSError as error:
        console.print(f"[red]mobius-ds compare:[/] cannot write {escape(str(error.filename or args.out))}: "
                      f"{error.strerror}. Name a folder that can be written and has room with --out")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; all processes stopped")
        return INTERRUPTED
    return _show(report, args.out, console)


def choose_arms(args: argparse.Namespace) -> List[Arm]:
    """The arms to run, each with its effective DeepSpeed config.

    Raises:
        CompareError: an unknown arm, a missing script or config, or a config that ZeRO-3 cannot run.
    """
    for what, path, default in (("--script", args.script, DEFAULT_SCRIPT), ("--config", args.config, DEFAULT_CONFIG)):
        if not path.is_file():
            raise CompareError(f"the default {path.name} comes with a clone of mobius_ds, not with the installed package: "
                               f"run from a clone, or pass {what}" if path == default else
                               f"{what} {path} does not exist")
    if args.ranks < 1 or args.steps < 1:
        raise CompareError(f"--ranks and --steps must be positive, got {args.ranks} and {args.steps}")
    config = _with_dtype(_read_config(args.config), args.dtype)
    zero = config.get("zero_optimization", {})
    if zero.get("stage") != 3:
        raise CompareError(f"{args.config} sets zero_optimization.stage to {zero.get('stage')}; only stage 3 is "
                           "compared with Mobius")
    sized = any(setting in zero for setting in SIZE_SETTINGS)
    names = args.arms.split(",") if args.arms else [arm for arm in ARMS if sized or arm != ZERO3_DEFAULTS]
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise CompareError(f"unknown arm {unknown[0]!r} in --arms; choose from {', '.join(ARMS)}")
    return [_arm(name, args.steps, config) for name in dict.fromkeys(names)]


def _read_config(path: Path) -> Dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CompareError(f"{path} is not valid JSON: {error}") from None
    except OSError as error:
        raise CompareError(f"cannot read {path}: {error.strerror}") from None
    if not isinstance(config, dict) or not isinstance(config.get("zero_optimization", {}), dict):
        raise CompareError(f"{path} is not a DeepSpeed config: it and its zero_optimization must be JSON objects")
    return config


def dtype_of(record: Record) -> str:
    """The precision a run trained in: ``bf16``, ``fp16`` or ``fp32``. The config may have left it to the script ("auto")."""
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[record["dtype"]]


def _arm(name: str, steps: int, config: Dict[str, Any]) -> Arm:
    if name != ZERO3_DEFAULTS:
        return Arm(name, steps, config)
    config = copy.deepcopy(config)
    for setting in SIZE_SETTINGS:
        config["zero_optimization"].pop(setting, None)
    return Arm(name, min(steps, DEFAULTS_ARM_STEPS), config)


def _with_dtype(config: Dict[str, Any], dtype: Optional[str]) -> Dict[str, Any]:
    if dtype is None:
        return config
    for section in ("bf16", "fp16"):
        if section in config or section == dtype:
            config[section] = {**config.get(section, {}), "enabled": section == dtype}
    return config


def _run(arm: Arm, args: argparse.Namespace, console: Console) -> List[Record]:
    folder = (args.out / _RUNS / arm.name).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / _CONFIG).write_text(json.dumps(arm.config, indent=2) + "\n")

    with (folder / _LAUNCHER_LOG).open("w") as log:
        # Its own session, so that ctrl-C reaches this process alone, which then stops the ranks in order.
        job = subprocess.Popen(_command(arm, args, folder), env=_environment(arm, args.ranks, folder),
                               stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            _follow(job, arm, folder, console)
        finally:
            _stop_processes_recording_into(folder)
            job.wait()
    if job.returncode != 0:
        raise CompareError(f"the {arm.name} arm failed (logs are in {folder}); {failure_of(folder)}")
    try:
        records = read_records(folder, args.ranks)
    except FileNotFoundError as error:
        raise CompareError(f"the {arm.name} arm ended, but recorded nothing: {error}. Logs are in {folder}") from None
    _check_steps(records, arm)
    return records


def _command(arm: Arm, args: argparse.Namespace, folder: Path) -> List[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(args.ranks),
        "--master_addr", "127.0.0.1", "--master_port", str(_free_port()),
        "--redirects", "3", "--log-dir", str(folder / _RANK_LOGS),
        "--module", "mobius_ds.plugin.launcher", str(args.script.resolve()),
        "--deepspeed_config", str(folder / _CONFIG), "--steps", str(arm.steps), *args.script_args,
    ]  # yapf: disable


def _environment(arm: Arm, ranks: int, folder: Path) -> Dict[str, str]:
    paths = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if str(CHECKOUT) != sysconfig.get_path("purelib"):  # an installed package is found anyway
        paths.insert(0, str(CHECKOUT))
    return {
        # Ranks share the cores: more threads than cores would slow both arms down.
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        FLAG_VARIABLE: arm.flag,
        RECORD_VARIABLE: str(folder),
    }


def _follow(job: subprocess.Popen, arm: Arm, folder: Path, console: Console) -> None:
    """Shows the arm's progress until the job ends."""
    columns = (TextColumn("{task.fields[arm]}"), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        line = progress.add_task("starting (DeepSpeed's first start compiles for minutes)", total=arm.steps,
                                 arm=f"{arm.name:14}")
        while job.poll() is None:
            steps = read_progress(folder)
            progress.update(line, completed=steps, **({"description": "step"} if steps else {}))
            time.sleep(_POLL_SECONDS)
        progress.update(line, completed=read_progress(folder), description="step")


def _check_steps(records: Sequence[Record], arm: Arm) -> None:
    for record in records:
        taken = len(record["step_seconds"])
        if taken != arm.steps:
            raise CompareError(f"the {arm.name} arm took {taken} steps instead of {arm.steps} on rank "
                               f"{record['rank']}; the script has to take as many optimizer steps as --steps says")


def failure_of(folder: Path) -> str:
    """What made a job fail: the rank that failed first, how it ended, and the last lines it wrote."""
    output = (folder / _LAUNCHER_LOG).read_text(errors="replace")
    cause = re.search(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+[^\n]*)", output, re.DOTALL)
    if cause is None:
        return f"the launcher itself failed:\n{_last_lines(output)}"
    rank, exitcode = cause.groups()
    written = _written_by(rank, folder)
    ended = f"rank {rank} ended first, with exitcode {exitcode.strip()}"
    # The rank that fails is often slower to exit than the one that only heard of it.
    blamed = re.search(r"PeerLost: rank (\d+) is gone", written)
    if blamed and (reason := _written_by(blamed[1], folder)):
        return f"{ended}, because it lost rank {blamed[1]}, whose last lines are:\n{_last_lines(reason)}"
    return f"{ended}:\n{_last_lines(written)}"


def _written_by(rank: str, folder: Path) -> str:
    # Ranks write at the same time; a log of their own keeps each one's last words together.
    logs = sorted(folder.glob(f"{_RANK_LOGS}/*/attempt_0/{rank}/std*.log"), reverse=True)  # errors come last
    return "".join(log.read_text(errors="replace") for log in logs)


def _last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-_LAST_LINES:])


def _stop_processes_recording_into(folder: Path) -> None:
    """Ends whatever is left of a job: the launcher and the ranks, each of which is a session of its own.

    They are told by their environment, because ranks whose launcher was killed have lost their parent.
    """
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(RECORD_VARIABLE) == str(folder):
                left.append(process)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(left, timeout=_GRACE_SECONDS)
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=_GRACE_SECONDS)


def _show(report: Dict[str, Any], folder: Path, console: Console) -> int:
    problems, notes = findings(report)
    console.print(rich_table(report))
    difference = report["comparison"].get("max_loss_difference")
    if difference is not None:
        console.print(f"largest loss difference of {ZERO3} and {MOBIUS} at any step: {difference:.3g} "
                      f"(allowed: {report['comparison']['loss_tolerance']:g})")
    for note in notes:
        console.print(f"note: {note}")
    for problem in problems:
        console.print(f"[bold red]{escape(problem)}[/]")
    console.print(Markdown(measures(report)), style="dim")
    console.print(f"{folder / 'report.md'}, report.json and plots written")
    return 1 if problems else 0


@contextlib.contextmanager
def _as_interrupt(number: int):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    finally:
        signal.signal(number, before)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

"""One arm of a comparison as a job of its own: started, followed and stopped.

A job runs under ``torch.distributed.run``; only the config, the environment and an option of the script tell it from the
other arms'. The script receives ``--deepspeed_config PATH`` (DeepSpeed's own convention) and ``--steps N``, then
``SCRIPT_ARGS``.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Protocol, Sequence

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mobius_ds.inputs.topology import Topology
from mobius_ds.names import FLAG_VARIABLE, RECORD_VARIABLE, TRACE_FILE
from mobius_ds.observation.records import Record, Told, read_progress, read_records, remove_shared_files, tell
from mobius_ds.reporting.comparison.arms import MOBIUS, Arm, CompareError, Failure, device_memory, with_mobius
from mobius_ds.reporting.comparison.job_failure import LAUNCHER_LOG, RANK_LOGS, failure_of, reason_of

CHECKOUT = Path(__file__).resolve().parents[3]

_CONFIG = "ds_config.json"  # in the job's folder
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 5.0


class JobFailed(CompareError):
    """An arm's job failed; the message has the last lines it wrote, ``failure`` the reason in a sentence."""

    def __init__(self, message: str, failure: Failure):
        super().__init__(message)
        self.failure = failure


class Server(Protocol):
    """A server that is not there, whose links the ranks' bytes cross. Emulation is not imported unless it is asked for."""

    topology: Topology

    def to_json(self) -> Dict[str, Any]:
        """What the ranks' recorders are told of it."""

    def to_report(self) -> Dict[str, Any]:
        """The report's ``emulated``."""


@dataclass(frozen=True)
class Jobs:
    """What the arms' jobs have in common."""

    script: Path
    script_args: Sequence[str]
    ranks: int
    folder: Path
    """Each arm writes into a folder of its name in here."""
    server: Optional[Server] = None
    """Whose links are emulated."""


def run(arm: Arm, jobs: Jobs, console: Console) -> List[Record]:
    """Runs one arm to its end and returns the records of its ranks, in order. No process of it is left.

    Raises:
        JobFailed: a rank failed, or the job recorded something else than the arm's steps.
    """
    folder = folder_of(arm.name, jobs)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = with_mobius(arm.config, trace=str(folder / TRACE_FILE)) if arm.name == MOBIUS else arm.config
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    tell(folder, Told(device_memory(arm.config), jobs.server.to_json() if jobs.server else None))

    with (folder / LAUNCHER_LOG).open("w") as log:
        # Its own session, so that ctrl-C reaches this process alone, which then stops the ranks in order.
        job = subprocess.Popen(_command(arm, jobs, folder), env=_environment(arm, jobs, folder),
                               stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        try:
            _follow(job, arm, folder, console)
        finally:
            _stop_processes_recording_into(folder)
            job.wait()
            remove_shared_files(folder)  # which a rank that fails leaves
    if job.returncode != 0:
        reason = reason_of(folder)
        raise JobFailed(f"the {arm.name} arm failed: {reason.why}. Logs are in {folder}; {failure_of(folder)}", reason)
    try:
        records = read_records(folder, jobs.ranks)
    except FileNotFoundError as error:
        raise JobFailed(f"the {arm.name} arm ended, but recorded nothing: {error}. Logs are in {folder}",
                        Failure("failed", str(error))) from None
    _check_steps(records, arm)
    return records


def folder_of(arm: str, jobs: Jobs) -> Path:
    """Where an arm's config, logs, records and trace lie."""
    return (jobs.folder / arm).resolve()


def _command(arm: Arm, jobs: Jobs, folder: Path) -> List[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(jobs.ranks),
        # The launcher binds a port and tells the ranks: one chosen here could be another's by then. Told the address, it
        # needs no name of this machine that can be resolved.
        "--standalone", "--local-addr", "127.0.0.1",
        "--redirects", "3", "--log-dir", str(folder / RANK_LOGS),
        "--module", "mobius_ds.plugin.launcher", str(jobs.script.resolve()),
        "--deepspeed_config", str(folder / _CONFIG), "--steps", str(arm.steps), *arm.options, *jobs.script_args,
    ]  # yapf: disable


def _environment(arm: Arm, jobs: Jobs, folder: Path) -> Dict[str, str]:
    paths = list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    if str(CHECKOUT) != sysconfig.get_path("purelib"):  # an installed package is found anyway
        paths.insert(0, str(CHECKOUT))
    return {
        # Ranks share the cores: more threads than cores would slow all arms down.
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs.ranks)),
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
            why = (f"took {taken} steps instead of {arm.steps} on rank {record['rank']}; the script has to take as many "
                   "optimizer steps as --steps says")
            raise JobFailed(f"the {arm.name} arm {why}", Failure("failed", why))


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

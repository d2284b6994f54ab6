"""The profile of a training script's own model: the script runs on one rank up to its first forward."""

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Sequence

import psutil

from mobius_ds.inputs.profile import ModelProfile, profile_from_json
from mobius_ds.names import FLAG_VARIABLE

PACKAGE = Path(__file__).resolve().parents[1]
LAST_LINES = 30
LIMIT_SECONDS = 1800.0
"""Loading data and making a large model on one rank takes minutes."""
GRACE_SECONDS = 5.0


def profile_of_script(script: Path, config: Path, arguments: Sequence[str]) -> ModelProfile:
    """Runs a training script on one rank up to its first forward, and takes that one's profile, for 1 FLOP/s.

    Raises:
        ValueError: the script ended without a forward of an engine, or did not come to one in time.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        written = folder / "profile.json"
        ended = _run(script, ["--deepspeed_config", str(config), *arguments], written, folder)
        if not written.exists():
            last = "\n".join((folder / "output").read_text(errors="replace").splitlines()[-LAST_LINES:])
            raise ValueError(f"{script} {ended} without a forward that could be profiled:\n{last}")
        return profile_from_json(json.loads(written.read_text()))


def _run(script: Path, arguments: Sequence[str], profile: Path, folder: Path) -> str:
    """Runs the script, which writes its profile there and its output into the folder. Returns how it ended."""
    # The plugin is loaded in the script's process whether or not the package is installed there.
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1", "--log-dir",
               str(folder), "--module", "mobius_ds.plugin.profiled_script", str(profile), str(script), *arguments]
    environment = {**os.environ, "PYTHONPATH": path, FLAG_VARIABLE: "1"}
    with (folder / "output").open("w") as output:
        job = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            return f"ended (status {job.wait(LIMIT_SECONDS)})"
        except subprocess.TimeoutExpired:
            return f"was stopped after {LIMIT_SECONDS:g} s"
        finally:
            _stop(job)


def _stop(job: subprocess.Popen) -> None:
    """Ends the launcher and its rank, if they still run."""
    running = []
    with suppress(psutil.NoSuchProcess):
        if job.poll() is None:
            launcher = psutil.Process(job.pid)
            running = [launcher, *launcher.children(recursive=True)]
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in running:
            with suppress(psutil.NoSuchProcess):
                end(process)
        _, running = psutil.wait_procs(running, timeout=GRACE_SECONDS)
    job.wait()

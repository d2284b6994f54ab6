"""Whole jobs under their launchers: how they end when someone ends them, and that they go on when they are started again."""

import os
import re
import signal
import subprocess
import sys
import time
from itertools import takewhile
from pathlib import Path
from typing import Dict, List

import pytest

from tests.features import survives
from tests.ranks import free_port, run_ranks
from tests.runtime.checkpoint import restarting_job

ROOT = Path(__file__).parents[3]
SCRIPT = restarting_job.__file__
STEPS = 8
RANKS = 2
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(RANKS)]
SECONDS = 120.0


def started(launcher: List[str], *arguments: object) -> subprocess.Popen:
    """Starts the job as from a shell: in a process group of its own."""
    # torch keeps the first start's addresses in a store that a restart reads again, unless told not to share it.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *launcher, SCRIPT, *map(str, arguments)], cwd=ROOT, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                            # Tests started in the background inherit an ignored interrupt; a shell's jobs do not.
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))


def losses(folder: Path, rank: int) -> Dict[int, str]:
    """Of each step, as the last start of the job that came to it wrote it."""
    lines = (folder / f"losses of rank {rank}").read_text().splitlines()
    return {int(step): loss for _, step, loss in map(str.split, lines)}


def starts(folder: Path) -> List[int]:
    """Which start of the job made each step."""
    return [int(line.split()[0]) for line in (folder / "losses of rank 0").read_text().splitlines()]


def assert_nothing_left(folder: Path) -> None:
    deadline = time.monotonic() + 60
    pids = [path.name.split()[1] for path in folder.glob("pid *")]
    while any(Path("/proc", pid).exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pids and not [pid for pid in pids if Path("/proc", pid).exists()]
    assert not [name for name in os.listdir("/dev/shm") if "mobius" in name]


def ignored_by_us(output: str) -> List[str]:
    """What Python could only print of exceptions out of this package or the job: an interrupt may meet a library's finalizer
    as well."""
    told = []
    for after in output.split("Exception ignored in")[1:]:
        what, *lines = after.splitlines()
        told.append("\n".join([what, *takewhile(lambda line: line.startswith(("Traceback", " ")), lines)]))
    return [text for text in told if any(place in text for place in (str(ROOT / "mobius_ds"), SCRIPT))]


def undisturbed(folder: Path) -> None:
    restarting_job.main(folder, STEPS)


@survives("Ranks", "`torchrun --max-restarts`; a rank is killed in a backward, then another in the middle of a save",
          "the job starts again by itself from its latest checkpoint, to the losses of a run that nobody disturbed")
def test_a_job_that_is_restarted_comes_to_the_losses_of_an_undisturbed_one(tmp_path):
    straight, disturbed = tmp_path / "straight", tmp_path / "disturbed"
    straight.mkdir(), disturbed.mkdir()
    run_ranks(RANKS, undisturbed, straight)
    job = started([*TORCHRUN, "--max-restarts", "2"], disturbed, STEPS, "1:backward:killed", "0:save:killed")
    output, _ = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, output
    assert starts(disturbed) == [0] * 4 + [1] * 2 + [2] * 4
    for rank in range(RANKS):
        assert losses(disturbed, rank) == losses(straight, rank) and len(losses(straight, rank)) == STEPS
    assert sorted(os.listdir(disturbed / "checkpoints")) == sorted(os.listdir(straight / "checkpoints"))
    assert_nothing_left(disturbed)


ENDED = [
    ("torchrun", TORCHRUN, signal.SIGINT),
    ("torchrun", TORCHRUN, signal.SIGTERM),
    ("mobius-ds run", ["-m", "mobius_ds.cli", "run", "--num_gpus", str(RANKS)], signal.SIGINT),
]


@survives("Ranks", "Ctrl-C at the terminal, under torchrun and under `mobius-ds run`; SIGTERM from a scheduler",
          "the launcher and all ranks end; no process, no shared memory and no half checkpoint stays")
@pytest.mark.parametrize("name, launcher, ending", ENDED)
def test_a_job_that_is_told_to_end_ends_and_leaves_nothing(name, launcher, ending, tmp_path):
    port = ["--master_port", str(free_port())] if name == "mobius-ds run" else []
    job = started([*launcher, *port], tmp_path, 10**6)
    try:
        deadline = time.monotonic() + SECONDS
        while not (tmp_path / "checkpoints" / "latest").exists() and time.monotonic() < deadline:
            assert job.poll() is None, job.communicate()[0]
            time.sleep(0.05)
        (os.killpg if ending == signal.SIGINT else os.kill)(job.pid, ending)
        output, _ = job.communicate(timeout=SECONDS)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode != 0, output
    assert_nothing_left(tmp_path)
    assert ignored_by_us(output) == [], output
    assert "forcefully exiting" not in output, "a rank that did not end when it was told to"
    for rank in range(RANKS):  # of each rank, no more than one error
        assert len(re.findall(rf"^\[rank{rank}\]: Traceback", output, re.MULTILINE)) <= 1, output


@survives("Ranks", "an exception in one rank's own code, such as its loss", "the other ranks' one error quotes it")
@survives("Ranks", "a rank that leaves by `sys.exit`", "the others end at once, with one error that says it has left")
@pytest.mark.parametrize("fault, said", [("raises", "rank 1 is gone (ZeroDivisionError: division by zero)"),
                                         ("exits", "rank 1, which has left (its engine was destroyed or its script ended)")])
def test_a_rank_whose_script_ends_says_why(fault, said, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [subprocess.Popen([sys.executable, SCRIPT, str(tmp_path), str(STEPS), f"1:script:{fault}"], cwd=ROOT, text=True,
                              env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE)
             for rank in range(RANKS)]
    first, second = [process.communicate(timeout=SECONDS)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 7 if fault == "exits" else 1]
    assert said in first and "its part of forward" in first, first
    assert first.count("Traceback") == 1 and second.count("Traceback") == (fault == "raises"), first + second
    assert ignored_by_us(first + second) == []
    assert_nothing_left(tmp_path)

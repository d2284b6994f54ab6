"""``mobius-ds rehearse`` from the command line: what it shows, and that nothing of it is left however it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List

import psutil
import pytest

from mobius_ds import cli
from mobius_ds.emulation import rehearsal_ranks
from mobius_ds.inputs.topology import preset
from mobius_ds.planner.plan_files import from_json

MODEL = ("--model", "gpt-3b", "--seq", "512", "--micro-batch", "1", "--time-limit", "20")
SHARE = 0.3
"""How much of the simulated time the runtime and its emulation may take of a processor for each rank, in the leanest of five
rehearsals. How much longer they take by the clock depends on what else the machine does."""


def server(folder: Path, name: str) -> str:
    """A topology with links fast enough for a test, as a file."""
    topology = preset(name)
    faster = replace(topology, name=f"fast {name}", link_bandwidth=tuple(3 * rate for rate in topology.link_bandwidth),
                     root_bandwidth=tuple(3 * rate for rate in topology.root_bandwidth))
    path = folder / f"{name}.json"
    path.write_text(json.dumps(faster.to_json()))
    return str(path)


class Job:
    """A rehearsal in a session of its own, with its own folder for temporary files: a short one, for sockets lie there."""

    def __init__(self, *arguments: str):
        self.said = ""
        self._temporary = tempfile.TemporaryDirectory()
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "mobius_ds.cli", "rehearse", *MODEL, *arguments], text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "TMPDIR": self._temporary.name, "COLUMNS": "160"})

    def until_it_runs(self, ranks: int) -> List[psutil.Process]:
        """Waits for its ranks, which exchange their first messages by then, and returns them."""
        while "ranks rehearse" not in (line := self.process.stdout.readline()):
            assert line, f"it has ended: {self.said}"
            self.said += line
        found: List[psutil.Process] = []
        deadline = time.monotonic() + 60
        while len(found) < ranks and time.monotonic() < deadline:
            time.sleep(0.1)
            found = [rank for server in psutil.Process(self.process.pid).children() for rank in server.children()]
        time.sleep(1.0)
        return found

    def ended(self, timeout: float = 240) -> str:
        """Waits for its end, and for that of all its processes; returns what it wrote."""
        written, _ = self.process.communicate(timeout=timeout)
        deadline = time.monotonic() + 60
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, left
        return self.said + written

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.processes():
            process.kill()
        self.process.communicate()
        self._temporary.cleanup()

    def files(self) -> List[str]:
        """What is left for others to clean up, but for the folder that torch makes when it is loaded."""
        return [path.name for path in Path(self._temporary.name).iterdir() if not path.name.startswith("torchinductor")]

    def processes(self) -> List[psutil.Process]:
        """Those of its session that live."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.NoSuchProcess):
                pass
        return found


def test_a_rehearsal_shows_what_the_runtime_adds_and_what_each_choice_is_worth(tmp_path):
    with Job("--topology", server(tmp_path, "3090ti-4-2+2"), "--strategy", "max", "--steps", "1", "--ablate",
             "--out", str(tmp_path / "out"), "--trace", str(tmp_path / "trace.json")) as job:
        written = job.ended()
        assert job.process.returncode == 0, written
        assert not job.files()
    for line in written.splitlines():
        assert "rehearsed" not in line or "emulated" in line or "longer" in line, line
    outcomes = json.loads((tmp_path / "out" / "rehearsal.json").read_text())
    assert set(outcomes) == {"as asked", "mip stages", "min stages", "sequential mapping", "no prefetch"}
    for name, outcome in outcomes.items():
        check(name, outcome)
    asked, many = outcomes["as asked"], outcomes["mip stages"]
    assert 0 < min(outcome["rehearsed"]["processor_seconds"] / sum(outcome["simulated"]["sweep_seconds"])
                   for outcome in outcomes.values()) < SHARE * 4
    assert sum(many["simulated"]["sweep_seconds"]) < 0.8 * sum(asked["simulated"]["sweep_seconds"])
    assert len(asked["figures"]["rehearsed"]["compute_seconds"]) == 4
    events = json.loads((tmp_path / "trace.json").read_text() + "]")
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert "GPU 0 (emulated)" in names and any("simulated" in name for name in names), names
    assert sum(event.get("cat") == "compute" and event["args"]["step"] == 2 and event["pid"] < 4 for event in events) \
        == 2 * 4 * len(asked["plan"]["layers_per_stage"])


def check(name: str, outcome: Dict[str, Any]) -> None:
    """What holds for every rehearsal, however busy the machine is."""
    assert outcome["emulated"]["topology"] == "fast 3090ti-4-2+2" and outcome["emulated"]["says"].startswith("Emulated")
    assert outcome["ratio"] > 0.98, (name, outcome["ratio"])
    moved = outcome["rehearsed"]["bytes"]
    assert moved == outcome["rehearsed"]["scheduled_bytes"]
    assert {**moved, "other": 0} == outcome["simulated"]["bytes"]
    assert outcome["memory"]["stored"] == [0] * 4
    assert max(outcome["memory"]["resident"]) < 1.5e9


def test_nothing_is_left_of_a_rehearsal_that_does_not_come_to_its_end(tmp_path):
    """A rank is killed; and the process that started them."""
    topology = server(tmp_path, "3090-2")
    with contextlib.ExitStack() as stack:
        jobs = [stack.enter_context(Job("--topology", topology, "--strategy", "even", "--steps", "1000")) for _ in range(2)]
        ranks = [job.until_it_runs(2) for job in jobs]
        assert list(map(len, ranks)) == [2, 2]
        ranks[0][1].kill()
        jobs[1].process.kill()
        written = [job.ended() for job in jobs]
        assert not jobs[0].files()
    assert [job.process.returncode for job in jobs] == [1, -signal.SIGKILL], written
    assert "rank 1 failed" in written[0] or "rank 1 is gone" in written[0], written[0]
    assert "Traceback" not in "".join(written), written


def test_a_request_to_end_stops_the_ranks(monkeypatch, capsys):
    stopped = []

    def run(*_: Any) -> None:
        with rehearsal_ranks._stopped([(FakeRank(stopped), FakeRank(stopped))]):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

    monkeypatch.setattr(rehearsal_ranks, "load", lambda: None)
    monkeypatch.setattr(rehearsal_ranks, "run", run)
    before = signal.getsignal(signal.SIGTERM)
    assert cli.main(["rehearse", *MODEL, "--topology", "3090-2", "--strategy", "even"]) == 130
    assert "interrupted" in capsys.readouterr().out
    assert stopped == ["close", "join 0", "kill", "join None"]
    assert signal.getsignal(signal.SIGTERM) == before


class FakeRank:
    """A process and a connection that note what is done to them."""

    pid = 1

    def __init__(self, notes: List[str]):
        self.close = lambda: notes.append("close")
        self.kill = lambda: notes.append("kill")
        self.join = lambda seconds=None: notes.append(f"join {seconds and round(seconds)}".replace("0.0", "0"))


@pytest.mark.parametrize("arguments, says", [
    (("--topology", "3090ti-8"), "Presets are"),
    (("--topology", "3090-2", "--steps", "0"), "give 1 or more"),
    (("--topology", "3090-2", "--microbatches", "3"), "give a multiple of 2, or fewer"),
    (("--plan", "none.json"), "cannot read the plan none.json"),
    (("--plan", "none.json", "--ablate"), "leave --plan out"),
])
def test_a_users_mistake_is_said_in_a_sentence(arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(rehearsal_ranks, "load", lambda: None)
    assert cli.main(["rehearse", *MODEL, *arguments]) == 1
    assert says in capsys.readouterr().out.replace("\n", " ")


def test_a_plan_is_rehearsed_if_it_is_one_of_the_model(tmp_path, monkeypatch, capsys):
    asked = []

    def run(rehearsal: rehearsal_ranks.Rehearsal, limit_seconds: float) -> None:
        asked.append(rehearsal)
        raise rehearsal_ranks.RehearsalFailed("enough")

    monkeypatch.setattr(rehearsal_ranks, "load", lambda: None)
    monkeypatch.setattr(rehearsal_ranks, "run", run)
    plan = tmp_path / "plan.json"
    assert cli.main(["plan", *MODEL, "--topology", "3090-2", "--strategy", "even", "--out", str(plan)]) == 0
    assert cli.main(["rehearse", *MODEL, "--plan", str(plan), "--no-prefetch"]) == 1
    assert "enough" in capsys.readouterr().out
    assert asked[0].planned == from_json(plan) and asked[0].slots == 1
    assert cli.main(["rehearse", "--model", "gpt-8b", "--seq", "512", "--plan", str(plan)]) == 1
    assert "is a plan of gpt-3b" in capsys.readouterr().out.replace("\n", " ")

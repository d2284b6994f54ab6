"""Every command of the README and of the pages under docs/ is run as it stands there, or says which test runs it.

A command is a line of a ``sh`` block. They are run in order, in one folder that has what the reader has: a clone's scripts
and configs, a training script and its config, a Hugging Face config.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple

import pytest

from mobius_ds import cli
from tests.generated import LAUNCHERS, PAGES, ROOT

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHELL = "sh"
PROGRAMS = ("mobius-ds", "make", "pip", "python", "torchrun", "deepspeed", "accelerate", "git", "MOBIUS_DS=0", "MOBIUS_DS=1")


class Smaller(NamedTuple):
    """A change to commands that makes them short, and why the command stays the same one."""

    pattern: str
    becomes: str
    why: str


SMALLER = [
    Smaller(r"-- --your-args", "-- --layers 6 --width 64 --heads 4", "stands for arguments of the reader's script"),
    Smaller(r"^(mobius-ds (?:plan|advise) .*?)(?= -- |$)", r"\1 --time-limit 1", "the solver keeps the best it has by then"),
    Smaller(r"^(mobius-ds rehearse) .*", r"\1 --model gpt-3b --topology 4090-2 --time-limit 1 --steps 1",
            "two ranks instead of eight, one step instead of three"),
    Smaller(r"^(mobius-ds compare .*) --steps 20", r"\1 --steps 2 --arms mobius", "the other arms are compared elsewhere"),
    Smaller(r"(train\.py --deepspeed_config ds_config\.json)", r"\1 --steps 2 --layers 4 --width 32 --heads 2",
            "the reader's script ends by itself"),
    Smaller(r"--num_gpus \d", "--num_gpus 2", "two cores"),
]

COMPARE = "mobius-ds compare"
ON_TWO_RANKS = "--config ds_configs/auto_offload.json --ranks 2"
ELSEWHERE: Dict[str, str] = {
    "make test": ".ci/run",
    "make compare": "tests/reporting/test_compare.py::test_all_arms_end_to_end",
    "make paper": "tests/planner/test_paper.py",
    "make chaos": "tests/runtime/sweeps/test_chaos.py",
    "make soak": "tests/runtime/engine/test_soak.py",
    "pip install .": "tests/plugin/test_hooks.py",
    "torchrun --nproc_per_node 4 train.py --deepspeed_config ds_config.json": "tests/runtime/checkpoint/test_restarts.py",
    "deepspeed --num_gpus 4 train.py --deepspeed_config ds_config.json": "tests/plugin/test_launcher.py",
    "accelerate launch --config_file accelerate.yaml train.py":
        "tests/integrations/test_accelerate.py::test_a_loop_is_the_same_loop",
    f"{COMPARE} --script comparisons/finetune_trainer.py {ON_TWO_RANKS} --dtype fp32":
        "tests/integrations/test_trainer.py::test_the_script_is_compared",
    f"{COMPARE} --script comparisons/finetune_accelerate.py {ON_TWO_RANKS}":
        "tests/integrations/test_accelerate.py::test_the_script_is_compared",
    f"{COMPARE} --script comparisons/finetune_lora.py --config ds_configs/gpt_offload.json --ranks 2":
        "tests/integrations/test_peft.py::test_the_lora_script_is_compared",
    f"{COMPARE} --arms zero3,mobius,pipeline,zero2,ddp": "tests/reporting/test_compare.py::test_all_arms_end_to_end",
    f"{COMPARE} --arms zero3,mobius --sweep ranks=1,2,4":
        "tests/reporting/test_compare.py::test_a_sweep_runs_all_arms_at_each_value",
    f"{COMPARE} --arms zero3,mobius --sweep micro_batch=1,2,4":
        "tests/reporting/test_compare.py::test_a_sweep_runs_all_arms_at_each_value",
    f"{COMPARE} --wires 4090-2 --slowdown 1000": "tests/emulation/test_wired.py",
    "mobius-ds rehearse --model gpt-8b --topology 3090ti-4-2+2 --ablate":
        "tests/emulation/test_rehearse.py::test_a_rehearsal_shows_what_the_runtime_adds_and_what_each_choice_is_worth",
}
"""What takes minutes, or changes the environment: which test runs the same on a smaller scale."""

DEPENDS_ON_THE_MACHINE: Dict[str, str] = {
    "mobius-ds topology --detect": "no GPU found",
    "mobius-ds doctor": "to fix before a job runs",
}
"""What may end with status 1 here, and what it says then."""


def commands(page: Path) -> List[str]:
    """The commands of a page, without comments, continued lines joined."""
    blocks = [text for language, text in BLOCK.findall(page.read_text()) if language == SHELL]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    stripped = (re.sub(r"(^|\s)#.*", "", line) for line in lines)
    return [" ".join(line.split()) for line in stripped if line.strip()]


def smaller(command: str) -> str:
    """A command in the size in which it is run here."""
    for change in SMALLER:
        command = re.sub(change.pattern, change.becomes, command)
    return command


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's folder."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("comparisons", "ds_configs"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "comparisons" / "train_gpt.py", folder / "train.py")
    shutil.copy(ROOT / "ds_configs" / "gpt_offload.json", folder / "ds_config.json")
    (folder / "my_model").mkdir()
    (folder / "my_model" / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 6}))
    (folder / "bin").mkdir()
    command = folder / "bin" / "mobius-ds"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mobius_ds.cli "$@"\n')
    command.chmod(0o755)
    return folder


def test_every_command_runs(reader: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    """Page by page, as some commands read what others have written; each once."""
    monkeypatch.chdir(reader)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PATH", os.pathsep.join([str(reader / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]))
    for command in dict.fromkeys(command for page in PAGES for command in commands(page)):
        if command in ELSEWHERE:
            continue
        status = run(smaller(command))
        said = "".join(capfd.readouterr())
        if status == 1 and command in DEPENDS_ON_THE_MACHINE:
            assert DEPENDS_ON_THE_MACHINE[command] in said, said
        else:
            assert status == 0, f"{command}\n{said}"


def run(command: str) -> int:
    """Runs a command; what the installed ``mobius-ds`` would call is called here, without the start of a process."""
    words = shlex.split(command)
    if words[0] == "mobius-ds" and words[1] not in LAUNCHERS and ">" not in words:
        try:
            return cli.main(words[1:])
        except SystemExit as ended:  # of the argument parser
            return ended.code
    return subprocess.run(command, shell=True, timeout=200).returncode


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_stand_in_shell_blocks(page: Path):
    """Elsewhere they would not be run."""
    text = page.read_text()
    others = [line for language, block in BLOCK.findall(text) if language != SHELL for line in block.splitlines()]
    others += re.findall(r"^ {4}(\S.*)$", BLOCK.sub("", text), re.MULTILINE)
    for line in others:
        assert not line.lstrip("$ ").startswith(tuple(f"{program} " for program in PROGRAMS)), line


def test_what_is_run_elsewhere_is():
    documented = {command for page in PAGES for command in commands(page)}
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command, where in ELSEWHERE.items():
        assert command in documented, f"no page has {command!r}"
        assert not command.startswith("make ") or command.split()[1] in targets
        path, _, name = where.partition("::")
        assert name in (ROOT / path).read_text()
    assert set(DEPENDS_ON_THE_MACHINE) <= documented
    for change in SMALLER:
        assert any(re.search(change.pattern, command) for command in documented), change.pattern

"""``mobius-ds run`` and the command line around it."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Tuple

import pytest
import torch

from mobius_ds import cli
from mobius_ds.plugin import launcher
from tests.ranks import free_port, run_ranks

ROOT = Path(__file__).resolve().parents[2]

RANK = r'''
import json, os, pathlib, sys, time
rank = os.environ["RANK"]
here = pathlib.Path(__file__).parent
facts = {"name": __name__, "arguments": sys.argv, "path": sys.path[0], "plugin": "mobius_ds" in sys.modules,
         "flag": os.environ.get("MOBIUS_DS"), "ranks": os.environ["WORLD_SIZE"]}
(here / f"part{rank}").write_text(json.dumps(facts))
(here / f"part{rank}").rename(here / f"facts{rank}.json")
if rank == "1":
    while not (here / "facts0.json").exists():
        time.sleep(0.05)
    sys.exit(3)
'''


def test_run_starts_ranks_with_the_plugin_and_returns_their_status(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RANK)
    port = free_port()
    environment = {key: value for key, value in os.environ.items() if key != "MOBIUS_DS"}
    done = subprocess.run([sys.executable, "-m", "mobius_ds.cli", "run", "--num_gpus", "2", "--master_port", str(port),
                           str(script), "--lr", "1", "--", "-m"],
                          cwd=tmp_path, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                          timeout=200)
    assert done.returncode == 3, done.stdout + done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / f"facts{rank}.json").read_text()) == {
            "name": "__main__", "arguments": [str(script), f"--local_rank={rank}", "--lr", "1", "--", "-m"],
            "path": str(tmp_path), "plugin": True, "flag": None, "ranks": "2"}


@pytest.mark.parametrize("given, expected", [
    (["s.py"], ["--module", launcher.__name__, "s.py"]),
    (["--num_gpus", "2", "s.py", "--num_gpus", "3", "s.py"],
     ["--num_gpus", "2", "--module", launcher.__name__, "s.py", "--num_gpus", "3", "s.py"]),
    (["--no_local_rank", "--module", "package.train", "x"],
     ["--no_local_rank", "--module", launcher.__name__, "-m", "package.train", "x"]),
    (["--no_python", "./train.sh", "x"], ["--no_python", "./train.sh", "x"]),
])
def test_launcher_options_and_script_arguments_keep_their_places(given, expected):
    from deepspeed.launcher import runner

    assert launcher._with_plugin(given, runner.parse_args(given)) == expected


@pytest.mark.parametrize("as_module", [False, True])
@pytest.mark.parametrize("local_rank", [[], ["--local_rank=1"]])
def test_a_rank_runs_its_script_as_python_would(tmp_path, as_module, local_rank):
    (tmp_path / "rank.py").write_text("import sys; print(__name__, 'mobius_ds' in sys.modules, *sys.argv)")
    script = ["-m", "rank"] if as_module else [str(tmp_path / "rank.py")]
    # -S: no .pth file has loaded the plugin before.
    done = subprocess.run([sys.executable, "-S", "-m", launcher.__name__, *local_rank, *script, "--x"], cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == ["__main__", "True", str(tmp_path / "rank.py"), *local_rank, "--x"], done.stderr


def choice(gpu: bool, cpu: bool) -> Tuple[str, bool]:
    """What Accelerate chooses, and whether the ranks are connected then."""
    from accelerate.state import DistributedType, PartialState
    if gpu:
        PartialState._prepare_backend = lambda self, *_: ("nccl", DistributedType.MULTI_GPU)
    launcher.let_accelerate_run_on_cpu()
    launcher.let_accelerate_run_on_cpu()
    chosen = PartialState._prepare_backend(object.__new__(PartialState), cpu, False, None)
    return str(chosen), torch.distributed.is_initialized()


@pytest.mark.parametrize("ranks, gpu, cpu, chosen", [
    (1, False, False, "(None, <DistributedType.NO: 'NO'>)"),
    (2, False, False, "('gloo', <DistributedType.MULTI_CPU: 'MULTI_CPU'>)"),
    (2, False, True, "('gloo', <DistributedType.MULTI_CPU: 'MULTI_CPU'>)"),
    (2, True, False, "('nccl', <DistributedType.MULTI_GPU: 'MULTI_GPU'>)"),
])
def test_accelerate_gets_gloo_where_there_is_no_gpu(ranks, gpu, cpu, chosen):
    for rank in run_ranks(ranks, choice, gpu, cpu, connected=False):
        assert rank == (chosen, "gloo" in chosen)


def test_a_checkout_is_importable_in_children(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    launcher._make_importable_in_children()
    launcher._make_importable_in_children()
    assert os.environ["PYTHONPATH"] == os.pathsep.join([str(ROOT), "/elsewhere"])


def test_an_installed_package_leaves_the_path_alone(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setattr(launcher.site, "getsitepackages", lambda: [str(ROOT)])
    launcher._make_importable_in_children()
    assert os.environ["PYTHONPATH"] == "/elsewhere"


def test_compare_is_handed_its_own_options(monkeypatch):
    compare = types.ModuleType("mobius_ds.reporting.compare")
    compare.add_arguments = lambda parser: parser.add_argument("--ranks", type=int)
    compare.main = lambda arguments: arguments.ranks
    import mobius_ds.reporting
    monkeypatch.setitem(sys.modules, compare.__name__, compare)
    monkeypatch.setattr(mobius_ds.reporting, "compare", compare, raising=False)
    assert cli.main(["compare", "--ranks", "7"]) == 7


@pytest.mark.parametrize("arguments, status", [([], 2), (["fly"], 2), (["--help"], 0)])
def test_verbs(arguments, status, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == status
    printed = capsys.readouterr()
    assert "run" in printed.out + printed.err and "compare" in printed.out + printed.err


@pytest.mark.parametrize("module", ["launcher", "profiled_script"])
def test_what_runs_a_script_leaves_it_to_load_torch(module):
    """It may have something to set up first."""
    loaded = subprocess.run([sys.executable, "-c", f"import mobius_ds.plugin.{module}, sys; print(*sys.modules)"],
                            text=True, capture_output=True, check=True, cwd=ROOT).stdout.split()
    assert f"mobius_ds.plugin.{module}" in loaded and not {"torch", "deepspeed", "transformers"} & set(loaded)

"""The package without its emulation: everything else is there, and works."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "mobius_ds"

WITHOUT = r'''
import contextlib, importlib, io, pkgutil, sys
from pathlib import Path

import mobius_ds
from mobius_ds import cli
from mobius_ds.plugin import hooks

folder = Path(mobius_ds.__file__).parent
assert folder.parent == Path(sys.argv[1]) and not (folder / "emulation").exists()
modules = [module.name for module in pkgutil.walk_packages([str(folder)], "mobius_ds.") if not module.ispkg]
for name in modules:
    importlib.import_module(name)
assert len(modules) > 100

with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
    cli.main(["compare", "--help"])
assert "--slowdown" in said.getvalue()

import deepspeed, torch
from mobius_ds.observation.records import Told, read_records, tell

run = folder.parent / "run"
run.mkdir()
tell(run, Told(device_memory_gb=1.0))
hooks._record_into(run)
deepspeed.init_distributed("gloo", verbose=False)
model = torch.nn.Linear(2, 1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
for _ in range(2):
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
engine.destroy()
record, = read_records(run, 1)
assert len(record["losses"]) == 2 and record["engine"] == "DeepSpeedEngine"
'''


def test_everything_else_goes_on_without_emulation(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=shutil.ignore_patterns("emulation", "__pycache__"))
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
             "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", WITHOUT, str(tmp_path)], env={**os.environ, **alone}, cwd=tmp_path,
                           capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr

"""How DeepSpeed finds the plugin.

The hooks are under test here, not the engine: where one is needed, a tiny stand-in takes the place of
``mobius_ds.runtime.engine.engine``. Everything that depends on the order of imports runs in a process of its own.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

INITIALIZE = r'''
import copy, json, os, sys, types, warnings

import deepspeed
from deepspeed import initialize            # bound before the plugin is there
from deepspeed.pipe import PipelineModule
import torch

facts = {}
PlainEngine = deepspeed.DeepSpeedEngine
BASE = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}

def train(config, model=None):
    torch.manual_seed(0)
    model = model or torch.nn.Linear(4, 1)
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config={**BASE, **config})
    losses = []
    for _ in range(2 if type(engine) is PlainEngine else 0):
        loss = engine(torch.ones(1, 4)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses

def failure(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return [type(error).__name__, str(error)]

assert "mobius_ds" not in sys.modules
before, losses_before = train({})

import mobius_ds
from mobius_ds.plugin import hooks

stand_in = types.ModuleType("mobius_ds.runtime.engine.engine")
class MobiusEngine(PlainEngine):
    def __init__(self, *args, **kwargs):
        torch.nn.Module.__init__(self)
        self.inits = getattr(self, "inits", 0) + 1
        self.given = kwargs
        self.optimizer = self.training_data = self.training_dataloader = self.lr_scheduler = None
    def _configure_python_gc(self):
        pass
stand_in.MobiusEngine = MobiusEngine
sys.modules["mobius_ds.runtime.engine.engine"] = stand_in

ON, OFF = {"mobius": {"enabled": True}}, {"mobius": {"enabled": False}}

for name, config in {"absent": {}, "disabled": OFF}.items():
    engine, losses = train(config)
    facts[name] = {"plain": type(engine) is PlainEngine, "same_losses": losses == losses_before,
                   "same_attributes": vars(engine).keys() == vars(before).keys()}

engine, _ = train(ON)
facts["enabled"] = {"mobius": type(engine) is MobiusEngine, "inits": engine.inits,
                    "plain_too": isinstance(engine, PlainEngine), "config": engine.given["config"]["mobius"]}
os.environ["MOBIUS_DS"] = "0"
facts["override_off"] = type(train(ON)[0]).__name__
os.environ["MOBIUS_DS"] = "1"
facts["override_on"] = type(train(OFF)[0]).__name__
del os.environ["MOBIUS_DS"]

def pipeline():
    return PipelineModule(layers=[torch.nn.Linear(4, 1)], num_stages=1, loss_fn=torch.nn.functional.mse_loss)
facts["pipeline_off"] = type(train(OFF, pipeline())[0]).__name__
engine, _ = train(ON, pipeline())
facts["pipeline_on"] = {"type": type(engine).__name__, "inits": engine.inits}

facts["direct"] = MobiusEngine(config={**BASE, **ON}).inits
facts["copied"] = type(copy.copy(before)).__name__
facts["hybrid"] = failure(deepspeed.DeepSpeedHybridEngine, model=None, config={**BASE, **ON})
facts["bad_key"] = failure(train, {"mobius": {"enabled": False, "stage": 2}})
facts["bad_value"] = failure(train, {"mobius": {"enabled": False, "stages": 0}})

patched_new, patched_init = PlainEngine.__new__, deepspeed.zero.Init.__new__
hooks.install(); mobius_ds.import_hook.register(); hooks.install()
facts["idempotent"] = PlainEngine.__new__ is patched_new and deepspeed.zero.Init.__new__ is patched_init
facts["one_finder"] = sum(getattr(finder, "name", None) == "deepspeed" for finder in sys.meta_path)

def partitioned(**arguments):
    module = torch.nn.Linear(2, 2)
    with deepspeed.zero.Init(module=module, **arguments):
        inside = torch.nn.Linear(2, 2)
    return [hasattr(module.weight, "ds_id"), hasattr(inside.weight, "ds_id")]
def written(config):
    path = os.path.join(os.environ["FOLDER"], "config.json")
    with open(path, "w") as file:
        json.dump(config, file)
    return path
stage3 = {**BASE, "zero_optimization": {"stage": 3}}
facts["init"] = {"dict_on": partitioned(config_dict_or_path={**stage3, **ON}),
                 "path_on": partitioned(config_dict_or_path=written({**stage3, **ON})),
                 "old_name_on": partitioned(config={**stage3, **ON}),
                 "dict_off": partitioned(config_dict_or_path={**stage3, **OFF}),
                 "path_off": partitioned(config_dict_or_path=written({**stage3, **OFF})),
                 "none": partitioned()}
os.environ["MOBIUS_DS"] = "1"
facts["init"]["none_override_on"] = partitioned()
del os.environ["MOBIUS_DS"]

from deepspeed.utils import logger
warned = []
logger.warning = logger.log = lambda *message, **_: warned.append(str(message[-1]))
deepspeed.__version__ = "0.99.1"
train(OFF)
facts["warned_when_off"] = [text for text in warned if "mobius_ds" in text]
train(ON); train(ON)
facts["warned"] = [text for text in warned if "mobius_ds" in text]

with open(os.path.join(os.environ["FOLDER"], "facts.json"), "w") as file:
    json.dump(facts, file)
'''


def python(code: str, *, executable=sys.executable, options=(), path=(ROOT, ), **environment) -> str:
    """Runs Python code in a fresh process, with this checkout importable, and returns what it printed."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MOBIUS_DS")}
    done = subprocess.run([executable, *options, "-c", code], capture_output=True, text=True, timeout=200,
                          env={**inherited, "PYTHONPATH": os.pathsep.join(map(str, path)), **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def facts(tmp_path_factory, free_port):
    folder = tmp_path_factory.mktemp("initialize")
    # -S: no .pth file has loaded the plugin before the script gets to it.
    python(INITIALIZE, options=["-S"], path=(ROOT, sysconfig.get_path("purelib")), FOLDER=str(folder), RANK="0",
           LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port)
    return json.loads((folder / "facts.json").read_text())


@pytest.fixture(scope="module")
def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.mark.parametrize("config", ["absent", "disabled"])
def test_deepspeed_is_untouched_unless_enabled(facts, config):
    assert facts[config] == {"plain": True, "same_losses": True, "same_attributes": True}


def test_initialize_bound_earlier_returns_a_mobius_engine(facts):
    assert facts["enabled"] == {"mobius": True, "inits": 1, "plain_too": True, "config": {"enabled": True}}


def test_variable_overrides_the_config(facts):
    assert facts["override_off"] == "DeepSpeedEngine"
    assert facts["override_on"] == "MobiusEngine"


def test_pipeline_module(facts):
    assert facts["pipeline_off"] == "PipelineEngine"
    assert facts["pipeline_on"] == {"type": "MobiusPipelineEngine", "inits": 1}


def test_direct_construction_and_copies_pass_through(facts):
    assert facts["direct"] == 1
    assert facts["copied"] == "DeepSpeedEngine"


def test_hybrid_engine_is_refused(facts):
    kind, text = facts["hybrid"]
    assert kind == "ValueError" and "DeepSpeedHybridEngine" in text and '"hybrid_engine"' in text


def test_section_is_validated_even_when_disabled(facts):
    kind, text = facts["bad_key"]
    assert kind == "ValueError"
    assert text == "unknown key 'stage' in the 'mobius' section: did you mean 'stages'?"
    kind, text = facts["bad_value"]
    assert kind == "ValueError" and "\n  stages: " in text and "pydantic" not in text


def test_install_is_idempotent(facts):
    assert facts["idempotent"] and facts["one_finder"] == 1


def test_zero_init_keeps_parameters_whole_for_mobius_only(facts):
    whole, partitioned = [False, False], [True, True]
    assert facts["init"] == {"dict_on": whole, "path_on": whole, "old_name_on": whole, "none_override_on": whole,
                             "dict_off": partitioned, "path_off": partitioned, "none": partitioned}


def test_unknown_deepspeed_warns_once_and_only_when_enabled(facts):
    assert facts["warned_when_off"] == []
    assert len(facts["warned"]) == 1 and "0.99.1" in facts["warned"][0]


# What DeepSpeed must offer for the hooks to hold; enough to test the import hook without loading torch.
STUB = """
class DeepSpeedEngine:
    def load_checkpoint(self, load_dir, tag=None): pass
class PipelineEngine(DeepSpeedEngine): pass
class pipe:
    class PipelineModule:
        def _build(self): pass
class zero:
    class Init:
        def __init__(self): pass
    class GatheredParameters:
        def __init__(self): pass
        def __enter__(self): pass
        def __exit__(self, *error): pass
"""
HOOKED = "import deepspeed; assert deepspeed.DeepSpeedEngine.__new__.mobius_ds"


@pytest.fixture
def stub(tmp_path):
    """A folder with a stand-in for DeepSpeed."""
    (tmp_path / "stub" / "deepspeed").mkdir(parents=True)
    (tmp_path / "stub" / "deepspeed" / "__init__.py").write_text(STUB)
    return tmp_path / "stub"


def test_import_is_light():
    # -S: no .pth file has loaded the plugin before.
    new = python(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); before = set(sys.modules); import mobius_ds;"
        "print(*sorted(set(sys.modules) - before))", options=["-S"])
    assert new.split() == ["mobius_ds", "mobius_ds.plugin", "mobius_ds.plugin.import_hook"]


def test_import_order_does_not_matter(stub):
    python("import mobius_ds;" + HOOKED, options=["-S"], path=(stub, ROOT))
    python("import deepspeed, mobius_ds;" + HOOKED, options=["-S"], path=(stub, ROOT))


def test_loader_is_deepspeeds_own(stub):
    python("import mobius_ds, importlib.util, sys; importlib.util.find_spec('deepspeed');"
           "assert 'deepspeed' not in sys.modules;" + HOOKED + ";"
           "assert type(deepspeed.__loader__).__name__ == 'SourceFileLoader' and not 'exec_module' in vars(deepspeed.__loader__)",
           options=["-S"], path=(stub, ROOT))


def test_import_that_failed_once_is_hooked_the_next_time(stub):
    source = stub / "deepspeed" / "__init__.py"
    source.write_text("import os\nif os.environ.pop('BROKEN', ''): raise ImportError('broken')" + STUB)
    python("import mobius_ds\ntry: import deepspeed\nexcept ImportError as error: assert str(error) == 'broken'\n" +
           HOOKED, options=["-S"], path=(stub, ROOT), BROKEN="1")


def test_unhookable_deepspeed_still_imports_with_a_warning(stub):
    (stub / "deepspeed" / "__init__.py").write_text("")
    python("import mobius_ds, warnings\nwith warnings.catch_warnings(record=True) as caught:\n import deepspeed\n"
           "assert len(caught) == 1 and 'could not hook' in str(caught[0].message)",
           options=["-S"], path=(stub, ROOT))


def test_missing_deepspeed_stays_an_import_error():
    python("import mobius_ds\ntry: import deepspeed\nexcept ModuleNotFoundError as error: assert error.name == 'deepspeed'\n"
           "else: assert False", options=["-S"])


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """The wheels of a normal and of an editable installation, built from a copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    for name in ("mobius_ds", "comparisons", "ds_configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    found = {}
    for kind in ("wheel", "editable"):
        out = source / kind
        subprocess.run([sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"],
                       cwd=source, check=True, capture_output=True, timeout=100)
        found[kind], = out.glob("*.whl")
    return found


def install(wheel: Path, folder: Path) -> Path:
    """Python of a fresh venv in ``folder`` into which pip has installed the wheel and nothing else."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=100)
    executable = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", executable, "install", "--quiet", "--no-deps", "--no-index",
                    wheel], check=True, timeout=100)
    return executable


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_installed_package_hooks_into_jobs_that_never_import_it(kind, wheels, stub, tmp_path):
    installed = install(wheels[kind], tmp_path / "venv")
    python("import sys; assert 'mobius_ds' in sys.modules and not {'torch', 'deepspeed'} & set(sys.modules);" + HOOKED,
           executable=installed, path=(stub, ))

    site_packages, = (tmp_path / "venv").glob("lib/python*/site-packages")
    for module in site_packages.glob("mobius_ds/plugin/import_hook.py"):
        module.unlink()  # half uninstalled
        python("print('starts')", executable=installed, path=())
    subprocess.run([sys.executable, "-m", "pip", "--python", installed, "uninstall", "--quiet", "--yes", "mobius_ds"],
                   check=True, timeout=100)
    assert not list(site_packages.glob("*mobius*.pth"))


def test_installed_package_hooks_into_the_real_deepspeed(wheels, tmp_path):
    executable = install(wheels["wheel"], tmp_path / "venv")
    site_packages, = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site_packages / "zz_others.pth").write_text(sysconfig.get_path("purelib"))
    python(HOOKED, executable=executable, path=())
    python("from mobius_ds.reporting.compare import DEFAULT_CONFIG, DEFAULT_SCRIPT\n"
           "assert DEFAULT_CONFIG.is_file() and DEFAULT_SCRIPT.is_file()\n"
           f"assert DEFAULT_SCRIPT.is_relative_to({str(site_packages)!r})", executable=executable, path=())

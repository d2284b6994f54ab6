"""Wrong plan files, topologies and arguments of the mobius-ds command: one sentence and a status, no traceback."""

import json
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest

from mobius_ds import cli
from mobius_ds.inputs.topology import preset
from mobius_ds.planner.plan_files import to_json
from mobius_ds.planner.planner import Request, make_best_plan
from tests.bad_input.cases import Case
from tests.features import survives
from tests.planner.models import even_model

SERVER = preset("4090-2").to_json()


def server(**changes: Any) -> str:
    return json.dumps({**SERVER, **changes})


def without(key: str) -> str:
    return json.dumps({name: value for name, value in SERVER.items() if name != key})


TOPOLOGIES = [
    Case("cut short", server()[:-20], "is not valid JSON"),
    Case("empty", "", "is not valid JSON"),
    Case("no text", b"\xff\xfe\x00", "is not text"),
    Case("a list", "[1]", "is not a JSON object with the keys name, gpus, root_of"),
    Case("an unknown key", server(bandwith=3), "has an unknown key 'bandwith' (did you mean 'root_bandwidth'?)"),
    Case("no list of GPUs", without("gpus"), "server.json lacks gpus"),
    Case("GPUs that are none", server(gpus=[3, 4]), "GPU 0 of server.json is not a JSON object"),
    Case("no GPUs", server(gpus=[], root_of=[], link_bandwidth=[]), "has no GPUs"),
    Case("a link too few", server(link_bandwidth=[1e9]), "has 2 GPUs, but root complexes for 2 and links for 1 of them"),
    Case("a root complex left out", server(root_of=[0, 2]), "names root complexes [0, 2], but gives bandwidths for [0]"),
    Case("a negative bandwidth", server(link_bandwidth=[-1, 1e9]),
         "link_bandwidth of GPU 0 of topology '4090-2' is -1; it must "
         "be positive and finite"),
    Case("no bandwidth", server(root_bandwidth=[0]), "root_bandwidth of root complex 0 of topology '4090-2' is 0"),
    Case("a figure that is none", server(dram_bytes=float("nan")), "dram_bytes of topology '4090-2' is nan"),
    Case("a figure in words", server(dram_bytes="lots"), "dram_bytes of topology '4090-2' is 'lots'; it must be a number"),
    Case("a name that is none", server(name=3), "a name in topology 3 is 3; it must be text"),
]
"""Contents of a file."""


def change(*path: Any, to: Any) -> Callable[[Dict[str, Any]], str]:
    def changed(plan: Dict[str, Any]) -> str:
        inner = plan = json.loads(json.dumps(plan))
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = to
        return json.dumps(plan)
    return changed


PLANS = [
    Case("cut short", lambda plan: json.dumps(plan)[:-20],
         "is not a plan file made by mobius-ds plan --out FILE, or it is damaged"),
    Case("a list", lambda plan: "[]", "is not a plan file"),
    Case("no text", lambda plan: b"\xff\xfe", "is not a plan file"),
    Case("a topology", lambda plan: server(), "is not a plan file"),
    Case("of a later format", change("format", to=9), "is of format 9, and this mobius_ds reads format 1. Make it again"),
    Case("without layers", change("request", "profile", "layers", to=[]), "has 0 layers"),
    Case("without parameters", change("request", "profile", "parameters", to=0), "of 0 parameters"),
    Case("negative bytes", change("request", "profile", "layers", 0, "weight_bytes", to=-1), "weight_bytes of layer 0 of"),
    Case("times in words", change("request", "profile", "layers", 0, "forward_seconds", to="x"),
         "forward_seconds of layer 0 of"),
    Case("stages of another model", change("plan", "layers_per_stage", to=[1]),
         "but the model has 6. Make a plan of this model"),
    Case("stages in words", change("plan", "layers_per_stage", to=["a"]), "is not a plan file"),
    Case("GPUs that are not there", change("plan", "gpu_of_stage", to=[7] * 6), "but there are 2 GPUs"),
    Case("no micro-batches", change("request", "microbatches", to=0), "a step of 0 micro-batches cannot be planned"),
    Case("an unknown strategy", change("request", "strategy", to="best"),
         "unknown strategy 'best'; choose from mip, max, min, even"),
    Case("a wrong topology in it", change("request", "topology", "link_bandwidth", to=[-1, 1]), "link_bandwidth of GPU 0"),
]
"""Contents of a file, by those of a right one."""

MODEL = ["--model", "gpt-3b", "--seq", "64", "--topology"]
COMMANDS = [
    Case("no verb", [], "the following arguments are required"),
    Case("an unknown verb", ["plam"], "invalid choice: 'plam'"),
    Case("an unknown topology", ["plan", *MODEL, "4090-3"],
         "unknown topology '4090-3' (did you mean '4090-8'?). Presets are"),
    Case("a topology that is not there", ["plan", *MODEL, "nowhere.json"],
         "cannot read topology nowhere.json: No such file"),
    Case("an unknown model", ["plan", "--model", "gpt-4b", "--topology", "4090-2"], "Did you mean 'gpt-"),
    Case("a folder that is no model", ["plan", "--model", ".", "--topology", "4090-2"],
         "has no config.json; save one there"),
    Case("an unknown kind of model", ["plan", "--model", "kind.json", "--topology", "4090-2"],
         "has model_type 'zzz', which"),
    Case("a model's figure in words", ["plan", "--model", "words.json", "--topology", "4090-2"],
         "transformers cannot read the config of words; correct it"),
    Case("too large a model", ["plan", "--model", "gpt-51b", "--topology", "4090-1"], "781.06 GiB are missing"),
    Case("no samples", ["plan", *MODEL, "4090-2", "--micro-batch", "0"], "a microbatch cannot have samples=0"),
    Case("too long a sequence", ["plan", *MODEL, "4090-2", "--seq", "9999"], "defined for sequences of up to 2048 tokens"),
    Case("no micro-batches", ["plan", *MODEL, "4090-2", "--microbatches", "0"],
         "a step of 0 micro-batches cannot be planned"),
    Case("no time to solve", ["plan", *MODEL, "4090-2", "--time-limit", "0"], "the solver cannot have 0.0 s"),
    Case("a plan where none can be", ["plan", *MODEL, "4090-2", "--strategy", "even", "--out", "kind.json/plan.json"],
         "cannot write the plan kind.json/plan.json"),
    Case("a plan over a folder", ["plan", *MODEL, "4090-2", "--strategy", "even", "--out", "."],
         "it is there and is no file"),
    Case("a script that is not there", ["plan", "--script", "no.py", "--config", "kind.json", "--topology", "4090-2"],
         "--script no.py is no file; a script is planned with --script FILE --config FILE"),
    Case("a script without a config", ["plan", "--script", "kind.json", "--topology", "4090-2"], "--config None is no file"),
    Case("a plan that is not there", ["simulate", "no.json"], "cannot read the plan no.json: No such file or directory"),
    Case("a trace where none can be", ["simulate", "plan.json", "--trace", "."], "cannot write .: Is a directory"),
    Case("a trace that is not there", ["trace", "no.json"], "cannot read the trace no.json: No such file or directory"),
    Case("a trace that is another file", ["trace", "plan.json"], "plan.json holds no finished step of a job with"),
    Case("a trace that is no text", ["trace", "binary.json"], "cannot read the trace binary.json: 'utf-8' codec can't decode"),
    Case("a picture of no kind", ["simulate", "plan.json", "--png", "step.abc"], "Format 'abc' is not supported"),
    Case("an unknown preset", ["topology", "--preset", "dgx"], "unknown topology 'dgx'"),
    Case("a topology file that is a folder", ["topology", "--file", "."], "cannot read topology .: Is a directory"),
    Case("no ranks", ["compare", "--ranks", "0"], "--ranks must be positive and finite, got 0"),
    Case("fewer than no steps", ["compare", "--steps", "-1"], "--steps must be positive and finite, got -1"),
    Case("an unknown arm", ["compare", "--arms", "zero9"], "unknown arm 'zero9' in --arms; choose from zero3, mobius"),
    Case("a config that is not there", ["compare", "--config", "no.json"], "--config no.json does not exist"),
    Case("a config that is a list", ["compare", "--config", "list.json"],
         "list.json holds a list, where a DeepSpeed config is an object"),
    Case("a config that is no text", ["compare", "--config", "binary.json"], "cannot be read as a DeepSpeed config: it is not valid"),
    Case("a config of another stage", ["compare", "--config", "stage2.json"],
         "sets zero_optimization.stage to 2; only stage 3"),
    Case("a report where none can be", ["compare", "--out", "kind.json", "--ranks", "1"],
         "Name a folder that can be written"),
]
"""Arguments."""


@pytest.fixture(scope="module")
def plan() -> Dict[str, Any]:
    return to_json(make_best_plan(Request(even_model(6), preset("4090-2"), 2, "even")))


@pytest.fixture
def say(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[List[str]], str]:
    """Runs the command in an empty folder and returns what it says; it must fail."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")

    def run(arguments: List[str]) -> str:
        try:
            status = cli.main(arguments)
        except SystemExit as ended:  # of the argument parser
            status = ended.code
        said = capsys.readouterr()
        assert status in (1, 2), (arguments, said.out)
        return said.out + said.err

    return run


def write(path: str, content: Any) -> None:
    Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())


@survives("Bad input", "a topology file that is cut short, not one, or impossible",
          "one sentence that names the file, the figure and what it must be")
def test_topology_files(say):
    for case in TOPOLOGIES:
        write("server.json", case.input)
        assert case.words in say(["topology", "--file", "server.json"]), case.what


@survives("Bad input", "a plan file that is damaged, of another model, of other GPUs or of a later format",
          "one sentence that names the file and says to make it again")
def test_plan_files(say, plan):
    for case in PLANS:
        write("plan.json", case.input(plan))
        assert case.words in say(["simulate", "plan.json"]), case.what


@survives("Bad input", "wrong arguments of mobius-ds plan, simulate, topology and compare",
          "one sentence and a status, before anything is started or written")
def test_commands(say, plan):
    files = {"plan.json": json.dumps(plan), "kind.json": '{"model_type": "zzz"}', "list.json": "[]",
    "binary.json": b"\xff\xfe",
             "words.json": '{"model_type": "gpt2", "n_embd": "x"}', "stage2.json": '{"zero_optimization": {"stage": 2}}'}
    for name, content in files.items():
        write(name, content)
    for case in COMMANDS:
        said = say(case.input)
        assert case.words in said and "Traceback" not in said, (case.what, said)
    assert sorted(path.name for path in Path().iterdir()) == sorted(files)

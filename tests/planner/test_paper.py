"""The comparison with the paper runs, and its firm statements hold."""

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "comparisons" / "paper.py"


def load():
    spec = importlib.util.spec_from_file_location("paper", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["paper"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_what_does_not_depend_on_unknown_lengths_agrees():
    paper = load()
    lab = paper.Lab(time_limit=1.0)
    rows = paper.limits(lab)
    assert [row.what for row in rows if not row.agrees] == []
    moved = {row.what: row for row in paper.traffic(lab)}
    assert moved["ZeRO-3 offload, 4 GPUs"].agrees and moved["ZeRO-3 offload, 8 GPUs"].agrees
    assert moved["Mobius, 4 GPUs"].agrees

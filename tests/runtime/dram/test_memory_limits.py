"""What happens where memory ends: of the host, of /dev/shm, of what may be pinned, and of the device."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple
from unittest import mock

import pytest
import torch
from torch import nn

from mobius_ds.inputs.units import GIB
from mobius_ds.reporting.comparison.building import build_report
from mobius_ds.reporting.comparison.tables import table_rows
from mobius_ds.runtime.device import pinning
from mobius_ds.runtime.dram.memory_estimate import Dram, check_dram, state_tensors
from mobius_ds.runtime.ranks.errors import OutOfMemory
from tests.features import survives
from tests.ranks import run_ranks
from tests.runtime.device.test_device_memory import section, train
from tests.runtime.dram.loading_jobs import available
from tests.runtime.jobs import failure, initialize, language_model, rank_and_size

MIB = 2**20


# The host's memory, asked before it runs out.

def test_optimizers_keep_what_they_are_known_to_keep():
    assert [state_tensors(*of) for of in [(None,), ("SGD",), ("SGD", 0.9), ("Lion",), ("AdamW",), ("something else",)]] == \
        [0, 0, 1, 1, 2, 2]


def test_no_more_of_a_part_is_there_than_it_needs():
    dram = Dram(100, "here")
    check_dram({"weights": 50, "gradients": 110}, {"weights": 500, "gradients": 10}, dram, "")
    with pytest.raises(OutOfMemory, match="needs 161 bytes of DRAM, but only 160 bytes are available"):
        check_dram({"weights": 50, "gradients": 111}, {"weights": 500, "gradients": 10}, dram, "")


class Residual(nn.Linear):
    """A MiB of fp32 weights."""

    def forward(self, x):
        return x + 0.1 * super().forward(x)


class Wide(nn.Module):

    def __init__(self, layers: int):
        super().__init__()
        self.layers = nn.ModuleList(Residual(512, 512, bias=False) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def refused_at_the_start() -> Dict[str, str]:
    def said(nbytes: int, optimizer: Dict[str, Any]) -> str:
        # Only the first rank looks: what the others see of the node may differ by then.
        with available(nbytes if rank_and_size()[0] == 0 else 10**15):
            settings = {**section(), "bf16": {"enabled": True}, "optimizer": optimizer}
            return failure(lambda: initialize(Wide(8), settings).destroy())

    adam = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    sgd = {"type": "SGD", "params": {"lr": 1e-3}}
    return {"adam": said(30 * MIB, adam), "enough": said(36 * MIB, adam), "sgd": said(20 * MIB, sgd),
            "less": said(19 * MIB, sgd)}


@survives("Memory", "a model and its training state that DRAM, or the limit of a control group, does not hold",
          "refused at `deepspeed.initialize` on every rank, with bytes by part, need and have")
def test_a_model_too_large_for_dram_is_refused_by_part_on_every_rank():
    first, second = run_ranks(2, refused_at_the_start)
    assert first == second
    assert first["enough"] == first["sgd"] == "nothing was raised"
    title, *rows, advice = first["adam"].splitlines()
    assert title == "OutOfMemory: training this model needs 36.00 MiB of DRAM, but only 30.00 MiB are available:"
    assert [" ".join(row.split()) for row in rows] == [
        "weights 4.00 MiB", "fp32 masters 8.00 MiB", "gradients 8.00 MiB", "optimizer state 16.00 MiB", "needed 36.00 MiB",
        "in memory already 0 bytes", f"free {Dram.here().limit} 30.00 MiB"]
    assert "deepspeed.zero.Init" in advice and "needs 20.00 MiB of DRAM, but only 19.00 MiB" in first["less"]


def refused_for_activations() -> Tuple[Dict[str, str], int]:
    engine = initialize(Wide(8), section(layers_per_stage=2))

    def step(samples: int) -> None:
        engine.backward(engine(torch.randn(samples, 512)))
        engine.step()

    found: Dict[str, str] = {}
    # Adam's moments, gradients, slots of two ranks (2 x 2 layers, weights and gradients), the gradients of a stage of each
    # on their way, and 1.75 MiB of activations.
    need = 16 * MIB + 8 * MIB + 16 * MIB + 4 * MIB + 7 * MIB // 4
    with available(need - MIB // 4):
        found["too early"] = failure(lambda: step(64))
    with available(need + MIB // 4):
        found["small"] = failure(lambda: step(64))
    # All of it is there by now, and half a MiB free: enough for what came before, too little for ten times as much.
    with available(MIB // 2):
        found["again"] = failure(lambda: step(64))
        found["large"] = failure(lambda: step(640))
        found["after"] = failure(lambda: step(64))
    with available(20 * MIB):
        found["enough"] = failure(lambda: step(640))
    taken = engine.pipeline.activations.nbytes
    engine.destroy()
    return found, taken


@survives("Memory", "a micro-batch whose activations DRAM does not hold",
          "refused before its forward on every rank, with bytes by part; a smaller one goes on")
def test_activations_too_large_for_dram_are_refused_before_the_forward():
    (first, taken), (second, also_taken) = run_ranks(2, refused_for_activations)
    assert first == second
    assert {case for case, said in first.items() if said != "nothing was raised"} == {"too early", "large"}
    assert "OutOfMemory: training this model needs " in first["large"]
    # Two microbatches: the input, what each of the first three stages makes, and the gradients of that.
    expected = 2 * 7 * 640 * 512 * 4
    assert f"activations {expected / MIB:.2f} MiB" in " ".join(first["large"].split())
    assert 0.9 * expected < taken + also_taken <= expected + 2**10  # a scalar takes a cache line
    assert "train_micro_batch_size_per_gpu" in first["large"] and "the device being the CPU" in first["large"]


# In a mount namespace: what a container would show.

def in_a_container() -> Dict[str, Any]:
    """Trains in a place that shows a 64 MiB /dev/shm and a control group's limit."""
    torch.manual_seed(0)
    groups = Path("/sys/fs/cgroup")
    rank, _ = rank_and_size()
    model = Wide(80)
    (groups / "memory.current").write_text(str(100 * MIB))
    (groups / "memory.max").write_text(str(300 * MIB))
    refused = failure(lambda: initialize(model, section()))
    if rank == 0:
        (groups / "memory.max").write_text(str(16 * GIB))
    torch.distributed.barrier()
    engine = initialize(Wide(80), section())
    losses = []
    for step in range(2):
        loss = engine(torch.randn(4, 512, generator=torch.Generator().manual_seed(rank)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = {"refused": refused, "losses": losses, "store": engine.pipeline.store.nbytes}
    engine.destroy()
    return found


def main() -> None:
    print(json.dumps(run_ranks(2, in_a_container)))


MOUNTS = """
mount -t tmpfs -o size=64m tmpfs /dev/shm && mount -t tmpfs tmpfs /sys/fs/cgroup && df --output=size /dev/shm | tail -1 &&
exec "$0" -c "from tests.runtime.dram.test_memory_limits import main; main()"
"""


@survives("Memory", "/dev/shm of 64 MB, as Docker gives it", "nothing: the store lies in anonymous files, of any size")
def test_a_small_dev_shm_limits_nothing_and_a_control_groups_limit_is_seen():
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("mount namespaces are not permitted here")
    done = subprocess.run(["unshare", "-m", "sh", "-c", MOUNTS, sys.executable], capture_output=True, text=True, timeout=240,
                          cwd=Path(__file__).parents[3])
    assert done.returncode == 0, done.stderr
    shm, *_, printed = done.stdout.splitlines()
    assert int(shm) == 64 * 1024
    first, second = json.loads(printed)
    assert first["store"] > 2 * 64 * MIB and first["losses"][1] < first["losses"][0]
    assert first["refused"] == second["refused"]
    assert "needs 320.00 MiB of DRAM, but only 200.00 MiB are available" in first["refused"]
    assert "free in the control group /, which is allowed 300.00 MiB" in first["refused"]


# Pinning.

class Limited(pinning.Registrar):
    """Pins up to a limit, and remembers what is pinned."""

    def __init__(self, limit: int):
        self.limit = limit
        self.pinned: Dict[int, int] = {}

    def pin(self, host: torch.Tensor) -> str:
        if sum(self.pinned.values()) + host.nbytes > self.limit:
            return "error 2"
        assert host.data_ptr() not in self.pinned
        self.pinned[host.data_ptr()] = host.nbytes
        return ""

    def unpin(self, host: torch.Tensor) -> None:
        del self.pinned[host.data_ptr()]


def pins(limit: int) -> Dict[str, Any]:
    from deepspeed.utils import logger
    registrar = Limited(limit)
    with mock.patch.object(pinning, "registrar_of", lambda device: registrar), \
            mock.patch.object(logger, "warning") as warning:
        engine = initialize(language_model(), section(layers_per_stage=1))
        found = {"losses": train(engine, 2), "pinned": engine.pinned_bytes(), "pageable": engine.pageable_bytes(),
                 "weights": engine.pipeline.store.layout.weight_bytes}
        assert found["pinned"] == sum(registrar.pinned.values())
        engine.destroy()
    found["left"] = len(registrar.pinned)
    found["warnings"] = [call.args[0] for call in warning.call_args_list if "pinned" in call.args[0]]
    return found


def pinned_fully_partly_and_not() -> List[Dict[str, Any]]:
    return [pins(limit) for limit in (2**40, 2**20, 0)]


@survives("Memory", "the system refuses to pin host memory, all of it or some",
          "training goes on with pageable copies; one warning with the bytes and the usual cause; the report has both "
          "numbers")
def test_memory_that_cannot_be_pinned_is_copied_all_the_same():
    for fully, partly, none in run_ranks(2, pinned_fully_partly_and_not):
        assert fully["losses"] == partly["losses"] == none["losses"]
        assert fully["pageable"] == 0 and not fully["warnings"]
        assert fully["weights"] < partly["pinned"] < 2**20 < partly["pageable"] < fully["pinned"]
        assert none["pinned"] == 0 and none["pageable"] == fully["pinned"]
        assert [case["left"] for case in (fully, partly, none)] == [0, 0, 0]
        for case in (partly, none):
            [warned] = case["warnings"]
            assert "could not be pinned (error 2)" in warned and "ulimit -l" in warned and "container" in warned
        assert "64.00 MiB" in partly["warnings"][0]  # a segment of activations


def test_the_report_has_a_row_where_something_was_pinned_or_refused():
    record = {"rank": 0, "ranks": 1, "engine": "E", "device": "cuda", "parameters": 10, "dtype": "float32", "losses": [1.0],
              "step_seconds": [1.0], "traffic": [dict.fromkeys(("parameters_in", "gradients_out", "activations_in",
                                                                "activations_out", "other"), 1)],
              "predicted_traffic": None, "delivered_bytes": [1], "peak_device_bytes": 1, "peak_device_measure": "a test's",
              "store_bytes": None, "sweeps": 1, "pss_bytes": 1, "pinned_bytes": 0, "pageable_bytes": 0}

    def rows(**changes: int) -> Dict[str, List[str]]:
        report = build_report({"zero3": [{**record, "pinned_bytes": None, "pageable_bytes": None}],
                               "mobius": [{**record, "predicted_traffic": record["traffic"], "store_bytes": 1, **changes}]},
                              "fp32", {})
        return {label: cells for label, cells in table_rows(report) if "pinned" in label}

    assert rows() == {}
    assert rows(pinned_bytes=2_000_000) == {"host memory mapped and pinned, all ranks, MB": ["0.00", "2.00"]}
    assert rows(pageable_bytes=3_000_000) == {"could not be pinned, MB": ["0.00", "3.00"]}

"""``mobius-ds doctor``: on recorded machines, on machines with one thing wrong, on this one; and that it never hangs."""

import io
import json
import os
import re
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console

from mobius_ds import cli
from mobius_ds.inputs.hardware import GB, GIB
from mobius_ds.machine import check_host, check_software, doctor, gpu_probe
from mobius_ds.machine.check_gpus import judge_gpus
from mobius_ds.machine.check_host import Memory
from mobius_ds.machine.finding import NOTE, OK, PROBLEM, Finding, Probe, examine
from mobius_ds.machine.gpu_probe import TorchGpu, TorchReport, Unanswered, ask_torch, report_from_json
from mobius_ds.machine.host_memory import Cap
from mobius_ds.machine.topology_sources import SourceMissing, Sources
from tests.machine.test_topology_detection import sources_of

HOUR = 3600
MIB = 2**20
ON_CPU = TorchReport("2.13.0+cpu", None, None, None, "/nowhere")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "WORLD_SIZE", "MOBIUS_DS", "CXX", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def on_gpus(count, alone=13.0, together=6.4, free=23.5, peers=False, **more) -> TorchReport:
    """What torch says of a healthy machine with 24 GiB GPUs; rates in GB/s."""
    gpus = tuple(TorchGpu("NVIDIA GeForce RTX 3090", 24 * GIB, int(free * GIB), [other for other in range(count) if
                          peers and other != number], None, alone * GB, together * GB) for number in range(count))
    return TorchReport(**{**ON_CPU._asdict(), "version": "2.13.0+cu128", "cuda": "12.8", "cuda_home": "/usr/local/cuda",
                          "gpus": gpus, **more})


def by_name(findings):
    return {finding.what: finding for finding in findings}


# Recorded machines.


def test_a_recorded_server_without_nvlink(tmp_path):
    sources = sources_of("8x3090-4+4", tmp_path)
    found = by_name(judge_gpus(sources, on_gpus(8, alone=6.4), {}))
    assert found["GPUs"] == Finding("GPUs", "8x NVIDIA GeForce RTX 3090, 24.00 GiB each")
    assert found["PCIe"].found.startswith("root complexes 0 1 2 3 | 4 5 6 7; 6.5 GB/s a GPU, 6.5 if all copy")
    assert found["PCIe"].verdict == NOTE and "8 of the card's 16 PCIe lanes in use (and 2 more: " in found["PCIe"].advice
    assert found["NVLink"] == Finding("NVLink", "none: GPUs meet in DRAM, which is what Mobius is made for")
    assert found["peer access"].found == "none of 28 pairs of GPUs (Mobius needs none)"
    assert found["copies"] == Finding("copies", "pinned: 6.4 GB/s alone, 6.4 all at once")


def test_a_recorded_server_with_nvlink(tmp_path):
    found = by_name(judge_gpus(sources_of("8xa100-nvlink", tmp_path), on_gpus(8, 26, 13, peers=True), {}))
    assert found["NVLink"] == Finding("NVLink", "270 GB/s between any two", NOTE,
                                      "ZeRO-3 may be as fast here: mobius-ds advise --model ...")
    assert found["peer access"].found.startswith("28 of 28 pairs")


@pytest.mark.parametrize("torch, what, verdict, expected", [
    (on_gpus(4, 26, 26), "copies", OK, ""),
    (on_gpus(4, 13, 13), "copies", NOTE, "GPU 0's link should carry 26.2 GB/s"),
    (on_gpus(4, 26, 13), "copies", NOTE, "Plans count on 26.2 GB/s for GPU 0 when all copy"),
    (on_gpus(4, 26, 26, refused_pin="CUDA error 1"), "copies", NOTE, "Raise ulimit -l"),
    (on_gpus(4, 26, 26, failed="OutOfMemoryError: full"), "copies", NOTE, "another job"),
    (on_gpus(4, 26, 26, free=10), "GPU memory", NOTE, "nvidia-smi says which"),
    (ON_CPU, "torch's GPUs", PROBLEM, "torch 2.13.0+cpu is built for the CPU"),
    (on_gpus(0), "torch's GPUs", PROBLEM, "driver may be too old"),
])
def test_what_is_wrong_with_gpus(tmp_path, torch, what, verdict, expected):
    found = [finding for finding in judge_gpus(sources_of("4x4090-2+2", tmp_path), torch, {}) if finding.what == what]
    assert found[0].verdict == verdict and expected in found[0].advice


def test_no_gpu_is_a_line(tmp_path):
    assert [finding.verdict for finding in judge_gpus(Sources([]), ON_CPU, {})] == [NOTE]


# Memory, cores, environment.


def test_memory_limits():
    fine, = check_host.judge_memory(Memory(512 * GIB, 500 * GIB, None))
    assert fine == Finding("DRAM", "512.00 GiB, 500.00 GiB free: room for 29.8 B parameters")
    capped, = check_host.judge_memory(Memory(64 * GIB, 60 * GIB, Cap("/job", 64 * GIB, 4 * GIB)))
    assert capped.verdict == NOTE and "control group /job allows 64.00 GiB" in capped.advice
    assert check_host.judge_shared_memory(64 * MIB).advice.endswith("docker run --shm-size=8g")
    assert check_host.judge_shared_memory(8 * GIB).verdict == OK
    assert check_host.judge_locked_memory(None, ON_CPU) == Finding("locked memory", "unlimited")
    assert [check_host.judge_locked_memory(8 * MIB, torch).verdict for torch in
            (ON_CPU, on_gpus(1), on_gpus(1, refused_pin="CUDA error 1"))] == [OK, OK, NOTE]


@pytest.mark.parametrize("cores, ranks, threads, expected", [
    (32, 4, "8", ""), (32, 4, "4", ""), (2, 0, None, ""), (8, 1, None, ""), (2, 4, "1", ""),
    (32, 4, None, "export OMP_NUM_THREADS=8"), (32, 4, "1", "export OMP_NUM_THREADS=8"),
    (32, 4, "32", "export OMP_NUM_THREADS=8"), (32, 4, "8,4", "export OMP_NUM_THREADS=8"),
])
def test_threads_and_cores(cores, ranks, threads, expected):
    finding = check_host.judge_cores(cores, ranks, threads)
    assert (finding.verdict == OK) == (expected == "") and expected in finding.advice


def test_an_environment_left_over_from_a_launcher(monkeypatch):
    left, = check_host.ask_ranks(4, {"WORLD_SIZE": "4"})
    assert left.verdict == PROBLEM and "unset WORLD_SIZE" in left.advice
    assert [finding.found for finding in check_host.ask_ranks(4, {})] == ["one per GPU: --num_gpus 4 (several on one share "
                                                                          "its memory)"]
    assert any("MOBIUS_DS=1 is set" == finding.found for finding in check_software.ask_plugin({"MOBIUS_DS": "1"}))
    assert check_software.judge_restarts("2.13.0+cpu", {})[0].advice == "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    assert not check_software.judge_restarts("2.13.0+cpu", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    assert not check_software.judge_restarts("2.14.0", {})


# Software.

INSTALLED = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", **dict.fromkeys(check_software.TESTED), "transformers": "5.24.0"}


@pytest.mark.parametrize("change, what, verdict, expected", [
    ({}, "libraries", OK, ""),
    ({"transformers": "4.50.0"}, "libraries", NOTE, "transformers==5.24.*"),
    ({"deepspeed": "0.18.1"}, "DeepSpeed", NOTE, "deepspeed==0.19.*"),
    ({"deepspeed": None}, "DeepSpeed", PROBLEM, "pip install"),
    ({"torch": None}, "torch", PROBLEM, "pip install torch"),
])
def test_versions(change, what, verdict, expected):
    found = by_name(check_software.judge_versions((3, 11, 7), {**INSTALLED, **change}, ON_CPU))
    assert found[what].verdict == verdict and expected in found[what].advice
    assert found["Python"].verdict == OK
    assert by_name(check_software.judge_versions((3, 10, 1), INSTALLED, None))["Python"].verdict == PROBLEM


def test_the_tested_releases_are_those_that_the_tests_install():
    setup = (Path(__file__).parents[2] / "setup.py").read_text()
    assert dict(re.findall(r'"(\w+)==([\d.]+)\*"', setup)) == check_software.TESTED


def compilers(nvcc="Cuda compilation tools, release 12.6, V12.6.20", missing=""):
    def command(words):
        name = Path(words[0]).name
        if name == missing:
            raise SourceMissing(f"{name} is not installed")
        return {"c++": "12.2.0\n", "ninja": "1.13.2\n", "nvcc": nvcc}[name]

    return command


@pytest.mark.parametrize("torch, command, verdict, expected", [
    (ON_CPU, compilers(), OK, "c++ 12.2.0, ninja 1.13.2"),
    (ON_CPU, compilers(missing="ninja"), PROBLEM, "ninja is not installed"),
    (on_gpus(1), compilers(), OK, "CUDA 12.6"),  # another minor version is accepted
    (on_gpus(1), compilers("release 11.8, V11"), NOTE, "CUDA 11.8 in /usr/local/cuda, but torch's is 12.8"),
    (on_gpus(1), compilers(missing="nvcc"), NOTE, "nvcc is not installed"),
    (on_gpus(1, cuda_home=None), compilers(), NOTE, "no CUDA toolkit"),
])
def test_compilers(torch, command, verdict, expected):
    finding, = check_software.ask_compiler(torch, {}, command)
    assert finding.verdict == verdict and expected in finding.found


def test_locks_of_killed_builds_are_named_with_what_removes_them(tmp_path):
    assert "none built yet" in check_software.judge_extensions(tmp_path).found
    for name in ("cpu_adam", "deepspeed_shm_comm"):
        (tmp_path / name).mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.touch()
    built = check_software.judge_extensions(tmp_path)  # a young one: somebody builds
    assert built == Finding("extensions", f"cpu_adam built in {tmp_path}")
    os.utime(lock, (time.time() - HOUR,) * 2)
    stale = check_software.judge_extensions(tmp_path)
    assert stale.verdict == PROBLEM and stale.advice.endswith(f"rm {lock}")
    with lock.open():  # a slow build
        assert check_software.judge_extensions(tmp_path).verdict == OK


def test_plugin_and_plans(tmp_path):
    assert check_software.judge_plugin([tmp_path]).verdict == NOTE
    (tmp_path / "mobius_ds.pth").touch()
    assert check_software.judge_plugin([tmp_path]).verdict == OK
    (tmp_path / "plan.json").touch()
    assert check_software.judge_plans(tmp_path).found == f"1 in {tmp_path}"
    assert check_software.judge_plans(tmp_path / "plan.json" / "folder").verdict == NOTE


# Asking.


def test_a_probe_that_hangs_and_one_that_raises_are_lines():
    def raising():
        raise OSError("broken")

    never = threading.Event()
    findings = examine([Probe("late", never.wait), Probe("broken", raising),
                        Probe("fine", lambda: [Finding("fine", "yes")])], seconds=3.0)
    never.set()
    assert [finding.what for finding in findings] == ["late", "broken", "fine"]
    assert findings[0].found == "no answer within 3 s" and "OSError: broken" in findings[1].found
    assert findings[2] == Finding("fine", "yes")


def test_torch_that_hangs_or_crashes_takes_nobody_with_it(tmp_path, monkeypatch):
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    others = psutil.Process().children()
    monkeypatch.setattr(sys, "executable", str(hanging))
    with pytest.raises(Unanswered, match="did not answer"):
        ask_torch(0.2)
    assert psutil.Process().children() == others
    for executable, why in (("/bin/true", "printed no report"), ("/bin/false", "ended with status 1")):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(Unanswered, match=why):
            ask_torch(10)
    monkeypatch.setattr(doctor, "ask_torch", lambda seconds: ask_torch(10))
    monkeypatch.setattr(doctor, "_probes", lambda torch, environment: ())
    assert doctor.found_here({})[0].verdict == PROBLEM


def test_copies_are_timed_in_bytes_a_second():
    class Event:
        elapsed_time = staticmethod(lambda other: 40.0)  # ms
        record = synchronize = lambda self: None

    copied = []
    host = SimpleNamespace(nbytes=128 * MIB)
    target = SimpleNamespace(copy_=lambda source, non_blocking: copied.append(non_blocking))
    torch = SimpleNamespace(device=lambda kind, number: (kind, number), empty_like=lambda tensor, device: target,
                            cuda=SimpleNamespace(Stream=lambda device: device, stream=nullcontext,
                                                 Event=lambda enable_timing: Event()))
    rate = gpu_probe._copier(torch, 0, host)()()
    assert rate == pytest.approx(len(copied) * 128 * MIB / 0.040) and all(copied)


def test_a_report_survives_its_way_between_processes():
    report = on_gpus(2, peers=True)
    again = json.dumps({**report._asdict(), "gpus": [gpu._asdict() for gpu in report.gpus]})
    assert report_from_json(again) == report


def test_eight_gpus_are_one_screen(tmp_path):
    environment = {"OMP_NUM_THREADS": "4"}
    torch = on_gpus(8, 6.4, 6.4)
    findings = [*check_software.judge_versions((3, 11, 7), {**INSTALLED, **{name: f"{version}0" for name, version in
                                                                            check_software.TESTED.items()}}, torch),
                Finding("plugin", "active: every script finds it"), *check_software.ask_compiler(torch, {}, compilers()),
                check_software.judge_extensions(Path("/ext")), check_software.judge_plans(Path("/cache")),
                *judge_gpus(sources_of("8x3090-4+4", tmp_path), torch, {}), *check_host.ask_ranks(8, environment),
                *check_host.judge_memory(Memory(512 * GIB, 500 * GIB, None)), check_host.judge_locked_memory(8 * MIB, torch),
                check_host.judge_shared_memory(64 * MIB), check_host.judge_cores(32, 8, "4"),
                *check_software.judge_restarts("2.13.0", {})]
    console = Console(width=80, file=io.StringIO())
    doctor.show(findings, console)
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= 32 and max(map(len, lines)) <= 80


def test_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("MOBIUS_DS_CACHE", str(tmp_path / "plans"))
    status = cli.main(["doctor", "--json"])
    said = json.loads(capsys.readouterr().out)
    problems = [finding for finding in said["findings"] if finding["verdict"] == PROBLEM]
    assert status == int(said["prevents_a_job"]) == int(bool(problems))
    found = {finding["what"]: finding for finding in said["findings"]}
    assert {"Python", "torch", "DeepSpeed", "compiler", "extensions", "plans", "GPUs", "DRAM", "/dev/shm"} <= set(found)
    assert str(tmp_path) in found["extensions"]["found"]
    assert not any(words in finding["found"] for finding in said["findings"] for words in ("cannot be told", "no answer"))
    (tmp_path / "cpu_adam").mkdir()
    lock = tmp_path / "cpu_adam" / "lock"
    lock.touch()
    os.utime(lock, (time.time() - HOUR,) * 2)
    assert cli.main(["doctor"]) == 1
    assert f"rm {lock}" in " ".join(capsys.readouterr().out.split())

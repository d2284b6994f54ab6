"""Detection on recorded machines: what their tools print and their sysfs shows, in ``tests/data/topology``.

A recording holds ``gpus.csv`` (``nvidia-smi --query-gpu``), ``topo.txt`` (``nvidia-smi topo -m``), ``rocm.json``,
``sysfs.json`` (paths under ``/sys/devices`` and their files) and ``cpuinfo``; what is missing, the machine lacks.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mobius_ds import cli
from mobius_ds.inputs.hardware import GB, GIB, PCIE3_X16
from mobius_ds.inputs.topology import TopologyError, preset, topology_from_json
from mobius_ds.machine import topology_detection
from mobius_ds.machine.gpu_listing import ListedGpu, Matrix, pci_address
from mobius_ds.machine.nvidia_smi import parse_gpu_query, parse_topo_matrix
from mobius_ds.machine.pci_tree import PciFunction, read_pci_tree
from mobius_ds.machine.rocm_smi import parse_rocm_smi
from mobius_ds.machine.topology_detection import topology_from_sources
from mobius_ds.machine.topology_sources import SourceMissing, Sources, read_sources, run_command
from mobius_ds.reporting import topology_table

RECORDINGS = Path(__file__).parents[1] / "data" / "topology"
X16 = {3: PCIE3_X16, 4: 2 * PCIE3_X16, 5: 4 * PCIE3_X16}


@pytest.fixture(autouse=True)
def all_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def sysfs_of(recording, folder):
    """A folder with links and files as ``/sys`` has them."""
    devices = folder / "bus" / "pci" / "devices"
    devices.mkdir(parents=True)
    tree = recording / "sysfs.json"
    for path, attributes in (json.loads(tree.read_text()) if tree.exists() else {}).items():
        real = folder / "devices" / path
        real.mkdir(parents=True, exist_ok=True)
        for name, value in attributes.items():
            (real / name).write_text(value + "\n")
        (devices / real.name).symlink_to(os.path.relpath(real, devices))
    return folder


def sources_of(name, folder):
    recording = RECORDINGS / name

    def command(words):
        file = {"rocm-smi": "rocm.json"}.get(words[0], "topo.txt" if "topo" in words else "gpus.csv")
        if not (recording / file).exists():
            raise SourceMissing(f"{words[0]} is not installed")
        return (recording / file).read_text()

    return read_sources(sysfs_of(recording, folder / "sys"), recording, command, no_torch)


def no_torch():
    raise SourceMissing("torch sees no GPU")


def detect(name, folder):
    return topology_from_sources(sources_of(name, folder))


@pytest.mark.parametrize("name, groups, links, roots", [
    # Four x8 ports to a socket, so a root complex carries two x16 links' worth.
    ("8x3090-4+4", [4, 4], X16[3] / 2, 2 * X16[3]),
    ("4x4090-2+2", [2, 2], X16[4], 2 * X16[4]),
    ("8xa100-nvlink", [2, 2, 2, 2], X16[4], X16[4]),
    ("1x4090", [1], X16[4], X16[4]),
    ("container-4xa6000", [2, 2], X16[4], X16[4]),
    ("vm-flat-4xa10", [4], X16[4], X16[4]),
    ("vm-virtual-roots-4xa100", [2, 2], X16[4], X16[4]),
    # Two switches to a socket, an x16 port each.
    ("plx-8x2080ti", [4, 4], X16[3], 2 * X16[3]),
    ("mig-1xa100", [1], X16[4], X16[4]),
    ("8xmi300x", [1] * 8, X16[5], X16[5]),
])  # yapf: disable
def test_recorded_machines(name, groups, links, roots, tmp_path):
    topology = detect(name, tmp_path).topology
    assert [len(group) for group in topology.groups] == groups
    assert topology.link_bandwidth == pytest.approx([links] * topology.size)
    assert topology.root_bandwidth == pytest.approx([roots] * len(groups))
    assert 0 < topology.dram_bytes < 2**50


@pytest.mark.parametrize("name, expected", [
    ("8x3090-4+4", ["GPUs 0, 1, 2, 3, 4, 5, 6, 7: 8 of the card's 16 PCIe lanes in use",
                    "root complex 0 has 4 ports in use, assumed to carry 26.2 GB/s together",
                    "root complex 1 has 4 ports in use, assumed to carry 26.2 GB/s together"]),
    ("8xa100-nvlink", [f"GPUs {gpu}, {gpu + 1} share a PCIe switch (0000:{bus}:00.0), whose way up carries 26.2 GB/s"
                       for gpu, bus in ((0, "01"), (2, "41"), (4, "81"), (6, "b1"))]),
    ("1x4090", []),
    ("container-4xa6000", ["sysfs shows 0 of 4 GPUs (containers hide devices), so its PCI tree is not used",
                           "GPUs 0, 1 are taken to share 26.2 GB/s, one link's, as the paper measured it on its server",
                           "GPUs 2, 3 are taken to share 26.2 GB/s, one link's, as the paper measured it on its server"]),
    ("vm-flat-4xa10", ["this is a virtual machine, whose PCI tree does not show the real root complexes",
                       "assumed one root complex per NUMA node: 1 for 4 GPUs",
                       "GPUs 0, 1, 2, 3 are taken to share 26.2 GB/s, one link's, as the paper measured it on its server"]),
    ("mig-1xa100", ["GPU 0: cut into MIG instances, which are not modelled; figures are of the whole GPU"]),
    ("8xmi300x", []),
])  # yapf: disable
def test_what_is_assumed_is_said(name, expected, tmp_path):
    assert list(detect(name, tmp_path).warnings) == expected


def test_switches_under_one_root_complex_are_told_apart(tmp_path):
    warnings = detect("plx-8x2080ti", tmp_path).warnings
    assert [warning for warning in warnings if "switch" in warning] == [
        f"GPUs {gpu}, {gpu + 1} share a PCIe switch (0000:{bus}:00.0), whose way up carries 13.1 GB/s"
        for gpu, bus in ((0, "3b"), (2, "4b"), (4, "af"), (6, "bf"))]  # yapf: disable


def test_direct_connections(tmp_path):
    for number, (name, gigabytes) in enumerate({"8xa100-nvlink": 270, "8xmi300x": 57.6, "4x4090-2+2": None}.items()):
        peers = detect(name, tmp_path / str(number)).topology.peer_bandwidth
        assert peers == (gigabytes and pytest.approx(gigabytes * GB))


def test_nvlink_between_some_pairs_is_not_planned_with(tmp_path):
    detection = detect("vm-virtual-roots-4xa100", tmp_path)
    assert detection.topology.peer_bandwidth is None
    assert any(warning.startswith("2 of 6 pairs of GPUs have NVLink (the first is 0 and 1)") for warning in detection.warnings)


def test_a_detected_dgx_a100_is_the_preset(tmp_path):
    detected, known = detect("8xa100-nvlink", tmp_path).topology, preset("a100-8-nvlink")
    assert detected.root_of == known.root_of and detected.peer_bandwidth == known.peer_bandwidth
    assert detected.root_bandwidth == known.root_bandwidth and detected.link_bandwidth == known.link_bandwidth
    assert [gpu.flops for gpu in detected.gpus] == [gpu.flops for gpu in known.gpus]
    assert detected.gpus[0].memory_bytes == 80 * GIB


# Sources that are missing, disagree, or are not to be believed.


def test_sysfs_and_topo_agree_on_bare_metal(tmp_path):
    for number, name in enumerate(("8x3090-4+4", "4x4090-2+2", "plx-8x2080ti")):
        sources = sources_of(name, tmp_path / str(number))
        by_tree = topology_from_sources(sources).topology.root_of
        sources.tree = {}
        assert topology_from_sources(sources).topology.root_of == by_tree


def test_sysfs_wins_over_topo_and_says_so(tmp_path):
    sources = sources_of("4x4090-2+2", tmp_path)
    sources.matrix = parse_topo_matrix((RECORDINGS / "4x4090-2+2" / "topo.txt").read_text().replace("NODE", "PHB"))
    detection = topology_from_sources(sources)
    assert detection.topology.root_of == (0, 0, 1, 1)
    assert "sysfs puts GPUs 0 and 2 under two, nvidia-smi topo -m does not; sysfs is used" in detection.warnings


def test_part_of_a_tree_is_not_used(tmp_path):
    sources = sources_of("4x4090-2+2", tmp_path)
    del sources.tree["0000:c2:00.0"]
    detection = topology_from_sources(sources)
    assert detection.topology.root_of == (0, 0, 1, 1)  # by nvidia-smi topo -m
    assert any(warning.startswith("sysfs shows 3 of 4 GPUs") for warning in detection.warnings)


@pytest.mark.parametrize("entry, reason", [
    (("GPU0", 2, "NODE"), "NODE between GPUs 0 and 2, which share a host bridge with a third"),
    (("GPU0", 3, "SYS"), "SYS between GPUs 0 and 3, which are next to the same NUMA node"),
])  # yapf: disable
def test_a_matrix_that_contradicts_itself_is_not_used(entry, reason):
    rows = [["X", "PHB", "PHB", "NODE"], ["PHB", "X", "PHB", "NODE"], ["PHB", "PHB", "X", "NODE"], ["NODE", "NODE", "NODE", "X"]]
    _, column, value = entry
    rows[0][column] = rows[column][0] = value
    text = "\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\n" + "".join(
        f"GPU{number}\t" + "\t".join(row) + "\t0-31\t0\n" for number, row in enumerate(rows))
    detection = topology_from_sources(Sources(devices(4), parse_topo_matrix(text), dram_bytes=GIB))
    assert any(reason in warning for warning in detection.warnings)
    assert detection.topology.root_of == (0, 0, 0, 0)


def devices(count, name="NVIDIA GeForce RTX 3090", **more):
    return [ListedGpu(name, 24 * GIB, f"0000:{number + 1:02x}:00.0", uuid=f"GPU-{number}{number}", **more)
            for number in range(count)]


def test_a_matrix_of_other_gpus_is_not_used(tmp_path):
    sources = sources_of("4x4090-2+2", tmp_path)
    sources.devices, sources.tree = sources.devices[:3], {}
    assert "nvidia-smi topo -m has 4 GPUs, but 3 are listed; it is not used" in topology_from_sources(sources).warnings


def test_with_nothing_but_a_list_the_worst_is_assumed():
    detection = topology_from_sources(Sources(devices(3), dram_bytes=GIB, problems=["nvidia-smi is not installed"]))
    assert detection.topology.root_of == (0, 0, 0)
    assert detection.topology.root_bandwidth == (13.1 * GB,)
    assert detection.warnings == (
        "GPUs 0, 1, 2: PCIe link unknown; assumed 3.0 x16, 13.1 GB/s",
        "sysfs shows 0 of 3 GPUs (containers hide devices), so its PCI tree is not used",
        "assumed that all 3 GPUs share one root complex",
        "GPUs 0, 1, 2 are taken to share 13.1 GB/s, one link's, as the paper measured it on its server",
        "whether GPUs are joined by NVLink is unknown (nvidia-smi is not installed); assumed that they are not")


def test_bridges_that_qemu_makes_up_are_seen_through():
    tree = {}
    for number in range(2):
        port, gpu = f"0000:00:{number + 2:02x}.0", f"0000:{number + 1:02x}:00.0"
        tree[port] = PciFunction(("pci0000:00", port), "0x1b36")
        tree[gpu] = PciFunction(("pci0000:00", port, gpu), "0x10de", numa=number)
    detection = topology_from_sources(Sources(devices(2), tree=tree, dram_bytes=GIB))
    assert detection.warnings[1].startswith("this is a virtual machine")
    assert detection.topology.root_of == (0, 1)  # by NUMA node


def test_a_narrow_way_up_limits_what_is_behind_a_switch(tmp_path):
    sources = sources_of("8xa100-nvlink", tmp_path)
    switch = sources.tree["0000:01:00.0"]
    sources.tree["0000:01:00.0"] = switch._replace(width=8)
    assert topology_from_sources(sources).topology.root_bandwidth[0] == pytest.approx(X16[4] / 2)


def test_links_from_sysfs_are_as_narrow_as_card_and_port(tmp_path):
    sources = sources_of("8x3090-4+4", tmp_path)
    sources.devices = [device._replace(link=None) for device in sources.devices]
    assert topology_from_sources(sources).topology.link_bandwidth == pytest.approx([X16[3] / 2] * 8)


def test_an_unknown_gpu_gets_a_guess_and_a_warning():
    detection = topology_from_sources(Sources(devices(1, "NVIDIA Graphics Device"), dram_bytes=GIB))
    assert detection.topology.gpus[0].flops == pytest.approx(0.6 * 71e12)
    assert detection.warnings[0] == ("GPU 0: NVIDIA Graphics Device is not a known model; assumed 42.6 TFLOP/s sustained, an "
                                     "RTX 3090's")


def test_a_gpu_without_memory_is_looked_up_or_refused():
    known = ListedGpu("NVIDIA L4", None, None)
    assert topology_from_sources(Sources([known], dram_bytes=GIB)).topology.gpus[0].memory_bytes == 24 * GIB
    with pytest.raises(TopologyError, match=r"GPU 0 \(NVIDIA GB10\) does not tell its memory .* use --file F"):
        topology_from_sources(Sources([ListedGpu("NVIDIA GB10", None, None)], dram_bytes=GIB))


def test_without_a_gpu_the_way_out_is_named(tmp_path):
    with pytest.raises(TopologyError) as caught:
        topology_from_sources(read_sources(tmp_path, tmp_path, refuse, no_torch))
    assert str(caught.value) == ("no GPU found: nvidia-smi is not installed; rocm-smi is not installed; torch sees no GPU. Use "
                                 "--preset NAME for a known server or --file F for a topology in JSON")


def refuse(words):
    raise SourceMissing(f"{words[0]} is not installed")


def test_torch_lists_gpus_where_tools_are_missing(tmp_path):
    sources = read_sources(sysfs_of(RECORDINGS / "4x4090-2+2", tmp_path / "sys"), tmp_path, refuse,
                           lambda: parse_gpu_query((RECORDINGS / "4x4090-2+2" / "gpus.csv").read_text()))
    detection = topology_from_sources(sources)
    assert detection.topology.root_of == (0, 0, 1, 1)


def test_a_containers_memory_cap_is_its_dram(tmp_path):
    cgroup = sysfs_of(RECORDINGS / "1x4090", tmp_path) / "fs" / "cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text(f"{GIB}\n")
    assert read_sources(tmp_path, tmp_path, refuse, no_torch).dram_bytes == GIB
    (cgroup / "memory.max").write_text("max\n")
    assert read_sources(tmp_path, tmp_path, refuse, no_torch).dram_bytes > GIB


# The environment.


@pytest.mark.parametrize("visible, roots", [
    ("0,1,2,3", (0, 0, 1, 1)), ("3,0", (0, 1)), ("2,3", (0, 0)), ("1", (0,)), ("GPU-00000003,GPU-00000002", (0, 0)),
    ("0,7,1", (0,)), ("MIG-1234", (0, 0, 1, 1)),
])  # yapf: disable
def test_visible_gpus_are_those_cuda_sees(visible, roots, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert detect("4x4090-2+2", tmp_path).topology.root_of == roots


@pytest.mark.parametrize("visible", ["", "-1", "4"])
def test_no_visible_gpu_is_an_error(visible, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(TopologyError, match=f"CUDA_VISIBLE_DEVICES='{visible}' leaves none of 4 GPUs visible"):
        detect("4x4090-2+2", tmp_path)


# Parsing.


def test_network_cards_and_underlines_are_passed_over():
    matrix = parse_topo_matrix((RECORDINGS / "8xa100-nvlink" / "topo.txt").read_text())
    assert len(matrix.connections) == 8
    assert {connection.links for row in matrix.connections for connection in row if connection} == {12}
    assert matrix.locality == tuple(f"NUMA_Affinity {node}" for node in (3, 3, 1, 1, 7, 7, 5, 5))


def test_matrices_of_other_drivers_and_from_web_pages():
    old = parse_topo_matrix("        GPU0    GPU1    mlx4_0  CPU Affinity\n"
                            "GPU0     X      SOC     PHB     0-9,20-29\n"
                            "GPU1    SOC      X      PSB     10-19,30-39\n")
    assert old.connections[0][1].path == "SYS"
    assert old.locality == ("CPU_Affinity 0-9,20-29", "CPU_Affinity 10-19,30-39")
    assert parse_topo_matrix("    GPU0 CPU Affinity\n    GPU0  X  N/A\n").locality == (None,)


@given(st.integers(1, 10), st.data())
def test_any_matrix_is_read_back(size, data):
    entry = st.sampled_from(["PIX", "PXB", "PHB", "NODE", "SYS", "NV1", "NV18"])
    rows = [["X"] * size for _ in range(size)]
    for row in range(size):
        for column in range(row):
            rows[row][column] = rows[column][row] = data.draw(entry)
    text = "\t" + "\t".join(f"GPU{number}" for number in range(size)) + "\tCPU Affinity\n" + "".join(
        f"GPU{number}\t" + "\t".join(row) + "\t0-7\n" for number, row in enumerate(rows))
    matrix = parse_topo_matrix(text)
    read = [["X" if it is None else it.path or f"NV{it.links}" for it in row] for row in matrix.connections]
    assert read == rows
    detection = topology_from_sources(Sources(devices(size), matrix, dram_bytes=GIB))  # whatever it says, there is an answer
    assert detection.topology.size == size


HEADER = "\tGPU0\tGPU1\tCPU Affinity\n"


@pytest.mark.parametrize("text, reason", [
    ("", "no line of the 0 of nvidia-smi topo -m heads a matrix"),
    ("Failed to initialize NVML\n", "no line of the 1 of"),
    (HEADER + "GPU0\t X \tPHB\t0-7\n", r"has 2 columns of GPUs, but rows for 1: \[0\]"),
    (HEADER + "GPU0\t X \tPHB\nGPU1\tPHB\n", "has 1 entries for GPU 1, none for GPU 1"),
    (HEADER + "GPU0\t X \tERR!\nGPU1\tERR! X \n", "says 'ERR!' from GPU 0 to 1; known are NV#, PIX"),
    (HEADER + "GPU0\t X \tPHB\nGPU1\tSYS\t X \n", "says SYS from GPU 1 to 0, but PHB from 0 to 1"),
    (HEADER + "GPU0\tPHB\t X \nGPU1\tPHB\t X \n", "says 'PHB' from GPU 0 to 0; X stands for a GPU itself"),
])  # yapf: disable
def test_a_malformed_matrix_is_an_error(text, reason):
    with pytest.raises(TopologyError, match=reason):
        parse_topo_matrix(text)


def test_a_malformed_matrix_does_not_stop_detection(tmp_path):
    recording = RECORDINGS / "4x4090-2+2"
    answers = {"topo": HEADER, "gpus": (recording / "gpus.csv").read_text()}
    sources = read_sources(sysfs_of(recording, tmp_path), tmp_path,
                           lambda words: answers["topo" if "topo" in words else "gpus"], no_torch)
    assert sources.problems == ["nvidia-smi topo -m has 2 columns of GPUs, but rows for 0: []"]
    assert topology_from_sources(sources).topology.root_of == (0, 0, 1, 1)


@pytest.mark.parametrize("text, reason", [
    ("NVIDIA L4, 24 GiB\n", "line 1 of nvidia-smi's list of GPUs has 2 fields instead of 8: 'NVIDIA L4, 24 GiB'"),
    ("NVIDIA L4, GPU-1, 23034, ?, 4, 16, 16, [N/A]\n", "'[?]' is not a PCI address such as 0000:3b:00.0"),
])  # yapf: disable
def test_a_malformed_list_is_an_error(text, reason):
    with pytest.raises(TopologyError, match=reason):
        parse_gpu_query(text)


def test_figures_that_a_driver_does_not_tell_are_left_open():
    (device,) = parse_gpu_query("NVIDIA L4, GPU-1, [N/A], 00000000:3B:00.0, [N/A], [N/A], [N/A], [N/A]\n")
    assert device == ListedGpu("NVIDIA L4", None, "0000:3b:00.0", None, "GPU-1", False)
    assert parse_gpu_query("No devices were found\n") == []


@given(st.integers(0, 2**20), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7))
def test_pci_addresses_of_any_notation_are_one(domain, bus, slot, function):
    expected = f"{domain:04x}:{bus:02x}:{slot:02x}.{function}"
    assert pci_address(f"{domain:08X}:{bus:02X}:{slot:02X}.{function:X}") == pci_address(expected) == expected


@pytest.mark.parametrize("text, reason", [
    ("ROCm is not loaded", "rocm-smi printed no JSON"),
    ('{"card0": {"GUID": "1"}}', r"lists card0 without 'Card Series' or 'VRAM Total Memory \(B\)': \['GUID'\]"),
])  # yapf: disable
def test_malformed_rocm_output_is_an_error(text, reason):
    with pytest.raises(TopologyError, match=reason):
        parse_rocm_smi(text)


def test_rocm_smi_may_warn_before_its_json():
    text = "WARNING: AMD GPU device(s) is/are in a low-power state.\n" + (RECORDINGS / "8xmi300x" / "rocm.json").read_text()
    gpus, matrix = parse_rocm_smi(text)
    assert len(gpus) == 8 and gpus[0].address == "0000:1b:00.0"
    assert isinstance(matrix, Matrix) and matrix.connections[7][0].links == 1


def test_a_root_bus_behind_a_root_bus_belongs_to_the_first(tmp_path):
    real = tmp_path / "devices" / "pci0000:16" / "0000:16:05.5" / "pci10000:00" / "10000:00:02.0"
    real.mkdir(parents=True)
    (tmp_path / "bus" / "pci" / "devices").mkdir(parents=True)
    (tmp_path / "bus" / "pci" / "devices" / real.name).symlink_to(real)
    assert read_pci_tree(tmp_path)[real.name].path == ("pci0000:16", "0000:16:05.5", "10000:00:02.0")


def test_commands_that_fail_say_why():
    assert run_command([sys.executable, "-c", "print(1)"]) == "1\n"
    with pytest.raises(SourceMissing, match="no-such-tool is not installed"):
        run_command(["no-such-tool"])
    with pytest.raises(SourceMissing, match="ended with status 9: no driver"):
        run_command([sys.executable, "-c", "print('no driver'); exit(9)"])


# The verb.


def test_the_verb_prints_a_table(capsys):
    assert cli.main(["topology", "--preset", "3090ti-4-1+3"]) == 0
    out = capsys.readouterr().out
    assert out.count("RTX 3090 Ti") == 4 and "root complexes: 0: 13.1 GB/s, 1: 13.1 GB/s" in out


def test_the_verbs_json_is_a_file_it_reads(tmp_path, capsys):
    assert cli.main(["topology", "--preset", "4090-8", "--json"]) == 0
    file = tmp_path / "server.json"
    file.write_text(capsys.readouterr().out)
    assert topology_from_json(file) == preset("4090-8")
    assert cli.main(["topology", "--file", str(file), "--json"]) == 0
    assert capsys.readouterr().out == file.read_text()


@pytest.mark.parametrize("arguments, reason", [
    (["--preset", "4090-9"], "unknown topology '4090-9' (did you mean '4090-8'?)"),
    (["--file", "nowhere.json"], "cannot read topology nowhere.json: No such file or directory"),
])  # yapf: disable
def test_the_verbs_errors_are_one_line(arguments, reason, capsys):
    assert cli.main(["topology", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"mobius-ds topology: {reason}") and captured.err.count("\n") == 1
    assert captured.out == ""


def test_the_verb_detects_and_keeps_warnings_out_of_its_json(tmp_path, capsys, monkeypatch):
    sources = sources_of("container-4xa6000", tmp_path)
    monkeypatch.setattr(topology_detection, "read_sources", lambda: sources)
    args = argparse.ArgumentParser()
    topology_table.add_arguments(args)
    assert topology_table.main(args.parse_args(["--detect", "--json"])) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["name"] == "4x NVIDIA RTX A6000"
    assert captured.err.startswith("warning: sysfs shows 0 of 4 GPUs")

"""The topology as data: what it accepts, what it answers, and that JSON gives it back unchanged."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mobius_ds.inputs.hardware import GB, GIB, GPU_MODELS, known_gpu, model_name, pcie_bandwidth
from mobius_ds.inputs.topology import PRESETS, Gpu, Topology, TopologyError, preset, topology_from_json

POSITIVE = st.floats(min_value=1e-3, max_value=1e18)


@st.composite
def topologies(draw):
    count = draw(st.integers(1, 12))
    roots = draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    names = list(dict.fromkeys(roots))
    gpus = tuple(Gpu(draw(st.text(max_size=8)), draw(st.integers(1, 2**40)), draw(POSITIVE)) for _ in range(count))
    return Topology(draw(st.text(max_size=8)), gpus, tuple(names.index(root) for root in roots),
                    tuple(draw(POSITIVE) for _ in roots), tuple(draw(POSITIVE) for _ in names),
                    draw(st.none() | POSITIVE), draw(st.integers(1, 2**50)), draw(POSITIVE))


@given(topologies())
def test_json_gives_it_back(topology):
    assert topology_from_json(json.loads(json.dumps(topology.to_json()))) == topology


@given(topologies())
def test_shared_counts_the_gpus_of_a_common_root(topology):
    for first in range(topology.size):
        for second in range(topology.size):
            shared = topology.shared(first, second)
            assert shared == topology.shared(second, first)
            common = [group for group in topology.groups if first in group and second in group]
            assert shared == (len(common[0]) if common else 0)


@given(topologies())
def test_shares_fit_their_links_and_their_root(topology):
    assert sorted(gpu for group in topology.groups for gpu in group) == list(range(topology.size))
    for root, group in enumerate(topology.groups):
        shares = [topology.share_of_root(gpu) for gpu in group]
        assert sum(shares) <= topology.root_bandwidth[root] * (1 + 1e-9)
        assert all(0 < share <= topology.link_bandwidth[gpu] for share, gpu in zip(shares, group))


@given(topologies(), st.data())
def test_selection_keeps_what_gpus_have_and_share(topology, data):
    chosen = data.draw(st.lists(st.integers(0, topology.size - 1), min_size=1, unique=True))
    part = topology.select(chosen)
    assert part.gpus == tuple(topology.gpus[gpu] for gpu in chosen)
    for at, gpu in enumerate(chosen):
        assert part.link_bandwidth[at] == topology.link_bandwidth[gpu]
        assert part.root_bandwidth[part.root_of[at]] == topology.root_bandwidth[topology.root_of[gpu]]
        for other_at, other in enumerate(chosen):
            assert bool(part.shared(at, other_at)) == bool(topology.shared(gpu, other))


@pytest.mark.parametrize("name, groups, gigabytes", [
    ("3090ti-4", [4], 13.1), ("3090ti-4-2+2", [2, 2], 13.1), ("3090ti-4-1+3", [1, 3], 13.1), ("3090ti-8-4+4", [4, 4], 13.1),
    ("4090-8", [4, 4], 26.2), ("a100-8-nvlink", [2, 2, 2, 2], 26.2), ("4090-2", [2], 26.2), ("h100-8-nvlink", [1] * 8, 52.4),
])  # yapf: disable
def test_presets(name, groups, gigabytes):
    topology = preset(name)
    assert [len(group) for group in topology.groups] == groups
    assert topology.root_bandwidth[0] == pytest.approx(gigabytes * GB)
    assert (topology.peer_bandwidth is not None) == name.endswith("nvlink")


def test_the_papers_server_is_the_papers():
    topology = preset("3090ti-8-4+4")
    assert topology.root_bandwidth == (13.1 * GB, 13.1 * GB)
    assert topology.gpus[0] == Gpu("RTX 3090 Ti", 24 * GIB, 0.6 * 80e12)
    assert topology.share_of_root(0) == 13.1 * GB / 4
    assert preset("4090-2").share_of_root(0) == pytest.approx(13.1 * GB)  # two x8 links fill an x16 root port


def test_every_preset_survives_a_file(tmp_path):
    for name, topology in PRESETS.items():
        assert topology.name == name
        (tmp_path / "server.json").write_text(json.dumps(topology.to_json()))
        assert topology_from_json(tmp_path / "server.json") == topology


def changed(**figures):
    return {**preset("3090ti-4-1+3").to_json(), **figures}


@pytest.mark.parametrize("figures, reason", [
    ({"link_bandwidth": [1e9, -5e9, 1e9, 1e9]}, "link_bandwidth of GPU 1 of topology .* is -5000000000.0; it "
     "must be positive and finite"),
    ({"root_bandwidth": [1e9, 0]}, "root_bandwidth of root complex 1 of topology .* is 0;"),
    ({"root_bandwidth": [1e9, float("nan")]}, "root_bandwidth of root complex 1 .* is nan"),
    ({"peer_bandwidth": float("inf")}, "peer_bandwidth .* is inf; it must be positive and finite"),
    ({"dram_bytes": "512 GiB"}, "dram_bytes .* is '512 GiB'; it must be a number"),
    ({"root_of": [0, 1, 1, 3]}, r"names root complexes \[0, 1, 3\], but gives bandwidths for \[0, 1\]"),
    ({"root_of": [0, 1, 1, "x"]}, "has 'x'; root complexes are numbered from 0"),
    ({"root_of": [0, 1]}, "has 4 GPUs, but root complexes for 2 and links for 4 of them"),
    ({"gpus": [], "root_of": [], "link_bandwidth": []}, "has no GPUs"),
    ({"gpus": 4}, "gpus of topology is 4; it must be a list"),
    ({"gpus": ["RTX 3090"]}, "GPU 0 of topology is not a JSON object with the keys name, memory_bytes, flops"),
    ({"gpus": [{"name": "x", "memory_bytes": 1}]}, "GPU 0 of topology lacks flops"),
    ({"gpus": [{"name": "x", "memory": 1, "flops": 1}]}, r"GPU 0 of topology has an unknown key 'memory' \(did you mean "
     r"'memory_bytes'\?\)"),
    ({"root_bandwith": [1]}, r"unknown key 'root_bandwith' \(did you mean 'root_bandwidth'\?\). Keys are name, gpus"),
])  # yapf: disable
def test_what_cannot_be_is_refused_with_its_number(figures, reason):
    with pytest.raises(TopologyError, match=reason):
        topology_from_json(changed(**figures))


def test_missing_keys_are_named():
    with pytest.raises(TopologyError, match="topology lacks gpus, root_of, root_bandwidth"):
        topology_from_json({"name": "x", "link_bandwidth": []})


@pytest.mark.parametrize("content, reason", [
    (None, "cannot read topology .*server.json: No such file"),
    (b"{", "server.json is not valid JSON: .* line 1 column 2"),
    (b"\xff\xfe", "server.json is not text"),
    (b"[1]", r"server.json is not a JSON object with the keys .*, but \[1\]"),
])  # yapf: disable
def test_files_that_are_no_topology_are_named(tmp_path, content, reason):
    if content is not None:
        (tmp_path / "server.json").write_bytes(content)
    with pytest.raises(TopologyError, match=reason):
        topology_from_json(tmp_path / "server.json")


def test_an_unknown_preset_gets_the_nearest_name():
    with pytest.raises(TopologyError, match=r"unknown topology '3090-ti-4' \(did you mean '3090ti-4'\?\). Presets are 3090ti"):
        preset("3090-ti-4")
    with pytest.raises(TopologyError, match="unknown topology 'dgx'. Presets are"):
        preset("dgx")


@pytest.mark.parametrize("gpus", [[4], [-1], [0, 0]])
def test_gpus_that_do_not_exist_cannot_be_selected(gpus):
    with pytest.raises(TopologyError, match="which has GPUs 0 to 3"):
        preset("3090ti-4").select(gpus)


@pytest.mark.parametrize("reported, name", [
    ("NVIDIA GeForce RTX 3090 Ti", "rtx 3090 ti"), ("GeForce RTX 2080 Ti", "rtx 2080 ti"), ("NVIDIA A100-SXM4-80GB", "a100"),
    ("NVIDIA A100 80GB PCIe", "a100 pcie"), ("Tesla V100-SXM2-32GB", "v100"), ("NVIDIA RTX A6000", "rtx a6000"),
    ("NVIDIA RTX 6000 Ada Generation", "rtx 6000 ada"), ("Quadro RTX 6000", "rtx 6000"), ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H100 NVL", "h100 nvl"), ("AMD Instinct MI300X OAM", "mi300x"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx pro 6000 blackwell workstation"),
])  # yapf: disable
def test_names_that_drivers_report_are_known(reported, name):
    assert model_name(reported) == name
    assert known_gpu(reported) is GPU_MODELS[name]


@pytest.mark.parametrize("reported", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation "
                                      "Edition", "NVIDIA GeForce GTX 1080 Ti", ""])
def test_slower_namesakes_are_not_taken_for_known(reported):
    assert known_gpu(reported) is None


def test_pcie_doubles_with_each_generation_and_lane():
    assert pcie_bandwidth(3, 16) == 13.1 * GB
    assert pcie_bandwidth(4, 8) == pytest.approx(13.1 * GB)
    assert pcie_bandwidth(5, 16) == pytest.approx(52.4 * GB)
    rates = [pcie_bandwidth(generation, 4) for generation in range(1, 7)]
    assert rates == sorted(rates)

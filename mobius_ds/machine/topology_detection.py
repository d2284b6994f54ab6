"""Detects the topology of this machine: which of its sources to believe, and what to assume where they are silent.

Note [Order of trust]
Which GPUs share a root complex is taken from the first of these that knows all GPUs:
1. the PCI tree in sysfs, because it is the hardware's own numbering and also shows switches and port widths;
2. ``nvidia-smi topo -m``: PIX, PXB and PHB stay under one host bridge, NODE and SYS do not;
3. NUMA nodes: GPUs next to the same node are taken to share a root complex;
4. nothing: all GPUs are taken to share one.
A virtual machine shows a PCI tree that its hypervisor made up, and ``topo -m`` is drawn from the same tree, so there
only 3 and 4 count. 3 and 4 err towards more contention, as a plan made for it also runs well without.
Every assumption becomes a warning that says what was assumed.
"""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Dict, Hashable, List, Optional, Sequence, Tuple

from mobius_ds.inputs.hardware import (GB, GIB, NVLINK_EFFICIENCY, UNKNOWN_GPU_FLOPS, UNKNOWN_NVLINK, known_gpu,
                                       pcie_bandwidth)
from mobius_ds.inputs.topology import Gpu, Topology, TopologyError, preset, topology_from_json
from mobius_ds.machine.gpu_listing import ListedGpu, PcieLink
from mobius_ds.machine.pci_tree import PciTree
from mobius_ds.machine.topology_sources import Sources, read_sources

ASSUMED_LINK = PcieLink(3, 16)
"""What a GPU's link is taken for when nothing tells: the paper's server, slow for today's."""

# Bridges that QEMU and VMware make up.
_VIRTUAL_BRIDGES = {"0x1b36", "0x15ad"}
_SHARED_PATHS = {"PIX", "PXB", "PHB"}


@dataclass(frozen=True)
class Detection:
    """A topology, and what was assumed to get it."""

    topology: Topology
    warnings: Tuple[str, ...] = ()


@dataclass(frozen=True)
class _Roots:
    """Root complexes as one source tells them."""

    names: Tuple[Hashable, ...]
    """Of each GPU; equal for GPUs that share one."""
    source: str
    from_tree: bool = False


class _Warnings:
    """What was assumed. The same assumption about several GPUs is one warning."""

    def __init__(self):
        self._gpus: Dict[str, List[int]] = {}

    def add(self, message: str, *gpus: int) -> None:
        """Adds a warning, about ``gpus`` if any are given."""
        self._gpus.setdefault(message, []).extend(gpus)

    def texts(self) -> Tuple[str, ...]:
        """Every warning once."""
        return tuple(f"{_numbers(gpus)}: {message}" if gpus else message for message, gpus in self._gpus.items())


def detect_topology() -> Detection:
    """The topology of this machine's GPUs that the environment leaves visible.

    Raises:
        TopologyError: no GPU can be found, or its memory cannot be told.
    """
    return topology_from_sources(read_sources())


def topology_from_sources(sources: Sources) -> Detection:
    """The topology that a machine's sources amount to, by the order of trust.

    Raises:
        TopologyError: there is no GPU, or a GPU's memory cannot be told.
    """
    devices, warnings = sources.devices, _Warnings()
    if not devices:
        raise TopologyError(f"no GPU found: {'; '.join(sources.problems) or 'nothing to ask'}. Use --preset NAME for a "
                            "known server or --file F for a topology in JSON")
    gpus = tuple(_gpu(number, device, warnings) for number, device in enumerate(devices))
    links = _links(sources, warnings)
    link_bandwidth = tuple(pcie_bandwidth(link.generation, link.width) for link in links)

    roots = _roots(sources, warnings)
    names = list(dict.fromkeys(roots.names))
    root_of = tuple(names.index(name) for name in roots.names)
    groups = [[gpu for gpu, root in enumerate(root_of) if root == wanted] for wanted in range(len(names))]
    root_bandwidth = tuple(_root_bandwidth(group, root, roots, sources, link_bandwidth, warnings)
                           for root, group in enumerate(groups))

    topology = Topology(_name(gpus), gpus, root_of, link_bandwidth, root_bandwidth, _peer_bandwidth(sources, warnings),
                        sources.dram_bytes)
    if sources.visible is not None:
        topology = topology.select(_visible(sources.visible, devices, warnings))
    return Detection(topology, warnings.texts())


def _name(gpus: Sequence[Gpu]) -> str:
    counts: Dict[str, int] = {}
    for gpu in gpus:
        counts[gpu.name] = counts.get(gpu.name, 0) + 1
    return " + ".join(f"{count}x {name}" for name, count in counts.items())


def _numbers(gpus: Sequence[int]) -> str:
    return f"GPU{'s' * (len(gpus) > 1)} {', '.join(map(str, gpus))}"


def _gpu(number: int, device: ListedGpu, warnings: _Warnings) -> Gpu:
    model = known_gpu(device.name)
    memory = device.memory_bytes or (model and model.memory_bytes)
    if not memory:
        raise TopologyError(f"GPU {number} ({device.name}) does not tell its memory and is not a known model. Write its "
                            "topology as JSON (start from mobius-ds topology --preset NAME --json) and use --file F")
    if device.memory_bytes is None:
        warnings.add(f"{device.name} does not tell its memory; assumed {memory / GIB:.0f} GiB", number)
    if model is None:
        warnings.add(f"{device.name} is not a known model; assumed {UNKNOWN_GPU_FLOPS / 1e12:.1f} TFLOP/s sustained, an RTX "
                     "3090's", number)
    if device.mig:
        warnings.add("cut into MIG instances, which are not modelled; figures are of the whole GPU", number)
    return Gpu(device.name, memory, model.flops if model else UNKNOWN_GPU_FLOPS)


# Links


def _links(sources: Sources, warnings: _Warnings) -> Tuple[PcieLink, ...]:
    links = []
    for number, device in enumerate(sources.devices):
        # The driver first: it knows what card and slot agreed on, where sysfs has each one's maximum.
        link = device.link or _link_in_tree(sources.tree, device.address)
        if link is None:
            link = ASSUMED_LINK
            bandwidth = pcie_bandwidth(link.generation, link.width)
            warnings.add(f"PCIe link unknown; assumed {link.generation}.0 x{link.width}, {bandwidth / GB:.1f} GB/s", number)
        if link.card_width and link.width < link.card_width:
            warnings.add(f"{link.width} of the card's {link.card_width} PCIe lanes in use", number)
        links.append(link)
    return tuple(links)


def _link_in_tree(tree: PciTree, address: Optional[str]) -> Optional[PcieLink]:
    """The link between a PCI device and the port above it, as wide and fast as both allow."""
    if address not in tree:
        return None
    function = tree[address]
    port = tree.get(function.path[-2])
    ends = [function] + ([port] if port else [])
    speeds = [end.speed for end in ends if end.speed]
    widths = [end.max_width for end in ends if end.max_width] + [function.width] * bool(function.width)
    # The speed in use says nothing: GPUs slow their link down when idle. Its width stays.
    return PcieLink(min(speeds), min(widths), function.max_width) if speeds and widths else None


# Root complexes: note [Order of trust]


def _roots(sources: Sources, warnings: _Warnings) -> _Roots:
    size = len(sources.devices)
    if size == 1:
        in_tree = sources.devices[0].address in sources.tree and not _is_virtual(sources)
        return _Roots((0,), "single GPU", in_tree)
    virtual = _is_virtual(sources)
    if virtual:
        warnings.add("this is a virtual machine, whose PCI tree does not show the real root complexes")
    by_tree = None if virtual else _roots_by_tree(sources, warnings)
    by_matrix = None if virtual else _roots_by_matrix(sources, warnings)
    if by_tree and by_matrix:
        _warn_of_difference(by_tree, by_matrix, warnings)
    found = by_tree or by_matrix
    if found:
        return found
    found = _roots_by_numa(sources)
    if found:
        count = len(set(found.names))
        warnings.add(f"assumed one root complex per NUMA node: {count} for {size} GPUs")
        return found
    warnings.add(f"assumed that all {size} GPUs share one root complex")
    return _Roots((0,) * size, "assumption")


def _is_virtual(sources: Sources) -> bool:
    """Whether the PCI tree is a hypervisor's. A real GPU always has a root port above it."""
    if sources.hypervisor:
        return True
    for device in sources.devices:
        if device.address in sources.tree:
            above = sources.tree[device.address].path[1:-1]
            if not above or any(bridge.vendor in _VIRTUAL_BRIDGES for bridge in map(sources.tree.get, above) if bridge):
                return True
    return False


def _roots_by_tree(sources: Sources, warnings: _Warnings) -> Optional[_Roots]:
    found = [device.address in sources.tree for device in sources.devices]
    if not all(found):
        warnings.add(f"sysfs shows {sum(found)} of {len(found)} GPUs (containers hide devices), so its PCI tree is "
                     "not used")
        return None
    return _Roots(tuple(sources.tree[device.address].path[0] for device in sources.devices), "sysfs", True)


def _roots_by_matrix(sources: Sources, warnings: _Warnings) -> Optional[_Roots]:
    """Joins GPUs that share a host bridge. None if direct links hide how GPUs are connected, or entries contradict."""
    matrix = sources.matrix
    size = len(sources.devices)
    if matrix is None:
        return None
    if len(matrix.connections) != size:
        warnings.add(f"nvidia-smi topo -m has {len(matrix.connections)} GPUs, but {size} are listed; it is not used")
        return None
    root = list(range(size))
    for first, second in combinations(range(size), 2):
        if matrix.connections[first][second].path in _SHARED_PATHS:
            root = [root[first] if name == root[second] else name for name in root]
    for first, second in combinations(range(size), 2):
        path = matrix.connections[first][second].path
        if path is None and root[first] != root[second] and _same_locality(sources, first, second) is not False:
            return None
        if path in ("NODE", "SYS") and root[first] == root[second]:
            warnings.add(f"nvidia-smi topo -m contradicts itself: {path} between GPUs {first} and {second}, which share "
                         "a host bridge with a third; it is not used")
            return None
        if path == "SYS" and _same_locality(sources, first, second) is True:
            warnings.add(f"nvidia-smi topo -m contradicts itself: SYS between GPUs {first} and {second}, which are next "
                         "to the same NUMA node, as virtual machines show it; it is not used")
            return None
    return _Roots(tuple(root), "nvidia-smi topo -m")


def _same_locality(sources: Sources, first: int, second: int) -> Optional[bool]:
    """Whether two GPUs are next to the same NUMA node; None if unknown, which may be."""
    locality = _localities(sources)
    if locality is None:
        return None
    return locality[first] == locality[second]


def _localities(sources: Sources) -> Optional[Tuple[Hashable, ...]]:
    """What tells each GPU's NUMA node, where it is known of all."""
    addresses = [device.address for device in sources.devices]
    if all(address in sources.tree and sources.tree[address].numa is not None for address in addresses):
        return tuple(sources.tree[address].numa for address in addresses)
    matrix = sources.matrix
    if matrix and len(matrix.locality) == len(addresses) and None not in matrix.locality:
        return matrix.locality
    return None


def _roots_by_numa(sources: Sources) -> Optional[_Roots]:
    locality = _localities(sources)
    return _Roots(locality, "NUMA nodes") if locality else None


def _warn_of_difference(trusted: _Roots, other: _Roots, warnings: _Warnings) -> None:
    for first, second in combinations(range(len(trusted.names)), 2):
        together = trusted.names[first] == trusted.names[second]
        if together != (other.names[first] == other.names[second]):
            warnings.add(f"{trusted.source} puts GPUs {first} and {second} under {'one root complex' if together else 'two'}"
                         f", {other.source} does not; {trusted.source} is used")
            return


def _root_bandwidth(group: Sequence[int], root: int, roots: _Roots, sources: Sources, link_bandwidth: Sequence[float],
                    warnings: _Warnings) -> float:
    """What a root complex carries: all its ports together, as wide as each is; one link where ports are not known."""
    if not roots.from_tree:
        widest = max(link_bandwidth[gpu] for gpu in group)
        if len(group) > 1:
            warnings.add(f"{_numbers(group)} are taken to share {widest / GB:.1f} GB/s, one link's, as the paper measured "
                         "it on its server")
        return widest
    ports: Dict[str, List[int]] = {}
    for gpu in group:
        ports.setdefault(_path(sources, gpu)[1], []).append(gpu)
    total = sum(_port_bandwidth(behind, sources, link_bandwidth, warnings) for behind in ports.values())
    if len(ports) > 1:
        warnings.add(f"root complex {root} has {len(ports)} ports in use, assumed to carry {total / GB:.1f} GB/s together")
    return total


def _path(sources: Sources, gpu: int) -> Tuple[str, ...]:
    return sources.tree[sources.devices[gpu].address].path


def _port_bandwidth(behind: Sequence[int], sources: Sources, link_bandwidth: Sequence[float], warnings: _Warnings) -> float:
    """What the GPUs behind one port of a root complex share: their links, or a switch's way up if that is less."""
    together = sum(link_bandwidth[gpu] for gpu in behind)
    first = _path(sources, behind[0])[2]
    if first == sources.devices[behind[0]].address:  # no switch between
        return together
    uplink = _link_in_tree(sources.tree, first)
    carried = pcie_bandwidth(*uplink[:2]) if uplink else max(link_bandwidth[gpu] for gpu in behind)
    if len(behind) > 1:
        warnings.add(f"{_numbers(behind)} share a PCIe switch ({first}), whose way up "
                     f"{'carries' if uplink else 'is unknown; assumed'} {carried / GB:.1f} GB/s")
    return min(together, carried)


# Direct connections


def _peer_bandwidth(sources: Sources, warnings: _Warnings) -> Optional[float]:
    """Of the weakest pair's direct connection, if every pair has one. A plan must hold for any two GPUs."""
    size = len(sources.devices)
    if sources.matrix is None or len(sources.matrix.connections) != size:
        models = [known_gpu(device.name) for device in sources.devices]
        if size > 1 and any(model is None or model.nvlink for model in models):
            reason = "; ".join(sources.problems) or "nvidia-smi topo -m tells of other GPUs"
            warnings.add(f"whether GPUs are joined by NVLink is unknown ({reason}); assumed that they are not")
        return None
    pairs = {(first, second): sources.matrix.connections[first][second].links
             for first, second in combinations(range(size), 2)}
    joined = [pair for pair, links in pairs.items() if links]
    if not joined:
        return None
    if len(joined) < len(pairs):
        warnings.add(f"{len(joined)} of {len(pairs)} pairs of GPUs have NVLink (the first is {joined[0][0]} and "
                     f"{joined[0][1]}); planned without, as a plan must hold for any two GPUs")
        return None
    rates = []
    for number, device in enumerate(sources.devices):
        model = known_gpu(device.name)
        if model is None or model.nvlink is None:
            warnings.add(f"NVLink rate of {device.name} unknown; assumed {UNKNOWN_NVLINK / GB:.1f} GB/s a link", number)
        rates.append(model.nvlink if model and model.nvlink else UNKNOWN_NVLINK)
    return NVLINK_EFFICIENCY * min(links * min(rates[first], rates[second]) for (first, second), links in pairs.items())


# The environment


def _visible(value: str, devices: Sequence[ListedGpu], warnings: _Warnings) -> List[int]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` names, as CUDA reads it: up to the first entry that does not exist.

    Raises:
        TopologyError: none is left.
    """
    if "MIG-" in value:
        warnings.add(f"CUDA_VISIBLE_DEVICES={value} names MIG instances, which are not modelled; all {len(devices)} GPUs "
                     "are listed")
        return list(range(len(devices)))
    gpus: List[int] = []
    for entry in filter(None, (entry.strip() for entry in value.split(","))):
        if entry.isdigit():
            named = [int(entry)] if int(entry) < len(devices) else []
        else:
            named = [number for number, device in enumerate(devices) if device.uuid.startswith(entry)]
        if len(named) != 1:
            warnings.add(f"CUDA_VISIBLE_DEVICES={value}: {entry!r} is none of {len(devices)} GPUs; it and what follows is "
                         "ignored, as CUDA does")
            break
        gpus += named
    if not gpus:
        raise TopologyError(f"CUDA_VISIBLE_DEVICES={value!r} leaves none of {len(devices)} GPUs visible; change it, or use "
                            "--preset NAME or --file F")
    if len({device.name for device in devices}) > 1:
        warnings.add("GPUs of different models are numbered by PCI address here; set CUDA_DEVICE_ORDER=PCI_BUS_ID so that "
                     "CUDA does too")
    return gpus


def topology_by_name(source: str) -> Topology:
    """A topology by what a user says: a preset's name, ``detect``, or a JSON file.

    Raises:
        TopologyError: it is none of these, or nothing was detected.
    """
    if source == "detect":
        return detect_topology().topology
    return topology_from_json(source) if source.endswith(".json") or Path(source).is_file() else preset(source)

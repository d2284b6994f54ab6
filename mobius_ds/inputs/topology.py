"""The topology: GPUs, the root complexes they hang under, and what their links carry.

Every GPU has a link of its own, the same in both directions at once. GPUs under one root complex share its way
to DRAM, which is narrower than their links together: that is what contention is about. Without peer-to-peer
everything between two GPUs goes through DRAM and so over both.
"""

import difflib
import json
import math
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Dict, Iterable, Optional, Sequence, Tuple, Union

from mobius_ds.inputs.hardware import GB, GIB, GPU_MODELS, NVLINK_EFFICIENCY, pcie_bandwidth


class TopologyError(ValueError):
    """A topology that cannot be: the message says which figure, and what it must be."""


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    name: str
    memory_bytes: int
    flops: float
    """Sustained 16-bit FLOP/s of large matrix products with fp32 accumulation, not the figure on the box."""


@dataclass(frozen=True)
class Topology:
    """One server. Bandwidths in bytes/s, each direction.

    Raises:
        TopologyError: a figure is not a positive number, or counts of GPUs, links and root complexes differ.
    """

    name: str
    gpus: Tuple[Gpu, ...]
    root_of: Tuple[int, ...]
    """The root complex of each GPU."""
    link_bandwidth: Tuple[float, ...]
    """Of each GPU's own link."""
    root_bandwidth: Tuple[float, ...]
    """What the GPUs of each root complex share on the way to DRAM."""
    peer_bandwidth: Optional[float] = None
    """Of each GPU's direct connection to the others (NVLink); None without peer-to-peer."""
    dram_bytes: int = 512 * GIB
    update_bandwidth: float = 20 * GB
    """DRAM bytes/s at which all CPU cores together run the optimizer. The default is an assumption."""

    def __post_init__(self):
        for name in (self.name, *(gpu.name for gpu in self.gpus)):
            if not isinstance(name, str):
                raise TopologyError(f"a name in topology {self.name!r} is {name!r}; it must be text")
        if not self.gpus:
            raise TopologyError(f"topology {self.name!r} has no GPUs")
        if len(self.root_of) != len(self.gpus) or len(self.link_bandwidth) != len(self.gpus):
            raise TopologyError(f"topology {self.name!r} has {len(self.gpus)} GPUs, but root complexes for "
                                f"{len(self.root_of)} and links for {len(self.link_bandwidth)} of them")
        for root in self.root_of:
            if not isinstance(root, int) or isinstance(root, bool):
                raise TopologyError(f"root_of of topology {self.name!r} has {root!r}; root complexes are numbered from 0")
        roots = set(self.root_of)
        if roots != set(range(len(self.root_bandwidth))):
            raise TopologyError(f"topology {self.name!r} names root complexes {sorted(roots)}, but gives bandwidths for "
                                f"{list(range(len(self.root_bandwidth)))}")
        for figure, value in self._figures():
            if not _is_number(value):
                raise TopologyError(f"{figure} of topology {self.name!r} is {value!r}; it must be a number")
            if not (0 < value < math.inf):
                raise TopologyError(f"{figure} of topology {self.name!r} is {value}; it must be positive and finite")

    def _figures(self) -> Iterable[Tuple[str, Any]]:
        for number, gpu in enumerate(self.gpus):
            yield f"memory_bytes of GPU {number}", gpu.memory_bytes
            yield f"flops of GPU {number}", gpu.flops
            yield f"link_bandwidth of GPU {number}", self.link_bandwidth[number]
        for root, bandwidth in enumerate(self.root_bandwidth):
            yield f"root_bandwidth of root complex {root}", bandwidth
        if self.peer_bandwidth is not None:
            yield "peer_bandwidth", self.peer_bandwidth
        yield "dram_bytes", self.dram_bytes
        yield "update_bandwidth", self.update_bandwidth

    @property
    def size(self) -> int:
        """The number of GPUs."""
        return len(self.gpus)

    @property
    def groups(self) -> Tuple[Tuple[int, ...], ...]:
        """The GPUs of each root complex."""
        return tuple(tuple(gpu for gpu, root in enumerate(self.root_of) if root == wanted)
                     for wanted in range(len(self.root_bandwidth)))

    def shared(self, first: int, second: int) -> int:
        """How many GPUs sit under the root complex that two GPUs have in common; 0 if they have none (paper, 3.3)."""
        root = self.root_of[first]
        return self.root_of.count(root) if root == self.root_of[second] else 0

    def share_of_root(self, gpu: int) -> float:
        """Bytes/s a GPU gets when all GPUs of its root complex transfer in one direction."""
        root = self.root_of[gpu]
        return min(self.link_bandwidth[gpu], self.root_bandwidth[root] / self.root_of.count(root))

    def select(self, gpus: Sequence[int]) -> "Topology":
        """The same server seen by a job that runs on some of its GPUs, in the given order.

        Raises:
            TopologyError: a GPU does not exist or is named twice, or none is named.
        """
        missing = [gpu for gpu in gpus if not 0 <= gpu < self.size]
        if missing or len(set(gpus)) != len(gpus):
            raise TopologyError(f"cannot select GPUs {list(gpus)} of topology {self.name!r}, which has GPUs 0 to "
                                f"{self.size - 1}, each of which can be selected once")
        if list(gpus) == list(range(self.size)):
            return self
        roots = list(dict.fromkeys(self.root_of[gpu] for gpu in gpus))
        return Topology(f"{self.name} [{','.join(map(str, gpus))}]", tuple(self.gpus[gpu] for gpu in gpus),
                        tuple(roots.index(self.root_of[gpu]) for gpu in gpus),
                        tuple(self.link_bandwidth[gpu] for gpu in gpus), tuple(self.root_bandwidth[root] for root in roots),
                        self.peer_bandwidth if len(gpus) > 1 else None, self.dram_bytes, self.update_bandwidth)

    def to_json(self) -> Dict[str, Any]:
        """Plain data for a JSON file."""
        return asdict(self)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def topology_from_json(source: Union[str, Path, Dict[str, Any]]) -> Topology:
    """Reads a topology from a JSON file or its content.

    Raises:
        TopologyError: the file cannot be read, a key is unknown or missing, or a figure is not positive.
    """
    if isinstance(source, dict):
        return _from_data(source, "topology")
    try:
        data = json.loads(Path(source).read_text())
    except OSError as error:
        raise TopologyError(f"cannot read topology {source}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TopologyError(f"{source} is not text: {error}") from None
    except (ValueError, RecursionError) as error:  # JSON's own error, a number of too many digits, lists nested too deep
        raise TopologyError(f"{source} is not valid JSON: {error}") from None
    return _from_data(data, str(source))


def _from_data(data: Any, where: str) -> Topology:
    _check_keys(data, Topology, where)
    for key in ("gpus", "root_of", "link_bandwidth", "root_bandwidth"):
        if not isinstance(data[key], (list, tuple)):
            raise TopologyError(f"{key} of {where} is {data[key]!r}; it must be a list")
    for number, gpu in enumerate(data["gpus"]):
        _check_keys(gpu, Gpu, f"GPU {number} of {where}")
    gpus = tuple(Gpu(**gpu) for gpu in data["gpus"])
    lists = {key: tuple(data[key]) for key in ("root_of", "link_bandwidth", "root_bandwidth")}
    return Topology(**{**data, **lists, "gpus": gpus})


def _check_keys(data: Any, kind: type, where: str) -> None:
    keys = {field.name: field.default is MISSING for field in fields(kind)}
    if not isinstance(data, dict):
        raise TopologyError(f"{where} is not a JSON object with the keys {', '.join(keys)}, but {json.dumps(data)[:40]}")
    for key in data:
        if key not in keys:
            raise TopologyError(f"{where} has an unknown key {key!r}{_nearest(key, keys)}. Keys are {', '.join(keys)}")
    missing = [key for key, required in keys.items() if required and key not in data]
    if missing:
        raise TopologyError(f"{where} lacks {', '.join(missing)}")


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


# Presets: servers that papers, clouds and workstation makers describe. A GPU's figures are in hardware.py. How
# the GPUs are grouped is the paper's for 3090ti-*, and the usual board's for the others; that a root complex carries
# what one of its GPUs' links carries was measured by the paper on PCIe 3.0, and is an assumption elsewhere.
# DRAM is the paper's (1.5 TB) for 3090ti-*, and a usual size for the others. Sockets are the usual board's.

SERVER_DRAM_GIB = 256
SOCKET_UPDATE_BANDWIDTH = 100 * GB
"""Assumption: eight channels of DDR4-3200, 205 GB/s, of which the optimizer reaches half."""
DESKTOP_UPDATE_BANDWIDTH = 20 * GB
"""Assumption: two channels of DDR4-3200, 51 GB/s, less than half of it."""


def _server(name: str, gpu_model: str, groups: Tuple[int, ...], generation: int, dram_gib: int, nvlinks: int = 0,
            link_width: int = 16, sockets: int = 1) -> Topology:
    """GPUs under root complexes in groups, each root complex as wide as one PCIe x16 link.

    Args:
        gpu_model: key of ``GPU_MODELS``.
        generation: of PCIe.
        nvlinks: between each GPU and the others.
    """
    model = GPU_MODELS[gpu_model]
    gpu = Gpu(gpu_model.upper().replace(" TI", " Ti"), model.memory_bytes, model.flops)
    root_of = tuple(root for root, count in enumerate(groups) for _ in range(count))
    links = (pcie_bandwidth(generation, link_width),) * len(root_of)
    peer = NVLINK_EFFICIENCY * (nvlinks * model.nvlink) if nvlinks else None
    return Topology(name, (gpu,) * len(root_of), root_of, links, (pcie_bandwidth(generation, 16),) * len(groups), peer,
                    dram_gib * GIB, SOCKET_UPDATE_BANDWIDTH * sockets if dram_gib >= SERVER_DRAM_GIB else
                    DESKTOP_UPDATE_BANDWIDTH)


PRESETS: Dict[str, Topology] = {topology.name: topology for topology in (
    # The paper's: eight 3090 Ti on PCIe 3.0, and three ways to take four of them.
    _server("3090ti-4", "rtx 3090 ti", (4,), 3, 1500, sockets=2),
    _server("3090ti-4-2+2", "rtx 3090 ti", (2, 2), 3, 1500, sockets=2),
    _server("3090ti-4-1+3", "rtx 3090 ti", (1, 3), 3, 1500, sockets=2),
    _server("3090ti-8-4+4", "rtx 3090 ti", (4, 4), 3, 1500, sockets=2),
    # Desktop boards: two cards split the processor's 16 lanes.
    _server("3090-2", "rtx 3090", (2,), 4, 128, link_width=8),
    _server("3090-2-nvlink", "rtx 3090", (2,), 4, 128, nvlinks=4, link_width=8),
    _server("4090-1", "rtx 4090", (1,), 4, 64),
    _server("4090-2", "rtx 4090", (2,), 4, 128, link_width=8),
    _server("5090-2", "rtx 5090", (2,), 5, 192, link_width=8),
    # Workstations: one socket, each root complex with two x16 slots.
    _server("4090-4-2+2", "rtx 4090", (2, 2), 4, 512),
    _server("a6000-4-2+2", "rtx a6000", (2, 2), 4, 512),
    # Two sockets with a switch to each, four GPUs behind it.
    _server("3090-8-4+4", "rtx 3090", (4, 4), 4, 512, sockets=2),
    _server("4090-8", "rtx 4090", (4, 4), 4, 1024, sockets=2),
    _server("5090-8-4+4", "rtx 5090", (4, 4), 5, 1024, sockets=2),
    _server("l40s-8-4+4", "l40s", (4, 4), 4, 1024, sockets=2),
    # DGX A100: pairs of GPUs share a switch (user guide). DGX H100: every GPU has a switch port of its own.
    _server("a100-8-nvlink", "a100", (2, 2, 2, 2), 4, 2048, nvlinks=12, sockets=2),
    _server("h100-8-nvlink", "h100", (1,) * 8, 5, 2048, nvlinks=18, sockets=2),
)}


def preset(name: str) -> Topology:
    """A known server.

    Raises:
        TopologyError: there is no preset of that name.
    """
    if name not in PRESETS:
        raise TopologyError(f"unknown topology {name!r}{_nearest(name, PRESETS)}. Presets are {', '.join(PRESETS)}; or "
                            "give a JSON file")
    return PRESETS[name]

"""The topology: GPUs, the root complexes they hang under, and what their links carry.

Every GPU has a link of its own, the same in both directions at once. GPUs under one root complex share its way
to DRAM, which is narrower than their links together: that is what contention is about. Without peer-to-peer
everything between two GPUs goes through DRAM and so over both.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Optional, Tuple, Union

GB = 10**9
GIB = 2**30


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
    """One server. Bandwidths in bytes/s, each direction."""

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
    """DRAM bytes/s at which all CPU cores together run the optimizer."""

    def __post_init__(self):
        if not self.gpus:
            raise TopologyError(f"topology {self.name!r} has no GPUs")
        if len(self.root_of) != len(self.gpus) or len(self.link_bandwidth) != len(self.gpus):
            raise TopologyError(f"topology {self.name!r} has {len(self.gpus)} GPUs, but root complexes for "
                                f"{len(self.root_of)} and links for {len(self.link_bandwidth)} of them")
        roots = set(self.root_of)
        if roots != set(range(len(self.root_bandwidth))):
            raise TopologyError(f"topology {self.name!r} names root complexes {sorted(roots)}, but gives bandwidths for "
                                f"{list(range(len(self.root_bandwidth)))}")
        figures = {"link_bandwidth": self.link_bandwidth, "root_bandwidth": self.root_bandwidth,
                   "update_bandwidth": (self.update_bandwidth,), "dram_bytes": (self.dram_bytes,),
                   "peer_bandwidth": () if self.peer_bandwidth is None else (self.peer_bandwidth,),
                   "memory_bytes": tuple(gpu.memory_bytes for gpu in self.gpus),
                   "flops": tuple(gpu.flops for gpu in self.gpus)}
        for figure, values in figures.items():
            for value in values:
                if not value > 0:
                    raise TopologyError(f"{figure} of topology {self.name!r} is {value}; it must be positive")

    @property
    def size(self) -> int:
        """The number of GPUs."""
        return len(self.gpus)

    def shared(self, first: int, second: int) -> int:
        """How many GPUs sit under the root complex that two GPUs have in common; 0 if they have none (paper, 3.3)."""
        root = self.root_of[first]
        return self.root_of.count(root) if root == self.root_of[second] else 0

    def share_of_root(self, gpu: int) -> float:
        """Bytes/s a GPU gets when all GPUs of its root complex transfer in one direction."""
        root = self.root_of[gpu]
        return min(self.link_bandwidth[gpu], self.root_bandwidth[root] / self.root_of.count(root))

    def to_json(self) -> Dict[str, Any]:
        """Plain data for a JSON file."""
        return asdict(self)


def topology_from_json(source: Union[str, Path, Dict[str, Any]]) -> Topology:
    """Reads a topology from a JSON file or its content.

    Raises:
        TopologyError: a key is unknown or missing, or a figure is not positive.
    """
    data = source if isinstance(source, dict) else json.loads(Path(source).read_text())
    try:
        gpus = tuple(Gpu(**gpu) for gpu in data["gpus"])
        lists = {key: tuple(data[key]) for key in ("root_of", "link_bandwidth", "root_bandwidth")}
        return Topology(**{**data, **lists, "gpus": gpus})
    except (KeyError, TypeError) as error:
        raise TopologyError(f"not a topology: {error}. Keys are {', '.join(Topology.__dataclass_fields__)}, and of a GPU "
                            f"{', '.join(Gpu.__dataclass_fields__)}") from None


# Sustained FLOP/s are 60 % of the published dense 16-bit rates (fp32 accumulation): what large matrix products reach.
_SUSTAINED = 0.6
_3090TI = Gpu("RTX 3090 Ti", 24 * GIB, _SUSTAINED * 80e12)
_4090 = Gpu("RTX 4090", 24 * GIB, _SUSTAINED * 165e12)
_A100 = Gpu("A100 80GB", 80 * GIB, _SUSTAINED * 312e12)
_ROOT_3090 = 13.1 * GB  # measured by the paper on PCIe 3.0 x16, 16 GB/s nominal
_ROOT_4090 = 26.2 * GB  # PCIe 4.0: twice that, by assumption


def _server(name: str, gpu: Gpu, groups: Tuple[int, ...], bandwidth: float, **figures: Any) -> Topology:
    """GPUs under root complexes in groups, where one GPU alone can use its root complex's whole bandwidth."""
    root_of = tuple(root for root, count in enumerate(groups) for _ in range(count))
    return Topology(name, (gpu,) * len(root_of), root_of, (bandwidth,) * len(root_of), (bandwidth,) * len(groups), **figures)


PRESETS: Dict[str, Topology] = {topology.name: topology for topology in (
    _server("3090ti-4", _3090TI, (4,), _ROOT_3090, dram_bytes=1500 * GIB),
    _server("3090ti-4-2+2", _3090TI, (2, 2), _ROOT_3090, dram_bytes=1500 * GIB),
    _server("3090ti-4-1+3", _3090TI, (1, 3), _ROOT_3090, dram_bytes=1500 * GIB),
    _server("3090ti-8-4+4", _3090TI, (4, 4), _ROOT_3090, dram_bytes=1500 * GIB),
    _server("4090-8", _4090, (4, 4), _ROOT_4090, dram_bytes=1024 * GIB),
    _server("a100-8-nvlink", _A100, (2, 2, 2, 2), _ROOT_4090, dram_bytes=2048 * GIB, peer_bandwidth=300 * GB),
)}


def preset(name: str) -> Topology:
    """A known server.

    Raises:
        TopologyError: there is no preset of that name.
    """
    if name not in PRESETS:
        raise TopologyError(f"unknown topology {name!r}; presets are {', '.join(PRESETS)}, or give a JSON file")
    return PRESETS[name]

"""The PCI devices of this machine, as sysfs shows them."""

import os
import re
from pathlib import Path
from typing import Dict, NamedTuple, Optional, Tuple

from mobius_ds.machine.gpu_listing import whole_number


class PciFunction(NamedTuple):
    """A PCI device in sysfs."""

    path: Tuple[str, ...]
    """From the root bus (``pci0000:16``) down to its own address."""
    vendor: Optional[str] = None
    numa: Optional[int] = None
    speed: Optional[int] = None
    """Generation of the fastest link it can have."""
    max_width: Optional[int] = None
    width: Optional[int] = None
    """Lanes in use."""


PciTree = Dict[str, PciFunction]

_ROOT_BUS = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_GENERATION = {"2.5": 1, "5": 2, "5.0": 2, "8": 3, "8.0": 3, "16": 4, "16.0": 4, "32": 5, "32.0": 5, "64": 6, "64.0": 6}


def read_pci_tree(sysfs: Path) -> PciTree:
    """The PCI devices under ``sysfs/bus/pci/devices``; empty where a container hides them."""
    folder = sysfs / "bus" / "pci" / "devices"
    tree = {}
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        parts = Path(os.path.realpath(entry)).parts
        # A second root bus further down (Intel VMD) still hangs under the first one's root complex.
        root = next((at for at, part in enumerate(parts) if _ROOT_BUS.fullmatch(part)), None)
        if root is None:
            continue
        numa = whole_number(_attribute(entry, "numa_node"))
        path = (parts[root], *(part for part in parts[root + 1:] if not _ROOT_BUS.fullmatch(part)))
        tree[entry.name] = PciFunction(
            path, _attribute(entry, "vendor") or None, numa if numa is not None and numa >= 0 else None,
            _GENERATION.get(_attribute(entry, "max_link_speed").split(" ")[0]), _lanes(entry, "max_link_width"),
            _lanes(entry, "current_link_width"))
    return tree


def _attribute(entry: Path, name: str) -> str:
    try:
        return (entry / name).read_text().strip()
    except OSError:
        return ""


def _lanes(entry: Path, name: str) -> Optional[int]:
    lanes = whole_number(_attribute(entry, name))
    return lanes if lanes and lanes <= 32 else None  # 0 and 255 stand for unknown

"""What tools tell of a machine's GPUs and how they are connected, whichever tool it is."""

import re
from typing import NamedTuple, Optional, Tuple

from mobius_ds.inputs.topology import TopologyError


class PcieLink(NamedTuple):
    """Speed of a PCIe link."""

    generation: int
    width: int
    """Lanes in use."""
    card_width: Optional[int] = None
    """Lanes the card has, where known."""


class ListedGpu(NamedTuple):
    """One GPU as a tool lists it."""

    name: str
    memory_bytes: Optional[int]
    address: Optional[str]
    """PCI address as sysfs writes it: ``0000:17:00.0``."""
    link: Optional[PcieLink] = None
    uuid: str = ""
    mig: bool = False
    """Cut into MIG instances."""


class Connection(NamedTuple):
    """How two GPUs are connected."""

    path: Optional[str]
    """The PCIe way, as ``nvidia-smi topo -m`` names it; None if a direct link hides it."""
    links: int = 0
    """NVLinks (or xGMI connections) between the two."""


class Matrix(NamedTuple):
    """Connections of all pairs of GPUs."""

    connections: Tuple[Tuple[Optional[Connection], ...], ...]
    """None on the diagonal."""
    locality: Tuple[Optional[str], ...]
    """Equal for GPUs next to the same NUMA node; None if unknown."""


def pci_address(text: str) -> str:
    """A PCI address as sysfs writes it: ``00000000:3B:00.0`` is ``0000:3b:00.0``.

    Raises:
        TopologyError: the text is no PCI address.
    """
    match = re.fullmatch(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", text.strip().lower())
    if match is None:
        raise TopologyError(f"{text!r} is not a PCI address such as 0000:3b:00.0")
    domain, bus, slot, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{int(bus, 16):02x}:{int(slot, 16):02x}.{function}"


def whole_number(text: str) -> Optional[int]:
    return int(text) if re.fullmatch(r"-?\d+", text.strip()) else None

"""What ``rocm-smi`` prints, read."""

import json
import re
from typing import List, Tuple

from mobius_ds.inputs.topology import TopologyError
from mobius_ds.machine.gpu_listing import Connection, ListedGpu, Matrix, pci_address, whole_number

ROCM_QUERY = ("--showproductname", "--showmeminfo", "vram", "--showbus", "--showtopo", "--json")


def parse_rocm_smi(text: str) -> Tuple[List[ListedGpu], Matrix]:
    """Reads ``rocm-smi --json`` with the options of ``ROCM_QUERY``.

    Raises:
        TopologyError: it is not JSON, or a card lacks its name or memory.
    """
    try:
        data = json.loads(text[text.index("{"):])
    except ValueError as error:
        raise TopologyError(f"rocm-smi printed no JSON: {error}") from None
    cards = sorted((key for key in data if re.fullmatch(r"card\d+", key)), key=lambda key: int(key[4:]))
    devices, localities = [], []
    for key in cards:
        card = data[key]
        name = card.get("Card Series") or card.get("Card series") or card.get("Card Model")
        memory = whole_number(card.get("VRAM Total Memory (B)", ""))
        if not name or memory is None:
            raise TopologyError(f"rocm-smi lists {key} without 'Card Series' or 'VRAM Total Memory (B)': {sorted(card)}")
        devices.append(ListedGpu(name, memory, pci_address(card["PCI Bus"]) if "PCI Bus" in card else None))
        node = whole_number(card.get("(Topology) Numa Node", ""))
        localities.append(None if node is None else f"NUMA node {node}")
    kinds = {}
    for key, kind in data.get("system", {}).items():
        match = re.fullmatch(r"\(Topology\) Link type between DRM devices (\d+) and (\d+)", key)
        if match:
            kinds[frozenset(map(int, match.groups()))] = kind
    connections = tuple(
        tuple(None if row == column else Connection(None, int(kinds.get(frozenset((row, column))) == "XGMI"))
              for column in range(len(cards))) for row in range(len(cards)))
    return devices, Matrix(connections, tuple(localities))

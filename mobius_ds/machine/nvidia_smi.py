"""What ``nvidia-smi`` prints, read: its list of GPUs, and ``topo -m``, how each two are connected."""

import re
from typing import Dict, List, Optional, Sequence

from mobius_ds.inputs.topology import TopologyError
from mobius_ds.machine.gpu_listing import Connection, ListedGpu, Matrix, PcieLink, pci_address, whole_number

MIB = 2**20

GPU_QUERY = ("name", "uuid", "memory.total", "pci.bus_id", "pcie.link.gen.max", "pcie.link.width.max",
             "pcie.link.width.current", "mig.mode.current")  # yapf: disable

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# The last two are what drivers before 2017 print for SYS and PIX.
_PATHS = {"PIX": "PIX", "PXB": "PXB", "PHB": "PHB", "NODE": "NODE", "SYS": "SYS", "SOC": "SYS", "PSB": "PIX"}
_HEADINGS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")


def parse_gpu_query(text: str) -> List[ListedGpu]:
    """Reads ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits`` with the fields of ``GPU_QUERY``.

    Raises:
        TopologyError: a line does not have these fields, or has no usable PCI address.
    """
    devices = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("No devices"):
            continue
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(GPU_QUERY):
            raise TopologyError(f"line {number} of nvidia-smi's list of GPUs has {len(values)} fields instead of "
                                f"{len(GPU_QUERY)}: {line.strip()!r}")
        name, uuid, memory, address, generation, max_width, width, mig = values
        card_width, width, generation = whole_number(max_width), whole_number(width), whole_number(generation)
        lanes = width or card_width
        devices.append(
            ListedGpu(name, None if whole_number(memory) is None else whole_number(memory) * MIB, pci_address(address),
                   PcieLink(generation, lanes, card_width) if generation and lanes else None, uuid, mig == "Enabled"))
    return devices


def parse_topo_matrix(text: str) -> Matrix:
    """Reads what ``nvidia-smi topo -m`` prints. Columns of network cards are passed over.

    Raises:
        TopologyError: there is no matrix, a row or column is missing, an entry is unknown, or a pair's two entries differ.
    """
    lines = _ANSI.sub("", text).splitlines()
    words = [line.split() for line in lines]
    header_at = next((at for at, line in enumerate(words) if line[:1] == ["GPU0"] and line[1:2] != ["X"]), None)
    if header_at is None:
        raise TopologyError(f"no line of the {len(lines)} of nvidia-smi topo -m heads a matrix of GPUs")
    header = lines[header_at]
    for heading in _HEADINGS:
        header = header.replace(heading, heading.replace(" ", "_"))
    columns = header.split()
    size = sum(re.fullmatch(r"GPU\d+", column) is not None for column in columns)
    rows: Dict[int, List[str]] = {}
    for line in lines[header_at + 1:]:
        match = re.match(r"\s*GPU(\d+)\s+(.*)", line)
        if match:
            rows[int(match[1])] = match[2].split()
    if sorted(rows) != list(range(size)):
        raise TopologyError(f"nvidia-smi topo -m has {size} columns of GPUs, but rows for {len(rows)}: {sorted(rows)}")
    connections = tuple(tuple(_connection(rows[row], row, column) for column in range(size)) for row in range(size))
    for row in range(size):
        for column in range(row):
            if connections[row][column] != connections[column][row]:
                raise TopologyError(f"nvidia-smi topo -m says {rows[row][column]} from GPU {row} to {column}, but "
                                    f"{rows[column][row]} from {column} to {row}")
    return Matrix(connections, tuple(_locality(columns, rows[row]) for row in range(size)))


def _connection(entries: Sequence[str], row: int, column: int) -> Optional[Connection]:
    if column >= len(entries):
        raise TopologyError(f"nvidia-smi topo -m has {len(entries)} entries for GPU {row}, none for GPU {column}")
    entry = entries[column]
    if (entry == "X") != (row == column):
        raise TopologyError(f"nvidia-smi topo -m says {entry!r} from GPU {row} to {column}; X stands for a GPU itself")
    if entry == "X":
        return None
    bonded = re.fullmatch(r"NV(\d+)", entry)
    if bonded:
        return Connection(None, int(bonded[1]))
    if entry not in _PATHS:
        raise TopologyError(f"nvidia-smi topo -m says {entry!r} from GPU {row} to {column}; known are NV#, "
                            f"{', '.join(_PATHS)}")
    return Connection(_PATHS[entry])


def _locality(columns: Sequence[str], entries: Sequence[str]) -> Optional[str]:
    """The NUMA node of a row, or its CPUs where drivers print no node. Blank cells make a row too short to tell."""
    for heading in ("NUMA_Affinity", "CPU_Affinity"):
        if heading in columns and columns.index(heading) < len(entries):
            value = entries[columns.index(heading)]
            if re.fullmatch(r"[\d,-]*\d", value):
                return f"{heading} {value}"
    return None

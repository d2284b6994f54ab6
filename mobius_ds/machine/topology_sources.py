"""What a machine says about its GPUs and how they are wired: each source read and parsed, none believed yet.

Sources are ``nvidia-smi`` (or ``rocm-smi``, or torch) for the list of GPUs, ``nvidia-smi topo -m`` for how each two are
connected, and sysfs for the PCI tree. Parsing is pure functions on text and trees; ``read_sources`` fetches both.
"""

import json
import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from mobius_ds.inputs.topology import TopologyError
from mobius_ds.machine.host_memory import total_dram

MIB = 2**20


class SourceMissing(Exception):
    """A source has nothing to say; the message says why."""


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


@dataclass
class Sources:
    """Everything a machine said."""

    devices: List[ListedGpu]
    matrix: Optional[Matrix] = None
    tree: PciTree = field(default_factory=dict)
    hypervisor: bool = False
    """The processor says that this is a virtual machine."""
    dram_bytes: int = 0
    visible: Optional[str] = None
    """The environment's list of GPUs that the job may use, if ``devices`` does not obey it already."""
    problems: List[str] = field(default_factory=list)
    """Why sources are missing."""


# nvidia-smi

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
        card_width, width, generation = _number(max_width), _number(width), _number(generation)
        lanes = width or card_width
        devices.append(
            ListedGpu(name, None if _number(memory) is None else _number(memory) * MIB, pci_address(address),
                   PcieLink(generation, lanes, card_width) if generation and lanes else None, uuid, mig == "Enabled"))
    return devices


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


# rocm-smi

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
        memory = _number(card.get("VRAM Total Memory (B)", ""))
        if not name or memory is None:
            raise TopologyError(f"rocm-smi lists {key} without 'Card Series' or 'VRAM Total Memory (B)': {sorted(card)}")
        devices.append(ListedGpu(name, memory, pci_address(card["PCI Bus"]) if "PCI Bus" in card else None))
        node = _number(card.get("(Topology) Numa Node", ""))
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


# sysfs

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
        numa = _number(_attribute(entry, "numa_node"))
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
    lanes = _number(_attribute(entry, name))
    return lanes if lanes and lanes <= 32 else None  # 0 and 255 stand for unknown


def _number(text: str) -> Optional[int]:
    return int(text) if re.fullmatch(r"-?\d+", text.strip()) else None


# Fetching

Command = Callable[[Sequence[str]], str]

_COMMAND_SECONDS = 60


def run_command(command: Sequence[str]) -> str:
    """What a command prints.

    Raises:
        SourceMissing: it is not installed, fails, or takes more than a minute (a hanging driver).
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_COMMAND_SECONDS)
    except FileNotFoundError:
        raise SourceMissing(f"{command[0]} is not installed") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SourceMissing(f"{command[0]} cannot run: {error}") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines() or [""]
        raise SourceMissing(f"{' '.join(command)[:60]} ended with status {done.returncode}: {said[0]}")
    return done.stdout


def devices_from_torch() -> List[ListedGpu]:
    """The GPUs that torch sees, in its order. Where containers have the driver's libraries, but not its tools.

    Raises:
        SourceMissing: torch is built without CUDA and ROCm or sees no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise SourceMissing("torch sees no GPU")
    devices = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        address = None
        if hasattr(properties, "pci_bus_id"):
            address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        devices.append(ListedGpu(properties.name, properties.total_memory, address))
    return devices


def read_sources(sysfs: Path = Path("/sys"), proc: Path = Path("/proc"), command: Command = run_command,
                 torch_devices: Callable[[], List[ListedGpu]] = devices_from_torch) -> Sources:
    """Asks every source of this machine. What fails is noted in ``problems``.

    Args:
        sysfs: where sysfs is mounted.
        proc: where procfs is mounted.
        command: runs a command and returns what it prints.
        torch_devices: the GPUs that torch sees.
    """
    sources = Sources([])

    def ask(question: Callable[[], None]) -> None:
        try:
            question()
        except (SourceMissing, TopologyError) as reason:
            sources.problems.append(str(reason))

    def ask_nvidia():
        query = ["nvidia-smi", f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader,nounits"]
        sources.devices = parse_gpu_query(command(query))
        if not sources.devices:
            raise SourceMissing("nvidia-smi lists no GPU")

    def ask_nvidia_matrix():
        sources.matrix = parse_topo_matrix(command(["nvidia-smi", "topo", "-m"]))

    def ask_rocm():
        sources.devices, sources.matrix = parse_rocm_smi(command(["rocm-smi", *ROCM_QUERY]))
        if not sources.devices:
            raise SourceMissing("rocm-smi lists no GPU")

    def ask_torch():
        sources.devices = torch_devices()

    ask(ask_nvidia)
    if sources.devices:
        ask(ask_nvidia_matrix)
    else:
        ask(ask_rocm)
    if sources.devices:
        sources.visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    else:
        ask(ask_torch)
    sources.tree = read_pci_tree(sysfs)
    cpuinfo = proc / "cpuinfo"
    flags = re.search(r"^flags\s*:.*$", cpuinfo.read_text() if cpuinfo.is_file() else "", re.MULTILINE)
    sources.hypervisor = flags is not None and "hypervisor" in flags[0].split()
    sources.dram_bytes = total_dram(sysfs, proc)
    return sources

"""What a machine says about its GPUs and how they are wired: each source read and parsed, none believed yet.

Sources are ``nvidia-smi`` (or ``rocm-smi``, or torch) for the list of GPUs, ``nvidia-smi topo -m`` for how each two are
connected, and sysfs for the PCI tree. Parsing is pure functions on text and trees; ``read_sources`` fetches both.
"""

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, List, Optional, Sequence

from mobius_ds.inputs.topology import TopologyError
from mobius_ds.machine.gpu_listing import ListedGpu, Matrix
from mobius_ds.machine.host_memory import total_dram
from mobius_ds.machine.nvidia_smi import GPU_QUERY, parse_gpu_query, parse_topo_matrix
from mobius_ds.machine.pci_tree import PciTree, read_pci_tree
from mobius_ds.machine.rocm_smi import ROCM_QUERY, parse_rocm_smi


class SourceMissing(Exception):
    """A source has nothing to say; the message says why."""


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

"""A server that is not there, under a job that is: its links are emulated, its GPUs are this machine's CPU.

``compare --wires`` hands an ``EmulatedServer`` to every arm's ranks through the environment, and each rank's recorder
puts emulated wires under its engine. Imports neither torch nor DeepSpeed.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Optional

from mobius_ds.emulation.wires import HostLink, Wires
from mobius_ds.inputs.topology import Topology, topology_from_json
from mobius_ds.names import WIRES_VARIABLE
from mobius_ds.simulation.costs import bandwidths

_FOLDER, _WIRES = "emulated", "wires"


@dataclass(frozen=True)
class EmulatedServer:
    """A topology whose links every rank's bytes have to cross, rank r those of GPU r.

    Args:
        topology: one GPU per rank.
        slowdown: what the bandwidth of every link is divided by.
    """

    topology: Topology
    slowdown: float

    @property
    def says(self) -> str:
        """What has to be said beside every time that was taken on it."""
        return (f"the links of {self.topology.name} are emulated, each with 1/{self.slowdown:g} of its bandwidth. Time on "
                f"the emulated server runs {self.slowdown:g} times slower, as if this CPU computed that much slower than "
                "its GPUs. Bytes and losses are real. An optimizer on the CPU runs at its own speed, which flatters all "
                "arms that have one. This is not a measurement of that server")

    def to_report(self) -> Dict[str, Any]:
        """The report's ``emulated``."""
        return {"topology": self.topology.name, "slowdown": self.slowdown, "says": self.says}

    def environment(self) -> Dict[str, str]:
        """What a job's environment needs beside the variable that makes it record."""
        return {WIRES_VARIABLE: json.dumps({"topology": self.topology.to_json(), "slowdown": self.slowdown})}

    @classmethod
    def from_environment(cls) -> Optional["EmulatedServer"]:
        """That of this process's job, if it has one."""
        value = os.environ.get(WIRES_VARIABLE)
        if value is None:
            return None
        data = json.loads(value)
        return cls(topology_from_json(data["topology"]), data["slowdown"])

    def link_of(self, rank: int, folder: Path) -> HostLink:
        """A rank's way to DRAM and back. All ranks name the same folder, where the files lie that they share."""
        wires = Wires(shared_files(folder) / _WIRES, bandwidths(self.topology), self.slowdown)
        return HostLink.of(wires, self.topology, rank)


def shared_files(folder: Path) -> Path:
    """Where the ranks of a recorded job keep what they share of an emulated server."""
    path = folder / _FOLDER
    path.mkdir(parents=True, exist_ok=True)
    return path


def remove_shared_files(folder: Path) -> None:
    """Removes them; ranks that have mapped them keep them."""
    shutil.rmtree(folder / _FOLDER, ignore_errors=True)

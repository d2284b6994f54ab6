"""A server that is not there, under a job that is: its links are emulated, its GPUs are this machine's CPU.

``compare --wires`` writes an ``EmulatedServer`` into the folder that every arm records into, and each rank's recorder
puts emulated wires under its engine. Imports neither torch nor DeepSpeed: those are the ranks'.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Mapping

from mobius_ds.emulation.wires import WiredLink, Wires
from mobius_ds.inputs.topology import Topology, topology_from_json
from mobius_ds.observation.records import shared_files
from mobius_ds.simulation.costs import bandwidths

if TYPE_CHECKING:
    from mobius_ds.emulation.transfers import EmulatedTransfers


@dataclass(frozen=True)
class EmulatedServer:
    """A topology whose links every rank's bytes have to cross, rank r those of GPU r: ``EmulatedLinks`` of a recorder.

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

    def to_json(self) -> Dict[str, Any]:
        """It as plain data, for the recorders of a job."""
        return {"topology": self.topology.to_json(), "slowdown": self.slowdown}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "EmulatedServer":
        """That of ``to_json``."""
        return cls(topology_from_json(data["topology"]), data["slowdown"])

    @property
    def name(self) -> str:
        """The server's, for messages."""
        return self.topology.name

    def link_of(self, rank: int, folder: Path) -> WiredLink:
        """A rank's way to DRAM and back. All ranks name the same folder, where the files lie that they share."""
        wires = Wires(shared_files(folder) / "wires", bandwidths(self.topology), self.slowdown)
        return WiredLink(wires, self.topology, rank)

    def transfers_of(self, rank: int, folder: Path) -> "EmulatedTransfers":
        """What takes the transfers of a rank's observed engine, which is about to be built."""
        from mobius_ds.emulation.transfers import EmulatedTransfers

        peer = None if self.topology.peer_bandwidth is None else ("peer", rank)
        return EmulatedTransfers(self.link_of(rank, folder), peer, folder)

"""What a recorder needs of links that are emulated under the ranks of a recorded job."""

from pathlib import Path
from typing import Protocol

from mobius_ds.observation.transfers import Transfers
from mobius_ds.runtime.device.link import HostLink


class EmulatedLinks(Protocol):
    """Those of a server that is not there, rank r's being GPU r's.

    All ranks name the same folder, that of the job's records, in which they keep what they share of the links.
    """

    @property
    def name(self) -> str:
        """The server's, for messages."""

    def link_of(self, rank: int, folder: Path) -> HostLink:
        """A rank's way to DRAM and back, for a device of Mobius'."""

    def transfers_of(self, rank: int, folder: Path) -> Transfers:
        """What takes the transfers of a rank's observed engine, which is about to be built."""

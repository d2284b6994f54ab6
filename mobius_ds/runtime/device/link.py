"""What a device needs of a link that its copies take their time to cross."""

from typing import Protocol


class HostLink(Protocol):
    """One GPU's way to DRAM and back, where it is emulated."""

    slowdown: float
    """How many times slower than the emulated server's it is."""

    def to_gpu(self, nbytes: int, begun: float) -> None:
        """Blocks until so many bytes, which set out at ``begun`` by ``time.perf_counter``, have come from DRAM."""

    def to_dram(self, nbytes: int, begun: float) -> None:
        """Blocks until they have come to DRAM."""

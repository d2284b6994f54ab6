"""Host memory that the device copies from and to by itself, beside compute: pinned where the system allows it.

Where it does not, copies are as right as before and slower: the driver copies through a buffer of its own.
"""

import threading
from typing import Dict, Optional, Protocol

import torch
from deepspeed.utils import logger

from mobius_ds.inputs.units import readable


class Registrar(Protocol):
    """What pins memory that is there already."""

    def pin(self, host: torch.Tensor) -> str:
        """Pins a tensor's memory. Returns why it could not, or nothing."""

    def unpin(self, host: torch.Tensor) -> None:
        """Undoes it."""


class CudaRegistrar:
    """CUDA's, and by the same name ROCm's."""

    def __init__(self, device: torch.device):
        self._device = device

    def pin(self, host: torch.Tensor) -> str:
        """See ``Registrar``."""
        status = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))
        if status == 0:
            return ""
        try:
            torch.ones(1, device=self._device)  # CUDA tells the thread's next kernel of the refusal once more
        except RuntimeError:
            pass
        return f"CUDA error {status}"

    def unpin(self, host: torch.Tensor) -> None:
        """See ``Registrar``."""
        torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


def registrar_of(device: torch.device) -> Optional[Registrar]:
    """What pins memory for a device; None for one that needs none, or whose memory cannot be pinned in place."""
    return CudaRegistrar(device) if device.type == "cuda" else None


class Pinning:
    """The memory that one rank has pinned, or tried to."""

    def __init__(self, device: torch.device):
        self._registrar = registrar_of(device)
        self._pinned: Dict[int, torch.Tensor] = {}
        self._refused: Dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned now."""
        with self._lock:
            return sum(host.nbytes for host in self._pinned.values())

    @property
    def refused_bytes(self) -> int:
        """Bytes that should be pinned and are not."""
        with self._lock:
            return sum(self._refused.values())

    def pin(self, host: torch.Tensor) -> None:
        """Pins a tensor's memory until ``unpin`` or ``close``; warns the first time that it cannot be."""
        if self._registrar is None or not host.nbytes:
            return
        refusal = self._registrar.pin(host)
        with self._lock:
            first = refusal and not self._refused
            if refusal:
                self._refused[host.data_ptr()] = host.nbytes
            else:
                self._pinned[host.data_ptr()] = host
        if first:
            logger.warning(f"Mobius: {readable(host.nbytes)} of host memory could not be pinned ({refusal}), and will be "
                           "copied more slowly, as pageable memory. A limit on locked memory is the usual cause: raise "
                           "ulimit -l (docker run --ulimit memlock=-1, LimitMEMLOCK=infinity under systemd), or the memory "
                           "of the container.")

    def unpin(self, host: torch.Tensor) -> None:
        """Gives up a tensor's memory, before it is freed and its address is used again."""
        with self._lock:
            self._refused.pop(host.data_ptr(), None)
            pinned = self._pinned.pop(host.data_ptr(), None)
        if pinned is not None:
            self._registrar.unpin(pinned)

    def close(self) -> None:
        """Gives up everything that is pinned."""
        for host in list(self._pinned.values()):
            self.unpin(host)

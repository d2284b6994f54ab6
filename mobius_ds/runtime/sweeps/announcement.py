"""What a rank tells the others of its microbatches: which program each runs, and with what."""

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch

from mobius_ds.model.intercept import Entry
from mobius_ds.model.mode import Mode
from mobius_ds.model.program import Program
from mobius_ds.runtime.sweeps.signatures import Inputs, Signatures
from mobius_ds.runtime.sweeps.sweep import TensorLeaf

Batch = Tuple[tuple, dict]
"""The arguments of one forward."""


class Announcement(NamedTuple):
    """What a rank tells the others of one of its microbatches."""

    signature: str
    program: Optional[Program]
    """Only the first time this rank meets the signature."""
    leaves: Tuple[Any, ...]
    structure: Any
    input_bytes: int
    seed: int


class Announcer:
    """Makes announcements, and knows the programs of all that were made by any rank.

    Args:
        device: of the microbatches.
        trace: a forward's program.
    """

    def __init__(self, device: torch.device, trace: Callable[[Entry, tuple, dict], Program]):
        self._device = device
        self._trace = trace
        self._signatures = Signatures(trace)
        self._traced: set = set()
        self.programs: Dict[str, Program] = {}
        """By signature; the same on every rank after each gather."""

    def announce(self, entry: Entry, mode: Mode, batch: Batch, leaves: List[Any], structure: Any,
                 seed: int) -> Announcement:
        """Of one microbatch.

        Args:
            leaves, structure: those of ``batch``.
            seed: for its random numbers.

        Raises:
            ValueError: an input requires a gradient.
        """
        if torch.is_grad_enabled() and any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            raise ValueError("an input of the model requires a gradient, which Mobius would not hand back. Detach it, or "
                             "make what computes it part of the model.")
        circumstances = (mode.digest, torch.is_grad_enabled(), torch.is_autocast_enabled(self._device.type),
                         torch.get_autocast_dtype(self._device.type), entry.name)
        signature = self._signatures.of(entry, Inputs(leaves, structure, circumstances))
        program = None
        if signature not in self._traced:
            self._traced.add(signature)
            program = self.programs.get(signature) or self._trace(entry, *batch)
        shipped: List[Any] = []
        tensors = 0
        for leaf in leaves:
            shipped.append(TensorLeaf(tensors) if isinstance(leaf, torch.Tensor) else leaf)
            tensors += isinstance(leaf, torch.Tensor)
        nbytes = sum(leaf.numel() * leaf.dtype.itemsize for leaf in leaves if isinstance(leaf, torch.Tensor))
        return Announcement(signature, program, tuple(shipped), structure, nbytes, seed)

    def learn(self, announcements: List[List[Announcement]]) -> None:
        """Takes the programs that come with announcements, by rank."""
        for announcement in (one for ranks in announcements for one in ranks if one.program is not None):
            self.programs.setdefault(announcement.signature, announcement.program)

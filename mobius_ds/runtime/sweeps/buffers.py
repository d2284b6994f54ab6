"""A model's buffers: each is everywhere, at the end of a step, what the rank that ran its layer made of it."""

from typing import Dict, Iterable, Sequence, Set

import torch
from torch import nn

from mobius_ds.model.program import Program


class Buffers:
    """One rank's buffers, and which of them its own stages have changed since all ranks last agreed."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.accept()

    def accept(self) -> None:
        """Takes the buffers for the same on every rank, as the script or a checkpoint has made them."""
        self._versions = {name: buffer._version for name, buffer in self._model.named_buffers()}

    def changed(self, programs: Iterable[Program]) -> Dict[str, torch.Tensor]:
        """Those that this rank's stages have written, on the CPU, by name."""
        buffers, written = dict(self._model.named_buffers()), _written(programs)
        # Batch norm changes its statistics without a new version; the count beside them has one.
        holders = {_holder(name) for name in written if buffers[name]._version != self._versions[name]}
        return {name: buffers[name].cpu() for name in written if _holder(name) in holders}

    def take(self, rank: int, everyones: Sequence[Dict[str, torch.Tensor]], programs: Iterable[Program]) -> None:
        """Takes what other ranks have changed.

        Args:
            rank: this one.
            everyones: what ``changed`` returned, by rank.
        """
        buffers = dict(self._model.named_buffers())
        for other, theirs in enumerate(everyones):
            for name, buffer in theirs.items() if other != rank else ():
                buffers[name].copy_(buffer)
        self._versions.update({name: buffers[name]._version for name in _written(programs)})


def _written(programs: Iterable[Program]) -> Set[str]:
    return {name for program in programs for name in program.written_buffers}


def _holder(name: str) -> str:
    return name.rpartition(".")[0]

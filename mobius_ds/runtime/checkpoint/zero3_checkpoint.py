"""ZeRO-3's own checkpoints, of any number of ranks, read without converting them first.

Every rank wrote, for each of ZeRO-3's sub-groups, one flat tensor of fp32 values and one per optimizer state: its
share of each of the sub-group's parameters, one after another, all shares of a parameter equally long.
"""

from pathlib import Path
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
from deepspeed.checkpoint.constants import LOSS_SCALER
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase

from mobius_ds.runtime.checkpoint.checkpoint_files import read_tensors
from mobius_ds.runtime.checkpoint.saved_model import (Pieces, SavedParameter, StateValue, buffers_of, dp_rank_of,
                                                      frozen_pieces, shapes_of, unpadded)
from mobius_ds.runtime.ranks.errors import CheckpointError

PATTERN = "*zero_pp_rank_*_mp_rank_*_optim_states.pt"
"""The names of ZeRO's shards."""


class Zero3Checkpoint:
    """The same questions as of a ``UniversalCheckpoint``.

    Raises:
        CheckpointError: shards are missing or damaged, or they are of another kind.
    """

    seed = None

    def __init__(self, folder: Path):
        paths = sorted(folder.glob(PATTERN), key=dp_rank_of)
        shards = [read_tensors(path)["optimizer_state_dict"] for path in paths]
        _check(folder, paths, shards)
        self._model_states = [folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(len(shards))]
        self._states = [read_tensors(path) for path in self._model_states]
        self._shapes = shapes_of(self._states[0])
        self._values = [shard["fp32_flat_groups"] for shard in shards]
        self._optimizers = [shard["optimizer_state_dict"] for shard in shards]
        self.groups: List[Dict[str, Any]] = self._optimizers[0]["param_groups"]
        self.loss_scaler: LossScalerBase = shards[0][LOSS_SCALER]
        self.buffers = buffers_of(self._states[0])
        self._where: Dict[str, Tuple[int, int]] = {}
        for group, shapes in enumerate(self._states[0]["param_shapes"]):
            offset = 0
            for name, shape in shapes.items():
                self._where[name] = (group, offset)
                offset += -(-torch.Size(shape).numel() // len(shards))

    def model_state(self, rank: int) -> Dict[str, Any]:
        """What the model states file of a rank holds; the first rank's where there is none."""
        return self._states[rank if rank < len(self._states) else 0]

    def model_state_path(self, rank: int) -> Path:
        """Where ``model_state`` is read from."""
        return self._model_states[rank if rank < len(self._states) else 0]

    def names(self) -> Set[str]:
        """The parameters it holds."""
        return set(self._where) | set(self._states[0].get("frozen_param_fragments") or ())

    def parameter(self, name: str, trained: bool) -> Optional[SavedParameter]:
        """A parameter of the model, or None if the checkpoint lacks it."""
        if name in self._where:
            group, offset = self._where[name]
            values = self._pieces(name, offset, [values[group] for values in self._values])
            return SavedParameter(values, self._state(name, group, offset))
        if name in (self._states[0].get("frozen_param_fragments") or {}):
            return SavedParameter(frozen_pieces(self._states, name), {})
        return None

    def _state(self, name: str, group: int, offset: int) -> Dict[str, StateValue]:
        state: Dict[str, StateValue] = {}
        for key, first in self._optimizers[0]["state"].get(group, {}).items():
            if not isinstance(first, torch.Tensor) or not first.ndim:
                state[key] = first
            elif first.shape == self._values[0][group].shape:
                state[key] = self._pieces(name, offset, [optimizer["state"][group][key] for optimizer in self._optimizers])
            else:
                raise CheckpointError(f"the optimizer state {key!r} in this ZeRO-3 checkpoint has no element for each "
                                      f"element of a parameter, so that of {name!r} cannot be told from the others'. "
                                      "Load with load_optimizer_states=False.")
        return state

    def _pieces(self, name: str, offset: int, flat: List[torch.Tensor]) -> Pieces:
        shape = self._shapes[name]
        count = torch.Size(shape).numel()
        size = -(-count // len(flat))
        return Pieces(shape, unpadded([part[offset:offset + size] for part in flat], count))


def _check(folder: Path, paths: List[Path], shards: List[Dict[str, Any]]) -> None:
    convert = (f"Convert it: python -m deepspeed.checkpoint.ds_to_universal --input_folder {folder} --output_folder "
               f"{folder}_universal, and load that.")
    stage = int(shards[0].get("zero_stage", 0))
    if stage != 3:
        raise CheckpointError(f"{folder} is a checkpoint of ZeRO stage {stage}; Mobius reads those of stage 3. {convert}")
    if any("_mp_rank_00_" not in path.name for path in paths):
        raise CheckpointError(f"{folder} is a checkpoint of tensor parallelism. {convert}")
    count = shards[0]["partition_count"]
    if [dp_rank_of(path) for path in paths] != list(range(count)):
        have = {dp_rank_of(path) for path in paths}
        raise CheckpointError(f"{folder} was written by {count} ranks, and the shards of ranks "
                              f"{sorted(set(range(count)) - have)} are missing. Load another checkpoint.")

"""What a checkpoint holds, read parameter by parameter: a Universal Checkpoint, Mobius' own included.

Nothing is read from the disk before it is copied: the files are mapped.
"""

import json
import os
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple, Union

import torch
from deepspeed.checkpoint.constants import LOSS_SCALER
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase

from mobius_ds.names import CHECKPOINT_MARK
from mobius_ds.runtime.checkpoint.checkpoint_files import read_tensors
from mobius_ds.runtime.ranks.errors import CheckpointError

FORMAT = 1


class Pieces(NamedTuple):
    """A tensor in flat parts, one after another."""

    shape: Tuple[int, ...]
    parts: Tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Pieces":
        """A whole tensor."""
        return cls(tuple(tensor.shape), (tensor.reshape(-1),))

    @property
    def dtype(self) -> torch.dtype:
        """Of every part."""
        return self.parts[0].dtype

    def shaped(self, shape: Tuple[int, ...]) -> "Pieces":
        """With a shape, where a checkpoint holds its elements only."""
        return self._replace(shape=shape) if self.shape == (_count(shape),) else self

    def copy_to(self, target: torch.Tensor) -> None:
        """Fills a contiguous tensor."""
        flat, start = target.view(-1), 0
        for part in self.parts:
            flat[start:start + part.numel()].copy_(part)
            start += part.numel()


StateValue = Union[Pieces, torch.Tensor, int, float]
"""A piece of a parameter's optimizer state: one with dimensions, or one without such as ``step``."""


class SavedParameter(NamedTuple):
    """A parameter's values, fp32 where it was trained, and its optimizer state."""

    value: Pieces
    state: Dict[str, StateValue]


def as_state(value: Any, shape: Tuple[int, ...]) -> StateValue:
    """A piece of optimizer state as it was loaded. ``shape``: of its parameter, for what is saved flat."""
    return Pieces.of(value).shaped(shape) if isinstance(value, torch.Tensor) and value.ndim else value


class UniversalCheckpoint:
    """DeepSpeed's Universal Checkpoint: ``zero/<parameter>/{fp32,exp_avg,...}.pt``.

    Raises:
        CheckpointError: what every such checkpoint has is missing or damaged.
    """

    def __init__(self, folder: Path):
        self._zero = folder / "zero"
        mark = folder / CHECKPOINT_MARK
        self._folder = folder
        self._mark = _read_mark(mark) if mark.exists() else None
        # By the mark, where there is one: the missing file of a rank is a fault then, and not the first rank's turn.
        states = folder.glob("zero_pp_rank_*_mp_rank_00_model_states.pt") if self._mark is None else \
            [folder / path for path in self._mark["checksums"] if path.startswith("zero_pp_rank_")]
        self._model_states = sorted(states, key=dp_rank_of) or [folder / "mp_rank_00_model_states.pt"]
        self._read: Dict[Path, Dict[str, Any]] = {}
        self._optimizer = self._load(self._zero / "optimizer_state.pt")
        main = self.model_state(0)
        self._shapes = shapes_of(main)
        self.buffers = buffers_of(main)

    @property
    def seed(self) -> Optional[int]:
        """Of the random numbers of its job; None where another than Mobius wrote it."""
        return self._mark["seed"] if self._mark else None

    @property
    def groups(self) -> List[Dict[str, Any]]:
        """The hyperparameters of each parameter group."""
        return self._optimizer["param_groups"]

    @property
    def loss_scaler(self) -> Optional[LossScalerBase]:
        """DeepSpeed's, where one was saved."""
        return self._optimizer.get(LOSS_SCALER)

    def model_state(self, rank: int) -> Dict[str, Any]:
        """What DeepSpeed's model states file of a rank holds; the first rank's where there is none."""
        path = self._model_states[rank if rank < len(self._model_states) else 0]
        if path not in self._read:
            self._read[path] = self._load(path)
        return self._read[path]

    def model_state_path(self, rank: int) -> Path:
        """Where ``model_state`` is read from."""
        return self._model_states[rank if rank < len(self._model_states) else 0]

    def names(self) -> Set[str]:
        """The parameters it holds."""
        held = {str(Path(inner).relative_to(self._zero)) for inner, _, files in os.walk(self._zero)
                if "fp32.pt" in files or "frozen.pt" in files}
        return held | set(self.model_state(0).get("frozen_param_fragments") or ())

    def parameter(self, name: str, trained: bool) -> Optional[SavedParameter]:
        """A parameter of the model, or None if the checkpoint lacks it.

        Args:
            trained: whether it is trained now: then fp32 values are read before exact frozen ones.

        Raises:
            CheckpointError: a file of it is missing or damaged.
        """
        order = (self._trained_value, self._frozen_value) if trained else (self._frozen_value, self._trained_value)
        value = order[0](name)
        value = order[1](name) if value is None else value
        if value is None:
            return None
        shape = self._shapes.get(name, value.shape)
        return SavedParameter(value.shaped(shape), self._state(name, shape))

    def _trained_value(self, name: str) -> Optional[Pieces]:
        path = self._zero / name / "fp32.pt"
        return Pieces.of(self._content(path)) if path.exists() else None

    def _frozen_value(self, name: str) -> Optional[Pieces]:
        path = self._zero / name / "frozen.pt"
        if path.exists():
            return Pieces.of(self._content(path))
        if name in (self.model_state(0).get("frozen_param_fragments") or {}):
            return frozen_pieces([self.model_state(rank) for rank in range(len(self._model_states))], name)
        whole = (self.model_state(0).get("module") or {}).get(name)  # of ZeRO-1 and 2
        return Pieces.of(whole) if whole is not None and whole.numel() else None

    def _state(self, name: str, shape: Tuple[int, ...]) -> Dict[str, StateValue]:
        folder = self._zero / name
        if self._mark is not None:
            keys = self._mark["parameters"].get(name, [])
        else:
            keys = {path.stem for path in folder.glob("*.pt")} - {"fp32"}
            if keys & {"exp_avg", "exp_avg_sq"}:  # the two that the converter writes, of any optimizer
                keys |= {"exp_avg", "exp_avg_sq"}
        state = {key: as_state(self._content(folder / f"{key}.pt"), shape) for key in keys}
        common = (self._optimizer.get("optimizer_state_dict") or {}).get("state", {}).get(0, {})
        if state and "step" not in state and "step" in common:
            state["step"] = common["step"]
        return state

    def _content(self, path: Path) -> Any:
        content = self._load(path)
        return content["param"] if isinstance(content, dict) else content

    def _load(self, path: Path) -> Any:
        checksums = self._mark["checksums"] if self._mark else {}
        return read_tensors(path, checksums.get(path.relative_to(self._folder).as_posix()))


def _read_mark(path: Path) -> Dict[str, Any]:
    try:
        mark = json.loads(path.read_text())
        known = mark["format"] == FORMAT
        if known and not {"seed", "parameters", "checksums"} <= mark.keys():
            raise KeyError("seed, parameters or checksums")
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error!r}): it is damaged. Load another checkpoint.") from error
    if not known:
        raise CheckpointError(f"{path} is of format {mark['format']}, and this mobius_ds reads format {FORMAT}. Use the "
                              "release of mobius_ds that wrote it.")
    return mark


def dp_rank_of(path: Path) -> int:
    """The rank in the name of one of ZeRO's files."""
    return int(path.name.split("zero_pp_rank_")[1].split("_")[0])


def shapes_of(model_state: Dict[str, Any]) -> Dict[str, Tuple[int, ...]]:
    """Shapes of a checkpoint's parameters, frozen ones included."""
    shapes: Dict[str, Tuple[int, ...]] = {}
    groups = model_state.get("param_shapes") or []
    for group in [groups] if isinstance(groups, dict) else groups:
        shapes.update({name: tuple(shape) for name, shape in group.items()})
    shapes.update({name: tuple(shape) for name, shape in (model_state.get("frozen_param_shapes") or {}).items()})
    return shapes


def buffers_of(model_state: Dict[str, Any]) -> Dict[str, torch.Tensor]:
    """A checkpoint's persistent buffers."""
    module = model_state.get("module") or {}
    return {name: module[name] for name in model_state.get("buffer_names") or () if name in module}


def frozen_pieces(model_states: List[Dict[str, Any]], name: str) -> Pieces:
    """A frozen parameter of ZeRO, from what each rank saved of it."""
    shape = tuple(model_states[0]["frozen_param_shapes"][name])
    fragments = [state["frozen_param_fragments"][name] for state in model_states]
    if tuple(fragments[0].shape) == shape and fragments[0].numel() == _count(shape):
        return Pieces.of(fragments[0])  # ZeRO-2 and a single rank hold it whole
    return Pieces(shape, unpadded([fragment.reshape(-1) for fragment in fragments], _count(shape)))


def unpadded(fragments: List[torch.Tensor], count: int) -> Tuple[torch.Tensor, ...]:
    """ZeRO-3's equal fragments of ``count`` elements, without what pads the last ones."""
    size = -(-count // len(fragments))
    return tuple(fragment[:max(0, min(size, count - rank * size))] for rank, fragment in enumerate(fragments))


def _count(shape: Tuple[int, ...]) -> int:
    return torch.Size(shape).numel()

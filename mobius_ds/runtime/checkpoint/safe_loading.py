"""Reads files of a checkpoint without running code: tensors and plain data, and no object that is not known here.

A pickle may name any function of any module and call it, and a checkpoint comes from elsewhere. So ``torch.load`` makes
what torch itself takes for safe, the scalars and arrays of NumPy and ``argparse.Namespace``, which scripts put into their
client state, and what DeepSpeed writes. Whatever else a script saves, it allows by itself before it loads.
"""

from pathlib import Path
from typing import Any, List

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from mobius_ds.runtime.checkpoint.export_script import harmless
from mobius_ds.runtime.ranks.errors import CheckpointError


def load(path: Path) -> Any:
    """A file's content, its tensors mapped and read when they are touched.

    Raises:
        CheckpointError: it holds objects of other types.
        Exception: whatever a damaged file makes torch and pickle raise.
    """
    with torch.serialization.safe_globals([*harmless(), DynamicLossScaler, LossScaler, ZeroStageEnum]):
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            unknown = _unknown(path)
            if not unknown:
                raise
            raise CheckpointError(
                f"{path} holds what is neither a tensor nor plain data: {', '.join(unknown)}. It is not made, as that may "
                "run code which whoever wrote the file has chosen. If you trust it, and it is a type of your script, call "
                f"torch.serialization.add_safe_globals([{', '.join(name.rpartition('.')[2] for name in unknown)}]) before "
                "loading.") from error


def _unknown(path: Path) -> List[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # it is no such file at all
        return []

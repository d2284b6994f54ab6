"""The files that a recorded run leaves in its folder, and how to read them. Imports neither torch nor DeepSpeed."""

import json
from pathlib import Path
from typing import Any, Dict, List

Record = Dict[str, Any]
"""What one rank recorded; ``recorder`` says what is in it."""


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank writes its record when the run ends."""
    return folder / f"rank{rank}.json"


def progress_file(folder: Path) -> Path:
    """Where rank 0 keeps the number of finished steps while the run goes on."""
    return folder / "progress"


def read_progress(folder: Path) -> int:
    """Steps finished so far; 0 before the first one."""
    try:
        return int(progress_file(folder).read_text() or 0)  # may be caught between truncation and writing
    except FileNotFoundError:
        return 0


def read_records(folder: Path, ranks: int) -> List[Record]:
    """The records of all ranks, in order.

    Raises:
        FileNotFoundError: a rank has written none: the script built no engine, took no step, or was killed.
    """
    missing = [rank for rank in range(ranks) if not rank_file(folder, rank).exists()]
    if missing:
        raise FileNotFoundError(f"no record of rank {missing[0]} of {ranks} in {folder}: the script has to call "
                                "deepspeed.initialize and the engine's step() in every rank, and to end by itself")
    return [json.loads(rank_file(folder, rank).read_text()) for rank in range(ranks)]

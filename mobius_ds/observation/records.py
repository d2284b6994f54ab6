"""The files in a recorded job's folder: what its recorders are told, what they share, and what they leave.

Imports neither torch nor DeepSpeed.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

Record = Dict[str, Any]
"""What one rank recorded; ``recorder`` says what is in it."""

_TOLD, _SHARED = "recorder.json", "emulated"


class Told(NamedTuple):
    """What a job's recorders are told by who starts it."""

    device_memory_gb: Optional[float] = None
    """How much device memory an engine other than Mobius' may use on a rank, in GiB. Default: all there is."""
    emulated: Optional[Dict[str, Any]] = None
    """The server whose links every engine's bytes have to cross, as JSON. Default: none."""


def tell(folder: Path, told: Told) -> None:
    """Writes it into the folder of a job that is about to start."""
    (folder / _TOLD).write_text(json.dumps(told._asdict()))


def told_in(folder: Path) -> Told:
    """What the recorders of a job are told; nothing where nobody wrote it."""
    try:
        return Told(**json.loads((folder / _TOLD).read_text()))
    except FileNotFoundError:
        return Told()


def shared_files(folder: Path) -> Path:
    """Where the ranks of a job keep what they share of emulated links."""
    path = folder / _SHARED
    path.mkdir(parents=True, exist_ok=True)
    return path


def remove_shared_files(folder: Path) -> None:
    """Removes them; ranks that have mapped them keep them."""
    shutil.rmtree(folder / _SHARED, ignore_errors=True)


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

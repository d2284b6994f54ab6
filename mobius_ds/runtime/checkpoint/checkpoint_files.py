"""Folders that are there whole or not at all.

A checkpoint is written into a temporary folder beside its place, synced, and moved there by a rename. ``latest``
is written last. Killed at any moment, the checkpoint that ``latest`` names can be loaded.
"""

import ctypes
import errno
import os
import shutil
import uuid
import zlib
from pathlib import Path
from typing import Any, BinaryIO, Optional, Union

import torch

from mobius_ds.runtime.checkpoint.safe_loading import load
from mobius_ds.runtime.ranks.errors import CheckpointError

_SAVING = ".mobius-saving-"
_REPLACED = ".mobius-replaced-"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_PART = 2**20


def place_of(save_dir: str, tag: str) -> Path:
    """The folder of a tag.

    Raises:
        ValueError: the tag names no folder of its own inside ``save_dir``; replacing it would remove others.
    """
    root, place = Path(os.path.abspath(save_dir)), Path(os.path.abspath(os.path.join(save_dir, tag)))
    if root not in place.parents or place.name.startswith((_SAVING, _REPLACED)):
        raise ValueError(f"the tag {tag!r} names no folder inside {save_dir!r}. Use a name such as 'global_step100'.")
    return place


def begin(place: Path) -> Path:
    """Makes the temporary folder in which the checkpoint for ``place`` is written; removes those of killed saves."""
    place.parent.mkdir(parents=True, exist_ok=True)
    recover(place)
    for left in place.parent.glob(f"{_SAVING}*"):
        discard(left)
    folder = place.parent / f"{_SAVING}{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    return folder


def recover(place: Path) -> None:
    """Ends what a killed ``publish`` began on a file system that cannot exchange two folders."""
    replaced = place.parent / f"{_REPLACED}{place.name}"
    if not replaced.exists():
        return
    if place.exists():
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        os.rename(replaced, place)


def publish(folder: Path, place: Path) -> None:
    """Moves a written folder to its place, at once; what was there before is removed."""
    for inner, _, _ in os.walk(folder):
        _sync_folder(Path(inner))
    if not place.exists():
        os.rename(folder, place)
    elif _exchange(folder, place):
        _sync_folder(place.parent)
        shutil.rmtree(folder, ignore_errors=True)
    else:
        replaced = place.parent / f"{_REPLACED}{place.name}"
        os.rename(place, replaced)
        os.rename(folder, place)
        _sync_folder(place.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    _sync_folder(place.parent)


def discard(folder: Path) -> None:
    """Removes what was written, if it can be, and nothing will come of."""
    if folder.is_dir():
        shutil.rmtree(folder, ignore_errors=True)
    else:
        folder.unlink(missing_ok=True)


def write_tensors(path: Path, content: Any) -> int:
    """``torch.save``, and on the disk when it returns. Returns the file's checksum (CRC-32)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        summed = _Summed(file)
        torch.save(content, summed)
        file.flush()
        os.fsync(file.fileno())
    return summed.checksum


class _Summed:
    """A file whose checksum is known once it is written; ``torch.save`` writes from front to back."""

    def __init__(self, file: BinaryIO):
        self.checksum = 0
        self._file = file

    def write(self, data: Union[bytes, memoryview]) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def write_text(path: Path, text: str) -> None:
    """Replaces a small file at once."""
    temporary = path.with_name(f"{_SAVING}{path.name}")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def read_tensors(path: Path, checksum: Optional[int] = None) -> Any:
    """``torch.load`` of a file, its tensors mapped and read when they are touched. Nothing in it is run.

    Args:
        checksum: what ``write_tensors`` returned, if it is known: then the whole file is read at once to compare it.

    Raises:
        CheckpointError: it is missing or damaged, or holds what is neither a tensor nor plain data.
    """
    try:
        intact = checksum is None or _checksum(path) == checksum
        content = load(path) if intact else None
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is not complete. Load another one.") from None
    except Exception as error:  # whatever a damaged file makes torch and pickle raise
        first = str(error).split("\n", 1)[0]
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {first}): it is damaged or was cut short. "
                              "Load another checkpoint.") from error
    if not intact:
        raise CheckpointError(f"{path} cannot be read: its checksum is not the one in mobius.json. It was damaged or "
                              "replaced after it was saved. Load another checkpoint.")
    return content


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while part := file.read(_PART):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two folders in one step; False where the kernel or the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    done = libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE))
    number = ctypes.get_errno()
    if done != 0 and number not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise OSError(number, os.strerror(number), str(second))
    return done == 0


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

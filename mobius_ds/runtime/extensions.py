"""DeepSpeed's compiled extensions, which are built where they are first used, in a folder that all jobs of a user share.

A lock file lets one process build and the others wait. One that is killed while it builds leaves the file behind, and
torch would then wait for ever, in every later job.
"""

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Optional

import psutil
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils.file_baton import FileBaton

LONGEST_BUILD = 300.0
"""Seconds after which a lock that no process here holds is nobody's: until then another machine may be building."""


def load(builder: OpBuilder) -> Any:
    """The extension, built if need be.

    Raises:
        RuntimeError: a build that was killed has left its lock behind.
        Exception: whatever a compiler run can raise.
    """
    with _waiting_for_the_living():
        return builder.load()


@contextmanager
def _waiting_for_the_living() -> Iterator[None]:
    wait = FileBaton.wait
    FileBaton.wait = _wait
    try:
        yield
    finally:
        FileBaton.wait = wait


def _wait(baton: FileBaton) -> None:
    """``FileBaton.wait``, which ends when nobody will remove the lock."""
    lock = Path(baton.lock_file_path)
    while (age := _age(lock)) is not None:
        if age > LONGEST_BUILD and not _is_held(lock):
            raise RuntimeError(f"its lock {lock} is {age / 60:.0f} minutes old and no process of this machine holds it: a "
                               f"job was killed while it built the extension. Unless another machine is building: rm {lock}")
        time.sleep(baton.wait_seconds)


def _age(lock: Path) -> Optional[float]:
    """Seconds since a file was made; None if it is not there."""
    try:
        return time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return None


def _is_held(lock: Path) -> bool:
    """Whether a process has a file open, as one does that builds."""
    path = os.path.realpath(lock)
    for process in psutil.process_iter():
        try:
            if any(opened.path == path for opened in process.open_files()):
                return True
        except psutil.Error:  # it has ended, or is another user's, who has a folder of their own
            continue
    return False

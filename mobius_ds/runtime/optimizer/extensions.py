"""DeepSpeed's compiled extensions, which are built where they are first used, in a folder that all jobs of a user share.

A lock file lets one process build and the others wait. One that is killed while it builds leaves the file behind, and
torch would then wait for ever, in every later job.
"""

import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

from deepspeed.ops.op_builder.builder import OpBuilder
from torch.utils.file_baton import FileBaton

from mobius_ds.machine.build_locks import age, is_abandoned


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
    while (since := age(lock)) is not None:
        if is_abandoned(lock):
            raise RuntimeError(f"its lock {lock} is {since / 60:.0f} minutes old and no process of this machine holds it: a "
                               f"job was killed while it built the extension. Unless another machine is building: rm {lock}")
        time.sleep(baton.wait_seconds)

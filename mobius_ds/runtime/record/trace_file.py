"""The trace file: one Chrome trace of a whole job, in the JSON Array Format, whose closing bracket is optional.

Each rank appends an optimizer step's events in one write, a line each, so that the file is whole at any moment, also
after a rank was killed. Perfetto and chrome://tracing open it.
"""

import errno
import json
import os
import time
from pathlib import Path
from typing import Any, Callable, Iterable, List, Optional, Tuple

from mobius_ds.runtime.ranks.process import TRACES

LARGEST_FILE = 256 * 2**20
"""Bytes at which recording stops: some 800,000 tasks, which Perfetto still opens."""


class TraceFile:
    """A job's trace file, as one of its ranks appends to it.

    Args:
        origin: the time that is zero in it, by ``time.perf_counter``.
        largest: bytes at which the file is full; each of the ``ranks`` may write its share of them.
    """

    def __init__(self, path: Path, origin: float, largest: int, ranks: int):
        self.path = path
        self.origin = origin
        self.largest = largest
        self._left = largest // ranks
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    def append(self, lines: Iterable[str]) -> bool:
        """Appends events, a line each, in one write.

        Returns:
            Whether there was room for them.

        Raises:
            OSError: they cannot be written.
        """
        written = "".join(f",\n{line}" for line in lines).encode()
        self._left -= len(written)
        if self._left < 0:
            return False
        if os.write(self._descriptor, written) < len(written):  # a disk's last bytes
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return True

    def close(self) -> None:
        """Ends it; nothing may be appended any more."""
        os.close(self._descriptor)


def open_trace(path: str, rank: int, ranks: int, gather: Callable[[str, Any], List[Any]]) -> TraceFile:
    """Starts a job's trace file, in place of one that is there. All ranks call it together.

    Args:
        path: from rank 0's working directory. A second engine of the same process writes beside it, ``trace-2.json``
            beside ``trace.json``, and so on.
        gather: gathers one object from every rank, in rank order.

    Raises:
        ValueError: it cannot be written; on all ranks alike.
    """
    started, failure = gather("initialize", _attempt(lambda: _start(Path(path).resolve())) if rank == 0 else None)[0]
    file = None
    if failure is None:
        file, failure = _attempt(lambda: TraceFile(*started, LARGEST_FILE, ranks))
    failures = [failure for failure in gather("initialize", failure) if failure is not None]
    if not failures:
        return file
    if file is not None:
        file.close()
    raise ValueError(f'"mobius": {{"trace": {json.dumps(path)}}} cannot be written: {failures[0]}. Name a file in a folder '
                     "that can be written")


def _start(path: Path) -> Tuple[Path, float]:
    """Makes the file of this process's next engine. Returns its path, and what is zero in it."""
    TRACES[path] = TRACES.get(path, 0) + 1
    if TRACES[path] > 1:
        path = path.with_name(f"{path.stem}-{TRACES[path]}{path.suffix}")
    if path.exists() and not path.is_file():
        raise OSError("it is there and is no file")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # whoever still writes to the old one keeps it to himself
    path.write_text('[\n{"name": "process_labels", "ph": "M", "pid": 0, "args": {"labels": "mobius_ds"}}')
    return path, time.perf_counter()


def _attempt(action: Callable[[], Any]) -> Tuple[Any, Optional[str]]:
    try:
        return action(), None
    except OSError as error:
        return None, error.strerror or str(error)

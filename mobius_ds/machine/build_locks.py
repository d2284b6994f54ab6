"""The lock by which one process builds an extension while others wait: whether anybody will ever remove it."""

import os
import time
from pathlib import Path
from typing import Optional

import psutil

LONGEST_BUILD = 300.0
"""Seconds after which a lock that no process here holds is nobody's: until then another machine may be building."""


def age(lock: Path) -> Optional[float]:
    """Seconds since a lock was made; None if it is not there."""
    try:
        return time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return None


def is_abandoned(lock: Path) -> bool:
    """Whether a build that was killed has left the lock behind."""
    since = age(lock)
    return since is not None and since > LONGEST_BUILD and not _is_held(lock)


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

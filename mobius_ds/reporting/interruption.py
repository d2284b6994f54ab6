"""How a command that has started processes ends when it is told to."""

import contextlib
import signal
from typing import Iterator

INTERRUPTED = 130
"""A shell's status for ctrl-C."""


@contextlib.contextmanager
def ended_by_signal() -> Iterator[None]:
    """While the block runs, SIGTERM, by which job schedulers end a command, raises KeyboardInterrupt as ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

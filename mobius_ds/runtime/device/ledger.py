"""The ledger: the record of every byte that crossed a GPU's host link."""

import threading
from typing import Dict

from mobius_ds.schedule.tasks import CATEGORIES

Bytes = Dict[str, int]
"""Bytes by category; every category is a key."""


def no_bytes() -> Bytes:
    """An empty count."""
    return dict.fromkeys(CATEGORIES, 0)


class Ledger:
    """Counts bytes by category where they are moved. Streams of one rank may add at the same time."""

    def __init__(self):
        self._lock = threading.Lock()
        self._bytes = no_bytes()

    def add(self, category: str, nbytes: int) -> None:
        """Records one transfer of ``nbytes`` bytes.

        Raises:
            KeyError: ``category`` is not one of ``CATEGORIES``.
        """
        with self._lock:
            self._bytes[category] += nbytes

    def take(self) -> Bytes:
        """Returns what was counted since the last call, and starts again from zero."""
        with self._lock:
            taken, self._bytes = self._bytes, no_bytes()
        return taken

"""What is made once for all that are alike."""

from typing import Any, Callable, Dict, Hashable

_KEPT = 32
"""Schedules, up to some megabytes each, and what they are made from."""


class Kept:
    """Remembers what was made; what was not asked for longest is forgotten."""

    def __init__(self):
        self._made: Dict[Hashable, Any] = {}

    def once(self, what: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, made the first time ``what`` is asked for."""
        made = self._made.pop(what) if what in self._made else make()
        while len(self._made) >= _KEPT:
            del self._made[next(iter(self._made))]
        self._made[what] = made  # the last of the dictionary is the one that was asked for last
        return made

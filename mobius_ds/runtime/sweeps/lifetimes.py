"""Which forwards can still be asked for, and when what they left in DRAM is freed."""

from typing import Dict, Iterable, List

from mobius_ds.runtime.dram.activations import ActivationStore, Placed
from mobius_ds.runtime.sweeps.sweep import Sweep


class Lifetimes:
    """The sweeps of one rank. Memory is freed at a gather, which shows that no rank reads it any more.

    Args:
        ranks: as many must release a sweep.
    """

    def __init__(self, ranks: int, activations: ActivationStore):
        self._ranks = ranks
        self._activations = activations
        self._sweeps: Dict[int, Sweep] = {}
        self._begun = 0
        self._released: List[int] = []
        self._release_counts: Dict[int, int] = {}
        self._garbage: List[Placed] = []

    def next_number(self) -> int:
        """Of the next sweep; the same on every rank."""
        return self._begun

    def begin(self, sweep: Sweep) -> None:
        """Takes a sweep, which lives until every rank has released it."""
        self._sweeps[sweep.number] = sweep
        self._begun += 1

    def release(self, sweep: Sweep) -> None:
        """Says that this rank needs nothing of a sweep any more."""
        self._released.append(sweep.number)

    def revive(self, sweep: Sweep) -> bool:
        """Takes a release back, as nothing is freed before the next gather. False if the sweep is gone."""
        if sweep.number in self._released:
            self._released.remove(sweep.number)
            return True
        return sweep.number in self._sweeps

    def drop(self, placed: Iterable[Placed]) -> None:
        """Frees what this rank has placed, at the next gather."""
        self._garbage += placed

    def take_released(self) -> List[int]:
        """The sweeps released since the last call, to be told to all ranks."""
        return [self._released.pop() for _ in range(len(self._released))]  # a collected graph may add one meanwhile

    def gathered(self, released: Iterable[List[int]]) -> None:
        """Frees what nobody needs, every rank having told what it has released."""
        for placed in self._garbage:
            self._activations.free(placed)
        self._garbage = []
        for number in (number for numbers in released for number in numbers):
            self._release_counts[number] = self._release_counts.get(number, 0) + 1
            if self._release_counts[number] == self._ranks:
                del self._release_counts[number]
                for placed in self._sweeps.pop(number).placed_here:
                    self._activations.free(placed)

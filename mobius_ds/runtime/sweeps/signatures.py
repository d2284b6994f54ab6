"""Which forwards are of one kind, so that they run the same program and only the first one is traced.

What decides on a forward's path are the shapes and dtypes of its tensors and its plain arguments. A plain number may
be new in every step, such as the number of tokens that a loss is divided by. When one changes, it is tried: the
forward is traced once more with a fake tensor in its place, into which no code can look. If the program is the same,
the number only takes part in arithmetic, and forwards that differ in it are of one kind.
"""

import hashlib
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, NamedTuple, Sequence, Tuple

import torch
from torch.utils._pytree import tree_unflatten

from mobius_ds.model.program import Program, TensorSpec, plain
from mobius_ds.model.trace import Untold


class Inputs(NamedTuple):
    """The arguments of one forward, and all else that may decide on its path."""

    leaves: Sequence[Any]
    structure: Any
    circumstances: Tuple[Any, ...]
    """Such as the function that is run, and whether gradients are on; anything with a ``repr``."""


class Signatures:
    """Names the kinds of forwards and keeps what their numbers were found to decide.

    Args:
        trace: the program of a forward with some arguments.
    """

    def __init__(self, trace: Callable[[Any, tuple, dict], Program]):
        self._trace = trace
        self._numbers: Dict[str, Dict[int, Any]] = {}
        """By signature without any numbers: the ones first seen, by leaf; those found to decide nothing are gone."""
        self._deciding: Dict[str, FrozenSet[int]] = {}

    def of(self, entry: Any, inputs: Inputs) -> str:
        """The signature of a forward, equal for those that run the same program."""
        numbers = {index: leaf for index, leaf in enumerate(inputs.leaves) if type(leaf) in (int, float)}
        kind = _digest(inputs, numbers)
        first = self._numbers.setdefault(kind, numbers)
        deciding = self._deciding.setdefault(kind, frozenset())
        changed = [index for index, number in first.items() if number != numbers[index] and index not in deciding]
        for index in changed:
            if self._decides_nothing(entry, inputs, index):
                self._numbers[kind] = {other: number for other, number in first.items() if other != index}
            else:
                self._deciding[kind] |= {index}
            first = self._numbers[kind]
        return _digest(inputs, [index for index in numbers if index not in first])

    def _decides_nothing(self, entry: Any, inputs: Inputs, index: int) -> bool:
        untold = [Untold(leaf) if place == index else leaf for place, leaf in enumerate(inputs.leaves)]
        try:
            blind = self._trace(entry, *tree_unflatten(untold, inputs.structure))
        except Exception:  # whatever code raises that looks at a number and finds none
            return False
        return blind == self._trace(entry, *tree_unflatten(inputs.leaves, inputs.structure))


def _digest(inputs: Inputs, without: Iterable[int]) -> str:
    described: List[Any] = [TensorSpec.of(leaf) if isinstance(leaf, torch.Tensor) else repr(plain(leaf))
                            for leaf in inputs.leaves]
    for index in without:
        described[index] = type(inputs.leaves[index])
    return hashlib.sha256(repr((described, str(inputs.structure), inputs.circumstances)).encode()).hexdigest()

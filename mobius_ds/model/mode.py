"""The mode of a model: the switches of its modules as one forward finds them.

Train or eval, an adapter on or off, a parameter frozen for a while: a script flips them between a forward and its
backward, but what the backward computes again must be what the forward computed.
"""

import hashlib
from contextlib import contextmanager
from typing import Any, Dict, FrozenSet, Iterator, List, Tuple

from torch import nn

from mobius_ds.model.program import PLAIN_TYPES

PLAIN = frozenset(PLAIN_TYPES)

ABSENT = object()
"""What an attribute that does not exist is put back as."""


class Mode:
    """Every plain attribute of every module, and which parameters are frozen, at the time this is made.

    Args:
        model: the user's module.
    """

    def __init__(self, model: nn.Module):
        self._attributes: List[Tuple[Dict[str, Any], Dict[str, Any]]] = [
            (module.__dict__, dict(_plain_attributes(module))) for module in model.modules()]
        self.frozen: FrozenSet[str] = frozenset(
            name for name, parameter in model.named_parameters() if not parameter.requires_grad)
        """Names of the parameters that require no gradient."""
        training = [attributes.get("training") for _, attributes in self._attributes]
        self.digest: str = hashlib.sha256(repr((training, sorted(self.frozen))).encode()).hexdigest()
        """Of what must be alike on all ranks: which modules train, and which parameters are frozen."""

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts the modules' attributes back into this mode while the block runs."""
        present = []
        try:
            for holder, attributes in self._attributes:
                for key, value in attributes.items():
                    now = holder.get(key, ABSENT)
                    if now is not value and (type(now) is not type(value) or now != value):
                        present.append((holder, key, now))
                        holder[key] = value
            yield
        finally:
            for holder, key, value in present:
                if value is ABSENT:
                    del holder[key]
                else:
                    holder[key] = value


def _plain_attributes(module: nn.Module) -> Iterator[Tuple[str, Any]]:
    for key, value in module.__dict__.items():
        kind = type(value)
        if kind in PLAIN:
            yield key, value
        elif kind in (list, tuple) and all(type(item) in PLAIN for item in value):
            yield key, kind(value)  # a list may be changed in place

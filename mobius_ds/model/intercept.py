"""Running a model's own forward with its units' calls intercepted.

Nothing of this outlives the ``with`` block: the user's module is as it was before.
"""

from contextlib import contextmanager
from typing import Any, Callable, Iterator

from torch import nn

from mobius_ds.model.discovery import Units
from mobius_ds.model.wrappers import forward_of

Handler = Callable[[str, Callable, tuple, dict], Any]
"""Called in place of a unit's forward with the unit's name, its own forward, and the arguments."""


class Entry(nn.Module):
    """A model with the function through which a forward enters it.

    Args:
        model: the user's module.
        function: what to run; by default the model's own forward. Keeping it apart from ``model.forward``
            lets the engine route the raw module's calls to the pipeline while replay runs the original.
    """

    def __init__(self, model: nn.Module, function: Callable = None):
        super().__init__()
        self.model = model
        self._function = function or forward_of(model)
        named = hasattr(self._function, "__qualname__")  # a method's repr would print the whole model
        self.name = self._function.__qualname__ if named else repr(self._function)

    def forward(self, *args, **kwargs):
        """Runs the function."""
        return self._function(*args, **kwargs)


@contextmanager
def intercepted(units: Units, handler: Handler) -> Iterator[None]:
    """Routes every call of a unit to ``handler`` while the block runs."""
    saved = {}
    for name, module in units.modules.items():
        saved[name] = module.__dict__.get("forward")
        module.__dict__["forward"] = _routed(handler, name, module.forward)
    try:
        yield
    finally:
        for name, module in units.modules.items():
            del module.__dict__["forward"]
            if saved[name] is not None:
                module.__dict__["forward"] = saved[name]


def _routed(handler: Handler, name: str, forward: Callable) -> Callable:
    def call(*args, **kwargs):
        return handler(name, forward, args, kwargs)

    return call

"""A module's forward that runs in the pipeline, whoever calls it."""

import functools
from typing import Any, Callable

import torch
from torch import nn


class RoutedForward:
    """A module's forward that runs in the pipeline. A copy of the module gets its own forward back."""

    replaced = False
    """By that of a later engine on the same module."""

    def __init__(self, model: nn.Module, run: Callable[[tuple, dict], Any]):
        self._model = model
        self._own = model.__dict__.get("forward")  # libraries give a single module another forward than its class
        self._run = torch.compiler.disable(run)  # should the script compile the module
        functools.update_wrapper(self, model.forward)

    def put_back(self) -> None:
        """Gives the module its own forward back."""
        if self._own is None:
            del self._model.__dict__["forward"]
        else:
            self._model.__dict__["forward"] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)

    def __reduce__(self):
        return (getattr, (self._model, "forward")) if self._own is None else (_itself, (self._own,))


def _itself(forward: Callable) -> Callable:
    return forward

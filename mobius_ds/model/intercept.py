"""Running a model's own forward with its units' calls intercepted and its parameters replaced.

Nothing of this outlives the ``with`` block: the user's module is as it was before.
"""

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

import torch
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
        self.name = getattr(self._function, "__qualname__", repr(self._function))

    def forward(self, *args, **kwargs):
        """Runs the function."""
        return self._function(*args, **kwargs)

    @contextmanager
    def replaced(self, parameters: Dict[str, torch.Tensor]) -> Iterator[None]:
        """Replaces some of the model's parameters by other tensors while the block runs.

        It is what ``torch.func.functional_call`` does, but spans a forward and its backward, and puts back what
        was there when one module is registered under two names.

        Args:
            parameters: tensors by the parameter's name in the model; a tied one is replaced everywhere.
        """
        replaced = []
        try:
            for holder, attribute, name in self._places():
                if name in parameters:
                    parameter = holder[attribute]
                    replaced.append((holder, attribute, parameter))
                    holder[attribute] = parameters[name]
                    # What libraries have noted on it, such as a status or a flag.
                    parameters[name].__dict__.update({key: value for key, value in parameter.__dict__.items()
                                                      if not key.startswith("_")})
            yield
        finally:
            for holder, attribute, parameter in replaced:
                holder[attribute] = parameter

    @contextmanager
    def scratch_buffers(self, names: Optional[Iterable[str]] = None) -> Iterator[Dict[str, torch.Tensor]]:
        """Puts copies in place of buffers (all by default) while the block runs, so that nothing is written into them."""
        wanted = None if names is None else set(names)
        holders = [(module._buffers, attribute, f"{prefix}.{attribute}" if prefix else attribute)
                   for prefix, module in self.model.named_modules() for attribute in module._buffers]
        saved = [(holder, attribute, name, holder[attribute]) for holder, attribute, name in holders
                 if holder[attribute] is not None and (wanted is None or name in wanted)]
        copies = {}
        try:
            for holder, attribute, name, buffer in saved:
                copies[name] = holder[attribute] = buffer.clone()
            yield copies
        finally:
            for holder, attribute, _, buffer in saved:
                holder[attribute] = buffer

    def _places(self) -> List[Tuple[dict, str, str]]:
        """Where each parameter hangs: a module's own table, the key in it, and the parameter's name in the model."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [(module._parameters, attribute, names[id(parameter)]) for module in self.model.modules()
                for attribute, parameter in module._parameters.items() if parameter is not None]


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

"""Where a model's parameters and buffers hang and which of its modules are compiled, found by one walk.

A walk through all modules takes milliseconds, and a sweep runs many stages for many microbatches: it is taken once for
all of them. Nothing that is put in place of a parameter or a buffer outlives its ``with`` block.
"""

from contextlib import contextmanager
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import torch
from torch import nn

from mobius_ds.model.wrappers import is_compiled


class _Place(NamedTuple):
    """An entry of a module's own table of buffers."""

    holder: Dict[str, Any]
    key: str


class Parts:
    """A model's parameters and buffers with their places, as they are when this is made.

    Args:
        model: the user's module.
    """

    def __init__(self, model: nn.Module):
        self.compiled: List[nn.Module] = []
        """The modules that ``torch.compile(module)`` wraps or ``module.compile()`` compiles."""
        self._parameters: Dict[str, nn.Parameter] = {}
        self._places: List[Tuple[str, Dict[str, Any], str]] = []
        """Of every parameter: its name, a module's own table, and the key there. A tied one has several."""
        self._buffers: Dict[str, _Place] = {}
        names: Dict[int, str] = {}
        for prefix, module in model.named_modules():
            if is_compiled(module):
                self.compiled.append(module)
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = names.setdefault(id(parameter), _joined(prefix, key))
                    self._parameters.setdefault(name, parameter)
                    self._places.append((name, module._parameters, key))
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    self._buffers[_joined(prefix, key)] = _Place(module._buffers, key)

    @contextmanager
    def replaced(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Replaces some of the parameters by other tensors while the block runs.

        It is what ``torch.func.functional_call`` does, but spans a forward and its backward, and puts back what
        was there when one module is registered under two names.

        Args:
            tensors: by the parameter's name in the model; a tied one is replaced everywhere.
        """
        places = [(holder, key, tensors[name]) for name, holder, key in self._places if name in tensors]
        before = [holder[key] for holder, key, _ in places]
        try:
            for holder, key, tensor in places:
                holder[key] = tensor
            yield
        finally:
            for (holder, key, _), parameter in zip(places, before):
                holder[key] = parameter

    def like_parameters(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors, with what libraries have noted on the parameters of these names, such as a status or a flag."""
        for name, tensor in tensors.items():
            tensor.__dict__.update({key: value for key, value in self._parameters[name].__dict__.items()
                                    if not key.startswith("_")})
        return tensors

    def stand_ins(self, device: torch.device) -> Mapping[str, torch.Tensor]:
        """A zero in the shape of every parameter, without its memory: the model's code may mention one in passing."""
        zeros = {dtype: torch.zeros((), dtype=dtype, device=device)
                 for dtype in {parameter.dtype for parameter in self._parameters.values()}}
        return self.like_parameters({name: zeros[parameter.dtype].expand(parameter.shape)
                                     for name, parameter in self._parameters.items()})

    @contextmanager
    def scratch_buffers(self, names: Optional[Iterable[str]] = None) -> Iterator[Dict[str, torch.Tensor]]:
        """Puts copies in place of buffers (all by default) while the block runs, so that nothing is written into them."""
        places = {name: self._buffers[name] for name in (self._buffers if names is None else names)}
        saved = [(place, place.holder[place.key]) for place in places.values()]
        copies: Dict[str, torch.Tensor] = {}
        try:
            for name, (holder, key) in places.items():
                copies[name] = holder[key] = holder[key].clone()
            yield copies
        finally:
            for (holder, key), buffer in saved:
                holder[key] = buffer


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key

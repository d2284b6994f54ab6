"""Outputs that stay behind until the script reads them.

A training forward returns its loss; the logits are large and most scripts never look at them. A deferred
tensor has their shape and dtype. The first operation on it fetches the real one.
"""

import copy
from collections import OrderedDict
from typing import Any, Callable

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from mobius_ds.model.program import TensorSpec

_KNOWN = {getattr(torch.Tensor, name).__get__ for name in
          ("shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_sparse",
           "is_quantized", "is_meta")} | \
    {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel, torch.Tensor.nelement,
     torch.Tensor.__len__, torch.Tensor.stride, torch.Tensor.is_floating_point, torch.Tensor.is_complex,
     torch.Tensor.element_size, torch.Tensor.is_contiguous}
"""What is answered from the spec, without reading."""

_GRAPH = {torch.Tensor.requires_grad.__get__: lambda tensor: tensor._graded,
          torch.Tensor.grad_fn.__get__: lambda tensor: "deferred" if tensor._graded else None,
          torch.Tensor.is_leaf.__get__: lambda tensor: not tensor._graded,
          torch.Tensor.register_hook: lambda tensor, hook: tensor._remember(hook)}
"""What is said of its place in the script's graph while it is not read. DeepSpeed hooks every output with a ``grad_fn``."""


class DeferredTensor(torch.Tensor):
    """A tensor that is fetched when it is first used.

    Args:
        spec: its shape and dtype.
        fetch: calls its ``arrived``.
    """

    @staticmethod
    def __new__(cls, spec: TensorSpec, device: torch.device, fetch: Callable[[], None]):
        tensor = torch.Tensor._make_wrapper_subclass(cls, spec.shape, strides=spec.stride, dtype=spec.dtype, device=device)
        tensor._fetch = fetch
        tensor._graded = spec.requires_grad
        tensor._real = None
        tensor._hooks = OrderedDict()
        return tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _GRAPH and args[0]._real is None:
            return _GRAPH[func](*args, **kwargs)
        return func(*tree_map_only(DeferredTensor, _real, args), **tree_map_only(DeferredTensor, _real, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:
        return cls.__torch_function__(func, types, args, kwargs)

    def __repr__(self) -> str:
        if self._real is not None:
            return repr(self._real)
        return f"DeferredTensor({tuple(self.shape)}, {self.dtype}, fetched when it is first used)"

    def __reduce_ex__(self, protocol: int) -> Any:
        return _real(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return copy.deepcopy(_real(self), memo)

    def arrived(self, real: torch.Tensor) -> None:
        """Takes the tensor it stands for."""
        self._real, self._fetch = real, None
        for hook in self._hooks.values():
            real.register_hook(hook)

    def _remember(self, hook: Callable) -> RemovableHandle:
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle


def _real(tensor: DeferredTensor) -> torch.Tensor:
    if tensor._real is None:
        tensor._fetch()
    return tensor._real

"""Outputs that stay behind until the script reads them.

A training forward returns its loss; the logits are large and most scripts never look at them. A deferred
tensor has their shape and dtype. The first operation on it fetches the real one.
"""

from typing import Any, Callable

import torch
from torch.utils._pytree import tree_map_only

from mobius_ds.model.program import TensorSpec

_KNOWN = {getattr(torch.Tensor, name).__get__ for name in
          ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_sparse", "is_leaf",
           "grad_fn", "is_quantized", "is_meta")} | \
    {torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.is_floating_point,
     torch.Tensor.is_complex, torch.Tensor.element_size, torch.Tensor.is_contiguous}
"""What is answered from the spec, without reading."""


class DeferredTensor(torch.Tensor):
    """A tensor that is fetched when it is first used.

    Args:
        spec: its shape and dtype.
        read: fetches it.
    """

    @staticmethod
    def __new__(cls, spec: TensorSpec, device: torch.device, read: Callable[[], torch.Tensor]):
        tensor = torch.Tensor._make_wrapper_subclass(cls, spec.shape, dtype=spec.dtype, device=device)
        tensor._read = read
        return tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*tree_map_only(DeferredTensor, _real, args), **tree_map_only(DeferredTensor, _real, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:
        return cls.__torch_function__(func, types, args, kwargs)

    def __repr__(self) -> str:
        return f"DeferredTensor({tuple(self.shape)}, {self.dtype}, fetched when it is first used)"


def _real(tensor: DeferredTensor) -> torch.Tensor:
    return tensor._read()

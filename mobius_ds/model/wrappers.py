"""What scripts wrap around a model's modules to save memory or time, set aside while a stage runs.

A wrapper hides the calls of the modules in it: activation checkpointing makes them a second time in backward, and
``torch.compile`` makes them from code of its own. Replay needs each call once, as the model's code makes it. Neither
changes what is computed. Nothing of this outlives the ``with`` block.
"""

from contextlib import contextmanager
from typing import Any, Callable, Iterator, List

from torch import nn
from torch.utils import checkpoint


@contextmanager
def unwrapped(compiled: List[nn.Module]) -> Iterator[None]:
    """Sets aside activation checkpointing, and the compilation of the ``compiled`` modules, while the block runs."""
    with _checkpoints_called_directly(), _modules_called_directly(compiled):
        yield


def is_compiled(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` made it or ``module.compile()`` compiled it."""
    return _is_compiled_wrapper(module) or module.__dict__.get("_compiled_call_impl") is not None


def forward_of(model: nn.Module) -> Callable:
    """A model's own forward: of what is inside, if it is wrapped by ``torch.compile``."""
    return model._orig_mod.__call__ if _is_compiled_wrapper(model) else model.forward


def _is_compiled_wrapper(module: nn.Module) -> bool:
    return "dynamo_ctx" in module.__dict__  # without importing torch._dynamo, which takes a second


@contextmanager
def _checkpoints_called_directly() -> Iterator[None]:
    """A stage keeps boundary activations alone and is recomputed whole, so checkpoints inside would compute it again.

    Scripts bind ``checkpoint`` under many names. Both of its kinds end in a name that it looks up at each call.
    """
    saved = checkpoint._checkpoint_without_reentrant_generator
    checkpoint._checkpoint_without_reentrant_generator = _around_nothing
    checkpoint.CheckpointFunction.apply = _call
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = saved
        del checkpoint.CheckpointFunction.apply  # the inherited one shows again


def _around_nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _call(function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
    return function(*args)


@contextmanager
def _modules_called_directly(modules: List[nn.Module]) -> Iterator[None]:
    saved = [(module, key, module.__dict__[key]) for module in modules for key in ("_compiled_call_impl", "forward")
             if module.__dict__.get(key) is not None and (key != "forward" or _is_compiled_wrapper(module))]
    for module, key, _ in saved:
        module.__dict__[key] = module._orig_mod if key == "forward" else None
    try:
        yield
    finally:
        for module, key, value in saved:
            module.__dict__[key] = value

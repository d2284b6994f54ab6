"""Tracing: one forward without arithmetic, to learn the program before anything is trained.

The model's parameters are replaced by fake tensors (shapes without storage, as torch's own FakeTensor),
the inputs stay real. Whatever the model computes from its inputs alone (masks, positions, rotary tables)
is therefore computed for real, with its data-dependent checks; whatever depends on a parameter becomes
fake. A dispatch mode notes for each tensor the *origins* it was computed from: outputs of earlier calls
and parameters used outside any unit. What a call's arguments originate from is what the call needs.
"""

import copy
import logging
from contextlib import contextmanager
from typing import Any, Dict, FrozenSet, Iterator, List, NamedTuple, Tuple, Union

import torch
from torch._subclasses.fake_tensor import (DataDependentOutputException, DynamicOutputShapeException, FakeTensor,
                                           FakeTensorMode, UnsupportedFakeTensorException,
                                           UnsupportedOperatorException)
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from mobius_ds.model.discovery import Units
from mobius_ds.model.errors import WAY_OUT, NotSplittable
from mobius_ds.model.intercept import Entry, intercepted
from mobius_ds.model.program import PLAIN_TYPES, Call, Program, SameAsArgument, TensorSpec, Value, plain


class ParameterOrigin(NamedTuple):
    """A parameter used by the model's own code, outside any unit."""

    name: str


Origins = FrozenSet[Union[Value, ParameterOrigin]]
NO_ORIGINS: Origins = frozenset()
NEEDS_DATA = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException,
              UnsupportedOperatorException)
FAKE_TENSOR_LOGGER = logging.getLogger("torch._subclasses.fake_tensor")


def trace(entry: Entry, units: Units, args: tuple, kwargs: dict, device: torch.device) -> Program:
    """Traces one forward.

    Args:
        args, kwargs: the forward's arguments; their tensors are on ``device``.

    Raises:
        NotSplittable: the model's code decides on a computed value outside any layer, so that no stage
            could take the same path without running all the others.
    """
    recorder = _Recorder(entry, units, device)
    with _quiet(FAKE_TENSOR_LOGGER), recorder.mode, intercepted(units, recorder.call), \
            entry.replaced(recorder.parameters):
        try:
            outputs = entry(*args, **kwargs)
        except NEEDS_DATA as error:
            last = recorder.calls[-1].unit if recorder.calls else None
            where = f"after its module {last!r}" if last else "before its first module with parameters"
            raise NotSplittable(f"{type(entry.model).__name__} decides on a computed value in its own forward, {where}, "
                                f"outside any layer ({type(error).__name__}: {error}). {WAY_OUT}") from error
        recorder.finish(outputs)
    return Program(tuple(recorder.calls))


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    # It prints a stack trace for each operation it cannot fake, which is no error here.
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class _OriginMode(TorchDispatchMode):
    """Carries origins from every operation's inputs to its outputs, by storage, so that views share them."""

    def __init__(self):
        super().__init__()
        self._origins: Dict[int, Origins] = {}
        self._alive: List[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        origins = self.origins((args, kwargs))
        outputs = func(*args, **kwargs)
        if origins:
            self.mark(outputs, origins)
            for argument, value in zip(func._schema.arguments, args):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.mark(value, origins)
        return outputs

    def origins(self, tree: Any) -> Origins:
        """What the tensors of a tree were computed from."""
        found = NO_ORIGINS
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                found |= self._origins.get(leaf.untyped_storage()._cdata, NO_ORIGINS)
        return found

    def mark(self, tree: Any, origins: Origins) -> None:
        """Adds origins to the tensors of a tree."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self._alive.append(storage)  # its address is the key, so it must not be reused
                self._origins[storage._cdata] = self._origins.get(storage._cdata, NO_ORIGINS) | origins


class _Recorder:
    """Answers the units' calls during a trace and writes them down."""

    def __init__(self, entry: Entry, units: Units, device: torch.device):
        self._units = units
        self._device = device
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._model = entry.model
        self._similar: Dict[Any, Tuple[list, Any]] = {}
        self.mode = _OriginMode()
        self.calls: List[Call] = []
        self.parameters: Dict[str, FakeTensor] = {}
        for name, parameter in entry.model.named_parameters():
            fake = self._fake_like(TensorSpec.of(parameter))
            self.mode.mark(fake, frozenset([ParameterOrigin(name)]))
            self.parameters[name] = fake

    def call(self, unit: str, forward, args: tuple, kwargs: dict) -> Any:
        """Writes down one call and returns fresh fake tensors, whose only origin is this call."""
        index = len(self.calls)
        self.calls.append(self._call(unit, (args, kwargs)))
        leaves, structure = self._estimate(unit, forward, args, kwargs)
        arguments = tree_leaves((args, kwargs))
        returns, produced = [], []
        for position, leaf in enumerate(leaves):
            same = next((i for i, argument in enumerate(arguments) if argument is leaf and torch.is_tensor(leaf)), None)
            if same is not None:
                returns.append(SameAsArgument(same))
            elif isinstance(leaf, torch.Tensor):
                spec = TensorSpec.of(leaf)
                leaf = self._fake_like(spec)
                self.mode.mark(leaf, frozenset([Value(index, position)]))
                returns.append(spec)
            else:
                returns.append(plain(leaf))
            produced.append(leaf)
        self.calls[index] = self._call(unit, (args, kwargs), tuple(returns), structure)
        return tree_unflatten(produced, structure)

    def finish(self, outputs: Any) -> None:
        """Writes down the model's return."""
        leaves, structure = tree_flatten(outputs)
        returns = tuple(TensorSpec.of(leaf) if isinstance(leaf, torch.Tensor) else plain(leaf) for leaf in leaves)
        self.calls.append(self._call("", outputs, returns, structure))

    def _call(self, unit: str, needs: Any, returns: tuple = (), structure: Any = None) -> Call:
        origins = self.mode.origins(needs)
        return Call(unit, unit in self._units.layers,
                    frozenset(origin for origin in origins if isinstance(origin, Value)),
                    frozenset(origin.name for origin in origins if isinstance(origin, ParameterOrigin)),
                    returns, structure)

    def _fake_like(self, spec: TensorSpec) -> FakeTensor:
        with self._fake:
            return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=self._device,
                                       requires_grad=spec.requires_grad)

    def _estimate(self, unit: str, forward, args: tuple, kwargs: dict) -> Tuple[list, Any]:
        """The unit's output, without its arithmetic; layers alike in structure and arguments are asked once."""
        key = self._likeness(unit, args, kwargs)
        if key in self._similar:
            return self._similar[key]
        try:
            estimate = tree_flatten(forward(*tree_map(_private, args), **tree_map(_private, kwargs)))
        except Exception:  # whatever an operation without a fake version raises
            # A layer may look at its data (a router counts tokens per expert), or use an operation that only
            # real tensors have: let it run on zeros. A mistake in the layer shows itself there again.
            estimate = tree_flatten(self._run_on_zeros(unit, forward, args, kwargs))
        if not any(leaf is argument for leaf in estimate[0] for argument in tree_leaves((args, kwargs))
                   if torch.is_tensor(leaf)):
            self._similar[key] = estimate
        return estimate

    def _likeness(self, unit: str, args: tuple, kwargs: dict) -> Any:
        module = self._units.modules[unit]
        leaves, structure = tree_flatten((args, kwargs))
        arguments = tuple(TensorSpec.of(leaf) if isinstance(leaf, torch.Tensor) else repr(plain(leaf))
                          for leaf in leaves)
        parameters = tuple((name, TensorSpec.of(p)) for name, p in module.named_parameters())
        return type(module), module.training, parameters, arguments, str(structure)

    def _run_on_zeros(self, unit: str, forward, args: tuple, kwargs: dict) -> Any:
        def zeros(leaf):
            if not isinstance(leaf, FakeTensor):
                return _private(leaf)
            zero = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=self._device).zero_()
            return zero.requires_grad_(leaf.requires_grad)

        module = self._units.modules[unit]
        routed = module.__dict__.pop("forward")
        try:
            with torch.utils._python_dispatch._disable_current_modes():
                weights = {name: zeros(parameter) for name, parameter in module.named_parameters()}
                return functional_call(module, weights, tree_map(zeros, args), tree_map(zeros, kwargs))
        finally:
            module.__dict__["forward"] = routed


def _private(leaf: Any) -> Any:
    # Layers write into objects they are handed (a key-value cache); an estimate must leave no trace there.
    if isinstance(leaf, (torch.Tensor, *PLAIN_TYPES)):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:  # whatever the object's own copying raises
        return leaf

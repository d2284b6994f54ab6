"""A program: what one forward of a model does, written as data.

It is the list of the units' calls in the order in which the model makes them, with the values each
call needs. Where a program is cut, the values made before the cut and needed after it are the
boundary activations. Programs are pure data: they are made by tracing, sent between ranks, and read
by planning and replay.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Dict, FrozenSet, NamedTuple, Sequence, Tuple, Union

import torch

from mobius_ds.model.errors import WAY_OUT, NotSplittable


class TensorSpec(NamedTuple):
    """What is known of a tensor before it is computed."""

    shape: Tuple[int, ...]
    stride: Tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        """The spec of an existing tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)


class Value(NamedTuple):
    """A tensor that call number ``call`` returns as leaf ``leaf`` of its output."""

    call: int
    leaf: int

    def __str__(self) -> str:
        return f"v{self.call}.{self.leaf}"


class SameAsArgument(NamedTuple):
    """An output leaf that is the very object the call got as leaf ``index`` of its arguments."""

    index: int


class Unavailable:
    """Stands for an object that stays inside the pipeline, such as a key-value cache. Any use of it is an error."""

    def __init__(self, kind: str):
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"the model returned a {self._kind}, which does not leave the Mobius pipeline "
                             f"(asked for its attribute {name!r}); for a key-value cache pass use_cache=False")

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Unavailable) and other._kind == self._kind

    def __hash__(self) -> int:
        return hash(self._kind)

    def __getstate__(self) -> str:
        return self._kind

    def __setstate__(self, kind: str) -> None:
        self._kind = kind

    def __repr__(self) -> str:
        return f"Unavailable({self._kind})"


PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def plain(leaf: Any) -> Any:
    """A non-tensor output leaf as it may leave the pipeline."""
    return leaf if isinstance(leaf, PLAIN_TYPES) else Unavailable(type(leaf).__name__)


@dataclass(frozen=True)
class Call:
    """One call of a unit."""

    unit: str
    """Name of the unit."""
    is_layer: bool
    needs: FrozenSet[Value]
    """Values that its arguments are computed from."""
    loose_parameters: FrozenSet[str]
    """Parameters outside this unit that its arguments are computed from."""
    returns: Tuple[Union[TensorSpec, SameAsArgument, Any], ...] = ()
    """The leaves of its output: a tensor's spec, an argument handed through, or a plain value."""
    structure: Any = None
    """How the leaves nest (a ``TreeSpec``)."""


@dataclass(frozen=True)
class Program:
    """One forward of the model. The last entry of ``calls`` is the return of the model itself (unit ``""``)."""

    calls: Tuple[Call, ...]
    overwritten: FrozenSet[Value] = frozenset()
    """Values that are written into after the call that makes them (an activation in place, ``x += bias``)."""
    written_buffers: FrozenSet[str] = frozenset()
    """Buffers of the model that the forward writes into (running statistics)."""

    @property
    def end(self) -> int:
        """The number of unit calls; also the index of the return."""
        return len(self.calls) - 1

    @property
    def outputs(self) -> Call:
        """The model's return, as a call whose ``returns`` are the model's outputs."""
        return self.calls[-1]

    def spec(self, value: Value) -> TensorSpec:
        """The spec of ``value``."""
        return self.calls[value.call].returns[value.leaf]

    @cached_property
    def _live(self) -> Tuple[Tuple[Value, ...], ...]:
        """By cut. Asked for every stage and microbatch of every sweep, so found once."""
        last_need = {value: index for index, call in enumerate(self.calls) for value in call.needs}
        return tuple(tuple(sorted(value for value, need in last_need.items() if value.call < cut <= need))
                     for cut in range(len(self.calls)))

    def live(self, cut: int) -> Tuple[Value, ...]:
        """The boundary activations of a cut before call number ``cut``: made before it, needed at or after it."""
        return self._live[cut]

    def boundary_bytes(self, cut: int) -> int:
        """Bytes of the boundary activations at ``cut``."""
        return sum(self.spec(value).nbytes for value in self.live(cut))

    def parameters_of(self, start: int, stop: int, units: Dict[str, Tuple[str, ...]]) -> Tuple[str, ...]:
        """Names of the parameters that calls ``[start, stop)`` need; the return belongs to the last span.

        Args:
            units: the parameter names of each unit.
        """
        names: Dict[str, None] = {}
        for call in self.calls[start:stop + 1 if stop == self.end else stop]:
            names.update(dict.fromkeys(sorted(call.loose_parameters)))
            names.update(dict.fromkeys(units.get(call.unit, ())))
        return tuple(names)

    def returned(self, everything: bool = False) -> Tuple[int, ...]:
        """The output leaves that go home to the script at once.

        A training forward returns its scalars, which hold the loss, and leaves large tensors (logits) behind
        unless the script has asked for them before. A forward without a loss of its own returns everything.
        """
        tensors = [index for index, leaf in enumerate(self.outputs.returns) if isinstance(leaf, TensorSpec)]
        scalars = [index for index in tensors if torch.Size(self.outputs.returns[index].shape).numel() == 1]
        has_loss = any(self.outputs.returns[index].requires_grad for index in scalars)
        return tuple(scalars if has_loss and not everything else tensors)

    def layer_starts(self) -> Tuple[int, ...]:
        """The calls before which the program may be cut: each layer, and each run of outer units between layers."""
        return tuple(index for index, call in enumerate(self.calls[:-1])
                     if index == 0 or call.is_layer or self.calls[index - 1].is_layer)


class Span(NamedTuple):
    """The calls ``[start, stop)`` of a program: one stage's share of a forward."""

    start: int
    stop: int


def spans(reference: Program, first_layers: Sequence[int], program: Program) -> Tuple[Span, ...]:
    """Each stage's calls in ``program``, for a partition that was made for ``reference``.

    The two may differ in the calls around the layers (embeddings given instead of ids), not in the layers.

    Args:
        first_layers: each stage's first layer, as an index into ``reference.layer_starts()``.

    Raises:
        NotSplittable: ``program`` does not call a layer at which ``reference`` is cut.
    """
    layer_starts = reference.layer_starts()
    starts = [_same_place(reference, layer_starts[layer], program) for layer in first_layers]
    return tuple(Span(start, stop) for start, stop in zip(starts, [*starts[1:], program.end]))


def _same_place(reference: Program, index: int, program: Program) -> int:
    if index == 0:
        return 0
    if not reference.calls[index].is_layer:  # what comes between or after layers starts where the layer before ends
        return _same_place(reference, index - 1, program) + 1
    unit = reference.calls[index].unit
    occurrence = sum(call.unit == unit for call in reference.calls[:index])
    places = [place for place, call in enumerate(program.calls) if call.unit == unit]
    if occurrence >= len(places):
        raise NotSplittable(f"a stage starts at layer {unit!r}, which this forward does not call, though the first one "
                            f"did. Every forward must go through the same layers. {WAY_OUT}")
    return places[occurrence]

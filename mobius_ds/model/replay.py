"""Replay: a stage runs the model's own forward, with the calls outside the stage bypassed.

To run calls ``[start, stop)`` the model's forward is called with the microbatch's own inputs. A call
before ``start`` is not run: it returns the boundary activations received for it, and stand-ins of the
right shape for what nobody needs any more. Calls of the stage run for real. When call ``stop`` is made
the forward is left, and what is needed at or after ``stop`` is handed over. The model's own code between
the calls (masks, positions, residual sums) runs in every stage that needs it.

Random numbers: the generator is reseeded at the entry and the exit of every call, so a dropout mask
depends on the call and the microbatch and not on where the model is cut, and recomputing a stage draws
the same mask again.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mobius_ds.model.discovery import Units
from mobius_ds.model.errors import WAY_OUT, NotSplittable
from mobius_ds.model.intercept import Entry, intercepted
from mobius_ds.model.program import Program, SameAsArgument, Span, TensorSpec, Value

Reseed = Callable[[int], None]
"""Seeds the random generators for point number ``n`` of a forward: 2k at the entry of call k, 2k+1 at its exit."""


@dataclass
class Handover:
    """What one stage's replay of one microbatch produced."""

    values: Dict[Value, torch.Tensor] = field(default_factory=dict)
    """Boundary activations made by this stage and needed later; the ones only passed through are not here."""
    outputs: Optional[Tuple[list, Any]] = None
    """The model's output as leaves and structure, from the last stage."""


class _LeaveForward(BaseException):
    """Leaves the model's forward at a stage's end; no ``except Exception`` of the model can swallow it."""


@contextmanager
def replayed(entry: Entry, units: Units, program: Program, span: Span, parameters: Dict[str, torch.Tensor],
             received: Dict[Value, torch.Tensor], args: tuple, kwargs: dict, reseed: Reseed) -> Iterator[Handover]:
    """Runs one stage and yields what it hands over.

    The stage's parameters stay in place while the block runs, because a backward inside it may run a
    layer's forward again (activation checkpointing asked for by the user).

    Args:
        span: the stage's calls.
        parameters: device tensors of every parameter the stage needs, by name.
        received: the boundary activations of the cut at ``span.start``, on the device.
        args, kwargs: the microbatch's own inputs, on the device.

    Raises:
        NotSplittable: the model made other calls, or values of other shapes, than when it was traced.
    """
    replay = _Replay(program, span, received, reseed)
    stand_ins = _stand_ins(entry, units, parameters)
    with intercepted(units, replay.call), entry.replaced({**stand_ins, **parameters}):
        reseed(0)
        try:
            outputs = entry(*args, **kwargs)
        except _LeaveForward:
            pass
        else:
            replay.returned(outputs)
        replay.done = True
        yield replay.handover


def _stand_ins(entry: Entry, units: Units, parameters: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Zeros for the parameters outside layers that this stage lacks: the model's code may mention them in passing."""
    device = next((tensor.device for tensor in parameters.values()), None)
    in_layers = {name for layer in units.layers for name in units.parameters[layer]}
    return {name: torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
            for name, parameter in entry.model.named_parameters()
            if name not in parameters and name not in in_layers}


class _Replay:
    """Answers the units' calls of one stage."""

    def __init__(self, program: Program, span: Span, received: Dict[Value, torch.Tensor], reseed: Reseed):
        self._program = program
        self._span = span
        self._received = received
        self._reseed = reseed
        self._wanted = frozenset(program.live(span.stop))
        self._index = 0
        self.handover = Handover()
        self.done = False

    def call(self, unit: str, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs, bypasses or ends at one call."""
        if self.done:
            return forward(*args, **kwargs)
        index, self._index = self._index, self._index + 1
        if index == self._span.stop:
            raise _LeaveForward
        self._check(unit, index)
        if index < self._span.start:
            outputs = self._bypass(index, args, kwargs)
        else:
            self._reseed(2 * index)
            outputs = forward(*args, **kwargs)
            self._keep(index, outputs)
        self._reseed(2 * index + 1)
        return outputs

    def returned(self, outputs: Any) -> None:
        """Takes the model's own return."""
        if self._index != self._program.end:
            raise NotSplittable(f"the model returned after {self._index} calls of its modules, where {self._program.end} "
                                f"were made when the same kind of input was traced. {WAY_OUT}")
        self.handover.outputs = tree_flatten(outputs)

    def _check(self, unit: str, index: int) -> None:
        expected = self._program.calls[index].unit
        if unit != expected:
            raise NotSplittable(f"the model called module {unit!r} where it called {expected or 'nothing more'!r} when "
                                f"the same kind of input was traced: its path depends on more than the inputs' shapes. "
                                f"{WAY_OUT}")

    def _bypass(self, index: int, args: tuple, kwargs: dict) -> Any:
        call = self._program.calls[index]
        arguments = tree_leaves((args, kwargs))
        device = next((a.device for a in arguments if isinstance(a, torch.Tensor)), None)
        leaves = []
        for position, known in enumerate(call.returns):
            if isinstance(known, SameAsArgument):
                leaves.append(arguments[known.index])
            elif isinstance(known, TensorSpec):
                received = self._received.get(Value(index, position))
                leaves.append(_stand_in(known, device) if received is None else received)
            else:
                leaves.append(known)
        return tree_unflatten(leaves, call.structure)

    def _keep(self, index: int, outputs: Any) -> None:
        leaves, _ = tree_flatten(outputs)
        for position, leaf in enumerate(leaves):
            value = Value(index, position)
            if value not in self._wanted:
                continue
            spec = self._program.spec(value)
            if tuple(leaf.shape) != spec.shape or leaf.dtype != spec.dtype:
                raise NotSplittable(f"module {self._program.calls[index].unit!r} returned {tuple(leaf.shape)} {leaf.dtype} "
                                    f"where {spec.shape} {spec.dtype} was traced: the shapes of what layers hand on "
                                    f"must follow from the inputs' shapes. {WAY_OUT}")
            self.handover.values[value] = leaf


def _stand_in(spec: TensorSpec, device: Optional[torch.device]) -> torch.Tensor:
    # One element seen through zero strides: the right shape without its memory.
    return torch.zeros((), dtype=spec.dtype, device=device).expand(spec.shape)

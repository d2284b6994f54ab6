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

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

import torch
from torch.utils._pytree import tree_leaves

from mobius_ds.model.discovery import Units
from mobius_ds.model.errors import WAY_OUT, NotSplittable
from mobius_ds.model.intercept import Entry, intercepted
from mobius_ds.model.parts import Parts
from mobius_ds.model.program import Program, SameAsArgument, Span, TensorSpec, Value
from mobius_ds.model.structures import flatten, unflatten
from mobius_ds.model.wrappers import unwrapped

Reseed = Callable[[int], None]
"""Seeds the random generators for point number ``n`` of a forward: 2k at the entry of call k, 2k+1 at its exit."""


@dataclass
class Handover:
    """What one stage's replay of one microbatch produced."""

    values: Dict[Value, torch.Tensor] = field(default_factory=dict)
    """Boundary activations made by this stage and needed later; the ones only passed through are not here."""
    outputs: Optional[Tuple[list, Any]] = None
    """The model's output as leaves and structure, from the last stage."""

    def detached(self) -> "Handover":
        """The same without the graph behind it."""
        values = {value: tensor.detach() for value, tensor in self.values.items()}
        if self.outputs is None:
            return Handover(values)
        leaves, structure = self.outputs
        return Handover(values, ([leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], structure))

    def backward(self, received: Dict[Value, torch.Tensor], gradients: Dict[Any, torch.Tensor]) -> None:
        """Differentiates the stage, inside ``replayed``'s block.

        Args:
            received: what the stage started from, as leaves.
            gradients: of what it handed on, by value (what it only passed through included); from the last stage, of
                the model's outputs, by leaf.
        """
        roots = dict(enumerate(self.outputs[0])) if self.outputs else {**received, **self.values}
        pairs = [(roots[key], gradient) for key, gradient in gradients.items() if roots[key].requires_grad]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs)))


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """Leaves the script's random numbers as they were before the block."""
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
        yield


class _LeaveForward(BaseException):
    """Leaves the model's forward at a stage's end; no ``except Exception`` of the model can swallow it."""


class Replayer:
    """Runs the stages of one sweep.

    Args:
        parts: of the entry's model, as the sweep's forward found them.
    """

    def __init__(self, entry: Entry, units: Units, parts: Parts):
        self._entry = entry
        self._units = units
        self._parts = parts
        self._stand_ins: Mapping[str, torch.Tensor] = {}
        self._replay: Optional["_Replay"] = None

    @contextmanager
    def ready(self, device: torch.device) -> Iterator[None]:
        """While the block runs, the units' calls come here.

        What every stage needs is made once for all stages. The parameters are replaced only while a stage runs: between
        stages a sweep waits for other ranks, and a signal handler may save the model then.
        """
        self._stand_ins = self._parts.stand_ins(device)
        with unwrapped(self._parts.compiled), intercepted(self._units, self._call):
            yield

    @contextmanager
    def replayed(self, program: Program, span: Span, parameters: Dict[str, torch.Tensor],
                 received: Dict[Value, torch.Tensor], args: tuple, kwargs: dict, reseed: Reseed) -> Iterator[Handover]:
        """Runs one stage, inside ``ready``'s block, and yields what it hands over.

        The stage's parameters stay in place while the block runs, because a backward inside it may run a
        layer's forward again (activation checkpointing by a function of the model's own; torch's is set aside).

        Args:
            span: the stage's calls.
            parameters: device tensors of every parameter the stage needs, by name.
            received: the boundary activations of the cut at ``span.start``, on the device.
            args, kwargs: the microbatch's own inputs, on the device.

        Raises:
            NotSplittable: the model made other calls, or values of other shapes, than when it was traced.
        """
        replay = self._replay = _Replay(program, span, received, reseed)
        try:
            with self._parts.replaced({**self._stand_ins, **self._parts.like_parameters(parameters)}):
                reseed(0)
                try:
                    outputs = self._entry(*args, **kwargs)
                except _LeaveForward:
                    pass
                else:
                    replay.returned(outputs)
                replay.finish()
                yield replay.handover
        finally:
            self._replay = None  # and with it the stage's graph

    def _call(self, unit: str, forward: Callable, args: tuple, kwargs: dict) -> Any:
        if self._replay is None:  # the script's own call, from a signal handler for instance
            return forward(*args, **kwargs)
        return self._replay.call(unit, forward, args, kwargs)


@contextmanager
def replayed(entry: Entry, units: Units, program: Program, span: Span, parameters: Dict[str, torch.Tensor],
             received: Dict[Value, torch.Tensor], args: tuple, kwargs: dict, reseed: Reseed) -> Iterator[Handover]:
    """Runs a single stage and yields what it hands over: ``Replayer.replayed`` for those who run one only."""
    replayer = Replayer(entry, units, Parts(entry.model))
    device = next((tensor.device for tensor in parameters.values()), torch.device("cpu"))
    with replayer.ready(device), replayer.replayed(program, span, parameters, received, args, kwargs, reseed) as handover:
        yield handover


class _Replay:
    """Answers the units' calls of one stage."""

    def __init__(self, program: Program, span: Span, received: Dict[Value, torch.Tensor], reseed: Reseed):
        self._program = program
        self._span = span
        self._received = received
        self._reseed = reseed
        self._wanted = frozenset(program.live(span.stop))
        self._index = 0
        self._ran: Dict[str, List[int]] = defaultdict(list)
        self._done = False
        self.handover = Handover()

    def call(self, unit: str, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs, bypasses or ends at one call."""
        if self._done:
            return self._run_again(unit, forward, args, kwargs)
        index, self._index = self._index, self._index + 1
        if self._span.stop <= index and self._span.stop < self._program.end:
            raise _LeaveForward
        self._check(unit, index)
        if index < self._span.start:
            outputs = self._bypass(index, args, kwargs)
        else:
            self._reseed(2 * index)
            outputs = self._kept(index, forward(*args, **kwargs))
            self._ran[unit].append(index)
        self._reseed(2 * index + 1)
        return outputs

    def _run_again(self, unit: str, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """An activation checkpointing of the model's own runs a call a second time, last call of a unit first."""
        if not self._ran[unit]:
            raise NotSplittable(f"activation checkpointing runs module {unit!r} again together with others, but a stage "
                                f"has only its own. Turn activation checkpointing off: Mobius recomputes every stage "
                                f"anyway.")
        self._reseed(2 * self._ran[unit].pop())
        return forward(*args, **kwargs)

    def finish(self) -> None:
        """Ends the forward. What units are called for from now on is a backward."""
        self._done = True

    def returned(self, outputs: Any) -> None:
        """Takes the model's own return."""
        if self._span.stop < min(self._index, self._program.end):
            raise NotSplittable("the model's own forward caught the exception by which a stage leaves it: a bare "
                                f"'except:' or 'except BaseException:' around its modules' calls. Catch "
                                f"Exception. {WAY_OUT}")
        if self._index != self._program.end:
            raise NotSplittable(f"the model returned after {self._index} calls of its modules, where {self._program.end} "
                                f"were made when the same kind of input was traced. {WAY_OUT}")
        self.handover.outputs = flatten(outputs)

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
                leaves.append(self._given(Value(index, position), known, device))
            else:
                leaves.append(known)
        return unflatten(leaves, call.structure)

    def _given(self, value: Value, spec: TensorSpec, device: Optional[torch.device]) -> torch.Tensor:
        # What the model's code writes into must be a tensor of its own.
        received = self._received.get(value)
        given = _stand_in(spec, device) if received is None else received
        return given.clone() if value in self._program.overwritten else given

    def _kept(self, index: int, outputs: Any) -> Any:
        """Keeps what later stages need of a call's output, and returns the output for the model's code."""
        call = self._program.calls[index]
        leaves, structure = flatten(outputs)
        if structure != call.structure:
            raise NotSplittable(f"module {call.unit!r} returned {structure} where {call.structure} was traced: what "
                                f"layers return must be the same in every forward. {WAY_OUT}")
        for position, leaf in enumerate(leaves):
            value = Value(index, position)
            if value not in self._wanted:
                continue
            spec = self._program.spec(value)
            if tuple(leaf.shape) != spec.shape or leaf.dtype != spec.dtype:
                raise NotSplittable(f"module {call.unit!r} returned {tuple(leaf.shape)} {leaf.dtype} "
                                    f"where {spec.shape} {spec.dtype} was traced: the shapes of what layers hand on "
                                    f"must follow from the inputs' shapes. {WAY_OUT}")
            self.handover.values[value] = leaf
            if value in self._program.overwritten:  # the next stage starts from it as it is now
                leaves[position] = leaf.clone()
                outputs = unflatten(leaves, structure)
        return outputs


def _stand_in(spec: TensorSpec, device: Optional[torch.device]) -> torch.Tensor:
    # One element seen through zero strides: the right shape without its memory.
    return torch.zeros((), dtype=spec.dtype, device=device).expand(spec.shape)

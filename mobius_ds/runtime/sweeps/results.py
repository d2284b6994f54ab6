"""What a task gives to those that wait for it. On the same rank they read it, on another rank they get it as a message."""

from typing import Any, Dict, List, NamedTuple, Tuple, Union

from mobius_ds.model.program import Value
from mobius_ds.runtime.dram.activations import Placed


class PlacedInputs(NamedTuple):
    """Where a microbatch's input tensors lie in DRAM, in the order of their leaves."""

    tensors: Tuple[Placed, ...]


class PlacedActivations(NamedTuple):
    """Where the values that the next stage starts from lie in DRAM, those included that this one only passes through."""

    values: Dict[Value, Placed]


class PlacedOutputs(NamedTuple):
    """A microbatch's output: where its leaves lie in DRAM, and its structure."""

    leaves: List[Any]
    """A ``Placed`` for a tensor that goes home, a ``TensorSpec`` for one that does not, plain data as it is."""
    structure: Any


class PlacedGradients(NamedTuple):
    """Where gradients lie in DRAM: by the value they are of, or by output leaf."""

    of: Dict[Any, Placed]


class Outputs(NamedTuple):
    """A microbatch's output at home."""

    leaves: List[Any]
    """A ``TensorSpec`` stands for a tensor that did not come home."""
    structure: Any


Result = Union[PlacedInputs, PlacedActivations, PlacedOutputs, PlacedGradients, Outputs, None]

"""A model, traced for one microbatch: what profiling and planning start from."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Dict, Optional, Sequence

import torch
from torch import nn

from mobius_ds.model.discovery import Units, find_units
from mobius_ds.model.intercept import Entry
from mobius_ds.model.program import Program, TensorSpec
from mobius_ds.model.replay import own_random_numbers
from mobius_ds.model.trace import trace

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TracedModel:
    """A model, its program for one microbatch, and that microbatch."""

    entry: Entry
    units: Units
    program: Program
    args: tuple
    kwargs: Dict[str, Any]
    device: torch.device
    """Of the microbatch and of the model's buffers."""

    @cached_property
    def parameters(self) -> Dict[str, TensorSpec]:
        """Every parameter; a tied one once."""
        return {name: TensorSpec.of(parameter) for name, parameter in self.entry.model.named_parameters()}

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters."""
        return sum(torch.Size(spec.shape).numel() for spec in self.parameters.values())


def trace_model(model: nn.Module, args: tuple, kwargs: Dict[str, Any], device: torch.device = CPU,
                patterns: Optional[Sequence[str]] = None) -> TracedModel:
    """Traces a model whose parameters may be meta tensors; its buffers and the arguments are on ``device``.

    Raises:
        NotSplittable: see ``find_units`` and ``trace``.
        ValueError: a buffer is a meta tensor.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"buffer {name!r} is a meta tensor, so what the model computes from it is unknown. Construct "
                             "the model inside describe.weightless(), which makes only parameters meta tensors.")
    entry, units = Entry(model), find_units(model, patterns)
    with own_random_numbers(device):
        program = trace(entry, units, args, kwargs, device)
    return TracedModel(entry, units, program, args, kwargs, device)

"""One layer's run, as a stage of its own would run it: by replay, with a forward that is only recomputed in the backward.

Torch's own counter counts the FLOPs of forward, recomputation and backward. Only matrix products, convolutions and attention
count, the latter in full where it is causal.

Working memory is followed operation by operation: every tensor that the run makes counts from its operation on until
the last reference to it is gone, be it saved for the backward, a temporary or a gradient. What a kernel takes for
itself while it runs is not seen.
"""

import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, NamedTuple, Sequence, Set, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from mobius_ds.model.program import Span, TensorSpec, Value
from mobius_ds.model.replay import Handover, replayed
from mobius_ds.model.trace import storage_key
from mobius_ds.profiling.traced_model import TracedModel


class LayerWork(NamedTuple):
    """What one layer's run counts."""

    forward_flops: int
    backward_flops: int
    """Recomputation included."""
    working_bytes: int


class TracedLayer(NamedTuple):
    """One layer of the program."""

    span: Span
    parameters: Tuple[str, ...]
    """Names of all it needs."""


Make = Callable[[TensorSpec], torch.Tensor]
"""Makes a tensor for a spec, as a leaf that requires a gradient if the spec does."""


@dataclass
class Materials:
    """What a layer's run starts from. All of it is counted elsewhere, not as working memory."""

    parameters: Dict[str, torch.Tensor]
    received: Dict[Value, torch.Tensor]
    gradients: Dict[Any, torch.Tensor]
    """Of what the layer hands on: by value, or by output leaf for the last layer."""


def materials_of(traced: TracedModel, layer: TracedLayer, parameters: Dict[str, torch.Tensor], make: Make,
                 given: Sequence[Value]) -> Materials:
    """What to start a layer's run from.

    Args:
        parameters: all that the layer needs.
        make: makes what the run is handed, and the gradients of what it hands on.
        given: the values of earlier calls that the run is handed.
    """
    program, stop = traced.program, layer.span.stop
    if stop == program.end:
        handed_on = {leaf: program.outputs.returns[leaf] for leaf in program.returned()}
    else:
        handed_on = {value: program.spec(value) for value in program.live(stop)}
    return Materials(parameters, {value: make(program.spec(value)) for value in given},
                     {key: make(spec._replace(requires_grad=False)) for key, spec in handed_on.items()
                      if spec.requires_grad})


@contextmanager
def run_forward(traced: TracedModel, layer: TracedLayer, materials: Materials) -> Iterator[Handover]:
    """Runs the layer forward; within, there is what it hands over."""
    with replayed(traced.entry, traced.units, traced.program, layer.span, materials.parameters, materials.received,
                  traced.args, traced.kwargs, lambda point: None) as handover:
        yield handover


def _drop(parameter: torch.Tensor) -> None:
    # A stage adds each gradient to its accumulator and frees it; so it counts as working memory until then.
    parameter.grad = None


def leaf_of(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """The tensor as a leaf of a new graph, whose gradient is dropped as soon as it is complete."""
    tensor = tensor.detach().requires_grad_(requires_grad)
    if requires_grad:
        tensor.register_post_accumulate_grad_hook(_drop)
    return tensor


def work_of_run(traced: TracedModel, layer: TracedLayer, materials: Materials) -> LayerWork:
    """FLOPs and working memory of one recomputation and backward; its forward is the recomputation."""
    held = [*materials.parameters.values(), *materials.received.values(), *materials.gradients.values(),
            *(leaf for leaf in tree_leaves((traced.args, traced.kwargs)) if isinstance(leaf, torch.Tensor)),
            *traced.entry.model.buffers()]
    memory, flops = _LiveBytes(held), FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    with torch.enable_grad(), memory, flops, run_forward(traced, layer, materials) as handover:
        forward = flops.get_total_flops()
        handover.backward(materials.received, materials.gradients)
    return LayerWork(forward, flops.get_total_flops(), memory.peak)


class _LiveBytes(TorchDispatchMode):
    """Follows the bytes of the tensors that operations make, by storage, so that views count once."""

    def __init__(self, held: Sequence[torch.Tensor]):
        super().__init__()
        self._seen: Set[int] = set()
        self._live = 0
        self.peak = 0
        for tensor in held:
            self._note(tensor, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf, leaf.untyped_storage().nbytes())
        self.peak = max(self.peak, self._live)
        return outputs

    def _note(self, tensor: torch.Tensor, nbytes: int) -> None:
        key = storage_key(tensor)
        if key not in self._seen:
            self._seen.add(key)
            self._live += nbytes
            weakref.finalize(tensor.untyped_storage(), self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._seen.remove(key)  # another storage may come to lie there
        self._live -= nbytes


def _attention_flops(query, key, value, *rest, **more) -> int:
    """Scores and weighted sum; keys and values may have fewer heads."""
    samples, heads, length, size = query
    return 2 * samples * heads * length * key[2] * (size + value[3])


def _attention_backward_flops(gradient, query, key, value, *rest, **more) -> int:
    """Scores again, then the gradients of probabilities, queries, keys and values."""
    samples, heads, length, size = query
    return 2 * samples * heads * length * key[2] * (3 * size + 2 * value[3])


def _grouped_flops(first, second, *rest, **more) -> int:
    """Products of groups of rows or columns, each group with a matrix of its own: the experts of a mixture."""
    if len(first) == 3 and len(second) == 2:  # the groups are columns of the second
        return 2 * first[1] * first[2] * second[1]
    return 2 * torch.Size(first).numel() * second[-1]


_FORMULAS = {getattr(torch.ops.aten, operation): formula for operation, formula in (  # that torch's counter lacks
    ("_scaled_dot_product_flash_attention_for_cpu", _attention_flops),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", _attention_backward_flops),
    ("_grouped_mm", _grouped_flops)) if hasattr(torch.ops.aten, operation)}

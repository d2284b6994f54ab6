"""Sweeps as autograd sees them: a forward is one node of the script's graph, its backward one sweep.

So ``engine.backward(loss)``, ``loss.backward()`` and a loss that the script computes itself from returned
outputs all reach the pipeline, on every rank in the same order.
"""

import weakref
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from mobius_ds.model.program import TensorSpec
from mobius_ds.model.structures import unflatten
from mobius_ds.runtime.sweeps.deferred import DeferredTensor
from mobius_ds.runtime.sweeps.pipeline import Pipeline
from mobius_ds.runtime.sweeps.sweep import Sweep


def run(pipeline: Pipeline, args: tuple, kwargs: dict, seed: Tuple[int, int]) -> Any:
    """Runs this rank's microbatch through the pipeline and returns the model's output, differentiable if grad is on.

    Args:
        seed: (step, number within the step), for the microbatch's random numbers.
    """
    _refuse_caches((*args, *kwargs.values()))
    with computing(pipeline.device.torch_device):
        sweep, [(leaves, structure)] = pipeline.forward([(args, kwargs)], [seed])
    forward = _Forward(pipeline, sweep, torch.is_grad_enabled())
    return unflatten(forward.leaves(leaves), structure)


@contextmanager
def computing(device: torch.device, autocast: Optional[Tuple[bool, torch.dtype]] = None) -> Iterator[None]:
    """Computes in a state of autocast: by default the one that is on.

    Without its cache, which would keep a cast copy of every stage's weights until the script leaves autocast. And
    not in inference mode: what is made there, such as the slots, could never take part in a training step.

    Args:
        autocast: whether it is enabled, and to which dtype it casts.
    """
    enabled, dtype = autocast or autocast_state(device)
    graded = torch.is_grad_enabled()  # leaving inference mode would turn it on
    with torch.inference_mode(False), torch.set_grad_enabled(graded), \
            torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False):
        yield


def _refuse_caches(arguments: Sequence[Any]) -> None:
    for argument in arguments:
        if hasattr(argument, "get_seq_length"):
            raise ValueError(f"the model is called with a key-value cache ({type(argument).__name__}), which its layers "
                             "would fill on different ranks. Pass use_cache=False, to generate() as well.")


def autocast_state(device: torch.device) -> Tuple[bool, torch.dtype]:
    """Whether autocast is on, and to which dtype it casts."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


class _Forward:
    """One forward of this rank, kept by the graph (and the deferred outputs) that may still need it."""

    def __init__(self, pipeline: Pipeline, sweep: Sweep, differentiable: bool):
        self._pipeline = pipeline
        self._sweep = sweep
        self._differentiable = differentiable
        # A backward is usually called outside the script's autocast block, and must recompute what was computed inside.
        self._device = pipeline.device.torch_device
        self._autocast = autocast_state(self._device)
        self._nodes_to_come = 0
        # Weak, because what they read leads back here through the graph.
        self._deferred: Dict[int, "weakref.ref[DeferredTensor]"] = {}
        self._released = False
        if not differentiable:
            self.release()

    def leaves(self, leaves: Sequence[Any]) -> List[Any]:
        """The output's leaves for the script: tensors in its graph, deferred tensors, plain values."""
        returned = list(leaves)
        for index, tensor in self._in_graph(leaves).items():
            returned[index] = tensor
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, TensorSpec):
                returned[index] = DeferredTensor(leaf, self._device, self.fetch)
                self._deferred[index] = weakref.ref(returned[index])
        return returned

    def fetch(self) -> None:
        """Hands the deferred outputs what they stand for: all at the first read of one, on all ranks together."""
        with torch.set_grad_enabled(self._differentiable):
            with computing(self._device, self._autocast):
                [(leaves, _)] = self._pipeline.outputs(self._sweep)
            self._released = False
            fetched = self._in_graph(leaves)
        for index, reference in self._deferred.items():
            deferred = reference()
            if deferred is not None:
                deferred.arrived(fetched[index])

    def backward(self, gradients: Dict[int, torch.Tensor]) -> None:
        """Runs the backward sweep for some of the outputs' gradients."""
        if self._released:
            raise RuntimeError("backward through the same forward a second time: its boundary activations are freed. "
                               "Pass retain_graph=True to the first backward.")
        with computing(self._device, self._autocast):
            self._pipeline.backward(self._sweep, [gradients])
        self._nodes_to_come -= 1
        if self._nodes_to_come <= 0 and not torch._C._autograd._get_current_graph_task_keep_graph():
            self.release()

    def release(self) -> None:
        """Lets go of what the pipeline keeps for this forward."""
        if not self._released:
            self._released = True
            self._pipeline.release(self._sweep)

    def __del__(self) -> None:
        self.release()

    def _in_graph(self, leaves: Sequence[Any]) -> Dict[int, torch.Tensor]:
        tensors = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        specs = self._sweep.microbatches[self._pipeline.rank].program.outputs.returns
        graded = [index for index in tensors if isinstance(specs[index], TensorSpec) and specs[index].requires_grad]
        if not (self._differentiable and graded):
            return tensors
        self._nodes_to_come += 1
        anchor = torch.empty(0, device=self._device, requires_grad=True)
        attached = _GraphNode.apply(anchor, self, {index: tensors[index] for index in graded})
        return {**tensors, **dict(zip(graded, attached))}


class _GraphNode(torch.autograd.Function):
    """A forward's outputs in the script's graph. ``anchor`` is only there to require a gradient."""

    @staticmethod
    def forward(ctx, anchor: torch.Tensor, forward: _Forward, tensors: Dict[int, torch.Tensor]):
        ctx.pipelined = forward
        ctx.leaves = list(tensors)
        ctx.set_materialize_grads(False)
        return tuple(tensors.values())

    @staticmethod
    def backward(ctx, *gradients):
        ctx.pipelined.backward({leaf: gradient for leaf, gradient in zip(ctx.leaves, gradients) if gradient is not None})
        return None, None, None

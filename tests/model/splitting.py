"""A pipeline in one process: every stage of a model replayed in turn, for comparison with the model as it is."""

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from mobius_ds.model.discovery import Units, find_units
from mobius_ds.model.intercept import Entry
from mobius_ds.model.program import Program, Span, spans
from mobius_ds.model.replay import replayed
from mobius_ds.model.trace import trace
from mobius_ds.schedule.plan import even_partition

CPU = torch.device("cpu")


class Run(NamedTuple):
    """What one forward and backward gave."""

    loss: torch.Tensor
    gradients: Dict[str, Optional[torch.Tensor]]
    program: Optional[Program] = None
    shared: frozenset = frozenset()
    """Parameters that more than one stage uses."""


def loss_of(outputs: Any) -> torch.Tensor:
    """The model's own loss, or else a number that every float output has a part in."""
    loss = getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    floats = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return sum((leaf * leaf).mean() for leaf in floats)


def run_unsplit(model: nn.Module, *args: Any, loss: Callable = loss_of, **kwargs: Any) -> Run:
    """The model as it is."""
    model.zero_grad()
    value = loss(model(*args, **kwargs))
    value.backward()
    return Run(value.detach(), {name: p.grad for name, p in model.named_parameters()})


def seeds_from(seed: int) -> Callable[[int], None]:
    return lambda point: torch.manual_seed(1000 * seed + point)


def run_split(model: nn.Module, *args: Any, stages: Optional[int] = None, patterns: Optional[Sequence[str]] = None,
              loss: Callable = loss_of, seed: int = 0, program: Optional[Program] = None, **kwargs: Any) -> Run:
    """The model stage by stage: a forward that keeps the boundaries, a backward that recomputes from them.

    Args:
        stages: how many; by default every layer is one.
    """
    with left_as_it_was(model):
        units = find_units(model, patterns)
        entry = Entry(model)
        program = program or trace(entry, units, args, kwargs, CPU)
        pipeline = _Pipeline(entry, units, program, _cut(program, stages), args, kwargs, seeds_from(seed))
        return pipeline.run(loss)


def _cut(program: Program, stages: Optional[int]) -> Sequence[Span]:
    layers = len(program.layer_starts())
    partition = even_partition(layers, stages or layers)
    return spans(program, [sum(partition[:stage]) for stage in range(len(partition))], program)


class _Pipeline:

    def __init__(self, entry: Entry, units: Units, program: Program, cut: Sequence[Span], args: tuple, kwargs: dict,
                 reseed: Callable[[int], None]):
        self._entry, self._units, self._program, self._cut = entry, units, program, cut
        self._args, self._kwargs, self._reseed = args, kwargs, reseed
        self._weights = dict(entry.model.named_parameters())
        self._names = [program.parameters_of(*span, units.parameters) for span in cut]
        self._boundary: Dict[Any, torch.Tensor] = {}

    def run(self, loss: Callable) -> Run:
        for stage in range(len(self._cut)):
            leaves, structure = self._forward(stage)
        leaves = [leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf
                  for leaf in leaves]
        value = loss(tree_unflatten(leaves, structure))
        value.backward()
        arrived = {index: leaf.grad for index, leaf in enumerate(leaves)
                   if isinstance(leaf, torch.Tensor) and leaf.grad is not None}
        gradients = dict.fromkeys(self._weights)
        for stage in reversed(range(len(self._cut))):
            arrived = self._backward(stage, arrived, gradients)
        every = [name for names in self._names for name in names]
        return Run(value.detach(), gradients, self._program, frozenset(n for n in every if every.count(n) > 1))

    def _replayed(self, stage: int):
        """The stage's handover, its parameters and what it starts from, all leaves of a graph of their own."""
        span = self._cut[stage]
        copies = {name: self._weights[name].detach().clone().requires_grad_(self._weights[name].requires_grad)
                  for name in self._names[stage]}
        received = {value: self._boundary[value].clone().requires_grad_(self._program.spec(value).requires_grad)
                    for value in self._program.live(span.start)}
        return copies, received, replayed(self._entry, self._units, self._program, span, copies, received,
                                          self._args, self._kwargs, self._reseed)

    def _forward(self, stage: int):
        # With gradients on, as in the model as it is: torch chooses other kernels where none are needed.
        _, _, replay = self._replayed(stage)
        with replay as handover:
            self._boundary.update({value: tensor.detach() for value, tensor in handover.values.items()})
        return handover.outputs or ([], None)

    def _backward(self, stage: int, arrived: Dict, gradients: Dict[str, Optional[torch.Tensor]]) -> Dict:
        copies, received, replay = self._replayed(stage)
        with replay as handover:
            roots = dict(enumerate(handover.outputs[0])) if handover.outputs else {**received, **handover.values}
            pairs = [(roots[key], gradient) for key, gradient in arrived.items()]
            if pairs:
                torch.autograd.backward(*map(list, zip(*pairs)))
        for name, copy in copies.items():
            if copy.grad is not None:
                gradients[name] = copy.grad if gradients[name] is None else gradients[name] + copy.grad
        return {value: tensor.grad for value, tensor in received.items() if tensor.grad is not None}


def assert_same(split: Run, unsplit: Run, close: bool = False) -> None:
    """Loss and every gradient are equal bit for bit; where stages share a parameter the order of the sum differs.

    Args:
        close: the order differs for other parameters too, because several stages run the same code of the model's
            own on their values (a sum of embeddings that the first block needs and the model also returns).
    """
    assert torch.equal(split.loss, unsplit.loss), (split.loss, unsplit.loss)
    for name, expected in unsplit.gradients.items():
        gradient = split.gradients[name]
        if expected is None:  # a parameter that a stage holds and does not use has no gradient either
            assert gradient is None, name
        elif close or name in split.shared:
            torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6, msg=lambda text: f"{name}: {text}")
        else:
            assert gradient is not None, name
            assert torch.equal(gradient, expected), (name, (gradient - expected).abs().max())


def check(model: nn.Module, *args: Any, close: bool = False, patterns: Optional[Sequence[str]] = None,
          **options: Any) -> Run:
    """Splits a model into as many stages as it has layers, and into two, and compares with the model as it is."""
    unsplit = run_unsplit(model, *args, **options)
    assert_same(run_split(model, *args, stages=2, patterns=patterns, **options), unsplit, close)
    split = run_split(model, *args, patterns=patterns, **options)
    assert_same(split, unsplit, close)
    return split


def layers_of(model: nn.Module, patterns: Optional[Sequence[str]] = None) -> List[str]:
    """Names of the layers that are found, in the model's order."""
    found = find_units(model, patterns)
    return [name for name in found.modules if name in found.layers]


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Fails if a block leaves anything of its own in the model, even when it raises."""
    before = _anatomy(model)
    try:
        yield
    finally:
        assert _anatomy(model) == before


def _anatomy(model: nn.Module) -> List:
    return [(name, module.training, {key: id(value) for key, value in module.__dict__.items() if key != "training"},
             {key: (id(p), id(p.grad), p.requires_grad, p._version) for key, p in module._parameters.items()
              if p is not None},
             {key: (id(b), None if b is None else b._version) for key, b in module._buffers.items()})
            for name, module in model.named_modules(remove_duplicate=False)]

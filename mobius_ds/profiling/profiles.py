"""Profiling: what each layer of a traced model costs one GPU for one microbatch, computed or measured.

A layer runs here as a stage of its own would: by replay, with a forward that is only recomputed in the backward.
Layers alike in their settings, parameters and the tensors they exchange (a *kind*) run once.

Computed, the run is on fake tensors, and torch's own counter counts the FLOPs of forward, recomputation and backward.
Only matrix products, convolutions and attention count, the latter in full where it is causal; operations that memory
bandwidth bounds (norms, activations, embeddings) take no time. Measured, the run is real, one kind at a time.

Working memory is followed operation by operation: every tensor that the run makes counts from its operation on until
the last reference to it is gone, be it saved for the backward, a temporary or a gradient. What a kernel takes for
itself while it runs is not seen.
"""

import statistics
import time
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from mobius_ds.inputs.profile import LayerProfile, ModelProfile
from mobius_ds.inputs.topology import Gpu
from mobius_ds.model.discovery import Units, find_units
from mobius_ds.model.errors import NotSplittable
from mobius_ds.model.intercept import Entry
from mobius_ds.model.program import Program, Span, TensorSpec, Value
from mobius_ds.model.replay import Handover, own_random_numbers, replayed
from mobius_ds.model.trace import (FAKE_TENSOR_LOGGER, LARGEST_ON_ZEROS, needs_weights, quiet, settings, storage_key,
                                   trace)
from mobius_ds.profiling.describe import Source, describe

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


class Profiled(NamedTuple):
    """A model profiled from its description."""

    profile: ModelProfile
    program: Program
    parameters: int
    """How many the model has; tied ones once."""


class Work(NamedTuple):
    """What one layer's run counts."""

    forward_flops: int
    backward_flops: int
    """Recomputation included."""
    working_bytes: int


def profile_description(source: Source, samples: int, sequence: int, gpu: Gpu,
                        dtype: torch.dtype = torch.bfloat16) -> Profiled:
    """Profiles a model that need not exist: a named GPT size, or a Hugging Face config.

    Args:
        source: a name such as ``gpt-8b``, the folder or file of a config, or its content.
        samples, sequence: the shape of one microbatch, in samples and tokens.
        dtype: that the model computes in.

    Raises:
        UnknownModel: the description leads to no model.
        NotSplittable: the model cannot be cut, or a layer looks at its data and is too large to run on zeros.
    """
    name, model, inputs = describe(source, samples, sequence, dtype)
    traced = trace_model(model, (), inputs)
    return Profiled(computed_profile(traced, gpu, name), traced.program, traced.parameter_count)


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


def computed_profile(traced: TracedModel, gpu: Gpu, name: str) -> ModelProfile:
    """Profiles from FLOPs and a GPU's speed; no weights are needed, nor memory.

    Raises:
        NotSplittable: a layer looks at its data, so that fake tensors do not do, and is too large to run on zeros.
    """
    return _profile(traced, name, lambda layer: _computed_work(traced, layer),
                    lambda layer, work: (work.forward_flops / gpu.flops, work.backward_flops / gpu.flops))


def measured_profile(traced: TracedModel, weights: Mapping[str, torch.Tensor], name: str,
                     repeats: int = 5, budget_seconds: float = 2.0) -> ModelProfile:
    """Profiles by running one layer of each kind on the model's device, with its own weights and random activations.

    A first run counts, which also warms up; then times are medians. Only one layer's weights are on the device at a
    time.

    Args:
        weights: every parameter by name, wherever it lies.
        repeats: the most timed runs of a kind.
        budget_seconds: no further run of a kind begins once its runs have taken this long; one is always timed.
    """
    return _profile(traced, name, lambda layer: _real_work(traced, layer, weights),
                    lambda layer, work: _measured_seconds(traced, layer, weights, repeats, budget_seconds))


# Layers and their kinds.


class _Layer(NamedTuple):
    """One layer of the program."""

    span: Span
    parameters: Tuple[str, ...]
    """Names of all it needs."""


class _Figures(NamedTuple):
    """All that is counted of a layer. What differs only in settings that change none of it is of one kind as well."""

    name: str
    """The classes of its modules."""
    work: Work
    weight_bytes: int
    gradient_bytes: int
    boundary_bytes: int


def _profile(traced: TracedModel, name: str, count: Callable[[_Layer], Work],
             time_of: Callable[[_Layer, Work], Tuple[float, float]]) -> ModelProfile:
    """
    Args:
        count: counts a layer's work.
        time_of: its seconds forward and backward.
    """
    of_kind: Dict[Any, LayerProfile] = {}
    of_figures: Dict[_Figures, LayerProfile] = {}
    layers: List[LayerProfile] = []
    for layer in _layers(traced):
        kind = _kind(traced, layer)
        if kind not in of_kind:
            figures = _figures(traced, layer, count(layer))
            if figures not in of_figures:
                namesakes = sum(other.name == figures.name for other in of_figures)
                title = f"{figures.name} #{namesakes + 1}" if namesakes else figures.name
                of_figures[figures] = LayerProfile(title, *time_of(layer, figures.work), figures.weight_bytes,
                                                   figures.gradient_bytes, figures.boundary_bytes,
                                                   figures.work.working_bytes)
            of_kind[kind] = of_figures[figures]
        layers.append(of_kind[kind])
    return ModelProfile(name, tuple(layers), traced.parameter_count)


def _layers(traced: TracedModel) -> List[_Layer]:
    program = traced.program
    starts = [*program.layer_starts(), program.end]
    return [_Layer(Span(start, stop), program.parameters_of(start, stop, traced.units.parameters))
            for start, stop in zip(starts, starts[1:])]


def _kind(traced: TracedModel, layer: _Layer) -> Any:
    """What layers have in common that cost the same."""
    (start, stop), program = layer.span, traced.program
    units = [call.unit for call in program.calls[start:stop]]
    loose = [traced.parameters[name] for call in program.calls[start:stop] for name in sorted(call.loose_parameters)]
    return (tuple(tuple(settings(unit, traced.units.modules[unit])) for unit in units),
            tuple(traced.parameters[name] for name in layer.parameters), tuple(loose),
            tuple(map(program.spec, program.live(start))), tuple(map(program.spec, program.live(stop))),
            start == 0, stop == program.end)


def _figures(traced: TracedModel, layer: _Layer, work: Work) -> _Figures:
    program = traced.program
    specs = [traced.parameters[parameter] for parameter in layer.parameters]
    modules = [traced.units.modules[call.unit] for call in program.calls[slice(*layer.span)]]
    if layer.span.stop == program.end:  # it hands on what goes back to the script
        boundary_bytes = sum(program.outputs.returns[leaf].nbytes for leaf in program.returned())
    else:
        boundary_bytes = program.boundary_bytes(layer.span.stop)
    return _Figures("+".join(dict.fromkeys(type(module).__name__ for module in modules)), work,
                    sum(spec.nbytes for spec in specs), sum(spec.nbytes for spec in specs if spec.requires_grad),
                    boundary_bytes)


# Running one layer.

Make = Callable[[TensorSpec], torch.Tensor]
"""Makes a tensor for a spec, as a leaf that requires a gradient if the spec does."""


@dataclass
class _Materials:
    """What a layer's run starts from. All of it is counted elsewhere, not as working memory."""

    parameters: Dict[str, torch.Tensor]
    received: Dict[Value, torch.Tensor]
    gradients: Dict[Any, torch.Tensor]
    """Of what the layer hands on: by value, or by output leaf for the last layer."""


def _materials(traced: TracedModel, layer: _Layer, parameters: Dict[str, torch.Tensor], make: Make,
               given: Sequence[Value]) -> _Materials:
    """
    Args:
        given: the values of earlier calls that the run is handed.
    """
    program, stop = traced.program, layer.span.stop
    if stop == program.end:
        handed_on = {leaf: program.outputs.returns[leaf] for leaf in program.returned()}
    else:
        handed_on = {value: program.spec(value) for value in program.live(stop)}
    return _Materials(parameters, {value: make(program.spec(value)) for value in given},
                      {key: make(spec._replace(requires_grad=False)) for key, spec in handed_on.items()
                       if spec.requires_grad})


@contextmanager
def _forward(traced: TracedModel, layer: _Layer, materials: _Materials) -> Iterator[Handover]:
    with replayed(traced.entry, traced.units, traced.program, layer.span, materials.parameters, materials.received,
                  traced.args, traced.kwargs, lambda point: None) as handover:
        yield handover


def _drop(parameter: torch.Tensor) -> None:
    # A stage adds each gradient to its accumulator and frees it; so it counts as working memory until then.
    parameter.grad = None


def _leaf(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    tensor = tensor.detach().requires_grad_(requires_grad)
    if requires_grad:
        tensor.register_post_accumulate_grad_hook(_drop)
    return tensor


def _work_of_run(traced: TracedModel, layer: _Layer, materials: _Materials) -> Work:
    """FLOPs and working memory of one recomputation and backward; its forward is the recomputation."""
    held = [*materials.parameters.values(), *materials.received.values(), *materials.gradients.values(),
            *(leaf for leaf in tree_leaves((traced.args, traced.kwargs)) if isinstance(leaf, torch.Tensor)),
            *traced.entry.model.buffers()]
    memory, flops = _LiveBytes(held), FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    with torch.enable_grad(), memory, flops, _forward(traced, layer, materials) as handover:
        forward = flops.get_total_flops()
        handover.backward(materials.received, materials.gradients)
    return Work(forward, flops.get_total_flops(), memory.peak)


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


# Computed.


def _computed_work(traced: TracedModel, layer: _Layer) -> Work:
    try:
        with quiet(FAKE_TENSOR_LOGGER):
            return _fake_work(traced, layer)
    except NotSplittable:
        raise
    except Exception as error:  # whatever an operation without a fake version raises, as in a trace
        nbytes = sum(traced.parameters[name].nbytes for name in layer.parameters)
        if nbytes > LARGEST_ON_ZEROS:
            raise needs_weights(traced.program.calls[layer.span.start].unit, nbytes, error) from error

    def zeros(spec: TensorSpec) -> torch.Tensor:
        return _leaf(torch.zeros(spec.shape, dtype=spec.dtype, device=traced.device), spec.requires_grad)

    parameters = {name: zeros(traced.parameters[name]) for name in layer.parameters}
    with own_random_numbers(traced.device):
        return _work_of_run(traced, layer, _materials(traced, layer, parameters, zeros,
                                                      traced.program.live(layer.span.start)))


def _fake_work(traced: TracedModel, layer: _Layer) -> Work:
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(spec: TensorSpec) -> torch.Tensor:
        with mode:
            tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=traced.device)
        return _leaf(tensor, spec.requires_grad)

    # Every earlier value is given, not only those the layer needs: what the model's own code does with the
    # others would otherwise be done for real, on stand-ins.
    earlier = [Value(index, leaf) for index, call in enumerate(traced.program.calls[:layer.span.start])
               for leaf, known in enumerate(call.returns) if isinstance(known, TensorSpec)]
    parameters = {name: fake(traced.parameters[name]) for name in layer.parameters}
    with own_random_numbers(traced.device):
        return _work_of_run(traced, layer, _materials(traced, layer, parameters, fake, earlier))


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


# Measured.


def _real_work(traced: TracedModel, layer: _Layer, weights: Mapping[str, torch.Tensor]) -> Work:
    with own_random_numbers(traced.device):
        return _work_of_run(traced, layer, _real_materials(traced, layer, weights))


def _measured_seconds(traced: TracedModel, layer: _Layer, weights: Mapping[str, torch.Tensor], repeats: int,
                      budget_seconds: float) -> Tuple[float, float]:
    device, materials = traced.device, _real_materials(traced, layer, weights)
    forwards: List[float] = []
    backwards: List[float] = []
    begun = time.perf_counter()
    with own_random_numbers(device):
        while not forwards or (len(forwards) < repeats and time.perf_counter() - begun < budget_seconds):
            with _timed(device, forwards), torch.no_grad(), _forward(traced, layer, materials):
                pass
            with _timed(device, backwards), torch.enable_grad(), _forward(traced, layer, materials) as handover:
                handover.backward(materials.received, materials.gradients)
    return statistics.median(forwards), statistics.median(backwards)


def _real_materials(traced: TracedModel, layer: _Layer, weights: Mapping[str, torch.Tensor]) -> _Materials:
    generator = torch.Generator(traced.device).manual_seed(0)

    def random(spec: TensorSpec) -> torch.Tensor:
        tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=traced.device)
        return _leaf(tensor.normal_(generator=generator) if spec.dtype.is_floating_point else tensor, spec.requires_grad)

    parameters = {name: _leaf(weights[name].to(traced.device), traced.parameters[name].requires_grad)
                  for name in layer.parameters}
    return _materials(traced, layer, parameters, random, traced.program.live(layer.span.start))


@contextmanager
def _timed(device: torch.device, seconds: List[float]) -> Iterator[None]:
    def finished() -> float:
        if device.type != "cpu":
            getattr(torch, device.type).synchronize(device)
        return time.perf_counter()

    begun = finished()
    yield
    seconds.append(finished() - begun)

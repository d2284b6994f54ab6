"""A model's profile, layer by layer.

Layers alike in their settings, parameters and the tensors they exchange (a *kind*) run once.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Tuple

from mobius_ds.inputs.profile import LayerProfile, ModelProfile
from mobius_ds.model.program import Span
from mobius_ds.model.trace import settings
from mobius_ds.profiling.layer_run import LayerWork, TracedLayer
from mobius_ds.profiling.traced_model import TracedModel


class _Counted(NamedTuple):
    """All that is counted of a layer. What differs only in settings that change none of it is of one kind as well."""

    name: str
    """The classes of its modules."""
    work: LayerWork
    weight_bytes: int
    gradient_bytes: int
    boundary_bytes: int


def profile_layers(traced: TracedModel, name: str, count: Callable[[TracedLayer], LayerWork],
                   time_of: Callable[[TracedLayer, LayerWork], Tuple[float, float]]) -> ModelProfile:
    """The profile of a model whose layers are counted and timed so, one of each kind.

    Args:
        name: the model's.
        count: counts a layer's work.
        time_of: its seconds forward and backward.
    """
    of_kind: Dict[Any, LayerProfile] = {}
    of_figures: Dict[_Counted, LayerProfile] = {}
    layers: List[LayerProfile] = []
    for layer in _layers_of(traced):
        kind = _kind(traced, layer)
        if kind not in of_kind:
            figures = _counted(traced, layer, count(layer))
            if figures not in of_figures:
                namesakes = sum(other.name == figures.name for other in of_figures)
                title = f"{figures.name} #{namesakes + 1}" if namesakes else figures.name
                of_figures[figures] = LayerProfile(title, *time_of(layer, figures.work), figures.weight_bytes,
                                                   figures.gradient_bytes, figures.boundary_bytes,
                                                   figures.work.working_bytes)
            of_kind[kind] = of_figures[figures]
        layers.append(of_kind[kind])
    return ModelProfile(name, tuple(layers), traced.parameter_count)


def _layers_of(traced: TracedModel) -> List[TracedLayer]:
    program = traced.program
    starts = [*program.layer_starts(), program.end]
    return [TracedLayer(Span(start, stop), program.parameters_of(start, stop, traced.units.parameters))
            for start, stop in zip(starts, starts[1:])]


def _kind(traced: TracedModel, layer: TracedLayer) -> Any:
    """What layers have in common that cost the same."""
    (start, stop), program = layer.span, traced.program
    units = [call.unit for call in program.calls[start:stop]]
    loose = [traced.parameters[name] for call in program.calls[start:stop] for name in sorted(call.loose_parameters)]
    return (tuple(tuple(settings(unit, traced.units.modules[unit])) for unit in units),
            tuple(traced.parameters[name] for name in layer.parameters), tuple(loose),
            tuple(map(program.spec, program.live(start))), tuple(map(program.spec, program.live(stop))),
            start == 0, stop == program.end)


def _counted(traced: TracedModel, layer: TracedLayer, work: LayerWork) -> _Counted:
    program = traced.program
    specs = [traced.parameters[parameter] for parameter in layer.parameters]
    modules = [traced.units.modules[call.unit] for call in program.calls[slice(*layer.span)]]
    if layer.span.stop == program.end:  # it hands on what goes back to the script
        boundary_bytes = sum(program.outputs.returns[leaf].nbytes for leaf in program.returned())
    else:
        boundary_bytes = program.boundary_bytes(layer.span.stop)
    return _Counted("+".join(dict.fromkeys(type(module).__name__ for module in modules)), work,
                    sum(spec.nbytes for spec in specs), sum(spec.nbytes for spec in specs if spec.requires_grad),
                    boundary_bytes)

"""Profiles from runs on the model's own device, with its own weights: real, one kind of layer at a time."""

import statistics
import time
from contextlib import contextmanager
from typing import Iterator, List, Mapping, Tuple

import torch

from mobius_ds.inputs.profile import ModelProfile
from mobius_ds.model.program import TensorSpec
from mobius_ds.model.replay import own_random_numbers
from mobius_ds.profiling.layer_kinds import profile_layers
from mobius_ds.profiling.layer_run import (LayerWork, Materials, TracedLayer, leaf_of, materials_of, run_forward,
                                           work_of_run)
from mobius_ds.profiling.traced_model import TracedModel


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
    return profile_layers(traced, name, lambda layer: _real_work(traced, layer, weights),
                    lambda layer, work: _measured_seconds(traced, layer, weights, repeats, budget_seconds))


def _real_work(traced: TracedModel, layer: TracedLayer, weights: Mapping[str, torch.Tensor]) -> LayerWork:
    with own_random_numbers(traced.device):
        return work_of_run(traced, layer, _real_materials(traced, layer, weights))


def _measured_seconds(traced: TracedModel, layer: TracedLayer, weights: Mapping[str, torch.Tensor], repeats: int,
                      budget_seconds: float) -> Tuple[float, float]:
    device, materials = traced.device, _real_materials(traced, layer, weights)
    forwards: List[float] = []
    backwards: List[float] = []
    begun = time.perf_counter()
    with own_random_numbers(device):
        while not forwards or (len(forwards) < repeats and time.perf_counter() - begun < budget_seconds):
            with _timed(device, forwards), torch.no_grad(), run_forward(traced, layer, materials):
                pass
            with _timed(device, backwards), torch.enable_grad(), run_forward(traced, layer, materials) as handover:
                handover.backward(materials.received, materials.gradients)
    return statistics.median(forwards), statistics.median(backwards)


def _real_materials(traced: TracedModel, layer: TracedLayer, weights: Mapping[str, torch.Tensor]) -> Materials:
    generator = torch.Generator(traced.device).manual_seed(0)

    def random(spec: TensorSpec) -> torch.Tensor:
        tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=traced.device)
        return leaf_of(tensor.normal_(generator=generator) if spec.dtype.is_floating_point else tensor, spec.requires_grad)

    parameters = {name: leaf_of(weights[name].to(traced.device), traced.parameters[name].requires_grad)
                  for name in layer.parameters}
    return materials_of(traced, layer, parameters, random, traced.program.live(layer.span.start))


@contextmanager
def _timed(device: torch.device, seconds: List[float]) -> Iterator[None]:
    def finished() -> float:
        if device.type != "cpu":
            getattr(torch, device.type).synchronize(device)
        return time.perf_counter()

    begun = finished()
    yield
    seconds.append(finished() - begun)

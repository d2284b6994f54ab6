"""Profiles from FLOPs and a GPU's speed: layers run on fake tensors, or on zeros where fake ones do not do.

Operations that memory bandwidth bounds (norms, activations, embeddings) take no time.
"""

from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mobius_ds.inputs.profile import ModelProfile
from mobius_ds.inputs.topology import Gpu
from mobius_ds.model.errors import NotSplittable
from mobius_ds.model.program import Program, TensorSpec, Value
from mobius_ds.model.replay import own_random_numbers
from mobius_ds.model.trace import FAKE_TENSOR_LOGGER, LARGEST_ON_ZEROS, needs_weights, quiet
from mobius_ds.profiling.describe import Source, describe
from mobius_ds.profiling.layer_kinds import profile_layers
from mobius_ds.profiling.layer_run import LayerWork, TracedLayer, leaf_of, materials_of, work_of_run
from mobius_ds.profiling.traced_model import TracedModel, trace_model


class Profiled(NamedTuple):
    """A model profiled from its description."""

    profile: ModelProfile
    program: Program
    parameters: int
    """How many the model has; tied ones once."""


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


def computed_profile(traced: TracedModel, gpu: Gpu, name: str) -> ModelProfile:
    """Profiles from FLOPs and a GPU's speed; no weights are needed, nor memory.

    Raises:
        NotSplittable: a layer looks at its data, so that fake tensors do not do, and is too large to run on zeros.
    """
    return profile_layers(traced, name, lambda layer: _computed_work(traced, layer),
                          lambda layer, work: (work.forward_flops / gpu.flops, work.backward_flops / gpu.flops))


def _computed_work(traced: TracedModel, layer: TracedLayer) -> LayerWork:
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
        return leaf_of(torch.zeros(spec.shape, dtype=spec.dtype, device=traced.device), spec.requires_grad)

    parameters = {name: zeros(traced.parameters[name]) for name in layer.parameters}
    with own_random_numbers(traced.device):
        return work_of_run(traced, layer, materials_of(traced, layer, parameters, zeros,
                                                      traced.program.live(layer.span.start)))


def _fake_work(traced: TracedModel, layer: TracedLayer) -> LayerWork:
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(spec: TensorSpec) -> torch.Tensor:
        with mode:
            tensor = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=traced.device)
        return leaf_of(tensor, spec.requires_grad)

    # Every earlier value is given, not only those the layer needs: what the model's own code does with the
    # others would otherwise be done for real, on stand-ins.
    earlier = [Value(index, leaf) for index, call in enumerate(traced.program.calls[:layer.span.start])
               for leaf, known in enumerate(call.returns) if isinstance(known, TensorSpec)]
    parameters = {name: fake(traced.parameters[name]) for name in layer.parameters}
    with own_random_numbers(traced.device):
        return work_of_run(traced, layer, materials_of(traced, layer, parameters, fake, earlier))

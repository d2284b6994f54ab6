"""The profile: what each layer costs one GPU for one microbatch. Pure data; measured or computed elsewhere."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Dict, Tuple

BYTES_PER_PARAMETER = 4
"""Of the model size that traffic is compared with: 16-bit weights and 16-bit gradients, as in the paper."""


@dataclass(frozen=True)
class LayerProfile:
    """One layer. Layers with equal profiles are interchangeable, which keeps planning small."""

    name: str
    """Of the layer's kind, the same for all layers alike."""
    forward_seconds: float
    backward_seconds: float
    """Recomputation included."""
    weight_bytes: int
    """In compute dtype, as copied to the GPU."""
    gradient_bytes: int
    """As copied to DRAM; zero when frozen."""
    boundary_bytes: int
    """Of the activation it hands on."""
    working_bytes: int
    """The most it needs beside weights, gradients and boundary activations while it runs backward."""


@dataclass(frozen=True)
class ModelProfile:
    """The layers of a model in order, for one GPU type and one microbatch shape."""

    name: str
    layers: Tuple[LayerProfile, ...]
    parameters: int
    """Of the whole model; tied ones once."""

    @property
    def model_bytes(self) -> int:
        """The model's size as the paper counts it."""
        return BYTES_PER_PARAMETER * self.parameters

    @property
    def weight_bytes(self) -> int:
        """Weights of all layers."""
        return sum(layer.weight_bytes for layer in self.layers)

    def on_gpu_of(self, flops: float) -> "ModelProfile":
        """The times of a GPU of ``flops`` FLOP/s, for a profile that was made for one of 1 FLOP/s."""
        layers = (replace(layer, forward_seconds=layer.forward_seconds / flops,
                          backward_seconds=layer.backward_seconds / flops) for layer in self.layers)
        return replace(self, layers=tuple(layers))


def profile_from_json(data: Dict[str, Any]) -> ModelProfile:
    """A profile from its plain data (``dataclasses.asdict``).

    Raises:
        KeyError, TypeError: it has other keys.
        ValueError: a layer's time or bytes are not a number from 0 on, or there is no layer or no parameter.
    """
    layers = tuple(LayerProfile(**layer) for layer in data["layers"])
    if not layers or type(data["parameters"]) is not int or data["parameters"] < 1:
        raise ValueError(f"the profile of {data['name']} has {len(layers)} layers of {data['parameters']!r} parameters; "
                         "neither may be 0. Make the plan again with mobius-ds plan")
    for number, layer in enumerate(layers):
        for figure, value in asdict(layer).items():
            if figure != "name" and not (type(value) in (int, float) and 0 <= value < math.inf):
                raise ValueError(f"{figure} of layer {number} of {data['name']} is {value!r}; it must be a number from 0 "
                                 "on. Make the plan again with mobius-ds plan")
    return ModelProfile(**{**data, "layers": layers})

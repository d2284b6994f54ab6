"""The profile: what each layer costs one GPU for one microbatch. Pure data; measured or computed elsewhere."""

from dataclasses import dataclass, replace
from typing import Any, Dict, Tuple


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
        """The model's size as the paper counts it: 4 bytes a parameter."""
        return 4 * self.parameters

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
    """A profile from its plain data (``dataclasses.asdict``)."""
    return ModelProfile(**{**data, "layers": tuple(LayerProfile(**layer) for layer in data["layers"])})

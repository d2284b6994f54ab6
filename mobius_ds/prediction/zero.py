"""What a step of ZeRO and of plain data parallelism would take."""

from dataclasses import replace
from typing import List, Sequence

from mobius_ds.inputs.profile import LayerProfile, ModelProfile
from mobius_ds.inputs.topology import Topology
from mobius_ds.partition.problem import problem_of
from mobius_ds.prediction.prediction import Prediction, predicted
from mobius_ds.schedule.peers import zero3_offload_schedule
from mobius_ds.schedule.tasks import DEPTH
from mobius_ds.simulation.costs import bandwidths, collective_costs, zero3_costs

STATE_BYTES_PER_PARAMETER = 14
"""What a trained parameter takes on GPUs that hold its training state: 16-bit gradient, fp32 master, two moments."""
ON_GPU_BYTES_PER_PARAMETER = 2 + STATE_BYTES_PER_PARAMETER
"""What a trained parameter takes on a GPU that holds everything: its 16-bit weight as well."""


def predict_zero3_offload(profile: ModelProfile, topology: Topology) -> Prediction:
    """A ZeRO-3 step with everything offloaded: each GPU runs the whole model on its own micro-batch."""
    memory = _gathered_bytes(profile) + _activation_bytes(profile)
    problem = problem_of(profile, topology, topology.size)
    update = sum(map(problem.update_seconds, profile.layers)) / topology.size  # every rank its shard, all at once
    return predicted("zero3-offload", [zero3_offload_schedule(profile.layers, topology.size)],
                     zero3_costs(profile.layers, topology), bandwidths(topology), topology, update,
                     [memory] * topology.size)


def offloaded_bytes(profile: ModelProfile) -> int:
    """DRAM for weights, and for fp32 masters, gradients and two moments of what is trained; of ZeRO-3 and Mobius alike."""
    return profile.weight_bytes + 16 * _trained(profile)


def predict_zero3_on_gpu(profile: ModelProfile, topology: Topology) -> Prediction:
    """A ZeRO-3 step without offload: the GPUs' memory holds the model and its training state, a share each.

    Assumes that ring collectives carry all bytes and reach the full rate of the direct connection (or of PCIe, through
    DRAM, without one); that a layer is gathered while the one before runs; that activations are checkpointed.
    """
    shards = (2 * profile.parameters + STATE_BYTES_PER_PARAMETER * _trained(profile)) // topology.size
    return _on_gpu("zero3-on-gpu", _of_others(profile, topology, gathered=1, reduced=1), profile, topology,
                   shards + _gathered_bytes(profile))


def predict_zero2_on_gpu(profile: ModelProfile, topology: Topology) -> Prediction:
    """A ZeRO-2 step without offload: every GPU holds the weights, and a share of gradients and optimizer state.

    Assumes what ``predict_zero3_on_gpu`` does, and that new weights are gathered as gradients are reduced, beside the
    backward: as many bytes as DDP moves.
    """
    memory = 2 * profile.parameters + STATE_BYTES_PER_PARAMETER * _trained(profile) // topology.size
    return _on_gpu("zero2-on-gpu", _of_others(profile, topology, gathered=0, reduced=2), profile, topology, memory)


def predict_ddp(profile: ModelProfile, topology: Topology) -> Prediction:
    """A step of plain data parallelism: every GPU holds everything and averages the gradients.

    Assumes that a layer's gradient is averaged, which moves it twice, while the layers below run backward; that
    activations are checkpointed.
    """
    memory = 2 * profile.parameters + STATE_BYTES_PER_PARAMETER * _trained(profile)
    return _on_gpu("ddp", _of_others(profile, topology, gathered=0, reduced=2), profile, topology, memory)


def accumulated(prediction: Prediction, micro_batches: int) -> Prediction:
    """The step of so many micro-batches per rank, where each is swept by itself, as a loop over forward and backward does.

    For DDP it is an upper bound: DDP can wait with its reduction for the last one.
    """
    moved = {category: micro_batches * nbytes for category, nbytes in prediction.bytes_by_category.items()}
    return replace(prediction, sweeps=micro_batches * prediction.sweeps, bytes_by_category=moved)


def _trained(profile: ModelProfile) -> int:
    """Parameters that are trained; tied ones once."""
    return min(sum(layer.gradient_bytes for layer in profile.layers) // 2, profile.parameters)


def _gathered_bytes(profile: ModelProfile) -> int:
    """What a GPU holds of layers that come and go: two layers' weights and one's gradients."""
    weights, gradients = zip(*((layer.weight_bytes, layer.gradient_bytes) for layer in profile.layers))
    return DEPTH * max(weights) + max(gradients)


def _activation_bytes(profile: ModelProfile) -> int:
    """What a GPU holds that runs the whole model on one micro-batch: checkpoints, and what one layer works in."""
    return sum(layer.boundary_bytes for layer in profile.layers) + max(layer.working_bytes for layer in profile.layers)


def _of_others(profile: ModelProfile, topology: Topology, gathered: int, reduced: int) -> List[LayerProfile]:
    """The layers with the bytes that one GPU gets of the others: times a weight is gathered, and a gradient moved."""
    others = (topology.size - 1) / topology.size
    return [replace(layer, weight_bytes=int(gathered * others * layer.weight_bytes),
                    gradient_bytes=int(reduced * others * layer.gradient_bytes)) for layer in profile.layers]


def _on_gpu(name: str, layers: Sequence[LayerProfile], profile: ModelProfile, topology: Topology,
            state_bytes: int) -> Prediction:
    return predicted(name, [zero3_offload_schedule(layers, topology.size)], collective_costs(layers, topology),
                     bandwidths(topology), topology, 0.0, [state_bytes + _activation_bytes(profile)] * topology.size)

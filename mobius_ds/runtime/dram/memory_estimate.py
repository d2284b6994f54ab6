"""What training a model takes of a node's DRAM, part by part, and the refusal where that is more than there is.

A machine whose DRAM runs out kills a process without a word. So it is asked before: when the model is adopted, and again
before the first forward that needs more room for activations than any before it.
"""

from typing import Any, Callable, Dict, Iterable, Mapping, NamedTuple, Optional

import torch

from mobius_ds.inputs.units import readable
from mobius_ds.machine.host_memory import available_dram, binding_cap
from mobius_ds.runtime.dram.store import Layout
from mobius_ds.runtime.ranks.errors import OutOfMemory
from mobius_ds.schedule.mobius import Volumes

BytesByPart = Dict[str, int]
"""Bytes by what they are for."""

_TENSORS_OF_OPTIMIZER = {"sgd": 0, "lion": 1, "deepspeedcpulion": 1, "fusedlion": 1, "adagrad": 1, "deepspeedcpuadagrad": 1}
_ADAM_TENSORS = 2


class Dram(NamedTuple):
    """What one rank sees of its node's DRAM; its message to the others, so that all come to the same answer."""

    available: int
    limit: str
    """What leaves no more than that."""

    @classmethod
    def here(cls) -> "Dram":
        """As it is now."""
        cap = binding_cap()
        return cls(available_dram(), "on this machine" if cap is None else
                   f"in the control group {cap.group}, which is allowed {readable(cap.limit)}")


class OptimizerMemory(NamedTuple):
    """What a job's optimizer keeps."""

    tensors: int
    """fp32, of a parameter's size each; made at the first step."""
    present: Callable[[], int]
    """Bytes that this rank has of them by now."""


def state_tensors(optimizer: Optional[str], momentum: float = 0.0) -> int:
    """How many fp32 tensors of a parameter's size an optimizer keeps.

    Args:
        optimizer: the name of its class or in the config; None for a job that does not train. One that is not known is
            taken for Adam.
        momentum: SGD's.
    """
    if optimizer is None:
        return 0
    return _TENSORS_OF_OPTIMIZER.get(optimizer.lower(), _ADAM_TENSORS) + (optimizer.lower() == "sgd" and momentum > 0)


def state_bytes(state: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of an optimizer's state by parameter."""
    return sum(value.nbytes for values in state for value in values.values() if isinstance(value, torch.Tensor))


def training_parts(layout: Layout, tensors: int) -> BytesByPart:
    """What a model takes whatever its batches are.

    Args:
        tensors: of a parameter's size in the optimizer's state.
    """
    return {"weights": layout.weight_bytes,
            "fp32 masters": layout.full_bytes if layout.needs_masters else 0,
            "gradients": layout.full_bytes,
            "optimizer state": tensors * layout.full_bytes}


def activation_bytes(moved: Volumes) -> int:
    """What one forward and its backward keep in DRAM, over all ranks: inputs, boundary activations and their gradients."""
    return sum(moved.inputs) + sum(sum(stage) for stage in (*moved.made, *moved.made_gradients))


def check_dram(parts: BytesByPart, present: BytesByPart, dram: Dram, advice: str) -> None:
    """Refuses what does not fit.

    Args:
        present: what is in memory already of each part; no more of it counts than the part needs.
        advice: what to do about it.

    Raises:
        OutOfMemory: with the parts, need and have.
    """
    there = sum(min(nbytes, present.get(name, 0)) for name, nbytes in parts.items())
    need, have = sum(parts.values()), there + dram.available
    if need <= have:
        return
    rows = {**{name: nbytes for name, nbytes in parts.items() if nbytes}, "needed": need,
            "in memory already": there, f"free {dram.limit}": dram.available}
    width = max(map(len, rows))
    table = "\n".join(f"  {name:<{width}}  {readable(nbytes):>11}" for name, nbytes in rows.items())
    raise OutOfMemory(f"training this model needs {readable(need)} of DRAM, but only {readable(have)} are available:\n"
                      f"{table}\n{advice}")

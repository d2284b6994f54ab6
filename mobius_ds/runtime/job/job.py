"""What planning has to know of a running job, and what it answers."""

from typing import Callable, Mapping, NamedTuple, Optional

import torch

from mobius_ds.config import MobiusConfig
from mobius_ds.model.discovery import Units
from mobius_ds.model.program import Program
from mobius_ds.planner.planner import Request
from mobius_ds.prediction.mobius import predict_mobius
from mobius_ds.prediction.prediction import Prediction
from mobius_ds.profiling.traced_model import TracedModel
from mobius_ds.runtime.dram.store import Layout
from mobius_ds.schedule.plan import Plan
from mobius_ds.schedule.tasks import DEPTH


class Job(NamedTuple):
    """What planning has to know of a job."""

    reference: Program
    """The first forward's program, whose layers are planned."""
    units: Units
    layout: Layout
    config: MobiusConfig
    gpus: int
    budget: Optional[int]
    """Device memory each rank may use, bytes."""
    input_bytes: int
    """Of one sweep's inputs, which every device holds."""
    microbatches: int
    traced: Callable[[], TracedModel]
    """The model with the microbatch of the first forward, on the rank that plans."""
    weights: Mapping[str, torch.Tensor]


class Chosen(NamedTuple):
    """A job's plan."""

    plan: Plan
    how: str
    """A paragraph that says how it came about."""
    request: Optional[Request] = None
    """What it was planned for; None for a partition by hand or an even one."""

    def predicted(self, microbatches: int, slots: int = DEPTH) -> Optional[Prediction]:
        """What a step of so many micro-batches would take on the topology it was planned for."""
        if self.request is None:
            return None
        return predict_mobius(self.request.profile, self.request.topology, self.plan, microbatches, slots)

"""What is rehearsed, and what each rank reports of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import List, NamedTuple, Optional

from mobius_ds.inputs.topology import Topology
from mobius_ds.model.program import Program
from mobius_ds.planner.planner import Planned
from mobius_ds.profiling.describe import Source
from mobius_ds.runtime.device.ledger import Bytes
from mobius_ds.schedule.tasks import DEPTH
from mobius_ds.simulation.steps import Step


@dataclass(frozen=True)
class Rehearsal:
    """What is rehearsed; the same on every rank."""

    source: Source
    """The model's description."""
    samples: int
    """In a micro-batch."""
    sequence: int
    """Tokens in a sample."""
    program: Program
    """Of the model's forward."""
    planned: Planned
    """What to run, on which topology, and the seconds of its layers."""
    steps: int
    """The first one warms up: programs are exchanged, schedules proved."""
    timeout_seconds: float
    """How long a rank waits for another one."""
    slots: int = DEPTH
    """One for a step without prefetching."""
    trace: Optional[Path] = None
    """Where to record it."""

    @property
    def topology(self) -> Topology:
        """The emulated server."""
        return self.planned.request.topology


class RankStep(NamedTuple):
    """One step of one rank. Times are of ``time.perf_counter``, the same clock for all ranks."""

    begun: float
    """After the last rank had ended the step before."""
    forward_done: float
    backward_done: float
    processor_seconds: float
    """What the runtime, and the emulation, took of this machine's processors."""
    moved: Bytes
    """Bytes by category, as the ledger counted them."""
    predicted: Bytes
    """The same, by the schedules."""


class RankReport(NamedTuple):
    """What one rank has to say."""

    steps: List[RankStep]
    last: Step
    """The last step of all ranks, task by task."""
    resident_bytes: int
    """Of its process at the end."""
    stored_bytes: int
    """Of the model's store that are in memory."""

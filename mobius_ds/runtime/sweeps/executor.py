"""The executor: runs schedules on one rank with real tensors."""

from typing import Callable, Dict, List, Optional, Sequence

import torch

from mobius_ds.model.discovery import Units
from mobius_ds.model.replay import Replayer
from mobius_ds.runtime.device.device import Device
from mobius_ds.runtime.dram.activations import ActivationStore, Placed
from mobius_ds.runtime.dram.store import ParameterStore
from mobius_ds.runtime.ranks.mailbox import Mailbox
from mobius_ds.runtime.record.trace import Recorder
from mobius_ds.runtime.sweeps.results import Outputs
from mobius_ds.runtime.sweeps.run import ScheduleRun
from mobius_ds.runtime.sweeps.stage_work import Holdings, StageWork
from mobius_ds.runtime.sweeps.sweep import Sweep
from mobius_ds.schedule.plan import Plan
from mobius_ds.schedule.schedule import Schedule
from mobius_ds.schedule.tasks import Key, Kind


class Executor:
    """Runs schedules on one rank."""

    def __init__(self, rank: int, plan: Plan, units: Units, device: Device, mailbox: Mailbox,
                 activations: ActivationStore, store: ParameterStore, recorder: Optional[Recorder] = None):
        self.rank = rank
        self.plan = plan
        self.units = units
        self.recorder = recorder
        self.holdings = Holdings(rank, plan, device, mailbox, activations, store)

    def replayer(self, sweep: Sweep) -> Replayer:
        """What runs the layers of a sweep's stages."""
        return Replayer(sweep.entry, self.units, sweep.parts)

    def forward(self, sweep: Sweep, schedule: Schedule,
                inputs: Sequence[Sequence[torch.Tensor]]) -> List[Outputs]:
        """Runs a forward sweep.

        Args:
            inputs: the input tensors of this rank's microbatches, on the device.

        Returns:
            The outputs of this rank's microbatches.
        """
        work = StageWork(self.holdings, sweep, schedule, self.replayer(sweep))
        work.own_inputs = dict(zip(work.own, inputs))
        run = ScheduleRun(work, schedule, self.recorder)
        run.run()
        return [run.events[Key(Kind.OUTPUTS, None, microbatch)].result() for microbatch in work.own]

    def backward(self, sweep: Sweep, schedule: Schedule, output_gradients: Sequence[Dict[int, torch.Tensor]],
                 added_to: frozenset, update: Callable[[int], None]) -> List[Placed]:
        """Runs a backward sweep; the gradients add up in the store.

        Args:
            output_gradients: for each of this rank's microbatches, gradients by output leaf.
            added_to: parameters whose gradient in the store is to be added to, not overwritten.
            update: runs the optimizer for the parameters a stage updates, where the schedule says so.

        Returns:
            What this rank placed in DRAM for it; it may be freed once every rank is done.
        """
        work = StageWork(self.holdings, sweep, schedule, self.replayer(sweep))
        work.own_gradients = dict(zip(work.own, output_gradients))
        work.added_to = added_to
        work.update = update
        ScheduleRun(work, schedule, self.recorder).run()
        return work.placed

"""The schedules of a job's sweeps: made once for sweeps that are alike, proved before they run, and added up."""

from types import MappingProxyType
from typing import Dict, FrozenSet, List, Mapping, Sequence, Set

from mobius_ds.runtime.device.ledger import Bytes, no_bytes
from mobius_ds.runtime.dram.store import Layout
from mobius_ds.runtime.ranks.mailbox import Mailbox
from mobius_ds.runtime.sweeps.kept import Kept
from mobius_ds.runtime.sweeps.sweep import Sweep, giving_stages, sharing_stages, volumes
from mobius_ds.schedule.mobius import Volumes, backward_schedule, forward_schedule, outputs_schedule
from mobius_ds.schedule.plan import Plan
from mobius_ds.schedule.proof import check_schedule
from mobius_ds.schedule.schedule import BACKWARD, FORWARD, Schedule


class SweepSchedules:
    """Makes the schedules of sweeps under one plan.

    Args:
        rank: whose bytes are counted as predicted.
        mailbox: tells the other ranks of a proof that fails.
        slots: stages whose weights a device holds at once.
    """

    def __init__(self, plan: Plan, layout: Layout, rank: int, mailbox: Mailbox, slots: int):
        self._plan = plan
        self._layout = layout
        self._rank = rank
        self._mailbox = mailbox
        self._slots = slots
        self._kept = Kept()
        self._known_orders: Set[int] = set()
        self._predicted = no_bytes()

    def volumes(self, sweep: Sweep) -> Volumes:
        """The bytes of a forward."""
        return self._kept.once(("volumes", sweep.form), lambda: volumes(self._plan, sweep, self._layout))

    def forward(self, sweep: Sweep) -> Schedule:
        """Of a forward."""
        return self._kept.once((FORWARD, sweep.form), lambda: self._proved(
            forward_schedule(self._plan, sweep.home, self.volumes(sweep), self._slots)))

    def outputs(self, sweep: Sweep) -> Schedule:
        """Of a forward's last stage once more, for outputs that were left behind."""
        return self._proved(outputs_schedule(self._plan, sweep.home, volumes(self._plan, sweep, self._layout)))

    def backward(self, sweep: Sweep, given: Sequence[FrozenSet[int]], updated_by: Dict[int, List[str]]) -> Schedule:
        """Of a backward.

        Args:
            given: the output leaves of each microbatch whose gradients are given.
            updated_by: for each stage the parameters it updates within the sweep; empty to update none.
        """
        return self._kept.once((BACKWARD, sweep.form, tuple(given), bool(updated_by)),
                               lambda: self._backward(sweep, given, updated_by))

    def _backward(self, sweep: Sweep, given: Sequence[FrozenSet[int]], updated_by: Dict[int, List[str]]) -> Schedule:
        shared = sharing_stages(self._plan, sweep, self._layout)
        updates = giving_stages(updated_by, sweep)
        moved = volumes(self._plan, sweep, self._layout, given)
        schedule = backward_schedule(self._plan, sweep.home, moved, shared, updates, self._slots)
        return self._proved(schedule, shared, updates)

    def _proved(self, schedule: Schedule, shared: Mapping[int, Sequence[int]] = MappingProxyType({}),
                updates: Mapping[int, Sequence[int]] = MappingProxyType({})) -> Schedule:
        """A schedule that is proved right, the first time its order is met."""
        order = hash(tuple((task.key, task.gpu, task.after) for task in schedule.tasks))
        if order not in self._known_orders:
            with self._mailbox.told():
                check_schedule(schedule, self._plan, shared, updates)
            self._known_orders.add(order)
        return schedule

    def count(self, schedule: Schedule) -> Schedule:
        """Counts the bytes of a schedule that is about to run as predicted."""
        for category, nbytes in schedule.bytes_by_category(self._rank).items():
            self._predicted[category] += nbytes
        return schedule

    def take_predicted(self) -> Bytes:
        """The bytes of this rank's tasks in the schedules run since the last call."""
        taken, self._predicted = self._predicted, no_bytes()
        return taken

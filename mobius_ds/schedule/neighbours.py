"""Who gives what to whom. The one place that knows which stage stands before another: a forward goes up through the
stages, a backward comes down, and at both ends stands the microbatch's home."""

from typing import Optional

from mobius_ds.schedule.tasks import Key, Kind

GIVES = {Kind.FORWARD: Kind.GIVE_ACTIVATIONS, Kind.BACKWARD: Kind.GIVE_GRADIENTS}
"""The task that copies out what a compute made."""


def stage_before(compute: Kind, stage: int) -> int:
    """The stage whose forward or backward comes before this one's."""
    return stage - 1 if compute is Kind.FORWARD else stage + 1


def stage_after(compute: Kind, stage: int) -> int:
    """The stage whose forward or backward comes after this one's."""
    return stage + 1 if compute is Kind.FORWARD else stage - 1


def giver_of(key: Key, stages: int) -> Optional[Key]:
    """The task that copies to DRAM what ``key`` copies from there; None for one that copies no such thing.

    Args:
        stages: how many there are.
    """
    kind, stage, microbatch = key
    if kind is Kind.INPUTS:
        return Key(Kind.GIVE_INPUTS, None, microbatch)
    if kind is Kind.ACTIVATIONS:
        return Key(Kind.GIVE_ACTIVATIONS, stage_before(Kind.FORWARD, stage), microbatch)
    if kind is Kind.OUTPUTS:
        return Key(Kind.GIVE_ACTIVATIONS, stages - 1, microbatch)
    if kind is Kind.GRADIENTS:
        if stage == stages - 1:
            return Key(Kind.GIVE_OUTPUT_GRADIENTS, None, microbatch)
        return Key(Kind.GIVE_GRADIENTS, stage_before(Kind.BACKWARD, stage), microbatch)
    return None

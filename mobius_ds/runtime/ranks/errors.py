"""What can go wrong between the ranks of a pipeline."""

import torch


class PipelineError(RuntimeError):
    """The pipeline cannot go on; the message says what happened, where, and what to do."""


class PeerLost(PipelineError):
    """Another rank's process is gone or has failed.

    Args:
        rank, reason: which rank was lost first, and why.
    """

    def __init__(self, message: str, rank: int, reason: str):
        super().__init__(message)
        self.rank = rank
        self.reason = reason


class PeerOutOfMemory(PeerLost, torch.OutOfMemoryError):
    """Another rank has failed, and what failed is its device's memory: scripts catch it on all ranks alike."""


class PeerTimeout(PipelineError):
    """Another rank did not do its part in time.

    Args:
        rank, reason: which rank holds up all others, and how that was found out.
    """

    def __init__(self, message: str, rank: int, reason: str):
        super().__init__(message)
        self.rank = rank
        self.reason = reason


class OutOfStep(PipelineError):
    """The ranks did not make the same calls in the same order."""


class OutOfMemory(PipelineError):
    """Something does not fit; the message has need and have."""


class DeviceOutOfMemory(OutOfMemory, torch.OutOfMemoryError):
    """A device's memory is used up; what scripts catch to try smaller batches."""


class CheckpointError(PipelineError):
    """A checkpoint cannot be written or read; the same error on every rank."""

"""What can go wrong between the ranks of a pipeline."""


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


class PeerTimeout(PipelineError):
    """Another rank did not do its part in time."""


class OutOfStep(PipelineError):
    """The ranks did not make the same calls in the same order."""


class OutOfMemory(PipelineError):
    """Something does not fit; the message has need and have."""

"""What can go wrong between the ranks of a pipeline."""


class PipelineError(RuntimeError):
    """The pipeline cannot go on; the message says what happened, where, and what to do."""


class PeerLost(PipelineError):
    """Another rank's process is gone or has failed."""


class PeerTimeout(PipelineError):
    """Another rank did not do its part in time."""


class OutOfStep(PipelineError):
    """The ranks did not make the same calls in the same order."""


class OutOfMemory(PipelineError):
    """Something does not fit; the message has need and have."""

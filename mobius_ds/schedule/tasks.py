"""What a task is: one compute or one transfer, with its stream, its bytes and what it waits for.

Note [two of each]. A GPU holds two stages' weights (slots), two stages' weight gradients, and per stage two
microbatches' boundary activations on the way in and two on the way out. Task number k therefore waits for
the end of the use that task number k - 2 made of the same memory.
"""

import re
from enum import Enum
from typing import NamedTuple, Optional, Tuple

DEPTH = 2
"""Buffers of each kind on a GPU; see Note [two of each]."""

CATEGORIES = ("parameters_in", "gradients_out", "activations_in", "activations_out", "other")
"""What a transferred byte was: weights arriving at a GPU, weight gradients leaving it, boundary
activations and their gradients in either direction, and everything else (a microbatch's inputs)."""
DELIVERED = CATEGORIES[:-1]
"""Those that the paper counts."""
_PARAMETERS, _GRADIENTS, _ACTIVATIONS_IN, _ACTIVATIONS_OUT, _OTHER = CATEGORIES


class Stream(str, Enum):
    """A queue of one GPU: tasks of one stream run in order, tasks of different streams at the same time."""

    COMPUTE = "compute"
    """Runs the layers."""
    PREFETCH = "prefetch"
    """Copies weights in. A copy waits for a slot, that is for compute."""
    LOAD = "load"
    """Copies activations and their gradients in. A copy waits for another GPU; behind a queue shared with ``PREFETCH``
    each would wait for the other's reason."""
    STORE = "store"
    """Copies activations and their gradients out. Another GPU waits for each copy."""
    OFFLOAD = "offload"
    """Copies weight gradients out. Nobody waits for them, so they must not delay ``STORE``."""
    UPDATE = "update"
    """Runs the optimizer on the CPU, beside all of these."""


class Kind(str, Enum):
    """What a task does: the letter it prints as, the stream it runs on, and the category of its bytes, if it moves any.

    The one table of these. Whoever counts, draws or runs tasks by stream or category asks it.
    """

    stream: Stream
    category: Optional[str]

    FORWARD = "F", Stream.COMPUTE
    BACKWARD = "B", Stream.COMPUTE
    WEIGHTS = "W", Stream.PREFETCH, _PARAMETERS
    """Copy a stage's weights into a slot."""
    GIVE_INPUTS = "P", Stream.STORE, _OTHER
    """Copy a microbatch's inputs from its home GPU to DRAM."""
    INPUTS = "I", Stream.LOAD, _OTHER
    """Copy a microbatch's inputs to a GPU that runs stages for it; ``stage`` is the first of them."""
    ACTIVATIONS = "A", Stream.LOAD, _ACTIVATIONS_IN
    """Copy a stage's boundary activations in."""
    GIVE_ACTIVATIONS = "S", Stream.STORE, _ACTIVATIONS_OUT
    """Copy the boundary activations a stage made out to DRAM; for the last stage, the model's outputs."""
    OUTPUTS = "R", Stream.LOAD, _ACTIVATIONS_IN
    """Copy a microbatch's outputs to its home GPU."""
    GIVE_OUTPUT_GRADIENTS = "X", Stream.STORE, _ACTIVATIONS_OUT
    """Copy the gradients of a microbatch's outputs from its home GPU to DRAM."""
    GRADIENTS = "G", Stream.LOAD, _ACTIVATIONS_IN
    """Copy the gradients of what a stage handed over in."""
    GIVE_GRADIENTS = "T", Stream.STORE, _ACTIVATIONS_OUT
    """Copy the gradients of a stage's boundary activations out to DRAM."""
    WEIGHT_GRADIENTS = "D", Stream.OFFLOAD, _GRADIENTS
    """Copy a stage's weight gradients out to DRAM."""
    RECOMPUTE = "C", Stream.COMPUTE
    """Run a stage's forward again before its backward, where a schedule separates the two."""
    UPDATE = "U", Stream.UPDATE
    """Run the optimizer, on the CPU, for the parameters whose first stage this is."""
    GATHER = "Q", Stream.PREFETCH, _PARAMETERS
    """Collect a layer's weights on every GPU from all GPUs' shards; ``microbatch`` is the GPU's own."""
    REDUCE = "E", Stream.OFFLOAD, _GRADIENTS
    """Reduce a layer's weight gradients over all GPUs, each keeping its shard in DRAM."""

    def __new__(cls, letter: str, stream: Stream, category: Optional[str] = None) -> "Kind":
        kind = str.__new__(cls, letter)
        kind._value_, kind.stream, kind.category = letter, stream, category
        return kind


def stream_of(category: str) -> Stream:
    """The stream of the first kind of task that moves bytes of a category; also of engines that have no such tasks."""
    return next(kind.stream for kind in Kind if kind.category == category)


class Key(NamedTuple):
    """A task's name within its sweep; prints as ``2F0`` (stage 2, forward, microbatch 0), ``2W`` or ``P3``."""

    kind: Kind
    stage: Optional[int] = None
    microbatch: Optional[int] = None

    def __str__(self) -> str:
        return f"{'' if self.stage is None else self.stage}{self.kind.value}" \
               f"{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Key":
        """The key that prints as ``text``.

        Raises:
            ValueError: none does.
        """
        parts = _PRINTED.fullmatch(text)
        if parts is None:
            raise ValueError(f"{text!r} is no task's name, such as 2F0, 2W or P3")
        stage, kind, microbatch = parts.groups()
        return cls(Kind(kind), stage and int(stage), microbatch and int(microbatch))


_PRINTED = re.compile(f"([0-9]+)?([{''.join(kind.value for kind in Kind)}])([0-9]+)?")


class Task(NamedTuple):
    """One compute or one transfer."""

    key: Key
    gpu: int
    nbytes: int
    after: Tuple[Key, ...]

    @property
    def stream(self) -> Stream:
        """The stream it runs on."""
        return self.key.kind.stream

    @property
    def category(self) -> Optional[str]:
        """The ledger's category of its bytes; None for compute."""
        return self.key.kind.category

    @property
    def is_outward(self) -> bool:
        """Whether it copies from its GPU to DRAM."""
        return self.stream in (Stream.STORE, Stream.OFFLOAD)

    def __str__(self) -> str:
        waits = f" after {','.join(map(str, self.after))}" if self.after else ""
        return f"{self.key}{f' {self.nbytes}B' if self.nbytes else ''}{waits}"

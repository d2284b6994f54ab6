"""The schedule: every task of a sweep, as data.

A *sweep* takes all microbatches once through all stages, forward or backward. Its schedule lists, for
each GPU and each of its streams, the tasks in the order in which they run, with the bytes they move, the
category of those bytes, and the tasks they wait for. The executor runs it, the simulator plays it, the
report adds it up.

Each GPU has six streams, each with its reason:

- ``compute`` runs the layers.
- ``prefetch`` copies weights in. A copy waits for a slot, that is for compute.
- ``load`` copies activations and their gradients in. A copy waits for another GPU; behind a queue shared
  with ``prefetch`` each would wait for the other's reason.
- ``store`` copies activations and their gradients out. Another GPU waits for each copy.
- ``offload`` copies weight gradients out. Nobody waits for them, so they must not delay ``store``.
- ``update`` runs the optimizer on the CPU, beside all of these.

Note [two of each]. A GPU holds two stages' weights (slots), two stages' weight gradients, and per stage two
microbatches' boundary activations on the way in and two on the way out. Task number k therefore waits for
the end of the use that task number k - 2 made of the same memory.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum
from typing import Dict, NamedTuple, Optional, Tuple

DEPTH = 2
"""Buffers of each kind on a GPU; see Note [two of each]."""

FORWARD, OUTPUTS, BACKWARD = "forward", "outputs", "backward"
"""Names of Mobius' sweeps. ``outputs`` runs the last stage of a forward once more."""


class Stream(str, Enum):
    """A queue of one GPU: tasks of one stream run in order, tasks of different streams at the same time."""

    COMPUTE = "compute"
    PREFETCH = "prefetch"
    LOAD = "load"
    STORE = "store"
    OFFLOAD = "offload"
    UPDATE = "update"


class Kind(str, Enum):
    """What a task does. The value is the letter it prints as."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHTS = "W"
    """Copy a stage's weights into a slot."""
    GIVE_INPUTS = "P"
    """Copy a microbatch's inputs from its home GPU to DRAM."""
    INPUTS = "I"
    """Copy a microbatch's inputs to a GPU that runs stages for it; ``stage`` is the first of them."""
    ACTIVATIONS = "A"
    """Copy a stage's boundary activations in."""
    GIVE_ACTIVATIONS = "S"
    """Copy the boundary activations a stage made out to DRAM; for the last stage, the model's outputs."""
    OUTPUTS = "R"
    """Copy a microbatch's outputs to its home GPU."""
    GIVE_OUTPUT_GRADIENTS = "X"
    """Copy the gradients of a microbatch's outputs from its home GPU to DRAM."""
    GRADIENTS = "G"
    """Copy the gradients of what a stage handed over in."""
    GIVE_GRADIENTS = "T"
    """Copy the gradients of a stage's boundary activations out to DRAM."""
    WEIGHT_GRADIENTS = "D"
    """Copy a stage's weight gradients out to DRAM."""
    RECOMPUTE = "C"
    """Run a stage's forward again before its backward, where a schedule separates the two."""
    UPDATE = "U"
    """Run the optimizer, on the CPU, for the parameters whose first stage this is."""
    GATHER = "Q"
    """Collect a layer's weights on every GPU from all GPUs' shards; ``microbatch`` is the GPU's own."""
    REDUCE = "E"
    """Reduce a layer's weight gradients over all GPUs, each keeping its shard in DRAM."""


STREAM_OF = {
    Kind.FORWARD: Stream.COMPUTE, Kind.BACKWARD: Stream.COMPUTE, Kind.RECOMPUTE: Stream.COMPUTE,
    Kind.UPDATE: Stream.UPDATE, Kind.WEIGHTS: Stream.PREFETCH, Kind.GATHER: Stream.PREFETCH, Kind.REDUCE: Stream.OFFLOAD,
    Kind.INPUTS: Stream.LOAD, Kind.ACTIVATIONS: Stream.LOAD, Kind.OUTPUTS: Stream.LOAD, Kind.GRADIENTS: Stream.LOAD,
    Kind.GIVE_INPUTS: Stream.STORE, Kind.GIVE_ACTIVATIONS: Stream.STORE, Kind.GIVE_GRADIENTS: Stream.STORE,
    Kind.GIVE_OUTPUT_GRADIENTS: Stream.STORE, Kind.WEIGHT_GRADIENTS: Stream.OFFLOAD,
}
CATEGORY_OF = {
    Kind.WEIGHTS: "parameters_in", Kind.GATHER: "parameters_in",
    Kind.WEIGHT_GRADIENTS: "gradients_out", Kind.REDUCE: "gradients_out",
    Kind.ACTIVATIONS: "activations_in", Kind.GRADIENTS: "activations_in", Kind.OUTPUTS: "activations_in",
    Kind.GIVE_ACTIVATIONS: "activations_out", Kind.GIVE_GRADIENTS: "activations_out",
    Kind.GIVE_OUTPUT_GRADIENTS: "activations_out", Kind.INPUTS: "other", Kind.GIVE_INPUTS: "other",
}


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
        return STREAM_OF[self.key.kind]

    @property
    def category(self) -> Optional[str]:
        """The ledger's category of its bytes; None for compute."""
        return CATEGORY_OF.get(self.key.kind)

    @property
    def is_outward(self) -> bool:
        """Whether it copies from its GPU to DRAM."""
        return self.stream in (Stream.STORE, Stream.OFFLOAD)

    def __str__(self) -> str:
        waits = f" after {','.join(map(str, self.after))}" if self.after else ""
        return f"{self.key}{f' {self.nbytes}B' if self.nbytes else ''}{waits}"


@dataclass(frozen=True)
class Schedule:
    """The tasks of one sweep. Tasks of one GPU and stream are listed in their order."""

    name: str
    """Of the sweep, or of the peer whose schedule it is."""
    gpus: int
    tasks: Tuple[Task, ...]

    @property
    def is_backward(self) -> bool:
        """Whether it is a backward sweep."""
        return self.name == BACKWARD

    def of(self, gpu: int) -> Tuple[Task, ...]:
        """One GPU's tasks."""
        return tuple(task for task in self.tasks if task.gpu == gpu)

    def gpu_of(self) -> Dict[Key, int]:
        """Where each task runs."""
        return {task.key: task.gpu for task in self.tasks}

    def bytes_by_category(self, gpu: Optional[int] = None) -> Dict[str, int]:
        """Bytes moved, by category, by one GPU or by all."""
        total: Dict[str, int] = defaultdict(int)
        for task in self.tasks:
            if task.category is not None and gpu in (None, task.gpu):
                total[task.category] += task.nbytes
        return dict(total)

    def __str__(self) -> str:
        lines = []
        for gpu in range(self.gpus):
            for stream in Stream:
                tasks = [str(task) for task in self.of(gpu) if task.stream is stream]
                if tasks:
                    lines.append(f"gpu {gpu} {stream.value}: " + " | ".join(tasks))
        return "\n".join(lines)

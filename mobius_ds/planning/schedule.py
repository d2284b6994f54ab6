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
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from mobius_ds.planning.plan import Plan

DEPTH = 2
"""Buffers of each kind on a GPU; see Note [two of each]."""


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
    """``forward``, ``outputs`` (the last stages of a forward once more) or ``backward``."""
    gpus: int
    tasks: Tuple[Task, ...]

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


@dataclass(frozen=True)
class Volumes:
    """The bytes of a sweep. Lists over stages are indexed by stage; lists of lists by stage, then microbatch."""

    weights: List[int]
    """Of each stage's weights."""
    weight_gradients: List[int]
    """Of each stage's weight gradients; zero where all its weights are frozen."""
    inputs: List[int]
    """Of each microbatch's inputs."""
    received: List[List[int]]
    """Of the boundary activations a stage starts from."""
    made: List[List[int]]
    """Of the boundary activations a stage makes; for the last stage, of the outputs that go home."""
    received_gradients: List[List[int]]
    """Of the gradients of what a stage handed over; for the last stage, of its outputs."""
    made_gradients: List[List[int]]
    """Of the gradients of the boundary activations a stage started from."""


def forward_schedule(plan: Plan, home: List[int], volumes: Volumes, slots: int = DEPTH) -> Schedule:
    """The forward sweep: every stage runs all microbatches in order and is dropped (paper, section 3.1).

    Args:
        home: the GPU whose rank each microbatch belongs to.
        slots: how many stages' weights a GPU holds at once. With one, none are copied in while another stage runs.
    """
    build = _Builder("forward", plan, home, slots)
    for microbatch, gpu in enumerate(home):
        build.add(gpu, Key(Kind.GIVE_INPUTS, None, microbatch), volumes.inputs[microbatch])
    _run_forward(build, plan, home, volumes, range(plan.stages))
    return build.schedule()


def outputs_schedule(plan: Plan, home: List[int], volumes: Volumes) -> Schedule:
    """The last stage of a forward sweep once more, from what lies in DRAM, for the outputs it left behind."""
    build = _Builder("outputs", plan, home)
    _run_forward(build, plan, home, volumes, range(plan.stages - 1, plan.stages))
    return build.schedule()


def _run_forward(build: "_Builder", plan: Plan, home: List[int], volumes: Volumes, part: range) -> None:
    for gpu in range(plan.gpus):
        stages = [stage for stage in plan.stages_of(gpu) if stage in part]
        build.load_stages(gpu, stages, volumes, Kind.FORWARD)
        for stage in stages:
            for order, microbatch in enumerate(build.microbatches):
                if stage > 0:
                    build.add(gpu, Key(Kind.ACTIVATIONS, stage, microbatch), volumes.received[stage][microbatch],
                              [Key(Kind.GIVE_ACTIVATIONS, stage - 1, microbatch)]
                              + _earlier(Kind.FORWARD, stage, build.microbatches, order))
                build.add(gpu, Key(Kind.FORWARD, stage, microbatch), 0,
                          build.arrivals(stage, microbatch, stages[0])
                          + _earlier(Kind.GIVE_ACTIVATIONS, stage, build.microbatches, order))
                build.add(gpu, Key(Kind.GIVE_ACTIVATIONS, stage, microbatch), volumes.made[stage][microbatch],
                          [Key(Kind.FORWARD, stage, microbatch)])
    for microbatch, gpu in enumerate(home):
        build.add(gpu, Key(Kind.OUTPUTS, None, microbatch), volumes.made[-1][microbatch],
                  [Key(Kind.GIVE_ACTIVATIONS, plan.stages - 1, microbatch)])


def backward_schedule(plan: Plan, home: List[int], volumes: Volumes, shared: Dict[int, List[int]],
                      updates: Optional[Dict[int, List[int]]] = None, slots: int = DEPTH) -> Schedule:
    """The backward sweep: stages in reverse, each recomputed from its boundary activations.

    A stage below which nothing is trained has no tasks.

    Args:
        home: the GPU whose rank each microbatch belongs to.
        shared: for each stage, the later stages that use some of its parameters. Their gradients are added
            up in DRAM in a fixed order, the last stage's first.
        updates: to run the optimizer within the sweep: for each stage, the stages that give gradients to the
            parameters it updates.
        slots: see ``forward_schedule``.
    """
    build = _Builder("backward", plan, home, slots)
    trained = {stage: [m for m in build.microbatches if volumes.received_gradients[stage][m] > 0
                       and (volumes.weight_gradients[stage] > 0 or volumes.made_gradients[stage][m] > 0)]
               for stage in range(plan.stages)}
    for microbatch, gpu in enumerate(home):
        if microbatch in trained[plan.stages - 1]:
            build.add(gpu, Key(Kind.GIVE_OUTPUT_GRADIENTS, None, microbatch),
                      volumes.received_gradients[-1][microbatch])
    for gpu in range(plan.gpus):
        stages = [stage for stage in reversed(plan.stages_of(gpu)) if trained[stage]]
        build.load_stages(gpu, stages, volumes, Kind.BACKWARD, trained)
        for position, stage in enumerate(stages):
            for order, microbatch in enumerate(trained[stage]):
                buffers = _earlier(Kind.BACKWARD, stage, trained[stage], order)
                if stage > 0:
                    build.add(gpu, Key(Kind.ACTIVATIONS, stage, microbatch), volumes.received[stage][microbatch], buffers)
                last = stage == plan.stages - 1
                source = Key(Kind.GIVE_OUTPUT_GRADIENTS, None, microbatch) if last \
                    else Key(Kind.GIVE_GRADIENTS, stage + 1, microbatch)
                build.add(gpu, Key(Kind.GRADIENTS, stage, microbatch), volumes.received_gradients[stage][microbatch],
                          [source] + buffers)
                drained = [Key(Kind.WEIGHT_GRADIENTS, other) for other in stages[:max(0, position - DEPTH + 1)][-1:]
                           if order == 0 and volumes.weight_gradients[other]]
                build.add(gpu, Key(Kind.BACKWARD, stage, microbatch), 0,
                          build.arrivals(stage, microbatch, stages[0])
                          + [Key(Kind.GRADIENTS, stage, microbatch)] + drained
                          + _earlier(Kind.GIVE_GRADIENTS, stage, trained[stage], order))
                if volumes.made_gradients[stage][microbatch]:
                    build.add(gpu, Key(Kind.GIVE_GRADIENTS, stage, microbatch),
                              volumes.made_gradients[stage][microbatch], [Key(Kind.BACKWARD, stage, microbatch)])
            if volumes.weight_gradients[stage]:
                build.add(gpu, Key(Kind.WEIGHT_GRADIENTS, stage), volumes.weight_gradients[stage],
                          [Key(Kind.BACKWARD, stage, trained[stage][-1])]
                          + [Key(Kind.WEIGHT_GRADIENTS, other) for other in shared.get(stage, ()) if trained[other]])
    givers = {stage: [source for source in sources if trained[source] and volumes.weight_gradients[source]]
              for stage, sources in (updates or {}).items()}
    # A stage's last gradients come from the lowest of its givers, and the lowest stages are the last of a backward.
    for stage in sorted((stage for stage in givers if givers[stage]), key=lambda stage: min(givers[stage]), reverse=True):
        build.add(plan.gpu_of_stage[stage], Key(Kind.UPDATE, stage), 0,
                  [Key(Kind.WEIGHT_GRADIENTS, source) for source in givers[stage]])
    return build.schedule()


def _earlier(kind: Kind, stage: int, microbatches: Sequence[int], position: int) -> List[Key]:
    """The task that frees the buffer the microbatch at ``position`` needs; see Note [two of each]."""
    return [Key(kind, stage, microbatches[position - DEPTH])] if position >= DEPTH else []


class _Builder:
    """Collects tasks and knows the rules both sweeps share."""

    def __init__(self, name: str, plan: Plan, home: List[int], slots: int = DEPTH):
        self._name = name
        self._plan = plan
        self._slots = slots
        self.microbatches = range(len(home))
        self._tasks: List[Task] = []

    def add(self, gpu: int, key: Key, nbytes: int, after: Optional[List[Key]] = None) -> None:
        self._tasks.append(Task(key, gpu, nbytes, tuple(after or ())))

    def load_stages(self, gpu: int, stages: List[int], volumes: Volumes, compute: Kind,
                    microbatches: Optional[Dict[int, List[int]]] = None) -> None:
        """A GPU's weights, one stage after another, and the inputs it needs, once."""
        for position, stage in enumerate(stages):
            freed = []
            if position >= self._slots:
                before = stages[position - self._slots]
                freed = [Key(compute, before, (microbatches[before] if microbatches else self.microbatches)[-1])]
            self.add(gpu, Key(Kind.WEIGHTS, stage), volumes.weights[stage], freed)
        for microbatch in self.microbatches if stages else ():
            self.add(gpu, Key(Kind.INPUTS, stages[0], microbatch), volumes.inputs[microbatch],
                     [Key(Kind.GIVE_INPUTS, None, microbatch)])

    def arrivals(self, stage: int, microbatch: int, first_stage: int) -> List[Key]:
        """What a stage's compute waits for in either sweep."""
        received = [Key(Kind.ACTIVATIONS, stage, microbatch)] if stage > 0 else []
        return [Key(Kind.WEIGHTS, stage), Key(Kind.INPUTS, first_stage, microbatch)] + received

    def schedule(self) -> Schedule:
        keys = {task.key for task in self._tasks}
        # What a rule names may have nothing to move, or may lie in DRAM since an earlier sweep: no such task exists.
        tasks = (task._replace(after=tuple(key for key in task.after if key in keys)) for task in self._tasks)
        return Schedule(self._name, self._plan.gpus, tuple(tasks))

"""Mobius' sweeps as schedules: what it runs forward and backward, from a plan and the bytes of its parts.
"""

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

from mobius_ds.schedule.neighbours import giver_of
from mobius_ds.schedule.plan import Plan
from mobius_ds.schedule.schedule import BACKWARD, FORWARD, OUTPUTS, Schedule
from mobius_ds.schedule.tasks import DEPTH, Key, Kind, Task


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
    build = _Builder(FORWARD, plan, home, slots)
    for microbatch, gpu in enumerate(home):
        build.add(gpu, Key(Kind.GIVE_INPUTS, None, microbatch), volumes.inputs[microbatch])
    _run_forward(build, plan, home, volumes, range(plan.stages))
    return build.schedule()


def outputs_schedule(plan: Plan, home: List[int], volumes: Volumes) -> Schedule:
    """The last stage of a forward sweep once more, from what lies in DRAM, for the outputs it left behind."""
    build = _Builder(OUTPUTS, plan, home)
    _run_forward(build, plan, home, volumes, range(plan.last_stage, plan.stages))
    return build.schedule()


def _run_forward(build: "_Builder", plan: Plan, home: List[int], volumes: Volumes, part: range) -> None:
    for gpu in range(plan.gpus):
        stages = [stage for stage in plan.stages_of(gpu) if stage in part]
        build.load_stages(gpu, stages, volumes, Kind.FORWARD)
        for stage in stages:
            for order, microbatch in enumerate(build.microbatches):
                if stage > 0:
                    build.fetch(gpu, Key(Kind.ACTIVATIONS, stage, microbatch), volumes.received[stage][microbatch],
                                _earlier(Kind.FORWARD, stage, build.microbatches, order))
                build.add(gpu, Key(Kind.FORWARD, stage, microbatch), 0,
                          build.arrivals(stage, microbatch, stages[0])
                          + _earlier(Kind.GIVE_ACTIVATIONS, stage, build.microbatches, order))
                build.add(gpu, Key(Kind.GIVE_ACTIVATIONS, stage, microbatch), volumes.made[stage][microbatch],
                          [Key(Kind.FORWARD, stage, microbatch)])
    for microbatch, gpu in enumerate(home):
        build.fetch(gpu, Key(Kind.OUTPUTS, None, microbatch), volumes.made[-1][microbatch])


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
    build = _Builder(BACKWARD, plan, home, slots)
    trained = {stage: [m for m in build.microbatches if volumes.received_gradients[stage][m] > 0
                       and (volumes.weight_gradients[stage] > 0 or volumes.made_gradients[stage][m] > 0)]
               for stage in range(plan.stages)}
    for microbatch, gpu in enumerate(home):
        if microbatch in trained[plan.last_stage]:
            build.add(gpu, Key(Kind.GIVE_OUTPUT_GRADIENTS, None, microbatch),
                      volumes.received_gradients[-1][microbatch])
    for gpu in range(plan.gpus):
        stages = [stage for stage in reversed(plan.stages_of(gpu)) if trained[stage]]
        build.load_stages(gpu, stages, volumes, Kind.BACKWARD, trained)
        for position, stage in enumerate(stages):
            for order, microbatch in enumerate(trained[stage]):
                buffers = _earlier(Kind.BACKWARD, stage, trained[stage], order)
                if stage > 0:
                    build.fetch(gpu, Key(Kind.ACTIVATIONS, stage, microbatch), volumes.received[stage][microbatch], buffers)
                build.fetch(gpu, Key(Kind.GRADIENTS, stage, microbatch), volumes.received_gradients[stage][microbatch],
                            buffers)
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

    def fetch(self, gpu: int, key: Key, nbytes: int, after: Sequence[Key] = ()) -> None:
        """Adds a task that copies in what another one gives, so that it waits for that one."""
        self.add(gpu, key, nbytes, [giver_of(key, self._plan.stages), *after])

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
            self.fetch(gpu, Key(Kind.INPUTS, stages[0], microbatch), volumes.inputs[microbatch])

    def arrivals(self, stage: int, microbatch: int, first_stage: int) -> List[Key]:
        """What a stage's compute waits for in either sweep."""
        received = [Key(Kind.ACTIVATIONS, stage, microbatch)] if stage > 0 else []
        return [Key(Kind.WEIGHTS, stage), Key(Kind.INPUTS, first_stage, microbatch)] + received

    def schedule(self) -> Schedule:
        keys = {task.key for task in self._tasks}
        # What a rule names may have nothing to move, or may lie in DRAM since an earlier sweep: no such task exists.
        tasks = (task._replace(after=tuple(key for key in task.after if key in keys)) for task in self._tasks)
        return Schedule(self._name, self._plan.gpus, tuple(tasks))

"""A sweep's data: its microbatches, where their tensors lie in DRAM, and the bytes it will move."""

from dataclasses import dataclass, field
from typing import Any, Dict, FrozenSet, Hashable, List, NamedTuple, Optional, Sequence, Tuple

from mobius_ds.model.intercept import Entry
from mobius_ds.model.mode import Mode
from mobius_ds.model.parts import Parts
from mobius_ds.model.program import Program, Span, Value
from mobius_ds.runtime.dram.activations import Placed
from mobius_ds.runtime.dram.slots import gradient_groups
from mobius_ds.runtime.dram.store import Layout
from mobius_ds.schedule.mobius import Volumes
from mobius_ds.schedule.plan import Plan


class TensorLeaf(NamedTuple):
    """Stands for a tensor among the leaves of a microbatch's arguments; the tensors travel apart."""

    index: int


@dataclass
class Microbatch:
    """One microbatch of a sweep, as every rank knows it."""

    home: int
    """The rank whose data it is."""
    leaves: Tuple[Any, ...]
    """Leaves of (args, kwargs); tensors are ``TensorLeaf``s."""
    structure: Any
    """How the leaves nest."""
    input_bytes: int
    seed: int
    program: Program
    spans: Tuple[Span, ...]
    """Each stage's calls in this program."""
    returned: Tuple[int, ...] = ()
    """The output leaves that go home."""


@dataclass
class Sweep:
    """What one rank knows of one forward, from its start until its backward is done or can no longer come."""

    number: int
    form: Hashable
    """Equal for sweeps that run the same tasks: it names their microbatches' kinds and homes, and what goes home."""
    entry: Entry
    mode: Mode
    """Of the model when the forward was called; whatever is computed again is computed in it."""
    parts: Parts
    """Of the model at the same time."""
    microbatches: List[Microbatch]
    stage_parameters: Tuple[Tuple[str, ...], ...]
    """Names of the parameters each stage needs for any of the microbatches."""
    inputs: Dict[int, Tuple[Placed, ...]] = field(default_factory=dict)
    boundary: Dict[Tuple[int, Value], Placed] = field(default_factory=dict)
    """Boundary activations by microbatch and value, as far as this rank's stages need them."""
    placed_here: List[Placed] = field(default_factory=list)
    """What this rank placed and will free."""

    @property
    def home(self) -> List[int]:
        """The home rank of each microbatch."""
        return [microbatch.home for microbatch in self.microbatches]

    @property
    def replicas(self) -> int:
        """How many ranks gave microbatches. The loss of a job is the mean over theirs."""
        return len(set(self.home))


def stage_parameters(plan: Plan, microbatches: Sequence[Microbatch],
                     units: Dict[str, Tuple[str, ...]]) -> Tuple[Tuple[str, ...], ...]:
    """The parameters each stage needs for any of the microbatches, in a fixed order."""
    return tuple(tuple(dict.fromkeys(name for microbatch in microbatches
                                     for name in microbatch.program.parameters_of(*microbatch.spans[stage], units)))
                 for stage in range(plan.stages))


def volumes(plan: Plan, sweep: Sweep, layout: Layout,
            output_gradients: Optional[Sequence[FrozenSet[int]]] = None) -> Volumes:
    """The bytes of a sweep, from programs and layout alone.

    Args:
        output_gradients: for a backward, the output leaves of each microbatch whose gradients are given.
    """

    def per_stage(count) -> List[List[int]]:
        return [[count(stage, microbatch) for microbatch in sweep.microbatches] for stage in range(plan.stages)]

    def live(microbatch: Microbatch, cut: int, graded: bool = False) -> int:
        specs = (microbatch.program.spec(value) for value in microbatch.program.live(cut))
        return sum(spec.nbytes for spec in specs if spec.requires_grad or not graded)

    def made(stage: int, microbatch: Microbatch) -> int:
        program, span = microbatch.program, microbatch.spans[stage]
        if stage == plan.last_stage:
            return sum(program.outputs.returns[leaf].nbytes for leaf in microbatch.returned)
        return sum(program.spec(value).nbytes for value in program.live(span.stop) if value.call >= span.start)

    graded = {id(microbatch): leaves for microbatch, leaves in zip(sweep.microbatches, output_gradients or ())}

    def received_gradients(stage: int, microbatch: Microbatch) -> int:
        if stage == plan.last_stage:
            return sum(microbatch.program.outputs.returns[leaf].nbytes for leaf in graded.get(id(microbatch), ()))
        return live(microbatch, microbatch.spans[stage].stop, graded=True)

    return Volumes(
        weights=[layout.weights(names).moved for names in sweep.stage_parameters],
        weight_gradients=[sum(group.wire_bytes for group in gradient_groups(layout, names))
                          for names in sweep.stage_parameters],
        inputs=[microbatch.input_bytes for microbatch in sweep.microbatches],
        received=per_stage(lambda stage, microbatch: live(microbatch, microbatch.spans[stage].start)),
        made=per_stage(made),
        received_gradients=per_stage(received_gradients),
        made_gradients=per_stage(lambda stage, microbatch: live(microbatch, microbatch.spans[stage].start, graded=True)),
    )


def sharing_stages(plan: Plan, sweep: Sweep, layout: Layout) -> Dict[int, List[int]]:
    """For each stage, the later stages that train some of the same parameters."""
    trained = [frozenset(layout.trained(names)) for names in sweep.stage_parameters]
    return {stage: [later for later in range(stage + 1, plan.stages) if trained[stage] & trained[later]]
            for stage in range(plan.stages)}


def giving_stages(updated_by: Dict[int, List[str]], sweep: Sweep) -> Dict[int, List[int]]:
    """For each stage that updates parameters, the stages whose backward gives these gradients."""
    return {stage: [giver for giver, given in enumerate(sweep.stage_parameters) if not set(names).isdisjoint(given)]
            for stage, names in updated_by.items()}

"""Schedules of Mobius' peers, as the same data: GPipe, 1F1B, looped breadth-first, RoundPipe, ZeRO-3 offload.

The pipelines' stages stay on the GPU (RoundPipe's do not, but its transfers are hidden by design), so what they
move are boundary activations: one ``GIVE_ACTIVATIONS`` or ``GIVE_GRADIENTS`` task where neighbouring stages run on
different GPUs.
"""

from typing import Iterable, List, Sequence, Tuple

from mobius_ds.inputs.profile import LayerProfile
from mobius_ds.schedule.neighbours import GIVES, stage_after, stage_before
from mobius_ds.schedule.schedule import Schedule
from mobius_ds.schedule.tasks import DEPTH, Key, Kind, Task

Compute = Tuple[Kind, int, int]
"""A compute task: kind, stage, microbatch."""


def gpipe_schedule(stages: int, microbatches: int, handed_on: Sequence[int] = ()) -> Schedule:
    """All forwards, then all backwards; stage i on GPU i (Huang et al., 2019).

    Args:
        handed_on: bytes of the boundary activation that each stage makes; none if only times matter.
    """
    return looped_schedule(stages, stages, microbatches, handed_on)


def looped_schedule(gpus: int, stages: int, microbatches: int, handed_on: Sequence[int] = ()) -> Schedule:
    """Looped breadth-first: stage i on GPU i mod N, each stage runs all microbatches in turn (Lamy-Poirier, 2023)."""
    order = {gpu: [(Kind.FORWARD, stage, microbatch) for stage in range(gpu, stages, gpus)
                   for microbatch in range(microbatches)]
             + [(Kind.BACKWARD, stage, microbatch) for stage in reversed(range(gpu, stages, gpus))
                for microbatch in reversed(range(microbatches))] for gpu in range(gpus)}
    return _pipeline("looped breadth-first", [stage % gpus for stage in range(stages)], order, handed_on)


def one_forward_one_backward_schedule(stages: int, microbatches: int) -> Schedule:
    """1F1B: as many forwards as there are stages below, then one backward after each forward; stage i on GPU i."""
    order = {}
    for stage in range(stages):
        ahead = min(stages - 1 - stage, microbatches)
        steps: List[Compute] = [(Kind.FORWARD, stage, microbatch) for microbatch in range(ahead)]
        for microbatch in range(microbatches):
            if ahead + microbatch < microbatches:
                steps.append((Kind.FORWARD, stage, ahead + microbatch))
            steps.append((Kind.BACKWARD, stage, microbatch))
        order[stage] = steps
    return _pipeline("1f1b", list(range(stages)), order)


def _pipeline(name: str, gpu_of: Sequence[int], order: dict, handed_on: Sequence[int] = ()) -> Schedule:
    last = len(gpu_of) - 1
    tasks: List[Task] = []
    for gpu, steps in order.items():
        for kind, stage, microbatch in steps:
            source, target = stage_before(kind, stage), stage_after(kind, stage)
            after = []
            if kind is Kind.BACKWARD:
                after.append(Key(Kind.FORWARD, stage, microbatch))
            if 0 <= source <= last:
                after.append(Key(kind if gpu_of[source] == gpu else GIVES[kind], source, microbatch))
            tasks.append(Task(Key(kind, stage, microbatch), gpu, 0, tuple(after)))
            if 0 <= target <= last and gpu_of[target] != gpu:
                nbytes = handed_on[min(stage, target)] if handed_on else 0
                tasks.append(Task(Key(GIVES[kind], stage, microbatch), gpu, nbytes, (Key(kind, stage, microbatch),)))
    return Schedule(name, len(set(gpu_of)), tuple(tasks))


def roundpipe_schedule(gpus: int, forward_stages: int, backward_stages: int, microbatches: int, rounds: int) -> Schedule:
    """RoundPipe: stages are dispatched to GPUs in turn, forward and backward ones alike (arXiv 2604.27085).

    Forward and backward are cut differently. Stage numbers run through the forward stages and on through the
    backward ones, the first of which is the head, forward and backward at once; number k runs on GPU k mod N, and
    the numbers of a round go on where the round before ended. A backward stage recomputes as soon as its GPU is
    free, before its gradient arrives.

    Args:
        microbatches: of each round.
    """
    per_round = forward_stages + backward_stages
    tasks: List[Task] = []
    for turn in range(rounds):
        for number in range(per_round):
            stage = turn * per_round + number
            gpu = stage % gpus
            for microbatch in range(microbatches):
                tasks += _roundpipe_tasks(turn, number, stage, gpu, microbatch, forward_stages, per_round)
    return Schedule("roundpipe", gpus, tuple(tasks))


def _roundpipe_tasks(turn: int, number: int, stage: int, gpu: int, microbatch: int, forward_stages: int,
                     per_round: int) -> Iterable[Task]:
    arrived = (Key(Kind.GIVE_ACTIVATIONS, stage - 1, microbatch),) if number else ()
    if number < forward_stages:
        compute = Key(Kind.FORWARD, stage, microbatch)
        yield Task(compute, gpu, 0, arrived)
    else:
        compute = Key(Kind.BACKWARD, stage, microbatch)
        if number == forward_stages:
            yield Task(compute, gpu, 0, arrived)
        else:
            last_forward = Key(Kind.GIVE_ACTIVATIONS, turn * per_round + forward_stages - 1, microbatch)
            yield Task(Key(Kind.RECOMPUTE, stage, microbatch), gpu, 0, (last_forward,))
            yield Task(compute, gpu, 0, arrived + (Key(Kind.RECOMPUTE, stage, microbatch),))
    if number < per_round - 1:
        yield Task(Key(Kind.GIVE_ACTIVATIONS, stage, microbatch), gpu, 0, (compute,))


def zero3_offload_schedule(layers: Sequence[LayerProfile], gpus: int) -> Schedule:
    """ZeRO-3 with CPU offload: every GPU gathers every layer, forward and backward, for its own microbatch.

    A layer is gathered while the one before runs, and dropped after use. Collectives wait for the slowest GPU.
    ``nbytes`` is what is delivered: the whole layer to each GPU, the whole gradient from each.
    """
    everyone = range(gpus)
    tasks: List[Task] = []
    order = [(Kind.FORWARD, layer) for layer in range(len(layers))]
    order += [(Kind.BACKWARD, layer) for layer in reversed(range(len(layers)))]
    for position, (kind, layer) in enumerate(order):
        # Forward and backward gather the same layer; numbering them apart keeps every task's name its own.
        number = position if kind is Kind.FORWARD else len(layers) + layer
        room = [Key(order[position - DEPTH][0], order[position - DEPTH][1], gpu) for gpu in everyone] \
            if position >= DEPTH else []
        for gpu in everyone:
            gathered = Key(Kind.GATHER, number, gpu)
            tasks.append(Task(gathered, gpu, layers[layer].weight_bytes, tuple(room)))
            tasks.append(Task(Key(kind, layer, gpu), gpu, 0, (gathered,)))
            if kind is Kind.BACKWARD and layers[layer].gradient_bytes:
                tasks.append(Task(Key(Kind.REDUCE, layer, gpu), gpu, layers[layer].gradient_bytes,
                                  tuple(Key(Kind.BACKWARD, layer, other) for other in everyone)))
    return Schedule("zero3-offload", gpus, tuple(tasks))

"""How long a partition's step takes, from the rules that the schedule follows.

One evaluator judges every partition, whoever proposes it; the MIP states the same rules as linear constraints.

Note [first and last]. All microbatches cost the same and a stage takes them in order, so of its M starts only the
first and the last are needed. A start is the length of the longest chain of tasks before it. A chain to the last
microbatch advances M - 1 times from one microbatch to the next, each time at the cost of the stage (or transfer) it
is at, and so is longest when it advances at its slowest one only: either here, all M - 1 times after this stage's
first start, or wholly before, and then it comes from the last start of the stage before. This holds as long as no
stage waits for its two boundary buffers, that is as long as a boundary activation's transfers take less than a
microbatch's compute and than the copy of a stage's weights.
"""

from typing import NamedTuple, Sequence

from mobius_ds.partition.problem import Problem, cut
from mobius_ds.schedule.tasks import DEPTH


class StepSeconds(NamedTuple):
    """The parts of a step."""

    forward: float
    backward: float
    """With the copies of weight gradients to DRAM."""
    update: float

    @property
    def total(self) -> float:
        """Seconds from the first weight copied in to the last parameter updated."""
        return sum(self)


class Arrival(NamedTuple):
    """How boundary activations, or their gradients, come from one stage to the next: out to DRAM, then in again."""

    delay: float
    """Seconds on the way."""
    pace: float
    """Seconds between two microbatches at least: the slower of the two streams that carry them."""


NOWHERE = Arrival(0.0, 0.0)


class _StageTimes(NamedTuple):
    """What a stage does in a sweep, in seconds: its copy in, its compute per microbatch, its copy out."""

    gpu: int
    copy: float
    compute: float
    offload: float
    arrival: Arrival


def step_seconds(problem: Problem, partition: Sequence[int]) -> StepSeconds:
    """The step of a partition, as the schedule runs it when every GPU has the bandwidth that the problem says.

    Args:
        partition: the number of layers in each stage.
    """
    stages = cut(problem, partition)
    forward, backward = [], []
    for number, stage in enumerate(stages):
        gpu = problem.gpus[stage.gpu]
        weights = sum(layer.weight_bytes for layer in stage.layers) / gpu.bandwidth
        compute = gpu.slowdown * sum(layer.forward_seconds for layer in stage.layers)
        arrival = NOWHERE
        if number > 0:
            source = problem.gpus[stages[number - 1].gpu]
            out, into = stage.received_bytes / source.bandwidth, stage.received_bytes / gpu.bandwidth
            arrival = Arrival(problem.hop_seconds + out + into, max(out, into))
        forward.append(_StageTimes(stage.gpu, weights, compute, 0.0, arrival))

        compute = gpu.slowdown * sum(layer.backward_seconds for layer in stage.layers)
        gradients = sum(layer.gradient_bytes for layer in stage.layers) / gpu.bandwidth
        arrival = NOWHERE
        if number < len(stages) - 1:
            source = problem.gpus[stages[number + 1].gpu]
            out, into = stage.made_bytes / source.bandwidth, stage.made_bytes / gpu.bandwidth
            # One stream loads gradients and, for the recomputation, boundary activations.
            arrival = Arrival(problem.hop_seconds + out + into, max(out, into + stage.received_bytes / gpu.bandwidth))
        backward.append(_StageTimes(stage.gpu, weights, compute, gradients, arrival))
    update = [0.0] * len(problem.gpus)
    for stage in stages:
        update[stage.gpu] += sum(problem.update_seconds(layer) for layer in stage.layers)
    return StepSeconds(_sweep(forward, problem.microbatches), _sweep(backward[::-1], problem.microbatches), max(update))


def _sweep(tasks: Sequence[_StageTimes], microbatches: int) -> float:
    """Seconds until a sweep is over on all GPUs."""
    computed = {task.gpu: [0.0] * DEPTH for task in tasks}  # when each GPU's stages were done, latest last
    offloaded = {task.gpu: [0.0] * DEPTH for task in tasks}
    copied = {task.gpu: 0.0 for task in tasks}
    first_left = last_left = 0.0  # when the first and last microbatch left the stage before
    for task in tasks:
        done, drained = computed[task.gpu], offloaded[task.gpu]
        copied[task.gpu] = max(copied[task.gpu], done[-DEPTH]) + task.copy
        arrived = first_left + task.arrival.delay
        first = max(copied[task.gpu], done[-1], drained[-DEPTH], arrived)
        last = max(first + (microbatches - 1) * task.compute, arrived + (microbatches - 1) * task.arrival.pace,
                   last_left + task.arrival.delay)
        first_left, last_left = first + task.compute, last + task.compute
        done.append(last_left)
        drained.append(max(drained[-1], last_left) + task.offload)
    return max([last_left] + [drained[-1] for drained in offloaded.values()])

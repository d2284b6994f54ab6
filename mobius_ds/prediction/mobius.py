"""What a step of Mobius would take, from a profile, a topology and a plan."""

from typing import List, Optional

from mobius_ds.inputs.profile import ModelProfile
from mobius_ds.inputs.topology import Topology
from mobius_ds.partition.memory import gpu_memory
from mobius_ds.partition.problem import problem_of
from mobius_ds.partition.step_time import step_seconds
from mobius_ds.prediction.prediction import Prediction, predicted
from mobius_ds.schedule.mobius import Volumes, backward_schedule, forward_schedule
from mobius_ds.schedule.plan import Plan
from mobius_ds.schedule.tasks import DEPTH
from mobius_ds.simulation.costs import bandwidths, mobius_costs, stages_of


def profile_volumes(profile: ModelProfile, plan: Plan, microbatches: int) -> Volumes:
    """The bytes of a sweep, from the profile. Inputs are too small to matter here."""
    stages = stages_of(profile, plan)
    made = [stage[-1].boundary_bytes for stage in stages]
    received = [0] + made[:-1]

    def each(values: List[int]) -> List[List[int]]:
        return [[value] * microbatches for value in values]

    return Volumes([sum(layer.weight_bytes for layer in stage) for stage in stages],
                   [sum(layer.gradient_bytes for layer in stage) for stage in stages],
                   [0] * microbatches, each(received), each(made), each(made), each(received))


def predict_mobius(profile: ModelProfile, topology: Topology, plan: Plan,
                   microbatches: Optional[int] = None, slots: int = DEPTH) -> Prediction:
    """A Mobius step under a plan.

    Args:
        microbatches: default as many as GPUs, as in the paper.
        slots: how many stages' weights a GPU holds at once; with one, nothing is prefetched.
    """
    microbatches = microbatches or topology.size
    home = [microbatch % topology.size for microbatch in range(microbatches)]
    volumes, costs, links = profile_volumes(profile, plan, microbatches), mobius_costs(profile, topology, plan), \
        bandwidths(topology)
    schedules = [forward_schedule(plan, home, volumes, slots), backward_schedule(plan, home, volumes, {}, slots=slots)]
    problem = problem_of(profile, topology, microbatches, mapping=lambda stages: plan.gpu_of_stage)
    return predicted("mobius", schedules, costs, links, topology,
                     step_seconds(problem, plan.layers_per_stage).update,
                     [need.total for need in gpu_memory(problem, plan.layers_per_stage)])

"""Small models and sums for the planning tests."""

from mobius_ds.inputs.profile import LayerProfile, ModelProfile
from mobius_ds.schedule.mobius import Volumes, backward_schedule, forward_schedule
from mobius_ds.simulation.simulator import simulate


def even_model(layers: int, seconds: float = 0.02, weight_bytes: int = 10**9, boundary_bytes: int = 2**22) -> ModelProfile:
    """Identical layers."""
    layer = LayerProfile("layer", seconds, 3 * seconds, weight_bytes, weight_bytes, boundary_bytes, boundary_bytes)
    return ModelProfile("even", (layer,) * layers, layers * weight_bytes // 2)


def volumes_of(profile: ModelProfile, plan, microbatches: int) -> Volumes:
    """The bytes of a sweep of ``profile`` under ``plan``."""
    stages = [profile.layers[first:first + count] for first, count in zip(plan.first_layers(), plan.layers_per_stage)]
    made = [stage[-1].boundary_bytes for stage in stages]
    received = [0] + made[:-1]
    every = lambda values: [[value] * microbatches for value in values]  # noqa: E731
    return Volumes([sum(layer.weight_bytes for layer in stage) for stage in stages],
                   [sum(layer.gradient_bytes for layer in stage) for stage in stages],
                   [0] * microbatches, every(received), every(made), every(made), every(received))


def step_seconds(profile: ModelProfile, plan, microbatches: int, costs, links) -> float:
    """Forward and backward sweep, one after the other."""
    volumes, home = volumes_of(profile, plan, microbatches), [m % plan.gpus for m in range(microbatches)]
    return simulate(forward_schedule(plan, home, volumes), costs, links).makespan \
        + simulate(backward_schedule(plan, home, volumes, {}), costs, links).makespan

"""A measured step in few words: a line for the log, and scalars for DeepSpeed's monitors."""

from typing import Dict

from mobius_ds.inputs.units import readable
from mobius_ds.schedule.tasks import CATEGORIES
from mobius_ds.simulation.exposure import Figures


def scalars(step: Figures, model_bytes: int) -> Dict[str, float]:
    """Bytes are of all ranks; times, in seconds, of the rank with the most."""
    moved = sum(step.bytes_by_category.values())
    return {"bytes_moved": moved, "bytes_over_model_size": moved / model_bytes, "sweep_seconds": step.sweep_seconds,
            "compute_seconds": max(step.compute_seconds), "exposed_seconds": max(step.exposed_seconds),
            "bubble": step.bubble}


def breakdown(step: Figures, model_bytes: int) -> str:
    """The same in words, with the bytes by category."""
    told = scalars(step, model_bytes)
    moved = ", ".join(f"{category} {readable(step.bytes_by_category.get(category, 0))}" for category in CATEGORIES)
    return (f"moved {readable(told['bytes_moved'])}, {told['bytes_over_model_size']:.2f} times the model size ({moved}); "
            f"sweeps {told['sweep_seconds']:.3f} s, of which a GPU computes {told['compute_seconds']:.3f} s and waits for "
            f"transfers {told['exposed_seconds']:.3f} s at most; bubble {told['bubble'] * 100:.0f} %")

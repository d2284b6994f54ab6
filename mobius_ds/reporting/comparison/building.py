"""Makes the report of a comparison of its ranks' records."""

import os
import statistics
from importlib.metadata import version
from typing import Any, Dict, List, Mapping, Optional, Sequence

import cpuinfo
import psutil

from mobius_ds.inputs.profile import BYTES_PER_PARAMETER
from mobius_ds.observation.records import Record
from mobius_ds.reporting.comparison.arms import Failure
from mobius_ds.reporting.comparison.report import Report, counted
from mobius_ds.reporting.comparison.verdict import verdict_on
from mobius_ds.runtime.device.ledger import Bytes
from mobius_ds.schedule.tasks import CATEGORIES


def machine_description() -> Dict[str, Any]:
    """The machine and the versions the numbers belong to. Memory in bytes."""
    return {
        "cpu": cpuinfo.get_cpu_info().get("brand_raw", "unknown CPU"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "torch": version("torch"),
        "deepspeed": version("deepspeed"),
    }


def build_report(records: Mapping[str, Sequence[Record]], dtype: str, machine: Mapping[str, Any],
                 failed: Optional[Mapping[str, Failure]] = None) -> Report:
    """Makes the report of a comparison.

    Args:
        records: by arm, the records of all its ranks.
        dtype: ``fp32``, ``bf16`` or ``fp16``.
        machine: from ``machine_description``.
        failed: by arm without records, why.
    """
    first = next(iter(records.values()))
    parameters = first[0]["parameters"]
    arms = {name: _summarize(ranks, parameters * BYTES_PER_PARAMETER) for name, ranks in records.items()}
    report = {
        "machine": {**machine, "device": first[0]["device"]},
        "model": {"parameters": parameters, "model_size_bytes": parameters * BYTES_PER_PARAMETER},
        "ranks": len(first),
        "steps": len(first[0]["step_seconds"]),
        "dtype": dtype,
        "arms": arms,
        "failed": {name: failure._asdict() for name, failure in (failed or {}).items()},
    }
    report["comparison"] = verdict_on(report, records)
    return report


def _summarize(ranks: Sequence[Record], model_size: int) -> Dict[str, Any]:
    per_step = counted(_sum_over_ranks([rank["traffic"] for rank in ranks]))
    first, *_ = of_all = [sum(step) for step in zip(*(rank["delivered_bytes"] for rank in ranks))]
    delivered, link = counted(of_all), [sum(step.values()) for step in per_step]
    arm = {
        "losses": [_mean(step) for step in zip(*(rank["losses"] for rank in ranks))],
        "step_seconds": [max(step) for step in zip(*(rank["step_seconds"] for rank in ranks))],
        "traffic": {
            "per_step_bytes": _mean_over_steps(per_step),
            "delivered_bytes": round(statistics.fmean(delivered)),
            "link_bytes": round(statistics.fmean(link)),
            "delivered_over_model_size": statistics.fmean(delivered) / model_size,
            "link_over_model_size": statistics.fmean(link) / model_size,
            "delivered_bytes_in_first_step": first,
            "delivered_bytes_range": [min(delivered), max(delivered)],
            "link_bytes_range": [min(link), max(link)],
        },
        "sweeps": ranks[0]["sweeps"],
        "peak_device_bytes": max(rank["peak_device_bytes"] for rank in ranks),
        "peak_device_measure": ranks[0]["peak_device_measure"],
        "host_bytes_per_node": sum(rank["pss_bytes"] for rank in ranks),
    }
    if ranks[0]["predicted_traffic"] is not None:
        predicted = _sum_over_ranks([rank["predicted_traffic"] for rank in ranks])
        arm["predicted_traffic"] = _mean_over_steps(counted(predicted))
        arm["store_bytes_per_node"] = max(rank["store_bytes"] for rank in ranks)
    for kind in ("pinned_bytes", "pageable_bytes"):
        arm[kind] = sum(rank[kind] or 0 for rank in ranks)
    return arm


def _sum_over_ranks(ranks: Sequence[Sequence[Bytes]]) -> List[Bytes]:
    return [{category: sum(rank[category] for rank in step) for category in CATEGORIES} for step in zip(*ranks)]


def _mean_over_steps(steps: Sequence[Bytes]) -> Bytes:
    return {category: round(statistics.fmean(step[category] for step in steps)) for category in CATEGORIES}


def _mean(losses: Sequence[Optional[float]]) -> Optional[float]:
    return None if None in losses else statistics.fmean(losses)

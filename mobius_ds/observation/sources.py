"""Where a recorder's figures of traffic and memory come from, for each kind of engine."""

from pathlib import Path
from typing import Optional, Tuple

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from mobius_ds.inputs.units import GIB
from mobius_ds.observation import device_memory
from mobius_ds.observation.collectives import ObservedTraffic
from mobius_ds.observation.data_parallel_traffic import DataParallelTraffic
from mobius_ds.observation.emulated_links import EmulatedLinks
from mobius_ds.observation.pipeline_traffic import PipelineTraffic
from mobius_ds.observation.records import told_in
from mobius_ds.observation.transfers import Transfers
from mobius_ds.observation.zero3_traffic import Zero3Traffic
from mobius_ds.runtime.device.ledger import Bytes
from mobius_ds.runtime.device.link import HostLink

ACCELERATOR_MEASURE = "the accelerator's own count"


def source_of(engine, folder: Path, links: Optional[EmulatedLinks] = None,
              transfers: Optional[Transfers] = None) -> "MobiusSource | ObservedSource":
    """What counts for an engine that was just built.

    Args:
        folder: of the job's records.
        links: those that an engine of Mobius' copies over.
        transfers: takes the transfers of an observed engine.

    Raises:
        DeviceOutOfMemory: the engine keeps more on the device than the job's recorders are told that there is.
    """
    if hasattr(engine, "take_traffic"):
        return MobiusSource(engine, links and links.link_of(engine.global_rank, folder))
    limit = told_in(folder).device_memory_gb
    budget = None if limit is None else int(limit * GIB)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        return Zero3Source(engine, transfers, budget)
    return ResidentSource(engine, transfers, budget)


class MobiusSource:
    """Traffic and memory as the Mobius engine counts them itself."""

    predicts = True
    peak_device_measure = "what Mobius held on the device, slots, activations and gradients"

    def __init__(self, engine, link: Optional[HostLink]):
        self._engine = engine
        if link is not None:
            engine.pipeline.device.link = link

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(p.numel() for p in self._engine.module.parameters())

    def take(self) -> Tuple[Bytes, Bytes]:
        """Bytes by category since the last call, measured and predicted."""
        return self._engine.take_traffic(), self._engine.take_predicted_traffic()

    def delivered(self, traffic: Bytes) -> int:
        """Of ``traffic``, what the paper counts, in bytes."""
        return sum(traffic.values())  # nothing is forwarded: all that crosses a link is delivered

    def peak_device_bytes(self) -> int:
        """The most device memory used so far; ``peak_device_measure`` says of what."""
        return self._engine.peak_device_bytes()

    def store_bytes(self) -> Optional[int]:
        """Of the DRAM store on this node."""
        return self._engine.host_bytes_per_node()

    def pinned_and_pageable_bytes(self) -> Tuple[Optional[int], Optional[int]]:
        """Of the host memory copied from and to, what is pinned and what could not be."""
        return self._engine.pinned_bytes(), self._engine.pageable_bytes()

    def close(self) -> None:
        """Nothing was put in place."""


class ObservedSource:
    """Traffic and memory of an unmodified engine, observed. See ``MobiusSource`` for what the methods return.

    Those below take the transfers and a budget: bytes of device memory that one rank may use, None for all there is.
    """

    predicts = False
    parameters: int

    def __init__(self, traffic: ObservedTraffic, measure: str):
        self._traffic = traffic.start()
        # The CPU accelerator has no device memory to ask for.
        self._has_device_memory = get_accelerator().device_name() != "cpu"
        if self._has_device_memory:
            get_accelerator().reset_peak_memory_stats()  # building the engine is no part of a step
        self.peak_device_measure = ACCELERATOR_MEASURE if self._has_device_memory else measure

    def take(self) -> Tuple[Bytes, Bytes]:
        return self._traffic.take(), {}

    def delivered(self, traffic: Bytes) -> int:
        return self._traffic.delivered(traffic)

    def peak_device_bytes(self) -> int:
        return get_accelerator().max_memory_allocated() if self._has_device_memory else self._peak_on_cpu()

    def _peak_on_cpu(self) -> int:
        raise NotImplementedError

    def store_bytes(self) -> Optional[int]:
        return None

    def pinned_and_pageable_bytes(self) -> Tuple[Optional[int], Optional[int]]:
        return None, None

    def close(self) -> None:
        """Takes the observers away."""
        self._traffic.stop()


class Zero3Source(ObservedSource):
    """Of a ZeRO-3 engine."""

    def __init__(self, engine, transfers: Optional[Transfers], budget: Optional[int]):
        super().__init__(Zero3Traffic(engine, transfers),
                         "whole parameters gathered at once, without activations and gradients")
        self._engine = engine
        self._budget = budget
        self.parameters = sum(p.ds_numel for p in engine.module.parameters())

    def take(self) -> Tuple[Bytes, Bytes]:
        if self._budget is not None:
            device_memory.check_gathered(self._engine, self._traffic.peak_gathered_bytes(), self._budget)
        return super().take()

    def _peak_on_cpu(self) -> int:
        return self._traffic.peak_gathered_bytes()


class ResidentSource(ObservedSource):
    """Of an engine that keeps its model on the device: ZeRO stages 0, 1 and 2, ``PipelineEngine``."""

    def __init__(self, engine, transfers: Optional[Transfers], budget: Optional[int]):
        self._engine = engine
        self._budget = budget
        self._peak = 0
        self.parameters = _parameters_of_all_stages(engine)
        self._check()
        traffic = PipelineTraffic if isinstance(engine, PipelineEngine) else DataParallelTraffic
        super().__init__(traffic(transfers), device_memory.MEASURE)

    def take(self) -> Tuple[Bytes, Bytes]:
        self._check()  # the optimizer's moments are there from the end of the first step
        return super().take()

    def _check(self) -> None:
        if self._budget is not None:
            device_memory.check(self._engine, self._budget)

    def _peak_on_cpu(self) -> int:
        self._peak = max(self._peak, device_memory.held_by(self._engine).total)
        return self._peak


def _parameters_of_all_stages(engine) -> int:
    """The parameters of the whole model, those that several stages share once. All ranks of a pipeline call it together."""
    if not isinstance(engine, PipelineEngine):
        return sum(p.numel() for p in engine.module.parameters())
    shared = {id(p) for tied in engine.module.tied_comms.values() if engine.global_rank != min(tied["ranks"])
              for p in tied["module"].parameters()}
    mine = sum(p.numel() for p in engine.module.parameters() if id(p) not in shared)
    total = torch.tensor(mine, device=engine.device)
    torch.distributed.all_reduce(total, group=engine.module._grid.get_pipe_parallel_group())
    return int(total)

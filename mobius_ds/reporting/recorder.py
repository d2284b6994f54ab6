"""Records what a training script's engine does, step by step, without the script knowing.

``install()`` makes every ``DeepSpeedEngine`` that is built afterwards, a Mobius engine included, report to a
``Recorder``. When the script ends (or calls ``engine.destroy()``) each rank writes ``<folder>/rank<r>.json``:

    {"rank", "ranks", "engine", "device", "parameters", "dtype",
     "losses": [mean over the step's microbatches], "step_seconds": [...],
     "traffic": [{category: bytes}], "predicted_traffic": [...] or null, "delivered_bytes": [...],
     "peak_device_bytes", "peak_device_measure" (what that is),
     "store_bytes" (Mobius' DRAM store on this node) or null, "pss_bytes",
     "pinned_bytes", "pageable_bytes" (of the host memory that Mobius copies from and to, what is pinned, and what could
     not be; both null under ZeRO-3)}

One entry a step in every list; bytes are this rank's. A loss is null when the script called ``loss.backward()``
instead of ``engine.backward(loss)``. While it runs, rank 0 keeps the number of finished steps in
``<folder>/progress``.
"""

import atexit
import functools
import json
import os
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

import psutil
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import logger

from mobius_ds.plugin.hooks import RECORD_VARIABLE
from mobius_ds.reporting.records import Record, progress_file, rank_file
from mobius_ds.reporting.zero3_traffic import Zero3Traffic, delivered_bytes
from mobius_ds.runtime.ledger import Bytes

Loss = Union[float, torch.Tensor, None]


def install(folder: Optional[Union[str, Path]] = None) -> None:
    """Records every engine built from now on into ``folder`` (default: ``$MOBIUS_DS_RECORD``).

    Calling it again changes nothing.
    """
    folder = Path(folder or os.environ[RECORD_VARIABLE])
    build = DeepSpeedEngine.__init__
    if hasattr(build, "_mobius_recorder"):
        return

    @functools.wraps(build)
    def build_and_record(engine, *args, **kwargs):
        build(engine, *args, **kwargs)
        recorder = Recorder(engine, folder)
        recorder.attach()
        atexit.register(recorder.write)

    build_and_record._mobius_recorder = True
    DeepSpeedEngine.__init__ = build_and_record


class Recorder:
    """One rank's record of one engine. ``attach()`` wraps the engine's own methods, on the object only."""

    def __init__(self, engine, folder: Path):
        self._engine = engine
        self._folder = folder
        self._traffic = _traffic_source(engine)
        self._in_step = False
        self._in_train_batch = False
        self._microbatch_losses: List[Tuple[torch.Tensor, float]] = []
        self._step_began: Optional[float] = None
        self._losses: List[Loss] = []
        self._step_seconds: List[float] = []
        self._step_traffic: List[Bytes] = []
        self._step_predicted: List[Bytes] = []
        self._pss_bytes = 0
        self._about_engine: Dict[str, Any] = {}

    def attach(self) -> None:
        """Starts recording."""
        for method in ("forward", "backward", "step", "train_batch", "destroy"):
            original = getattr(self._engine, method, None)
            if original is not None:
                observer = functools.partial(getattr(self, f"_observe_{method}"), original)
                setattr(self._engine, method, functools.wraps(original)(observer))

    def write(self) -> None:
        """Writes this rank's file; the losses come off the device here, not during training."""
        if not self._step_seconds:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        rank_file(self._folder, self._engine.global_rank).write_text(json.dumps(self.record()))

    def record(self) -> Record:
        """What ``write`` writes."""
        return {
            **self._about_engine,
            "losses": [None if loss is None else float(loss) for loss in self._losses],
            "step_seconds": self._step_seconds,
            "traffic": self._step_traffic,
            "predicted_traffic": self._step_predicted if self._traffic.predicts else None,
            "delivered_bytes": [self._traffic.delivered(traffic) for traffic in self._step_traffic],
            "pss_bytes": self._pss_bytes,
        }

    def _describe_engine(self) -> Dict[str, Any]:
        engine = self._engine
        return {
            "rank": engine.global_rank,
            "ranks": engine.world_size,
            "engine": type(engine).__name__,
            "device": _device_name(),
            "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
            "dtype": str(engine.get_data_types()[0]).removeprefix("torch."),
            "peak_device_bytes": self._traffic.peak_device_bytes(),
            "peak_device_measure": self._traffic.peak_device_measure,
            "store_bytes": self._traffic.store_bytes(),
            **dict(zip(("pinned_bytes", "pageable_bytes"), self._traffic.pinned_and_pageable_bytes())),
        }

    def _observe_forward(self, forward, *args, **kwargs):
        # engine.eval() reaches the module only, not the engine's own flag.
        if self._engine.module.training and torch.is_grad_enabled():
            self._begin_step()
        return forward(*args, **kwargs)

    def _observe_backward(self, backward, loss, *args, **kwargs):
        self._begin_step(drop=False)  # only if the forward was the raw module's: its bytes are the step's
        # Accelerate divides by the accumulation steps itself and says so with scale_wrt_gas=False.
        scaled_here = kwargs.get("scale_wrt_gas", True)
        weight = 1 / self._engine.gradient_accumulation_steps() if scaled_here else 1.0
        self._microbatch_losses.append((loss.detach().to(torch.float32, copy=True), weight))
        return backward(loss, *args, **kwargs)

    def _observe_step(self, step, *args, **kwargs):
        before = self._engine.global_steps
        result = step(*args, **kwargs)
        # DeepSpeed's step() updates the weights only at an accumulation boundary.
        if self._engine.global_steps > before and not self._in_train_batch:
            losses = [loss * weight for loss, weight in self._microbatch_losses]
            self._end_step(sum(losses) if losses else None)
        return result

    def _observe_train_batch(self, train_batch, *args, **kwargs):
        self._begin_step()
        self._in_train_batch = True
        try:
            loss = train_batch(*args, **kwargs)
        finally:
            self._in_train_batch = False
        self._end_step(loss.detach().to(torch.float32, copy=True))
        return loss

    def _observe_destroy(self, destroy, *args, **kwargs):
        self.write()
        atexit.unregister(self.write)
        self._traffic.close()
        return destroy(*args, **kwargs)

    def _begin_step(self, drop: bool = True) -> None:
        """Drops what was counted before a step's first forward: start-up, evaluation, saving."""
        if self._in_step:
            return
        self._in_step = True
        if drop:
            self._traffic.take()
        if self._step_began is None:
            self._step_began = time.perf_counter()

    def _end_step(self, loss: Loss) -> None:
        self._step_seconds.append(time.perf_counter() - self._step_began)
        moved, predicted = self._traffic.take()
        self._step_traffic.append(moved)
        self._step_predicted.append(predicted)
        self._losses.append(loss)
        self._microbatch_losses.clear()
        self._pss_bytes = max(self._pss_bytes, proportional_set_bytes())
        self._about_engine = self._describe_engine()  # at exit the engine may be closed already
        self._report_progress()
        self._in_step = False
        self._step_began = time.perf_counter()

    def _report_progress(self) -> None:
        if self._engine.global_rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            progress_file(self._folder).write_text(str(len(self._step_seconds)))


class _MobiusSource:
    """Traffic and memory as the Mobius engine counts them itself."""

    predicts = True
    peak_device_measure = "what Mobius held on the device, slots, activations and gradients"

    def __init__(self, engine):
        self._engine = engine

    def take(self) -> Tuple[Bytes, Bytes]:
        return self._engine.take_traffic(), self._engine.take_predicted_traffic()

    def delivered(self, traffic: Bytes) -> int:
        return sum(traffic.values())  # nothing is forwarded: all that crosses a link is delivered

    def peak_device_bytes(self) -> int:
        return self._engine.peak_device_bytes()

    def store_bytes(self) -> Optional[int]:
        return self._engine.host_bytes_per_node()

    def pinned_and_pageable_bytes(self) -> Tuple[Optional[int], Optional[int]]:
        return self._engine.pinned_bytes(), self._engine.pageable_bytes()

    def close(self) -> None:
        pass


class _Zero3Source:
    """Traffic and memory of an unmodified ZeRO-3 engine, observed."""

    predicts = False

    def __init__(self, engine):
        self._observed = Zero3Traffic(engine).start()
        # The CPU accelerator has no device memory to ask for.
        self._has_device_memory = get_accelerator().device_name() != "cpu"
        if self._has_device_memory:
            get_accelerator().reset_peak_memory_stats()  # building the engine is no part of a step
        self.peak_device_measure = ("the accelerator's own count" if self._has_device_memory else
                                    "whole parameters gathered at once, without activations and gradients")

    def take(self) -> Tuple[Bytes, Bytes]:
        return self._observed.take(), {}

    def delivered(self, traffic: Bytes) -> int:
        return delivered_bytes(traffic)

    def peak_device_bytes(self) -> int:
        if self._has_device_memory:
            return get_accelerator().max_memory_allocated()
        return self._observed.peak_gathered_bytes()

    def store_bytes(self) -> Optional[int]:
        return None

    def pinned_and_pageable_bytes(self) -> Tuple[Optional[int], Optional[int]]:
        return None, None

    def close(self) -> None:
        self._observed.stop()


def _traffic_source(engine):
    """The counter that fits the engine.

    Raises:
        ValueError: neither a Mobius nor a ZeRO-3 engine.
    """
    if hasattr(engine, "take_traffic"):
        return _MobiusSource(engine)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer_Stage3):
        return _Zero3Source(engine)
    raise ValueError(f"{RECORD_VARIABLE} is set, but only Mobius and ZeRO-3 engines can be recorded, not a "
                     f"{type(engine).__name__} at ZeRO stage {engine.zero_optimization_stage()}: set "
                     "zero_optimization.stage to 3 in the DeepSpeed config")


def _device_name() -> str:
    if get_accelerator().device_name() == "cuda":
        return torch.cuda.get_device_name()
    return get_accelerator().device_name()


def proportional_set_bytes() -> int:
    """Memory of this process in bytes, pages shared with k processes counted 1/k (Linux; elsewhere all of them)."""
    try:
        return psutil.Process().memory_full_info().pss
    except AttributeError:
        logger.debug("no proportional set size on this system; using the resident set size")
        return psutil.Process().memory_info().rss

"""Records what a training script's engine does, step by step, without the script knowing.

``install()`` makes every ``DeepSpeedEngine`` that is built afterwards, a Mobius engine included, report to
an ``EngineRecorder``. When the script ends (or calls ``engine.destroy()``) each rank writes ``<folder>/rank<r>.json``:

    {"rank", "ranks", "engine", "device", "parameters", "dtype",
     "losses": [mean over the step's microbatches], "step_seconds": [...],
     "traffic": [{category: bytes}], "predicted_traffic": [...] or null, "delivered_bytes": [...],
     "peak_device_bytes", "peak_device_measure" (what that is),
     "store_bytes" (Mobius' DRAM store on this node) or null, "pss_bytes",
     "sweeps" (how often a step goes through the model: once a microbatch, but once in all in ``train_batch``),
     "pinned_bytes", "pageable_bytes" (of the host memory that Mobius copies from and to, what is pinned, and what could
     not be; both null for other engines),
     "last_step": {"begin", "end", "transfers": [[name, category, bytes received, bytes sent, begin, end, crossing]],
     "waits": [[begin, end]], "spans": [[forward or backward, begin, end]]} or null: the last step of an engine that is
     observed on CPU, in seconds on a clock that all ranks of a node share}

One entry a step in every list; bytes are this rank's. A loss is null when the script called ``loss.backward()``
instead of ``engine.backward(loss)``. While it runs, rank 0 keeps the number of finished steps in
``<folder>/progress``.
"""

import atexit
import contextlib
import functools
import json
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

import psutil
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger

from mobius_ds.observation.emulated_links import EmulatedLinks
from mobius_ds.observation.records import Record, progress_file, rank_file, remove_shared_files
from mobius_ds.observation.sources import source_of
from mobius_ds.observation.transfers import Transfers
from mobius_ds.runtime.device.ledger import Bytes

Loss = Union[float, torch.Tensor, None]


def install(folder: Path, links: Optional[EmulatedLinks] = None) -> None:
    """Records every engine built from now on into ``folder``. Calling it again changes nothing.

    Args:
        links: what every engine's bytes have to cross; none by default.
    """
    build = DeepSpeedEngine.__init__
    if hasattr(build, "_mobius_recorder"):
        return

    @functools.wraps(build)
    def build_and_record(engine, *args, **kwargs):
        transfers = _transfers_of(engine, folder, links)  # streams are emulated before the engine makes its own
        build(engine, *args, **kwargs)
        recorder = EngineRecorder(engine, folder, links, transfers)
        recorder.attach()
        atexit.register(recorder.write)

    build_and_record._mobius_recorder = True
    DeepSpeedEngine.__init__ = build_and_record


def _transfers_of(engine, folder: Path, links: Optional[EmulatedLinks]) -> Optional[Transfers]:
    """What takes the transfers of an engine that is about to be built; None for one that takes its own.

    Raises:
        ValueError: links are to be emulated under an accelerator, which has its own.
    """
    device = get_accelerator().device_name()
    if links is not None and device != "cpu":
        raise ValueError(f"the links of {links.name} cannot be emulated under {device}, whose copies run over its own: "
                         "leave out --wires, or run on CPU (DS_ACCELERATOR=cpu)")
    if hasattr(engine, "take_traffic") or device != "cpu":
        return None
    return Transfers() if links is None else links.transfers_of(torch.distributed.get_rank(), folder)


class EngineRecorder:
    """One rank's record of one engine. ``attach()`` wraps the engine's own methods, on the object only.

    Args:
        folder: where it is written, and what the job's recorders are told lies.
        links: those that an engine of Mobius' copies over.
        transfers: notes when those of an engine that is observed run.
    """

    def __init__(self, engine, folder: Path, links: Optional[EmulatedLinks] = None,
                 transfers: Optional[Transfers] = None):
        self._engine = engine
        self._folder = folder
        self._transfers = transfers
        self._traffic = source_of(engine, folder, links, transfers)
        self._in_step = False
        self._in_train_batch = False
        self._microbatch_losses: List[Tuple[torch.Tensor, float]] = []
        self._sweeps = 0
        self._step_began: Optional[float] = None
        self._losses: List[Loss] = []
        self._step_seconds: List[float] = []
        self._step_traffic: List[Bytes] = []
        self._step_predicted: List[Bytes] = []
        self._last_step: Optional[Dict[str, Any]] = None
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
        if self._engine.global_rank == 0:
            remove_shared_files(self._folder)
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
            "sweeps": self._sweeps,
            "pss_bytes": self._pss_bytes,
            "last_step": self._last_step,
        }

    def _describe_engine(self) -> Dict[str, Any]:
        engine = self._engine
        return {
            "rank": engine.global_rank,
            "ranks": engine.world_size,
            "engine": type(engine).__name__,
            "device": _device_name(),
            "parameters": self._traffic.parameters,
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
        with self._timed("forward"):
            return forward(*args, **kwargs)

    def _observe_backward(self, backward, loss, *args, **kwargs):
        self._begin_step(drop=False)  # only if the forward was the raw module's: its bytes are the step's
        # Accelerate divides by the accumulation steps itself and says so with scale_wrt_gas=False.
        scaled_here = kwargs.get("scale_wrt_gas", True)
        weight = 1 / self._engine.gradient_accumulation_steps() if scaled_here else 1.0
        self._microbatch_losses.append((loss.detach().to(torch.float32, copy=True), weight))
        with self._timed("backward"):
            return backward(loss, *args, **kwargs)

    def _observe_step(self, step, *args, **kwargs):
        before = self._engine.global_steps
        result = step(*args, **kwargs)
        # DeepSpeed's step() updates the weights only at an accumulation boundary.
        if self._engine.global_steps > before and not self._in_train_batch:
            losses = [loss * weight for loss, weight in self._microbatch_losses]
            self._end_step(sum(losses) if losses else None, sweeps=self._engine.gradient_accumulation_steps())
        return result

    def _observe_train_batch(self, train_batch, *args, **kwargs):
        self._begin_step()
        self._in_train_batch = True
        try:
            with self._timed("train_batch"):
                loss = train_batch(*args, **kwargs)
        finally:
            self._in_train_batch = False
        self._end_step(loss.detach().to(torch.float32, copy=True), sweeps=1)
        return loss

    def _observe_destroy(self, destroy, *args, **kwargs):
        self.write()
        atexit.unregister(self.write)
        self._traffic.close()
        if self._transfers is not None:
            self._transfers.close()
        return destroy(*args, **kwargs)

    @contextlib.contextmanager
    def _timed(self, name: str):
        begin = time.perf_counter()
        yield
        if self._transfers is not None:
            self._transfers.notes.ran(name, begin, time.perf_counter())

    def _begin_step(self, drop: bool = True) -> None:
        """Drops what was counted before a step's first forward: start-up, evaluation, saving."""
        if self._in_step:
            return
        self._in_step = True
        if drop:
            self._traffic.take()
            if self._transfers is not None:
                self._transfers.notes.take()
        if self._step_began is None:
            self._step_began = time.perf_counter()

    def _end_step(self, loss: Loss, sweeps: int) -> None:
        ended = time.perf_counter()
        self._step_seconds.append(ended - self._step_began)
        if self._transfers is not None:
            self._last_step = {"begin": self._step_began, "end": ended, **self._transfers.notes.take()}
        moved, predicted = self._traffic.take()
        self._step_traffic.append(moved)
        self._step_predicted.append(predicted)
        self._losses.append(loss)
        self._sweeps = sweeps
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

"""The device: streams, events, copies, and the memory they use.

A stream is a host thread that takes work in order. On an accelerator the thread issues its work to a
stream of the device and an event follows the work there; on CPU the thread does the work itself, so
copies really run beside compute. Either way a task waits for events of other streams, never for a
whole device, and the host threads are free to wait for other ranks without holding anything up.
"""

import queue
import threading
import time
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext
from typing import Any, Callable, Dict, Iterable, Optional

import torch
from deepspeed.accelerator import get_accelerator

from mobius_ds.inputs.units import readable
from mobius_ds.runtime.device.ledger import Ledger
from mobius_ds.runtime.device.link import HostLink
from mobius_ds.runtime.device.pinning import Pinning
from mobius_ds.runtime.ranks.errors import DeviceOutOfMemory, PeerLost
from mobius_ds.schedule.tasks import Stream


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that an allocation on this rank's device failed; the CPU's allocator has no class of error for it."""
    if isinstance(error, PeerLost):
        return False
    return isinstance(error, torch.OutOfMemoryError) or \
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


class Event:
    """The end of one piece of work: known to the host (``future``) and, on an accelerator, to the device."""

    def __init__(self):
        self.future: Future = Future()
        self.on_device: Any = None

    def result(self, timeout: Optional[float] = None) -> Any:
        """Waits until the work has been issued (on CPU: done) and returns its result or raises its error."""
        return self.future.result(timeout)

    def abandon(self, is_callers: bool) -> None:
        """Ends all waiting for it, where an interrupt keeps it from ever being told. What a stream is at is left to it.

        Args:
            is_callers: whether the work is the calling thread's own, so that nobody is at it any more.
        """
        if not self.future.cancel() and is_callers and not self.future.done():
            self.future.set_exception(CancelledError())
        # An interrupt may also come between a result and the word of it to those who wait: the future then counts as done.
        with self.future._condition:
            self.future._condition.notify_all()


class WorkStream:
    """A queue of work with its own thread, and on an accelerator its own stream there."""

    def __init__(self, name: str, device: "Device"):
        self._device = device
        self.on_device = None if device.is_cpu else get_accelerator().Stream(device=device.torch_device)
        self._queue: "queue.SimpleQueue" = queue.SimpleQueue()
        threading.Thread(target=self._loop, name=f"mobius-{name}", daemon=True).start()

    def run(self, work: Callable[[], Any], after: Iterable[Event], event: Event) -> None:
        """Queues ``work``, to be done after the given events; ``event`` is its end. It fails if one of them does."""
        self._queue.put((work, tuple(after), event))

    def synchronize(self) -> None:
        """Blocks the calling thread until the device has done what was issued to this stream so far."""
        if self.on_device is not None:
            self.on_device.synchronize()

    def close(self) -> None:
        """Ends the thread after the work that is queued."""
        self._queue.put(None)

    def _loop(self) -> None:
        self._device.bind_thread()
        while (item := self._queue.get()) is not None:
            with nullcontext() if self.on_device is None else get_accelerator().stream(self.on_device):
                self._device.do(*item)
            del item  # its closures hold device tensors


class Device:
    """One rank's GPU, or the CPU in its place.

    Args:
        torch_device: where the stages compute.
        budget: bytes this rank may use, or None for no limit.
        ledger: counts every copy between host and device where it is made.
        link: emulated wires, which every copy takes its time to cross; none by default.
    """

    def __init__(self, torch_device: torch.device, ledger: Ledger, budget: Optional[int] = None,
                 link: Optional[HostLink] = None):
        self.torch_device = torch_device
        self.memory_device = torch_device
        """Where its tensors are made: they have a memory of their own kind on a device that only rehearses."""
        self.is_cpu = torch_device.type == "cpu"
        self.ledger = ledger
        self.budget = budget
        self.link = link
        self._used = 0
        self._peak = 0
        self._memory_lock = threading.Lock()
        self.pinning = Pinning(torch_device)
        self._compute: Any = None
        self.streams: Dict[Stream, WorkStream] = {
            Stream.PREFETCH: WorkStream("prefetch", self),  # weights in, which wait for a slot, that is for compute
            Stream.LOAD: WorkStream("load", self),  # activations in, which wait for another rank
            Stream.STORE: WorkStream("store", self),  # activations out, for which another rank waits
            Stream.OFFLOAD: WorkStream("offload", self),  # weight gradients out, for which nobody waits
            Stream.UPDATE: WorkStream("update", self),  # the optimizer, on the CPU
        }
        """No thread for compute: it runs in the caller's, on the stream that is current there. A backward inside a
        backward must stay in autograd's thread, and grad mode and autocast belong to the caller's."""

    # Streams and events.

    def do(self, work: Callable[[], Any], after: Iterable[Event], event: Event) -> None:
        """Does ``work`` now, in the calling thread and on its current stream, once ``after`` have been issued.

        An error goes to whoever asks ``event`` for its result.
        """
        if not event.future.set_running_or_notify_cancel():
            return  # it was abandoned
        try:
            for earlier in after:
                earlier.result()
            self.wait_for(after)
            result = work()
            event.on_device = self.record()
        except Exception as error:
            event.future.set_exception(error)
        except BaseException as interrupt:
            event.future.set_exception(CancelledError(repr(interrupt)))
            raise
        else:
            event.future.set_result(result)

    def bind_thread(self) -> None:
        """Makes this the current device of the calling thread."""
        if not self.is_cpu:
            get_accelerator().set_device(self.torch_device.index or 0)

    def record(self) -> Any:
        """An event after what was issued to the current stream; None on CPU."""
        if self.is_cpu:
            return None
        event = get_accelerator().Event()
        event.record(get_accelerator().current_stream(self.torch_device.index))
        return event

    def wait_for(self, events: Iterable[Event]) -> None:
        """Lets the current stream wait for what the events stand for on the device. The host does not wait."""
        for event in events:
            if event.on_device is not None:
                get_accelerator().current_stream(self.torch_device.index).wait_event(event.on_device)

    def begin(self) -> Event:
        """Makes the caller's current stream the one that computes; the event is what it has been issued so far."""
        event = Event()
        self._compute = None if self.is_cpu else get_accelerator().current_stream(self.torch_device.index)
        event.on_device = self.record()
        event.future.set_result(None)
        return event

    # Copies. Host memory is pinned, so they do not block; the tensors they read and write outlive them
    # because an event of their stream is waited for before either is used again.

    def upload(self, host: torch.Tensor, category: str, into: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Copies a host tensor to the device, into ``into`` or a new tensor with the same strides."""
        if into is None:
            into = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self.memory_device)
        self._move(host, into, category, self.link and self.link.to_gpu)
        return into

    def download(self, tensor: torch.Tensor, category: str, into: torch.Tensor) -> None:
        """Copies a device tensor to a host tensor of the same shape and dtype."""
        self._move(tensor, into, category, self.link and self.link.to_dram)

    def _move(self, source: torch.Tensor, into: torch.Tensor, category: str,
              cross: Optional[Callable[[int, float], None]]) -> None:
        begun = time.perf_counter()
        self.copy(source, into)
        nbytes = into.numel() * into.dtype.itemsize
        if cross is not None:
            cross(nbytes, begun)  # the copy itself is part of the way
        self.ledger.add(category, nbytes)

    def copy(self, source: torch.Tensor, into: torch.Tensor) -> None:
        """Copies between host and device, uncounted."""
        into.copy_(source, non_blocking=True)

    def finish_copies(self) -> None:
        """Blocks until every copy issued so far is done. Compute goes on."""
        for stream in self.streams.values():
            stream.synchronize()

    def used_by(self, tensor: torch.Tensor, stream: Stream) -> torch.Tensor:
        """Tells the allocator that a tensor made on one stream is used on another."""
        if not self.is_cpu:
            tensor.record_stream(self._compute if stream is Stream.COMPUTE else self.streams[stream].on_device)
        return tensor

    def register(self, host: torch.Tensor) -> None:
        """Pins mapped host memory, so that copies from it run beside compute. Nothing to do on CPU."""
        self.pinning.pin(host)

    # Memory. On an accelerator the allocator knows best; on CPU what the pipeline holds is added up.

    def hold(self, nbytes: int, what: str) -> None:
        """Counts ``nbytes`` of device memory as used for ``what``.

        Raises:
            DeviceOutOfMemory: the budget would be exceeded.
        """
        with self._memory_lock:
            if self.budget is not None and self._used + nbytes > self.budget:
                raise DeviceOutOfMemory(f"{what} needs {readable(nbytes)} of device memory, but of the "
                                        f"{readable(self.budget)} budget (device_memory_gb) {readable(self._used)} are in "
                                        "use.")
            self._used += nbytes
            self._peak = max(self._peak, self._used)

    def release(self, nbytes: int) -> None:
        """Counts ``nbytes`` as free again."""
        with self._memory_lock:
            self._used -= nbytes

    def peak_bytes(self) -> int:
        """The most device memory used so far. On CPU: slots, gradient buffers and boundary activations."""
        return self._peak if self.is_cpu else get_accelerator().max_memory_allocated(self.torch_device.index)

    def memory(self) -> str:
        """What is held, for messages."""
        budget = "" if self.budget is None else f", of a budget of {readable(self.budget)}"
        return f"{readable(self._used)} there are held for two slots, their gradients and boundary activations{budget}"

    def close(self) -> None:
        """Ends the streams' threads and gives up what was pinned, before its mapping goes and its address is used again."""
        for stream in self.streams.values():
            stream.synchronize()
            stream.close()
        self.pinning.close()

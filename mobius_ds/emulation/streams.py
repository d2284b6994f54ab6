"""Streams and events for DeepSpeed on CPU, so that transfers overlap with compute as they would on a GPU.

On CPU DeepSpeed has one stream, the thread that computes, and takes code paths that wait for everything at once. With
``EmulatedAccelerator`` in the CPU accelerator's place it takes those it takes on CUDA: it makes streams, issues to
them, and waits for them and for events where it must. So its own code decides what overlaps with what.

What is emulated is time alone. Whatever DeepSpeed asks for is done at once, by the thread that asks; a stream only
holds the time that transfers take, one after the other, in a thread of its own. The compute stream is the thread that
computes: what it waits for holds it up. As of DeepSpeed 0.19, with its defaults, that means:

- ZeRO-3 gathers in a stream of its own: a submodule's shards are copied in, then collected. Compute waits for that
  stream when it reaches the submodule, so what is prefetched behind earlier submodules hides.
- ZeRO-3 reduces and offloads gradients in another stream, bucket by bucket, beside backward. The end of backward waits
  for it, and so does the optimizer.
- Stages 0 to 2 do not overlap (``overlap_comm`` is off): compute waits for each bucket's reduction and for its copy.
- ``PipelineEngine`` sends and receives in the compute stream: a stage that does, does nothing else.

It is harder on DeepSpeed than CUDA in three ways: where its host waits for a stream, compute waits too, which on CUDA may
have work left; what it computes in other streams, compute does; and gloo, which moves the data, needs this CPU. It is
easier in one: copies never wait for memory that is not pinned.
"""

import queue
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Callable, List, Optional

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

LONGEST_WAIT_SECONDS = 1800.0
"""As long as the process groups wait for a rank: a transfer is over by then, or an error."""

Passage = Callable[[float], float]
"""Waits until a transfer is over that could begin at the given time (``time.perf_counter``); returns when it was over."""


class EmulatedStream:
    """What DeepSpeed calls of a stream, as on CUDA."""

    last: Future
    """The end of what was issued so far; its result is when that was."""

    def submit(self, work: Passage) -> Future:
        """Issues a transfer; it begins when those before are over."""
        raise NotImplementedError

    def wait(self, end: Future) -> None:
        """Holds up what is issued from now on until another stream's work is over."""
        raise NotImplementedError

    def wait_stream(self, other: "EmulatedStream") -> None:
        self.wait(other.last)

    def wait_event(self, event: "EmulatedEvent") -> None:
        self.wait(event.end)

    def query(self) -> bool:
        return self.last.done()

    def synchronize(self) -> None:
        get_accelerator().default_stream().wait(self.last)


class SideStream(EmulatedStream):
    """Transfers one after the other, while others compute."""

    def __init__(self, name: str):
        self.last = _over(0.0)
        self._queue: "queue.SimpleQueue" = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=f"emulated-{name}", daemon=True)
        self._thread.start()

    def submit(self, work: Passage) -> Future:
        future: Future = Future()
        self._queue.put((work, time.perf_counter(), future))
        self.last = future
        return future

    def wait(self, end: Future) -> None:
        if not end.done():
            self.submit(lambda begin: max(begin, end.result(LONGEST_WAIT_SECONDS)))

    def close(self) -> None:
        """Ends the thread after what was issued. A thread that Python's end finds inside gloo would abort the process."""
        self._queue.put(None)
        self._thread.join(LONGEST_WAIT_SECONDS)

    def _loop(self) -> None:
        end = 0.0
        while (item := self._queue.get()) is not None:
            work, issued, future = item
            try:
                end = work(max(end, issued))
            except BaseException as error:  # whoever waits for it is told
                future.set_exception(error)
            else:
                future.set_result(end)


class ComputeStream(EmulatedStream):
    """The thread that computes. What is issued to it, it does.

    Args:
        waited: told from when to when it was held up.
    """

    def __init__(self, waited: Callable[[float, float], None]):
        self._waited = waited

    @property
    def last(self) -> Future:
        return _over(time.perf_counter())

    def submit(self, work: Passage) -> Future:
        begin = time.perf_counter()
        end = work(begin)
        self._waited(begin, time.perf_counter())
        return _over(end)

    def wait(self, end: Future) -> None:
        if not end.done():
            begin = time.perf_counter()
            try:
                end.result(LONGEST_WAIT_SECONDS)
            except TimeoutError:
                raise TimeoutError(f"a transfer over emulated links was not over after {LONGEST_WAIT_SECONDS:.0f} s: "
                                   "another rank does not take part, or --slowdown is too large for this job") from None
            self._waited(begin, time.perf_counter())
        end.result()


class EmulatedEvent:
    """The end of what a stream was issued before it."""

    def __init__(self, **_: Any):
        self.end: Future = _over(0.0)

    def record(self, stream: Optional[EmulatedStream] = None) -> None:
        self.end = (stream or get_accelerator().current_stream()).last

    def wait(self, stream: Optional[EmulatedStream] = None) -> None:
        (stream or get_accelerator().current_stream()).wait(self.end)

    def query(self) -> bool:
        return self.end.done()

    def synchronize(self) -> None:
        get_accelerator().default_stream().wait(self.end)


class EmulatedAccelerator(CPU_Accelerator):
    """The CPU accelerator, with streams.

    Args:
        waited: told from when to when compute was held up.
    """

    def __init__(self, waited: Callable[[float, float], None]):
        super().__init__()
        self._compute = ComputeStream(waited)
        self._current = threading.local()
        self._streams: List[SideStream] = []

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return True

    @property
    def Stream(self) -> Callable[..., SideStream]:
        return lambda *_, **__: self.new_stream("deepspeed")

    @property
    def Event(self) -> type:
        return EmulatedEvent

    def new_stream(self, name: str) -> SideStream:
        """A stream of its own."""
        self._streams.append(SideStream(name))
        return self._streams[-1]

    def current_stream(self, device_index: Any = None) -> EmulatedStream:
        return getattr(self._current, "stream", self._compute)

    def default_stream(self, device_index: Any = None) -> EmulatedStream:
        return self._compute

    @contextmanager
    def stream(self, stream: Optional[EmulatedStream]):
        before = self.current_stream()
        self._current.stream = stream or self._compute
        try:
            yield
        finally:
            self._current.stream = before

    def synchronize(self, device_index: Any = None) -> None:
        for stream in self._streams:
            self._compute.wait(stream.last)

    def close(self) -> None:
        """Ends the streams' threads."""
        for stream in self._streams:
            stream.close()


@contextmanager
def emulated_streams(waited: Callable[[float, float], None]):
    """Puts an ``EmulatedAccelerator`` in the CPU accelerator's place, and takes it away again."""
    before, emulated = get_accelerator(), EmulatedAccelerator(waited)
    set_accelerator(emulated)
    # Tensors are done with when DeepSpeed has called: no stream of an allocator has to know.
    torch.Tensor.record_stream = lambda tensor, stream: None
    try:
        yield emulated
    finally:
        set_accelerator(before)
        del torch.Tensor.record_stream  # and with it what hid the method of its base class
        emulated.close()


def _over(when: float) -> Future:
    future: Future = Future()
    future.set_result(when)
    return future

"""The CPU in the place of a GPU: streams that run beside each other, in order, and a budget that holds."""

import threading
import time

import pytest
import torch

from mobius_ds.runtime.device.device import Device, Event
from mobius_ds.runtime.device.ledger import Ledger
from mobius_ds.runtime.ranks.errors import OutOfMemory
from mobius_ds.schedule.tasks import Stream


@pytest.fixture
def device():
    device = Device(torch.device("cpu"), Ledger(), budget=1000)
    yield device
    device.close()


def test_streams_run_beside_each_other_and_each_in_order(device):
    gate, order = threading.Event(), []
    slow, fast, later = Event(), Event(), Event()
    device.streams[Stream.PREFETCH].run(lambda: gate.wait(10) and order.append("slow"), [], slow)
    device.streams[Stream.PREFETCH].run(lambda: order.append("later"), [], later)
    device.streams[Stream.LOAD].run(lambda: order.append("fast"), [], fast)
    fast.result(10)
    assert order == ["fast"] and not later.future.done()
    gate.set()
    later.result(10)
    assert order == ["fast", "slow", "later"]


def test_work_waits_for_events_of_other_streams(device):
    copied, computed = Event(), Event()
    memory = torch.zeros(1)
    device.streams[Stream.LOAD].run(lambda: time.sleep(0.1) or memory.fill_(7), [device.begin()], copied)
    device.do(lambda: memory.item(), [copied], computed)
    assert computed.result() == 7


def test_an_error_reaches_all_that_waits_for_it_and_ends_no_stream(device):
    failed, behind, other = Event(), Event(), Event()
    device.streams[Stream.LOAD].run(lambda: 1 / 0, [], failed)
    device.streams[Stream.STORE].run(lambda: "not reached", [failed], behind)
    with pytest.raises(ZeroDivisionError):
        behind.result(10)
    computed = Event()
    device.do(lambda: "not reached", [behind], computed)
    with pytest.raises(ZeroDivisionError):
        computed.result()
    device.streams[Stream.STORE].run(lambda: "alive", [], other)
    assert other.result(10) == "alive"


def test_an_interrupt_is_raised_where_it_happens(device):
    event = Event()

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        device.do(interrupted, [], event)
    assert event.future.exception() is not None


def test_streams_let_go_of_what_their_work_held(device):
    import weakref
    tensor = torch.zeros(10)
    reference, event = weakref.ref(tensor), Event()
    device.streams[Stream.LOAD].run(lambda held=tensor: None, [], event)
    event.result(10)
    del tensor
    deadline = time.monotonic() + 60
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reference() is None


def test_copies_keep_strides_and_are_counted(device):
    host = torch.arange(12.0).view(3, 4).t()
    up = device.upload(host, "activations_in")
    assert torch.equal(up, host) and up.stride() == host.stride() and up.data_ptr() != host.data_ptr()
    into = torch.empty(4, 3)
    device.download(up, "activations_out", into)
    assert torch.equal(into, host)
    counted = device.ledger.take()
    assert (counted["activations_in"], counted["activations_out"], counted["other"]) == (48, 48, 0)
    assert device.ledger.take()["activations_in"] == 0
    with pytest.raises(KeyError):
        device.upload(host, "no category")


def test_the_budget_is_kept_and_the_peak_remembered(device):
    device.hold(400, "slots")
    device.hold(500, "activations")
    with pytest.raises(OutOfMemory, match="more activations needs"):
        device.hold(101, "more activations")
    device.release(500)
    device.hold(600, "as much as is left")
    device.release(600)
    assert device.peak_bytes() == 1000


def test_the_ledger_adds_up_over_threads():
    ledger = Ledger()
    threads = [threading.Thread(target=lambda: [ledger.add("other", 1) for _ in range(2000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.take()["other"] == 8000


def test_a_closed_device_has_no_threads():
    before = threading.active_count()
    device = Device(torch.device("cpu"), Ledger())
    assert threading.active_count() == before + len(device.streams)
    device.close()
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before

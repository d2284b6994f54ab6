"""Messages between ranks; the ranks are threads of this process, each with its own mailbox."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, List

import pytest

import mobius_ds.runtime.ranks.mailbox as mailbox_module
from mobius_ds.runtime.ranks.errors import OutOfStep, PeerLost, PeerTimeout, PipelineError
from mobius_ds.runtime.ranks.mailbox import Mailbox
from mobius_ds.runtime.ranks.node import Node
from tests.features import survives
from tests.ranks import run_ranks


def gatherer(ranks: int) -> Callable[[int, Any], List[Any]]:
    barrier, contents = threading.Barrier(ranks), [None] * ranks

    def exchange(rank: int, content: Any) -> List[Any]:
        contents[rank] = content
        barrier.wait(60)
        return list(contents)

    return exchange


def connected(ranks: int, timeout: float = 60.0) -> List[Mailbox]:
    exchange = gatherer(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: Mailbox(rank, ranks, lambda content: exchange(rank, content), timeout),
                             range(ranks)))


@pytest.fixture
def mailboxes():
    made: List[Mailbox] = []

    def make(ranks: int, timeout: float = 60.0) -> List[Mailbox]:
        made.extend(connected(ranks, timeout))
        return made

    yield make
    for mailbox in made:
        mailbox.close()


def together(*calls: Callable[[], Any]) -> List[Any]:
    """Results of calls made at the same time, or what they raise."""
    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def test_messages_are_taken_by_key_in_any_order(mailboxes):
    first, second, third = mailboxes(3)
    for number in range(5):
        first.post(1, ("a", number), number)
        third.post(1, ("b", number), {"large": bytes(300_000)})
    assert [second.take(0, ("a", number), "a number") for number in reversed(range(5))] == [4, 3, 2, 1, 0]
    assert len(second.take(2, ("b", 4), "bytes")["large"]) == 300_000


def test_a_rank_can_write_to_itself(mailboxes):
    [alone] = mailboxes(1)
    alone.post(0, "key", 7)
    assert alone.take(0, "key", "a number") == 7
    assert alone.gather("a call", 8) == [8]


def test_a_wait_sleeps_until_its_message_comes(mailboxes):
    first, second = mailboxes(2)
    worked = []
    for key in range(3):  # one may meet a garbage collection
        begun, used = time.monotonic(), time.process_time()
        threading.Timer(0.2, lambda: first.post(1, key, "late")).start()
        assert second.take(0, key, "a word") == "late"
        assert time.monotonic() - begun >= 0.19
        worked.append(time.process_time() - used)
    assert min(worked) < 0.1


def test_gather_is_in_rank_order_and_names_who_is_elsewhere(mailboxes):
    boxes = mailboxes(3)
    assert together(*(lambda box=box: box.gather("sum", box.rank) for box in boxes)) == [[0, 1, 2]] * 3
    calls = ["step", "forward", "step"]
    errors = together(*(lambda box=box: box.gather(calls[box.rank], None) for box in boxes))
    assert all(isinstance(error, OutOfStep) for error in errors)
    assert "rank 0 is in step, but rank 1 is in forward" in str(errors[0])
    assert "rank 1 is in forward, but rank 0 is in step" in str(errors[1])


def test_a_late_message_is_an_error_that_says_what_and_whose(mailboxes):
    first, _ = mailboxes(2, timeout=0.2)
    with pytest.raises(PeerTimeout, match="rank 0 waited 0.2 s for the weights from rank 1; rank 1 is alive"):
        first.take(1, "key", "the weights")


@survives("Ranks", "a long wait, before it is too long", "one warning that says for whom, for what, and what that rank does")
def test_a_long_wait_says_so_once_in_a_call(mailboxes, monkeypatch):
    first, _ = mailboxes(2, timeout=1.0)
    said: List[str] = []
    monkeypatch.setattr(mailbox_module.logger, "warning", said.append)
    for key in ("one", "another"):
        with pytest.raises(PeerTimeout):
            first.take(1, key, "a word")
    [warning] = said
    assert "rank 0 has waited 0.1 s for a word from rank 1; rank 1 is alive" in warning and "after 1 s" in warning


def test_the_rank_that_holds_up_all_is_named_by_those_who_wait_for_others(mailboxes):
    boxes = mailboxes(4, timeout=1.0)

    def wait_for_the_one_before(box: Mailbox) -> None:
        box._caller = threading.get_ident()
        box.take(box.rank - 1, "key", "a word")

    # The last waits for the third, that one for the second, and so on: the first has something else to do.
    for error in together(*(lambda box=box: wait_for_the_one_before(box) for box in boxes[1:])):
        assert isinstance(error, PeerTimeout) and error.rank == 0 and "; rank 0 is alive" in str(error), error


def test_a_write_to_a_rank_that_reads_nothing_ends_as_well(mailboxes):
    first, second = mailboxes(2, timeout=0.5)
    with second._changed:  # its receiving thread stands still behind the first message, as all of a stopped process does
        first.post(1, "key", b"")
        time.sleep(0.1)
        first.post(1, "key", bytes(10_000_000))
        with pytest.raises(PeerTimeout, match="rank 0 could not write to rank 1 for 0.5 s: its process is stopped") as late:
            first.take(1, "key", "a word")
        first.fail(late.value)


def test_a_failure_ends_every_wait_and_all_name_the_first_rank(mailboxes):
    first, second, third = mailboxes(3)
    second.fail(ValueError("bad data"), "forward of stage 1")
    with pytest.raises(PeerLost, match="rank 1 is gone .ValueError: bad data; forward of stage 1") as lost:
        first.take(2, "key", "a word")
    assert lost.value.rank == 1
    first.fail(lost.value, "another place")
    with pytest.raises(PeerLost, match="rank 1 is gone .ValueError: bad data; forward of stage 1"):
        third.take(0, "key", "a word")
    with pytest.raises(PeerLost, match="rank 1 has failed before .ValueError: bad data"):
        second.take(0, "key", "a word")


def test_whose_memory_is_gone_is_asked_for_the_reason(mailboxes, monkeypatch):
    monkeypatch.setattr(mailbox_module, "_ANSWER_SECONDS", 120.0)
    first, second = mailboxes(2)
    begun = time.monotonic()
    threading.Timer(0.2, lambda: second.fail(ValueError("bad data"))).start()
    with pytest.raises(PeerLost, match="rank 1 is gone .ValueError: bad data. while rank 0 waited for its activations"):
        first.raise_told(1, "its activations")
    assert time.monotonic() - begun < 60


def test_a_rank_that_has_not_told_is_not_waited_for_long(mailboxes, monkeypatch):
    first, _ = mailboxes(2)
    monkeypatch.setattr(mailbox_module, "_ANSWER_SECONDS", 0.1)
    first.raise_told(1, "its activations")


def test_what_was_sent_before_a_failure_can_still_be_taken(mailboxes):
    first, second = mailboxes(2)
    first.post(1, "key", "sent")
    first.fail(ValueError("later"))
    time.sleep(0.1)
    assert second.take(0, "key", "a word") == "sent"


def test_a_rank_that_is_alone_may_go_on_after_an_error(mailboxes):
    [alone] = mailboxes(1)
    with pytest.raises(ValueError), alone.told():
        raise ValueError("caught by the script")
    assert alone.gather("a call", 8) == [8]


def test_a_rank_that_left_is_missed_only_when_waited_for(mailboxes):
    first, second, third = mailboxes(3)
    second.close()
    second.close()
    third.post(0, "key", "still here")
    assert first.take(2, "key", "a word") == "still here"
    with pytest.raises(PeerLost, match="a word from rank 1, which has left .* check for uneven data"):
        first.take(1, "key", "a word")


class Unreadable:
    def __reduce__(self):
        return _not_today, ()


def _not_today():
    raise ImportError("no such module here")


class Unwritable:
    def __reduce__(self):
        raise ValueError("cannot be pickled")


def test_what_cannot_be_sent_or_read_is_an_error_and_no_wait(mailboxes):
    first, second = mailboxes(2)
    with pytest.raises(ValueError, match="cannot be pickled"):
        first.post(1, "key", Unwritable())
    first.post(1, "key", Unreadable())
    with pytest.raises(PeerLost, match="rank 0 is gone .its message cannot be read: ImportError"):
        second.take(0, "key", "a word")


def test_closed_mailboxes_leave_no_file_and_no_thread():
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        for mailbox in connected(3):
            mailbox.close()
    deadline = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads
    del mailbox
    assert len(os.listdir("/proc/self/fd")) <= files


def test_a_peer_on_another_node_is_an_error():
    with pytest.raises(PipelineError, match="the ranks run on 2 machines .rank 0 on elsewhere; rank 1 on "):
        Mailbox(1, 2, lambda mine: [("\0mobius-there", Node("elsewhere", "another", "net")), mine], timeout=0.2)
    with pytest.raises(PipelineError, match="rank 1 could not reach rank.s. .0. on this node"):
        Mailbox(1, 2, lambda mine: [("\0mobius-of nobody", mine[1]), mine], timeout=0.2)


def failing_script() -> str:
    """Rank 1 ends by an error, with a child left, while rank 0 waits for it: what rank 0 hears."""
    import torch.distributed as dist

    def exchange(content: Any) -> List[Any]:
        gathered = [None, None]
        dist.all_gather_object(gathered, content)
        return gathered

    mailbox = Mailbox(dist.get_rank(), 2, exchange, timeout=60)
    mailbox.gather("a call", None)
    if dist.get_rank() == 1:
        child = os.fork()
        if child == 0:
            time.sleep(100)  # holds what it inherited
            os._exit(0)
        mailbox.post(0, "child", child)
        time.sleep(0.2)
        sys.last_value = OSError("disk full")
        mailbox_module._say_goodbye()  # what the interpreter does after an error of the script
        return ""
    child = mailbox.take(1, "child", "a number")
    try:
        mailbox.take(1, "never", "a word")
    except PeerLost as error:
        return str(error)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_script_that_fails_says_why():
    error, _ = run_ranks(2, failing_script)
    assert "rank 1 is gone (OSError: disk full) while rank 0 waited for a word" in error

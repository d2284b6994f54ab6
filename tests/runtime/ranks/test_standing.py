"""Where a rank stands while others wait for it."""

import multiprocessing
import threading
import time

import pytest

from mobius_ds.runtime.ranks.standing import Wait, standing

WAITS = (Wait(0, "a word"), )


@pytest.mark.parametrize("module, waits", [("mobius_ds.runtime.ranks.mailbox", WAITS), ("a_script", ())])
def test_a_thread_that_tells_the_others_of_its_wait_still_waits(module, waits):
    """A script may use the same library for itself, and is then at work."""
    ours, theirs = multiprocessing.Pipe()
    function = {"__name__": module}
    exec("def tell(connection):\n    connection.recv()", function)
    thread = threading.Thread(target=function["tell"], args=(theirs, ))
    thread.start()
    while standing(thread.ident, WAITS).place.find("tell") < 0:
        time.sleep(0.01)
    assert standing(thread.ident, WAITS).waits == waits
    ours.send(None)
    thread.join()

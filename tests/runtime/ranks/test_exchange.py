"""How ranks find each other."""

import os
import time

import deepspeed
import torch.distributed as dist

from mobius_ds.runtime.ranks.exchange import exchange, host_group
from tests.ranks import run_ranks


def enter_late_and_leave_at_once():
    deepspeed.init_distributed("gloo", verbose=False)
    new_group = dist.new_group

    def slow_to_connect(*args, **kwargs):
        group = new_group(*args, **kwargs)
        time.sleep(1.0 if os.environ["RANK"] == "0" else 0.0)
        return group

    dist.new_group = slow_to_connect
    with host_group():
        entered = time.monotonic()
    left = time.monotonic()
    dist.new_group = new_group
    return exchange((entered, left))


def test_nobody_leaves_a_group_that_another_is_still_entering():
    times, same = run_ranks(2, enter_late_and_leave_at_once)
    assert times == same
    assert max(entered for entered, _ in times) <= min(left for _, left in times)

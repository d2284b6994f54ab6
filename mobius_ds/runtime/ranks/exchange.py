"""How ranks find each other before a pipeline connects them."""

from contextlib import contextmanager
from typing import Any, Iterator, List

import torch.distributed as dist


@contextmanager
def host_group() -> Iterator[dist.ProcessGroup]:
    """A process group of all ranks for as long as the block runs. All ranks enter and leave it.

    Over gloo, whatever the job's own backend is: it is for what lies on the host.
    """
    group = dist.new_group(backend="gloo")
    yield group
    # A rank is connected once it has heard from the others, but they may still be waiting for it: if it left now, their
    # half of the connection would break while they build it.
    dist.barrier(group)
    dist.destroy_process_group(group)


def exchange(content: Any) -> List[Any]:
    """Gathers one object from every rank, in rank order. All ranks call it."""
    gathered = [None] * dist.get_world_size()
    with host_group() as group:
        dist.all_gather_object(gathered, content, group=group)
    return gathered

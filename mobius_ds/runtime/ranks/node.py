"""Which machine a rank runs on. All ranks share one: its memory holds the model."""

import os
import socket
from pathlib import Path
from typing import List, NamedTuple, Sequence

from mobius_ds.runtime.ranks.errors import PipelineError


class Node(NamedTuple):
    """Where a process runs. Two are on one node if ``boot`` and ``network`` are equal."""

    host: str
    boot: str
    """Of the kernel: names a machine, and is the same in all its containers."""
    network: str
    """The network namespace, outside which the sockets between ranks cannot be reached."""

    @classmethod
    def here(cls) -> "Node":
        """This process's."""
        return cls(socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
                   os.readlink("/proc/self/ns/net"))


def check_one_node(nodes: Sequence[Node]) -> None:
    """Raises PipelineError, with the same words on every rank, if the ranks are not on one node."""
    places: List[tuple] = [node[1:] for node in nodes]
    if len(set(places)) == 1:
        return
    ranks = "; ".join(f"rank{'s' * (places.count(place) > 1)} "
                      f"{', '.join(str(rank) for rank, other in enumerate(places) if other == place)} on "
                      f"{nodes[places.index(place)].host}" for place in dict.fromkeys(places))
    what = "containers with networks of their own" if len({node.boot for node in nodes}) == 1 else "machines"
    raise PipelineError(f"the ranks run on {len(set(places))} {what} ({ranks}). Mobius runs on one, whose memory holds the "
                        'model: start all ranks there, or set "mobius": {"enabled": false}.')

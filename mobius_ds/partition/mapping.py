"""The mapping: which GPU runs which stage (paper, section 3.3).

Neighbouring stages are copied in at nearly the same time. Put under different root complexes they do not compete.
"""

from itertools import combinations
from typing import Dict, Iterator, List, Sequence, Tuple

import numpy as np

from mobius_ds.inputs.topology import Topology

EXHAUSTIVE = 8
"""GPUs up to which all orders are tried: 8! are 40,320, and GPUs that can be exchanged leave far fewer."""
STARTS = 8
"""Random orders, beside two good ones, from which the search for more GPUs starts."""
CHUNK = 4096
"""Orders scored at once."""


def sequential(stages: int, gpus: int) -> Tuple[int, ...]:
    """Stage i on GPU i mod N."""
    return tuple(stage % gpus for stage in range(stages))


def cross(topology: Topology, stages: int) -> Tuple[int, ...]:
    """Stage i on GPU order[i mod N], for the order of the GPUs that has the least contention.

    All orders are compared on up to eight GPUs; beyond that, the best is returned that exchanging any two GPUs does
    not improve. Never worse than sequential, and sequential where nothing is better.
    """
    weights = _pair_weights(stages, topology.size)
    shared = _shared(topology)
    if topology.size <= EXHAUSTIVE:
        order = _least(_orders(topology), weights, shared)
    else:
        order = _least(iter([_descend(start, weights, shared) for start in _starts(topology)]), weights, shared)
    return tuple(order[stage % topology.size] for stage in range(stages))


def contention(topology: Topology, gpu_of_stage: Sequence[int]) -> float:
    """How much stages compete: the sum over pairs of stages i < j of shared(i, j) / (j - i) (paper, section 3.3).

    ``shared`` is the number of GPUs under the root complex that both stages' GPUs hang under, else zero.
    """
    shared = _shared(topology)[np.ix_(gpu_of_stage, gpu_of_stage)]
    distance = np.subtract.outer(np.arange(len(gpu_of_stage)), np.arange(len(gpu_of_stage)))
    return float(np.sum(shared[distance > 0] / distance[distance > 0]))


def _shared(topology: Topology) -> np.ndarray:
    return np.array([[topology.shared(i, j) for j in range(topology.size)] for i in range(topology.size)], dtype=float)


def _pair_weights(stages: int, gpus: int) -> np.ndarray:
    """For two places in the order, the sum of 1 / (j - i) over the pairs of stages i < j on them."""
    weights = np.zeros((gpus, gpus))
    for apart in range(1, stages):
        np.add.at(weights, (np.arange(stages - apart) % gpus, np.arange(apart, stages) % gpus), 1 / apart)
    return weights


def _orders(topology: Topology) -> Iterator[Tuple[int, ...]]:
    """Orders of the GPUs, one of each set that differs only by exchanging what does not change contention.

    That is GPUs of one root complex, which come in ascending order, and root complexes with as many GPUs each, which
    come in the order of their first GPUs.
    """
    groups: Dict[int, List[int]] = {}
    for gpu, root in enumerate(topology.root_of):
        groups.setdefault(root, []).append(gpu)

    def fill(order: Tuple[int, ...], left: List[List[int]], earliest: Dict[int, int]) -> Iterator[Tuple[int, ...]]:
        if not left:
            yield order
            return
        group = left[0]
        free = [place for place, gpu in enumerate(order) if gpu < 0]
        for places in combinations(free, len(group)):
            if places[0] > earliest.get(len(group), -1):
                filled = list(order)
                for place, gpu in zip(places, group):
                    filled[place] = gpu
                yield from fill(tuple(filled), left[1:], {**earliest, len(group): places[0]})

    return fill((-1,) * topology.size, list(groups.values()), {})


def _least(orders: Iterator[Tuple[int, ...]], weights: np.ndarray, shared: np.ndarray) -> Tuple[int, ...]:
    """The order with the least contention; of equal ones, the first in lexical order, in which sequential is first."""
    orders = np.array(list(orders))
    scores = np.concatenate([np.einsum("pq,kpq->k", weights, shared[chunk[:, :, None], chunk[:, None, :]])
                             for chunk in np.array_split(orders, -(-len(orders) // CHUNK))])
    # Equal contention can differ in rounding: the same terms are added in another order.
    best = orders[scores <= scores.min() * (1 + 1e-9)]
    return min(map(tuple, best.tolist()))


def _starts(topology: Topology) -> Iterator[Tuple[int, ...]]:
    yield tuple(range(topology.size))
    rank = [topology.root_of[:gpu].count(root) for gpu, root in enumerate(topology.root_of)]
    yield tuple(sorted(range(topology.size), key=lambda gpu: (rank[gpu], topology.root_of[gpu])))
    random = np.random.default_rng(0)  # the same plan every time
    for _ in range(STARTS):
        yield tuple(random.permutation(topology.size).tolist())


def _descend(order: Tuple[int, ...], weights: np.ndarray, shared: np.ndarray) -> Tuple[int, ...]:
    """Exchanges the two GPUs that gain most, until no exchange gains anything."""
    score = float("inf")
    while True:
        neighbours = [order]
        for i, j in combinations(range(len(order)), 2):
            exchanged = list(order)
            exchanged[i], exchanged[j] = order[j], order[i]
            neighbours.append(tuple(exchanged))
        stack = np.array(neighbours)
        scores = np.einsum("pq,kpq->k", weights, shared[stack[:, :, None], stack[:, None, :]])
        if not scores.min() < score * (1 - 1e-9):
            return order
        score = float(scores.min())
        order = neighbours[int(scores.argmin())]

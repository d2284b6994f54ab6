"""Emulated wires carry what the simulator says, between real processes."""

import math
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import pytest

from mobius_ds.emulation import wires as wires_module
from mobius_ds.emulation.wires import CHUNK_SECONDS, Wires
from mobius_ds.schedule.schedule import Schedule
from mobius_ds.schedule.tasks import Key, Kind, Task
from mobius_ds.simulation.simulator import Cost, Link, simulate
from tests.ranks import CONTEXT

GB = 10**9
LINKS: Dict[Link, float] = {("in", 0): 8 * GB, ("in", 1): 8 * GB, ("in", 2): 3 * GB, ("out", 0): 8 * GB,
                            ("root in", 0): 8 * GB, ("root in", 1): 8 * GB, ("root out", 0): 8 * GB}
Crossing = Tuple[Tuple[Link, float], ...]


def into(gpu: int, root: int, seconds: float) -> Crossing:
    """What takes so many seconds of a root complex that is free."""
    nbytes = seconds * 8 * GB
    return (("in", gpu), nbytes), (("root in", root), nbytes)


def at_random(seed: int) -> List[List[Crossing]]:
    """Three processes, each with transfers one after another, large and small."""
    chance = random.Random(seed)
    return [[into(gpu, chance.choice((0, 0, 1)), chance.choice((0.002, 0.02, 0.06))) for _ in range(chance.randint(1, 4))]
            for gpu in range(3)]


SCENES: List[List[List[Crossing]]] = [
    [[into(0, 0, 0.15)], [into(1, 0, 0.15)]],  # two GPUs under one root complex ...
    [[into(0, 0, 0.15)], [into(1, 1, 0.15)]],  # ... and under two
    [[into(2, 0, 0.05)], [into(1, 0, 0.2)]],  # a narrow link leaves the rest to the other
    [[into(0, 0, 0.15)], [into(1, 0, 0.15)], [into(0, 0, 0.002)] * 10],  # small ones between large ones
    [[into(0, 0, 0.1)], [((("out", 0), 0.8 * GB),)]],  # both directions at once
    *map(at_random, range(4)),
]


class Clock:
    """An emulated clock of several processes, or of one: it goes on when all of them sleep, to when the first wakes up.

    Stands in for the module ``time``.
    """

    def __init__(self, processes: int, late: float = 0.0):
        self._changed = CONTEXT.Condition()
        self._now = CONTEXT.Value("d", 0.0, lock=False)
        self._wakes_up = CONTEXT.Array("d", [-math.inf] * processes, lock=False)
        self._number, self._late = 0, late

    def of(self, number: int) -> "Clock":
        """As the process of this number has it."""
        self._number = number
        return self

    def perf_counter(self) -> float:
        return self._now.value

    def sleep(self, seconds: float) -> None:
        """Wakes up late, if it sleeps at all."""
        with self._changed:
            self._wakes_up[self._number] = end = self._now.value + seconds + (self._late if seconds else 0)
            self._go_on()
            while self._now.value < end:
                self._changed.wait()
            self._wakes_up[self._number] = -math.inf

    def begin(self) -> None:
        """This process takes part."""
        self._wakes_up[self._number] = -math.inf

    def end(self) -> None:
        """This process takes part no more."""
        with self._changed:
            self._wakes_up[self._number] = math.inf
            self._go_on()

    def _go_on(self) -> None:
        if math.inf > min(self._wakes_up) > self._now.value:
            self._now.value = min(self._wakes_up)
            self._changed.notify_all()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock(1)
    monkeypatch.setattr(wires_module, "time", clock)
    return clock


def carried(path: Path, scenes: Sequence[Any], clock: Clock, barrier: Any, results: Any, number: int) -> None:
    """One process: its transfers of every scene, and when each of them ended."""
    wires_module.time = clock.of(number)
    wires = Wires(path, LINKS)
    for scene in scenes:
        clock.begin()
        barrier.wait(100)
        begun = clock.perf_counter()
        barrier.wait(100)
        ended = []
        for crossing in scene[number] if number < len(scene) else ():
            wires.carry(crossing)
            ended.append(clock.perf_counter() - begun)
        clock.end()
        barrier.wait(100)
        results.put((number, ended))
    wires.close()


def simulated(scene: Sequence[Sequence[Crossing]]) -> List[List[float]]:
    """When they would end by max-min fairness."""
    crossings = {Key(Kind.WEIGHTS, place, number): crossing for number, flow in enumerate(scene)
                 for place, crossing in enumerate(flow)}
    tasks = tuple(Task(key, key.microbatch, 1, ()) for key in crossings)
    timeline = simulate(Schedule("scene", len(scene), tasks), lambda task: Cost(0.0, crossings[task.key]), LINKS)
    ends = {played.task.key: played.end for played in timeline.played}
    return [[ends[Key(Kind.WEIGHTS, place, number)] for place in range(len(flow))] for number, flow in enumerate(scene)]


def test_processes_share_links_as_the_simulator_does(tmp_path):
    """Never faster than the links, and not much slower."""
    barrier, results, clock = CONTEXT.Barrier(3), CONTEXT.Queue(), Clock(3)
    processes = [CONTEXT.Process(target=carried, args=(tmp_path / "wires", SCENES, clock, barrier, results, number))
                 for number in range(3)]
    for process in processes:
        process.start()
    by_process: Dict[int, List[List[float]]] = {number: [] for number in range(3)}
    for _ in range(3 * len(SCENES)):
        number, ended = results.get(timeout=100)
        by_process[number].append(ended)
    for process in processes:
        process.join(100)
    last = []
    for number, scene in enumerate(SCENES):
        measured = [by_process[process][number] for process in range(len(scene))]
        expected = simulated(scene)
        for ends, wanted in zip(measured, expected):
            for end, want in zip(ends, wanted):
                assert end > want - 0.03 * want - 3 * CHUNK_SECONDS, (number, measured, expected)
        last.append((max(end for ends in measured for end in ends), max(end for ends in expected for end in ends)))
        assert last[-1][0] > 0.99 * last[-1][1] - CHUNK_SECONDS, (number, measured, expected)
    assert sum(end for end, _ in last) < 1.3 * sum(want for _, want in last), last
    assert last[0][0] > 1.6 * last[1][0], "two root complexes carry twice as much as one"


def test_a_late_sleeper_loses_nothing(tmp_path, monkeypatch):
    wires = Wires(tmp_path / "wires", LINKS)
    late = 0.003
    monkeypatch.setattr(wires_module, "time", Clock(1, late))
    assert 0.2 <= wires.carry(into(0, 0, 0.2)) < 0.2 + 2 * late, "one lateness, not one for each chunk"
    wires.close()


def test_what_has_begun_before_is_not_waited_for_again(tmp_path, clock):
    wires = Wires(tmp_path / "wires", LINKS)
    begun = clock.perf_counter()
    clock.sleep(0.05)
    assert wires.carry(into(0, 0, 0.1), begun) == pytest.approx(0.1)
    assert wires.carry(()) == 0
    wires.close()


def die_holding(path: Path) -> None:
    """Ends within a booking."""
    wires = Wires(path, LINKS)
    with wires._alone():
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_leaves_the_wires_to_the_others(tmp_path, clock):
    wires = Wires(tmp_path / "wires", LINKS)
    victim = CONTEXT.Process(target=die_holding, args=(tmp_path / "wires",))
    victim.start()
    victim.join(30)
    assert victim.exitcode == -signal.SIGKILL
    assert wires.carry(into(0, 0, 0.01)) == pytest.approx(0.01)
    wires.close()


def test_a_slowdown_slows_down(tmp_path, clock):
    wires = Wires(tmp_path / "wires", LINKS, slowdown=10)
    assert wires.carry(into(0, 0, 0.01)) == pytest.approx(0.1)
    wires.close()


def test_other_links_are_refused(tmp_path):
    Wires(tmp_path / "wires", LINKS).close()
    for links, slowdown in (({**LINKS, ("in", 0): 1.0}, 1.0), ({("in", 0): 8.0}, 1.0), (LINKS, 2.0)):
        with pytest.raises(ValueError, match="made for other links"):
            Wires(tmp_path / "wires", links, slowdown)
    for links, slowdown in ((LINKS, 0.0), ({("in", 0): float("nan")}, 1.0), ({("in", 0): -1.0}, 1.0)):
        with pytest.raises(ValueError, match="must be positive"):
            Wires(tmp_path / "others", links, slowdown)
    assert not (tmp_path / "others").exists()


def test_short_transfers_at_once_take_no_more_than_the_link_has(tmp_path):
    """Boundary activations are shorter than a chunk, and come from many GPUs."""
    wires = Wires(tmp_path / "wires", LINKS)
    seconds, each, senders = 0.0005, 5, 8
    ready = threading.Barrier(senders)

    def send() -> float:
        ready.wait(30)
        begun = time.perf_counter()
        for _ in range(each):
            wires.carry(into(0, 0, seconds), begun)
        return begun

    with ThreadPoolExecutor(senders) as pool:
        begun = min(pool.map(lambda _: send(), range(senders)))
    assert time.perf_counter() - begun >= 0.95 * senders * each * seconds
    wires.close()

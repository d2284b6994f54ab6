"""The simulator: plays a schedule on links that are shared, and yields a timeline.

Tasks of one GPU and stream run in order, each once everything it waits for is over. Compute takes its time.
Transfers that run at the same time share the links they cross by max-min fairness: nobody gets more while
somebody with a smaller share could still be given it. A root complex is a link that its GPUs have in common.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, Dict, Hashable, Iterable, List, Mapping, NamedTuple, Sequence, Tuple

from mobius_ds.schedule.schedule import Schedule
from mobius_ds.schedule.tasks import Key, Stream, Task

Link = Hashable
EPSILON = 1e-12
"""Seconds: ends closer together than this are one event. Times here are seconds to hours, held in double precision."""


class Cost(NamedTuple):
    """What a task takes: a fixed time, and bytes over links. A transfer may have both (a latency first)."""

    seconds: float = 0.0
    crossing: Tuple[Tuple[Link, float], ...] = ()
    """Links and the bytes that cross each."""


class Played(NamedTuple):
    """A task in the timeline; times in seconds."""

    task: Task
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """What happened when."""

    played: Tuple[Played, ...]
    makespan: float
    """Seconds from the first task's start to the last one's end."""
    peak_rate: Dict[Link, float]
    """The most bytes/s that crossed each link at any time."""

    def of(self, gpu: int, *streams: Stream) -> List[Played]:
        """What one GPU did on some streams, in order."""
        return [played for played in self.played if played.task.gpu == gpu and played.task.stream in streams]

    def compute_seconds(self, gpu: int) -> float:
        """How long a GPU computed."""
        return sum(played.seconds for played in self.of(gpu, Stream.COMPUTE))

    def bubble(self, gpus: int) -> float:
        """The share of the GPUs' time in which they did not compute."""
        busy = sum(self.compute_seconds(gpu) for gpu in range(gpus))
        return 1 - busy / (gpus * self.makespan) if self.makespan else 0.0


class SimulationError(ValueError):
    """The schedule cannot be played: its tasks wait for each other in a circle, or a link has no bandwidth."""


def simulate(schedule: Schedule, cost: Callable[[Task], Cost], bandwidth: Mapping[Link, float]) -> Timeline:
    """Plays a schedule.

    Args:
        cost: what each task takes.
        bandwidth: bytes/s of every link that a cost names.

    Raises:
        SimulationError: tasks wait in a circle, or a link's bandwidth is not positive.
    """
    for link, rate in bandwidth.items():
        if not rate > 0:
            raise SimulationError(f"link {link} has a bandwidth of {rate} bytes/s; it must be positive")
    return _Simulation(schedule.tasks, cost, bandwidth).run()


class _Flow:
    """A transfer under way. ``left`` and ``weight`` are fractions of the whole, so all its links drain together."""

    __slots__ = ("task", "start", "left", "crossing", "rate")

    def __init__(self, task: Task, start: float, crossing: Sequence[Tuple[Link, float]]):
        self.task, self.start, self.left, self.crossing = task, start, 1.0, crossing
        self.rate = 0.0


class _Simulation:

    def __init__(self, tasks: Sequence[Task], cost: Callable[[Task], Cost], bandwidth: Mapping[Link, float]):
        self._cost = cost
        self._bandwidth = bandwidth
        self._queues: Dict[Tuple[int, Stream], List[Task]] = defaultdict(list)
        for task in reversed(tasks):
            self._queues[task.gpu, task.stream].append(task)
        self._waits: Dict[Key, int] = {}
        self._waiters: Dict[Key, List[Task]] = defaultdict(list)
        known = {task.key for task in tasks}
        for task in tasks:
            after = [key for key in set(task.after) if key in known]
            self._waits[task.key] = len(after)
            for key in after:
                self._waiters[key].append(task)
        self._busy: Dict[Tuple[int, Stream], bool] = {place: False for place in self._queues}
        self._timed: Dict[Key, Tuple[float, Task, float]] = {}
        self._flows: List[_Flow] = []
        self._played: List[Played] = []
        self._peak: Dict[Link, float] = defaultdict(float)
        self._now = 0.0

    def run(self) -> Timeline:
        self._start(self._queues)
        while self._timed or self._flows:
            self._advance()
        stuck = [str(queue[-1].key) for queue in self._queues.values() if queue]
        if stuck:
            raise SimulationError(f"tasks wait for each other in a circle: {', '.join(stuck[:8])} never start")
        return Timeline(tuple(self._played), self._now, dict(self._peak))

    def _start(self, places: Iterable[Tuple[int, Stream]]) -> None:
        """Starts the next task of every place that is free and whose task waits for nothing."""
        changed = False
        for place in list(places):
            queue = self._queues[place]
            if self._busy[place] or not queue or self._waits[queue[-1].key]:
                continue
            task = queue.pop()
            self._busy[place] = True
            seconds, crossing = self._cost(task)
            crossing = tuple((link, nbytes) for link, nbytes in crossing if nbytes > 0)
            if crossing and not seconds:
                self._flows.append(_Flow(task, self._now, crossing))
                changed = True
            else:
                self._timed[task.key] = (self._now + seconds, task, self._now)
        if changed:
            self._share()

    def _advance(self) -> None:
        """Goes on to the next end of anything."""
        until = min((end for end, _, _ in self._timed.values()), default=float("inf"))
        for flow in self._flows:
            until = min(until, self._now + flow.left / flow.rate)
        elapsed, self._now = until - self._now, until
        ended = []
        for flow in self._flows:
            flow.left -= flow.rate * elapsed
            if flow.left <= flow.rate * EPSILON:
                ended.append((flow.task, flow.start))
        if ended:
            self._flows = [flow for flow in self._flows if flow.left > flow.rate * EPSILON]
        for key, (end, task, start) in list(self._timed.items()):
            if end <= self._now + EPSILON:
                del self._timed[key]
                crossing = tuple((link, nbytes) for link, nbytes in self._cost(task).crossing if nbytes > 0)
                if crossing:  # its latency is over, now its bytes
                    self._flows.append(_Flow(task, start, crossing))
                else:
                    ended.append((task, start))
        self._end(ended)

    def _end(self, ended: List[Tuple[Task, float]]) -> None:
        places = {}
        for task, start in ended:
            self._played.append(Played(task, start, self._now))
            self._busy[task.gpu, task.stream] = False
            places[task.gpu, task.stream] = None
            for waiter in self._waiters[task.key]:
                self._waits[waiter.key] -= 1
                places[waiter.gpu, waiter.stream] = None
        self._share()
        self._start(places)

    def _share(self) -> None:
        """Max-min fairness by progressive filling: the tightest link decides for its flows, and so on."""
        users: Dict[Link, List[_Flow]] = defaultdict(list)
        load: Dict[Link, float] = defaultdict(float)
        for flow in self._flows:
            flow.rate = 0.0
            for link, nbytes in flow.crossing:
                users[link].append(flow)
                load[link] += 1.0
        left = {link: self._bandwidth[link] for link in users}
        while users:
            tightest = min(users, key=lambda link: left[link] / load[link])
            share = left[tightest] / load[tightest]
            for flow in users.pop(tightest):
                if flow.rate:
                    continue
                # ``share`` bytes/s over the tightest link; its other links carry in proportion.
                flow.rate = share / dict(flow.crossing)[tightest]
                for link, nbytes in flow.crossing:
                    if link != tightest and link in left:
                        left[link] = max(0.0, left[link] - flow.rate * nbytes)
                        load[link] -= 1.0
            for link in [link for link, flows in users.items() if all(flow.rate for flow in flows)]:
                del users[link]
        carried: Dict[Link, float] = defaultdict(float)
        for flow in self._flows:
            for link, nbytes in flow.crossing:
                carried[link] += flow.rate * nbytes
        for link, rate in carried.items():
            self._peak[link] = max(self._peak[link], rate)

"""The schedule: every task of a sweep, as data, and as a table that can be read, edited and read back.

A *sweep* takes all microbatches once through all stages, forward or backward. Its schedule lists, for
each GPU and each of its streams, the tasks in the order in which they run, with the bytes they move, the
category of those bytes, and the tasks they wait for. The executor runs it, the simulator plays it, the
report adds it up.

As text it is a line with its name, a row for each GPU and stream, and a line for each task that moves bytes or waits:

    forward on 2 GPUs
    gpu 0 compute  |    |     | 0F0 | 0F1
    gpu 0 prefetch | 0W |     |     |
    ...

    0W 4096B
    0F0 after 0W,0I0

In the rows a task stands to the right of all that it waits for. Only their order counts when they are read.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Collection, Dict, List, Optional, Sequence, Tuple

from mobius_ds.schedule.tasks import Key, Stream, Task

FORWARD, OUTPUTS, BACKWARD = "forward", "outputs", "backward"
"""Names of Mobius' sweeps. ``outputs`` runs the last stage of a forward once more."""

Row = Tuple[int, Stream]
"""A GPU and one of its streams."""
_AROUND = 4
"""Columns on either side of a task that an excerpt shows, and the most tasks that it is about."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The tasks of one sweep. Tasks of one GPU and stream are listed in their order; schedules whose rows are equal are."""

    name: str
    """Of the sweep, or of the peer whose schedule it is."""
    gpus: int
    tasks: Tuple[Task, ...]

    @property
    def is_backward(self) -> bool:
        """Whether it is a backward sweep."""
        return self.name == BACKWARD

    def of(self, gpu: int) -> Tuple[Task, ...]:
        """One GPU's tasks."""
        return tuple(task for task in self.tasks if task.gpu == gpu)

    def rows(self) -> Dict[Row, Tuple[Task, ...]]:
        """The tasks of each GPU's streams that have any, in order."""
        rows: Dict[Row, List[Task]] = {(gpu, stream): [] for gpu in range(self.gpus) for stream in Stream}
        for task in self.tasks:
            rows.setdefault((task.gpu, task.stream), []).append(task)
        return {row: tuple(tasks) for row, tasks in rows.items() if tasks}

    def gpu_of(self) -> Dict[Key, int]:
        """Where each task runs."""
        return {task.key: task.gpu for task in self.tasks}

    def bytes_by_category(self, gpu: Optional[int] = None) -> Dict[str, int]:
        """Bytes moved, by category, by one GPU or by all."""
        total: Dict[str, int] = defaultdict(int)
        for task in self.tasks:
            if task.category is not None and gpu in (None, task.gpu):
                total[task.category] += task.nbytes
        return dict(total)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and (self.name, self.gpus, self.rows()) == (other.name, other.gpus, other.rows())

    def __hash__(self) -> int:
        return hash((self.name, self.gpus, len(self.tasks)))

    def __str__(self) -> str:
        details = [str(task) for tasks in self.rows().values() for task in tasks if task.nbytes or task.after]
        return "\n".join([f"{self.name} on {self.gpus} GPUs", *self.table(), "", *details])

    def table(self, marked: Collection[Key] = ()) -> List[str]:
        """Its rows, with an arrow under each marked task; of a large schedule only what is around these."""
        column = _columns(self)
        about = [column[key] for key in list(marked)[:_AROUND] if key in column]
        shown = [number for number in sorted(set(column.values()))
                 if not about or any(abs(number - place) <= _AROUND for place in about)]
        gaps = ["   " if after == before + 1 else " ... " for before, after in zip(shown, shown[1:])]
        rows = {row: {column[task.key]: str(task.key) for task in tasks} for row, tasks in self.rows().items()}
        rows = {row: cells for row, cells in rows.items() if not marked or set(cells) & set(shown)}
        width = {number: max((len(cells.get(number, "")) for cells in rows.values()), default=0) for number in shown}
        titles = {row: f"gpu {row[0]} {row[1].value}" for row in rows}
        margin = max(map(len, titles.values()), default=0)
        names, lines = set(map(str, marked)), []
        for row, cells in rows.items():
            lines.append(_line(titles[row].ljust(margin), [cells.get(number, "").ljust(width[number]) for number in shown],
                               [gap.replace("   ", " | ") for gap in gaps], " | "))
            arrows = {number: "^" * len(name) for number, name in cells.items() if name in names}
            if arrows.keys() & set(shown):
                lines.append(_line(" " * margin, [arrows.get(number, "").ljust(width[number]) for number in shown],
                                   [" " * len(gap) for gap in gaps], "   "))
        return [line.rstrip() for line in lines]

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """The schedule that prints as ``text``.

        Raises:
            ValueError: none does; the message has the line.
        """
        head, *lines = text.strip("\n").split("\n")
        named = re.fullmatch(r"(.+) on ([0-9]+) GPUs", head.strip())
        if named is None:
            raise ValueError(f"{head!r} is not how a schedule begins, such as: forward on 2 GPUs")
        rows: List[Tuple[int, Stream, List[Key]]] = []
        details: Dict[Key, Tuple[int, Tuple[Key, ...]]] = {}
        for line in lines:
            try:
                if line.startswith("gpu "):
                    rows.append(_parsed_row(line))
                elif line.strip(" ^"):
                    key, *detail = _parsed_details(line)
                    details[key] = tuple(detail)
            except ValueError as error:
                raise ValueError(f"{line!r} is no row of a schedule, and no task's bytes and waits: {error}") from None
        astray = [f"{key} is no task of a {stream.value} stream" for _, stream, keys in rows for key in keys
                  if key.kind.stream is not stream]
        tasks = [Task(key, gpu, *details.pop(key, (0, ()))) for gpu, _, keys in rows for key in keys]
        if astray or details:
            raise ValueError("; ".join(astray + [f"{key} stands in no row" for key in details]))
        return cls(named[1], int(named[2]), tuple(tasks))


def _line(title: str, cells: Sequence[str], gaps: Sequence[str], first: str) -> str:
    """A title and cells, with what stands between them."""
    return title + "".join(gap + cell for gap, cell in zip([first, *gaps], cells))


def _parsed_row(line: str) -> Tuple[int, Stream, List[Key]]:
    title, *cells = line.split("|")
    _, gpu, stream = title.split()
    return int(gpu), Stream(stream), [Key.parse(cell.strip()) for cell in cells if cell.strip()]


def _parsed_details(line: str) -> Tuple[Key, int, Tuple[Key, ...]]:
    parts = re.fullmatch(r"(\S+)(?: ([0-9]+)B)?(?: after (\S+))?", line.strip())
    if parts is None:
        raise ValueError("it should read like 0I0 4096B after P0")
    key, nbytes, after = parts.groups()
    return Key.parse(key), int(nbytes or 0), tuple(map(Key.parse, after.split(","))) if after else ()


def _columns(schedule: Schedule) -> Dict[Key, int]:
    """A column for each task, to the right of those before it in its row and of those it waits for, as far as they go:
    tasks that wait for each other in a circle stand behind all others."""
    waits: Dict[Key, List[Key]] = {}
    for tasks in schedule.rows().values():
        for before, task in zip((None, *tasks), tasks):
            waits[task.key] = [*task.after, *([before.key] if before else [])]
    column: Dict[Key, int] = {}
    left = dict(waits)
    while left:
        ready = [key for key, earlier in left.items() if all(other in column or other not in waits for other in earlier)]
        for key in ready or list(left)[:1]:
            column[key] = max((column[other] + 1 for other in left.pop(key) if other in column), default=0)
    return column

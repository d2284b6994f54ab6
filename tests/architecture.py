"""The structure of the package: its rooms, and which may import which. docs/architecture.md shows the table.

A *room* is a folder of the package, or a file at its top. Read is the source: an import within a function or for a type
checker counts like any other.
"""

import ast
from collections import Counter
from pathlib import Path
from typing import AbstractSet, Dict, Iterator, List, Mapping, NamedTuple, Tuple

PACKAGE = Path(__file__).resolve().parents[1] / "mobius_ds"
LARGEST_FILE = 450
"""Lines."""
LARGEST_ROOM = 15
"""Files."""


class Room(NamedTuple):
    """What the files of a room may import."""

    rooms: Tuple[str, ...]
    packages: Tuple[str, ...]
    """Of ``torch`` and ``deepspeed``; any other package is free."""


def _room(rooms: str = "", packages: str = "") -> Room:
    return Room(tuple(rooms.split()), tuple(packages.split()))


_BOTH = "torch deepspeed"
ROOMS: Dict[str, Room] = {
    "__init__": _room("plugin"),
    "names": _room(),
    "config": _room("names", "deepspeed"),
    "inputs": _room(),
    "schedule": _room("inputs"),
    "partition": _room("inputs schedule"),
    "simulation": _room("inputs schedule"),
    "prediction": _room("inputs schedule partition simulation"),
    "planner": _room("inputs schedule partition prediction"),
    "model": _room("", "torch"),
    "profiling": _room("inputs model", "torch"),
    "runtime/ranks": _room("", _BOTH),
    "runtime/device": _room("inputs schedule runtime/ranks", _BOTH),
    "machine": _room("names inputs runtime/device", "torch"),
    "runtime/dram": _room("inputs schedule machine runtime/ranks runtime/device", _BOTH),
    "runtime/record": _room("inputs schedule simulation runtime/ranks", "deepspeed"),
    "runtime/job": _room("config names inputs schedule prediction planner model profiling machine runtime/dram", _BOTH),
    "runtime/sweeps": _room("config inputs schedule model profiling runtime/ranks runtime/device runtime/dram "
                            "runtime/record runtime/job", _BOTH),
    "runtime/optimizer": _room("machine runtime/sweeps", _BOTH),
    "runtime/checkpoint": _room("names runtime/ranks runtime/dram runtime/sweeps runtime/optimizer", _BOTH),
    "runtime/engine": _room("config names inputs schedule simulation runtime/ranks runtime/device runtime/dram runtime/sweeps "
                            "runtime/optimizer runtime/checkpoint", _BOTH),
    "observation": _room("inputs schedule simulation runtime/ranks runtime/device", _BOTH),
    "plugin": _room("config names inputs profiling observation runtime/dram runtime/checkpoint runtime/job "
                    "runtime/sweeps runtime/engine", _BOTH),
    "reporting/comparison": _room("names inputs schedule simulation runtime/device runtime/record observation"),
    "reporting/page": _room("inputs schedule simulation reporting/comparison"),
    "reporting": _room("config names inputs schedule simulation prediction planner profiling machine runtime/engine "
                       "runtime/record observation reporting/comparison reporting/page", "deepspeed"),
    "emulation": _room("config inputs schedule simulation prediction planner model profiling machine "
                       "runtime/device runtime/dram runtime/job runtime/sweeps observation reporting", _BOTH),
    "cli": _room(),
}
"""Every room, after all those that it imports: so no circle of rooms can be."""

DOORS = {("plugin", "emulation"), ("reporting", "emulation")}
"""Arrows that run back up, each an import within a function: what is asked for by name at run time, and may be missing."""


class Import(NamedTuple):
    """One name or module that a file imports."""

    file: str
    line: int
    module: str
    in_function: bool


def files() -> List[Path]:
    """The package's source files."""
    return sorted(PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
    """The room of a module of the package: the longest folder in its name, or the file at the top."""
    parts = module.split(".")[1:]
    folders = [parts[:count] for count in range(1, len(parts) + 1) if PACKAGE.joinpath(*parts[:count]).is_dir()]
    return "/".join(folders[-1]) if folders else parts[0] if parts else "__init__"


def imports() -> Iterator[Import]:
    """All that the package's files import, submodules by their full names."""
    for path in files():
        tree = ast.parse(path.read_text())
        at_top = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            for module in _imported(node):
                yield Import(module_of(path), node.lineno, module, id(node) not in at_top)


def _imported(node: ast.AST) -> List[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute here"
        folder = PACKAGE.parent.joinpath(*node.module.split("."))
        return [f"{node.module}.{alias.name}" if (folder / f"{alias.name}.py").exists() or (folder / alias.name).is_dir()
                else node.module for alias in node.names]
    return []


def module_of(path: Path) -> str:
    """The name of a file's module."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def circles(arrows: Mapping[str, AbstractSet[str]]) -> List[Tuple[str, ...]]:
    """Every arrow of a graph that closes a circle, as the path from its head back to it."""
    found: List[Tuple[str, ...]] = []
    done: Dict[str, bool] = {}

    def follow(node: str, path: Tuple[str, ...]) -> None:
        done[node] = False
        for other in sorted(arrows.get(node, ())):
            if done.get(other) is False:
                found.append((*path[path.index(other):], other))
            elif other not in done:
                follow(other, (*path, other))
        done[node] = True

    for node in sorted(arrows):
        if node not in done:
            follow(node, (node,))
    return found


def purposes() -> Dict[str, str]:
    """What each room is for: the first line of its docstring."""
    says = {}
    for room in ROOMS:
        path = PACKAGE / room / "__init__.py"
        source = path if path.exists() else PACKAGE / f"{room}.py"
        says[room] = (ast.get_docstring(ast.parse(source.read_text())) or "").partition("\n")[0]
    return says


def class_names() -> Dict[str, List[str]]:
    """Names of classes, and of other names for types, that have more than one meaning; each with its files."""
    where: Dict[str, List[str]] = {}
    for path in files():
        tree = ast.parse(path.read_text())
        names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        names += [node.targets[0].id for node in tree.body if isinstance(node, ast.Assign)
                  and isinstance(node.targets[0], ast.Name) and node.targets[0].id.lstrip("_")[:1].isupper()
                  and not node.targets[0].id.isupper()]
        for name in names:
            where.setdefault(name.lstrip("_"), []).append(module_of(path))
    return {name: modules for name, modules in where.items() if len(modules) > 1}


def sizes() -> Counter:
    """Files in each room."""
    return Counter(str(path.parent.relative_to(PACKAGE)) for path in files() if path.name != "__init__.py")

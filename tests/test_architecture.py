"""The structure is what docs/architecture.md says: rooms, arrows, no circles, one meaning a name, nothing too large."""

import re
import shutil
from pathlib import Path
from typing import Dict, Set

import pytest

from tests import architecture
from tests.architecture import DOORS, PACKAGE, ROOMS, circles, class_names, files, imports, purposes, room_of, sizes

ROOT = PACKAGE.parent


def test_every_room_is_in_the_table_and_says_what_it_is_for():
    assert {room_of(architecture.module_of(path)) for path in files()} - {"runtime"} == set(ROOMS)
    assert not [room for room, says in purposes().items() if not says]


def test_rooms_import_only_what_the_table_allows():
    wrong = [f"{found.file}:{found.line} imports {found.module}" for found in imports() if not _allowed(found)]
    assert not wrong, "\n".join(wrong)


def _allowed(found: architecture.Import) -> bool:
    room, (top, *_) = room_of(found.file), found.module.split(".")
    if top in ("torch", "deepspeed"):
        return top in ROOMS[room].packages
    if top != "mobius_ds":
        return True
    other = room_of(found.module)
    return other in (room, "__init__") or other in ROOMS[room].rooms or found.in_function and (room, other) in DOORS


def test_the_table_allows_nothing_that_is_not_there():
    there: Dict[str, Set[str]] = {room: set() for room in ROOMS}
    for found in imports():
        top = found.module.partition(".")[0]
        if top in ("torch", "deepspeed", "mobius_ds"):
            there[room_of(found.file)].add(top if top != "mobius_ds" else room_of(found.module))
    unused = [f"{room} -> {', '.join(sorted(left))}" for room, may in ROOMS.items()
              if (left := {*may.rooms, *may.packages} - there[room])]
    assert not unused, "\n".join(unused)
    assert all(other in there[room] for room, other in DOORS)


def test_a_room_stands_after_those_that_it_imports():
    order = list(ROOMS)
    assert not [(room, other) for room, may in ROOMS.items() if room != "__init__"
                for other in may.rooms if order.index(other) >= order.index(room)]


def test_no_files_import_each_other_in_a_circle():
    arrows: Dict[str, Set[str]] = {}
    for found in imports():
        if found.module.startswith("mobius_ds.") and (room_of(found.file), room_of(found.module)) not in DOORS:
            arrows.setdefault(found.file, set()).add(found.module)
    assert not circles(arrows)


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}}) == [("a", "b", "c", "a")]
    assert not circles({"a": {"b", "c"}, "b": {"c"}})


def test_a_name_has_one_meaning():
    assert not class_names()


def test_no_file_and_no_room_is_too_large():
    long = {path: lines for path in (*files(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "comparisons").glob("*.py"))
            if (lines := path.read_text().count("\n")) > architecture.LARGEST_FILE}
    assert not long
    assert not {room: count for room, count in sizes().items() if count > architecture.LARGEST_ROOM}
    folders = [path.parent for path in (ROOT / "tests").rglob("*.py") if path.name != "__init__.py"]
    assert max(map(folders.count, folders)) <= architecture.LARGEST_ROOM


def test_the_page_is_short_enough_to_be_read_first_and_names_what_is_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert page.count("\n") <= 80
    named = re.findall(r"`([a-z_0-9/]+(?:/|\.py))`", page)
    files = {path.name for path in PACKAGE.rglob("*.py")}
    assert len(named) > 30
    assert not [name for name in named if not (ROOT / name).exists() and not (PACKAGE / name).exists() and name not in files]


def test_an_arrow_that_is_not_in_the_table_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also one within a function."""
    shutil.copytree(PACKAGE, tmp_path / "mobius_ds", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(architecture, "PACKAGE", tmp_path / "mobius_ds")
    path = tmp_path / "mobius_ds" / "schedule" / "plan.py"
    path.write_text(path.read_text() + "\n\ndef late():\n    from mobius_ds.runtime.engine import engine\n    import torch\n")
    wrong = {found.module for found in imports() if not _allowed(found)}
    assert wrong == {"mobius_ds.runtime.engine.engine", "torch"}

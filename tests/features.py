"""Marks tests as the proof of a row of docs/compatibility.md, and makes that page from the marks.

    python -m tests.features > docs/compatibility.md
"""

import ast
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "compatibility.md"


def works(area: str, feature: str) -> Callable:
    """The test shows that a feature works."""
    return pytest.mark.feature(area, feature, "works")


def refused(area: str, feature: str, message: str) -> Callable:
    """The test shows that a feature is refused at once, with what the message says."""
    return pytest.mark.feature(area, feature, f"refused: {message}")


NOT_YET = [
]
"""(area, feature, what happens): rows that no test can show."""


class Row(NamedTuple):
    """A row of the page."""

    area: str
    feature: str
    status: str
    test: str


def rows() -> List[Row]:
    """Every marked test's rows, in the order of files and of lines in them."""
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found += [Row(*mark, f"{path.relative_to(TESTS.parent)}::{node.name}") for mark in _marks(node)]
    return found


def _marks(test: ast.FunctionDef) -> Iterator[List[str]]:
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id in ("works", "refused"):
            area, feature, *message = [ast.literal_eval(argument) for argument in mark.args]
            yield [area, feature, f"refused: *{message[0]}*" if message else "works"]


def page() -> str:
    """docs/compatibility.md."""
    areas: Dict[str, List[Row]] = {}
    for row in [*rows(), *(Row(area, feature, f"not yet: {what}", "") for area, feature, what in NOT_YET)]:
        areas.setdefault(row.area, []).append(row)
    lines = ["# What works with what", "",
             "Made from the marks on the tests by `python -m tests.features > docs/compatibility.md`; a test fails when this page",
             "and the tests differ. *Works* means that the test named in the row runs it on several processes, mostly against the",
             "same job under ZeRO-3. *Refused* means one error at once, on every rank, with these words.", ""]
    for area in sorted(areas):
        lines += [f"## {area}", "", "| feature | | shown by |", "|---|---|---|"]
        lines += [f"| {row.feature} | {row.status} | {f'`{row.test}`' if row.test else ''} |" for row in areas[area]] + [""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")

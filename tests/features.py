"""Marks tests as the proof of a row of docs/compatibility.md or docs/reliability.md, and makes the pages from the marks.

    python -m tests.features
"""

import ast
from pathlib import Path
from typing import Callable, Dict, Iterator, List, NamedTuple, Tuple

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"


def works(area: str, feature: str) -> Callable:
    """The test shows that a feature works."""
    return pytest.mark.feature(area, feature, "works")


def refused(area: str, feature: str, message: str) -> Callable:
    """The test shows that a feature is refused at once, with what the message says."""
    return pytest.mark.feature(area, feature, f"refused: {message}")


def survives(area: str, fault: str, happens: str) -> Callable:
    """The test makes a fault and shows what happens then."""
    return pytest.mark.feature(area, fault, happens)


NOT_YET: List[Tuple[str, str, str]] = [
]
"""(area, feature, what happens): rows of docs/compatibility.md that no test can show."""


class Row(NamedTuple):
    """A row of a page."""

    mark: str
    area: str
    subject: str
    says: str
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
        if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id in ("works", "refused", "survives"):
            area, subject, *says = [ast.literal_eval(argument) for argument in mark.args]
            yield [mark.func.id, area, subject, *(says or ["works"])]


def compatibility() -> str:
    """docs/compatibility.md."""
    shown = [row._replace(says=f"refused: *{row.says}*" if row.mark == "refused" else row.says) for row in rows()
             if row.mark != "survives"]
    return _page("""\
# What works with what

Made from the marks on the tests by `python -m tests.features`; a test fails when this page and the tests differ. *Works*
means that the test named in the row runs it on several processes, mostly against the same job under ZeRO-3. *Refused*
means one error at once, on every rank, with these words.
""", ("feature", "", "shown by"), shown + [Row("", area, feature, f"not yet: {what}", "") for area, feature, what in NOT_YET])


def reliability() -> str:
    """docs/reliability.md."""
    return _page("""\
# What goes wrong, and what happens then

Made from the marks on the tests by `python -m tests.features`; a test fails when this page and the tests differ. The test
named in the row makes the fault with real processes and checks what is said here.
""", ("fault", "what happens", "shown by"), [row for row in rows() if row.mark == "survives"])


PAGES = {DOCS / "compatibility.md": compatibility, DOCS / "reliability.md": reliability}


def _page(introduction: str, columns: Tuple[str, str, str], shown: List[Row]) -> str:
    areas: Dict[str, List[Row]] = {}
    for row in shown:
        areas.setdefault(row.area, []).append(row)
    lines = [introduction]
    for area in sorted(areas):
        lines += [f"## {area}", "", f"| {' | '.join(columns)} |", "|---|---|---|"]
        lines += [f"| {row.subject} | {row.says} | {f'`{row.test}`' if row.test else ''} |" for row in areas[area]] + [""]
    return "\n".join(lines)


if __name__ == "__main__":
    for path, make in PAGES.items():
        path.write_text(make())

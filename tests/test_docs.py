"""The pages say what the code does: made parts are up to date, and what a page names is there."""

import ast
import re
from pathlib import Path
from typing import Iterator, List, Set

import pytest

from tests.features import PAGES
from tests.generated import DOCS, PICTURES, ROOT, made, template, verbs
from tests.generated import PAGES as ALL_PAGES

PACKAGE = ROOT / "mobius_ds"
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"MOBIUS_DS(_[A-Z]+)*")

every_page = pytest.mark.parametrize("page", ALL_PAGES, ids=lambda path: path.name)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_a_page_is_what_the_tests_show(page: Path):
    assert page.read_text() == PAGES[page](), "run: python -m tests.features"


@every_page
def test_made_parts_are_what_the_code_says(page: Path):
    assert page.read_text() == made(page.read_text()), "run: python -m tests.generated"


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_the_schedule(picture: Path):
    assert picture.read_text() == PICTURES[picture](), "run: python -m tests.generated"


@every_page
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, heading = target.partition("#")
        if "://" in path:
            continue
        found = page.parent / path if path else page
        assert found.exists(), f"{page.name} links to {target}"
        assert not heading or heading in headings(found), f"{page.name} links to {target}; {headings(found)}"


@every_page
def test_files_and_commands_that_are_named_are_there(page: Path):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    options = {verb: {name for action in parser._actions for name in action.option_strings}
               for verb, parser in verbs().items()}
    for code in spans(page):
        words = code.split()
        if re.fullmatch(r"(mobius_ds|comparisons|docs|tests|ds_configs)/[\w./-]*", code):
            assert (ROOT / code).exists(), code
        elif re.fullmatch(r"\w+\.py", code) and code not in SCRIPTS_OF_USERS:
            assert any(ROOT.glob(f"*/**/{code}")), code
        elif words[:1] == ["make"] and len(words) > 1 and "=" not in words[1] and "." not in words[1]:
            assert words[1] in targets, code
        elif words[:2] == ["python", "-m"]:
            assert (ROOT / f"{words[2].replace('.', '/')}.py").exists() or words[2].partition(".")[0] == "deepspeed", code
        elif words[:1] == ["mobius-ds"] and len(words) > 1:
            assert words[1] in options, code
            if options[words[1]] - {"-h", "--help"}:
                assert {word for word in words if re.match("--[a-z]", word)} <= options[words[1]], code


SCRIPTS_OF_USERS = ("script.py", "train.py", "zero_to_fp32.py")


def test_every_environment_variable_is_on_the_page():
    of_package = {node.value for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
                  if isinstance(node, ast.Constant) and isinstance(node.value, str) and NAME.fullmatch(node.value)}
    assert {code for code in spans(DOCS / "configuration.md") if NAME.fullmatch(code)} == of_package


def test_messages_are_those_of_the_source():
    """A quoted message has … where the source fills something in, and is otherwise the source's."""
    said = templates()
    quoted = re.findall(r"^> (.+)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quoted) > 30
    missing = [message for message in quoted if not any(message in words for words in said)]
    assert not missing, "\n".join(missing)


def test_every_section_of_the_report_is_explained():
    titles = {_title(call.args[1]) for call in ast.walk(ast.parse((PACKAGE / "reporting" / "page" / "html_report.py").read_text()))
              if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Section"}
    page = prose(DOCS / "reading_the_report.md")
    assert set(re.findall(r"^### (.+)$", page, re.MULTILINE)) == titles


def _title(node: ast.expr) -> str:
    """The fixed part of a section's title."""
    if isinstance(node, ast.Call):  # _timed(title, report)
        return _title(node.args[0])
    return template(node).partition(" with …")[0]


def templates() -> Set[str]:
    """Every string of the package as a reader sees it, with … for what is filled in."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Constant, ast.JoinedStr)):
                found.add(template(node))
    return found


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", page.read_text())


def spans(page: Path) -> List[str]:
    """Code in the lines of a page."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def headings(page: Path) -> Set[str]:
    """The anchors that GitHub gives a page's headings."""
    return set(_anchors(page))


def _anchors(page: Path) -> Iterator[str]:
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")

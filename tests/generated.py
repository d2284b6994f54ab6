"""The parts of the pages that are made from the code: between two marks in a page, or a whole picture.

    python -m tests.generated

A mark is ``<!-- made by python -m tests.generated: NAME -->``; the part ends at ``<!-- end -->``.
"""

import argparse
import ast
import inspect
import re
import typing
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence

from mobius_ds import cli, config
from mobius_ds.runtime.engine import refusals
from tests import architecture, drawing

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
PICTURES = {DOCS / "schedule.svg": drawing.svg}

LAUNCHERS = ("run",)
"""Verbs whose options are another program's."""


def keys() -> str:
    """The keys of the "mobius" section, from the fields of MobiusConfig and the docstrings under them."""
    says = _docstrings_of_fields(config.MobiusConfig)
    rows = [(f"`{name}`", _kind(field.annotation), f"`{_json(field.default)}`", says[name])
            for name, field in config.MobiusConfig.model_fields.items()]
    return _table(("key", "value", "default", ""), rows)


def refused() -> str:
    """What is refused, from the Refusals in runtime/engine/refusals.py."""
    rows = []
    for node in ast.walk(ast.parse(inspect.getsource(refusals))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refusal":
            what, why, way_out = map(template, node.args)
            rows.append((what, why, way_out))
    return _table(("not run", "because", "instead"), rows)


def options() -> str:
    """Every verb's options, from the parsers of the command."""
    parts = []
    for verb, parser in verbs().items():
        says = parser.description or _help_of_verbs()[verb]
        parts += [f"### `mobius-ds {verb}`", "", f"{says[0].upper()}{says[1:]}.", ""]
        expanded = parser._get_formatter()._expand_help
        rows = [(f"`{_called(action)}`", _escaped(expanded(action)) if action.help else "") for action in parser._actions
                if not isinstance(action, argparse._HelpAction)]
        if rows:
            parts += [_table(("option", ""), rows), ""]
        elif verb in LAUNCHERS:
            parts += ["Its options, and what follows them, are those of DeepSpeed's launcher.", ""]
    return "\n".join(parts).rstrip()


def tasks() -> str:
    """The forward tasks of the drawn schedule's first GPU."""
    return f"```text\n{drawing.tasks_of(0)}\n```"


def rooms() -> str:
    """The rooms of the package, from the table that tests hold against its imports and from the rooms' docstrings."""
    says = architecture.purposes()
    return _table(("room", "what it is for", "imports"), [
        (f"`{room}`", says[room].replace("``", "`"), ", ".join([*(f"`{other}`" for other in may.rooms), *may.packages]))
        for room, may in architecture.ROOMS.items() if room != "__init__"])


PARTS: Dict[str, Callable[[], str]] = {"keys": keys, "refused": refused, "options": options, "tasks": tasks, "rooms": rooms}
_PART = re.compile(r"(<!-- made by python -m tests\.generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def made(page: str) -> str:
    """A page with its parts as the code says them now."""
    return _PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}\n{part[3]}", page)


def verbs() -> Dict[str, argparse.ArgumentParser]:
    """The parser of every verb of the command."""
    return {verb: _choices([verb])[verb] for verb in _choices([])}


def template(node: ast.expr) -> str:
    """A string of the source as a reader sees it, with … for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) if isinstance(value, ast.Constant) else "…" for value in node.values)
    return "…"


class _Caught(Exception):
    """Brings a parser out of the command that made it."""

    def __init__(self, parser: argparse.ArgumentParser):
        super().__init__()
        self.parser = parser


def _parser(arguments: List[str]) -> argparse.ArgumentParser:
    def parse_args(self, *_: Any) -> None:
        raise _Caught(self)

    original, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, parse_args
    try:
        cli.main(arguments)
    except _Caught as caught:
        return caught.parser
    finally:
        argparse.ArgumentParser.parse_args = original
    raise AssertionError(f"mobius-ds {arguments} parses nothing")


def _subparsers(parser: argparse.ArgumentParser) -> argparse._SubParsersAction:
    return next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))


def _choices(arguments: List[str]) -> Dict[str, argparse.ArgumentParser]:
    return _subparsers(_parser([] if set(arguments) & set(LAUNCHERS) else arguments)).choices


def _help_of_verbs() -> Dict[str, str]:
    return {action.dest: action.help for action in _subparsers(_parser([]))._choices_actions}


def _called(action: argparse.Action) -> str:
    """An option as it is typed."""
    if not action.option_strings:
        return str(action.metavar or action.dest.upper())
    name = ", ".join(action.option_strings)
    if action.nargs == 0:
        return name
    values = "|".join(map(str, action.choices)) if action.choices else str(action.metavar or action.dest.upper())
    return f"{name} {values}"


def _docstrings_of_fields(owner: type) -> Dict[str, str]:
    body = ast.parse(inspect.getsource(owner)).body[0].body
    return {field.target.id: _escaped(" ".join(ast.literal_eval(says.value).replace("``", "`").split()))
            for field, says in zip(body, body[1:])
            if isinstance(field, ast.AnnAssign) and isinstance(says, ast.Expr)}


_KINDS = {bool: "true or false", int: "number", float: "number", str: "text", List[int]: "list of numbers",
          List[str]: "list of texts"}


def _kind(annotation: Any) -> str:
    wanted: Sequence = typing.get_args(annotation) if typing.get_origin(annotation) is typing.Union else (annotation,)
    return " or ".join(_KINDS[kind] for kind in wanted if kind is not type(None))


def _json(value: Any) -> str:
    return {None: "none", True: "true", False: "false"}.get(value, f"{value:g}" if isinstance(value, float) else str(value))


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(_lines(columns, rows))


def _lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    yield from (f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(made(path.read_text()))
    for path, draw in PICTURES.items():
        path.write_text(draw())

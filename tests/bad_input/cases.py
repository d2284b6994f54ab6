"""A wrong input is one row: what is wrong, the input, and the words of the message a user gets."""

from typing import Any, Dict, List, NamedTuple, Sequence


class Case(NamedTuple):
    """A wrong input."""

    what: str
    input: Any
    words: str
    """That the message must have."""


def check(cases: Sequence[Case], said: Sequence[Dict[str, str]]) -> None:
    """Fails if a case's message, by the case on every rank, lacks its words or differs between ranks."""
    assert len({case.what for case in cases}) == len(cases), "two cases of one name"
    wrong: List[str] = []
    for case in cases:
        messages = [rank[case.what] for rank in said]
        if case.words not in messages[0] or len(set(messages)) > 1:
            wrong.append(f"{case.what}: wanted {case.words!r} on every rank, got\n  " + "\n  ".join(messages))
    assert not wrong, "\n".join(wrong)

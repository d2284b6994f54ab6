"""Why a job failed, from what its launcher and its ranks left: logs, and the error that ended a rank."""

import json
import re
import textwrap
from pathlib import Path
from typing import List, Optional, Tuple

from mobius_ds.reporting.comparison.arms import Failure

LAUNCHER_LOG, RANK_LOGS = "launcher.log", "logs"
"""What a job's launcher writes into its folder, and where the ranks' logs and errors lie there."""

_LAST_LINES = 40
_SENTENCE = 300  # characters

_OUT_OF_MEMORY = re.compile(r"OutOfMemory|out of memory|[Cc]an(?:'t|not) allocate memory")
_HEARSAY = "PeerOutOfMemory:"
_WRONG_ARGUMENT = re.compile(r"\S+\.py: error: ")
# What a rank says that ended because of another one.
_BLAMES = {
    "lost": re.compile(r"Peer(?:Lost|OutOfMemory): rank (\d+) is gone"),
    "waited too long for": re.compile(r"PeerTimeout: .*; rank (\d+) (?:does not answer|is alive|waits for)"),
}


def failure_of(folder: Path) -> str:
    """What made a job fail: the rank that failed first, how it ended, and the last lines it wrote."""
    cause = _root_cause(folder)
    if cause is None:
        return f"the launcher itself failed:\n{_last_lines(_launcher_log(folder))}"
    rank, exitcode = cause
    written = _written_by(rank, folder)
    ended = f"rank {rank} ended first, with exitcode {exitcode}"
    # The rank that fails is often slower to exit than the one that only heard of it.
    for says, blames in _BLAMES.items():
        blamed = blames.search(written)
        if blamed and blamed[1] != rank and (reason := _written_by(blamed[1], folder)):
            return (f"{ended}: {_error_of(rank, folder) or blamed[0]}\n"
                    f"It {says} rank {blamed[1]}, whose last lines are:\n{_last_lines(reason)}")
    return f"{ended}:\n{_last_lines(written)}"


def reason_of(folder: Path) -> Failure:
    """Why a job failed, in a sentence: memory if it was that for any rank, else the error of the rank that failed first."""
    cause = _root_cause(folder)
    if cause is None:
        return Failure("failed", "the launcher itself failed")
    errors = {rank: error for rank in _ranks(folder) if (error := _error_of(rank, folder))}
    used_up = [error for error in errors.values() if _OUT_OF_MEMORY.search(error)]
    if used_up:
        first_hand = [error for error in used_up if not error.startswith(_HEARSAY)]
        return Failure("OOM", _sentence((first_hand or used_up)[0]))
    rank, exitcode = cause
    if exitcode.startswith("-9"):
        return Failure("failed", f"rank {rank} was killed, as a system does with processes when its memory is used up")
    return Failure("failed", _sentence(errors.get(rank, f"rank {rank} ended with exitcode {exitcode}")))


def _launcher_log(folder: Path) -> str:
    return (folder / LAUNCHER_LOG).read_text(errors="replace")


def _root_cause(folder: Path) -> Optional[Tuple[str, str]]:
    """The rank that the launcher saw fail first, and its exitcode."""
    cause = re.search(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+[^\n]*)", _launcher_log(folder), re.DOTALL)
    return cause and (cause[1], cause[2].strip())


def _ranks(folder: Path) -> List[str]:
    return sorted({path.name for path in folder.glob(f"{RANK_LOGS}/*/attempt_0/*")}, key=int)


def _written_by(rank: str, folder: Path) -> str:
    # Ranks write at the same time; a log of their own keeps each one's last words together.
    logs = sorted(folder.glob(f"{RANK_LOGS}/*/attempt_0/{rank}/std*.log"), reverse=True)  # errors come last
    return "".join(log.read_text(errors="replace") for log in logs)


def _error_of(rank: str, folder: Path) -> Optional[str]:
    """What ended a rank: the class and the first line of the error that its launcher recorded. Else what argparse printed."""
    for file in folder.glob(f"{RANK_LOGS}/*/attempt_0/{rank}/error.json"):
        return json.loads(file.read_text())["message"]["message"].partition("\n")[0].removesuffix(": ")
    return next(filter(_WRONG_ARGUMENT.match, _written_by(rank, folder).splitlines()), None)


def _sentence(error: str) -> str:
    return textwrap.shorten(error, _SENTENCE, placeholder=" ...")


def _last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-_LAST_LINES:])

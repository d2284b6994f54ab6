"""What ``mobius-ds doctor`` found: data, and how it is gathered without ever hanging or raising."""

import threading
import time
from typing import Callable, Iterable, List, NamedTuple, Sequence

OK, NOTE, PROBLEM = "ok", "note", "problem"
"""Verdicts: fine; worth knowing; prevents a job."""


class Finding(NamedTuple):
    """One line."""

    what: str
    found: str
    verdict: str = OK
    advice: str = ""
    """What to do; empty where there is nothing to do."""


class Probe(NamedTuple):
    """A question to the machine."""

    what: str
    ask: Callable[[], Iterable[Finding]]


def examine(probes: Sequence[Probe], seconds: float) -> List[Finding]:
    """Asks all at once, and answers in their order. A probe that fails or is late is a line as well.

    Args:
        seconds: that they have together.
    """
    answers: List[List[Finding]] = [[_late(probe, seconds)] for probe in probes]

    def ask(number: int, probe: Probe) -> None:
        try:
            answers[number] = list(probe.ask())
        except Exception as error:  # whatever a machine can come up with
            answers[number] = [Finding(probe.what, f"cannot be told: {type(error).__name__}: {error}", NOTE,
                                       "Please report it, with the output of mobius-ds doctor --json.")]

    # Daemons: the interpreter ends without one that hangs in a driver or on a dead file system.
    threads = [threading.Thread(target=ask, args=pair, daemon=True) for pair in enumerate(probes)]
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [finding for answer in list(answers) for finding in answer]


def _late(probe: Probe, seconds: float) -> Finding:
    return Finding(probe.what, f"no answer within {seconds:.0f} s", NOTE,
                   "A driver or a file system hangs: see dmesg, and whether nvidia-smi and df answer.")

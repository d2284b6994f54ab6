"""``mobius-ds doctor``: this machine in one screen, each line with what to do where something is not as it should be.

It needs no GPU, never hangs and never raises: a question that fails or is late is a line like the others.
"""

import argparse
import json
import os
import sys
import textwrap
from typing import List, Mapping, Optional, Sequence, Union

from rich.console import Console
from rich.text import Text

from mobius_ds import __version__
from mobius_ds.machine import check_gpus, check_host, check_software
from mobius_ds.machine.finding import NOTE, OK, PROBLEM, Finding, Probe, examine
from mobius_ds.machine.gpu_probe import TorchReport, Unanswered, ask_torch

TORCH_SECONDS = 60.0
"""For torch to start, find the GPUs and measure: eight GPUs without a persistent driver take half of it."""
PROBE_SECONDS = 75.0
"""For everything else, more than the 60 s that a single command is given."""

_INDENT = " " * 19
_MARKS = {OK: ("ok", "green"), NOTE: ("note", "yellow"), PROBLEM: ("FIX", "bold red")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options to ``parser``."""
    parser.add_argument("--json", action="store_true", help="print JSON, for a report of a fault")


def main(args: argparse.Namespace) -> int:
    """Prints what is found. Returns 0, or 1 if something prevents a job."""
    findings = found_here(os.environ)
    prevented = any(finding.verdict == PROBLEM for finding in findings)
    if args.json:
        json.dump({"mobius_ds": __version__, "prevents_a_job": prevented,
                   "findings": [finding._asdict() for finding in findings]}, sys.stdout, indent=1)
        print()
    else:
        show(findings, Console())
    return int(prevented)


def found_here(environment: Mapping[str, str]) -> List[Finding]:
    """Everything about this machine."""
    torch = _torch()
    told = torch if isinstance(torch, TorchReport) else None
    findings = examine(_probes(told, environment), PROBE_SECONDS)
    return findings if told is not None else [torch, *findings]


def _torch() -> Union[TorchReport, Finding]:
    try:
        return ask_torch(TORCH_SECONDS)
    except Unanswered as why:
        return Finding("torch", str(why), PROBLEM, "Run python -c 'import torch; torch.cuda.init()' to see it.")


def _probes(torch: Optional[TorchReport], environment: Mapping[str, str]) -> Sequence[Probe]:
    gpus = 0 if torch is None else len(torch.gpus)
    return (
        Probe("versions", lambda: check_software.ask_versions(torch)),
        Probe("plugin", lambda: check_software.ask_plugin(environment)),
        Probe("compiler", lambda: check_software.ask_compiler(torch, environment)),
        Probe("extensions", lambda: check_software.ask_extensions(torch)),
        Probe("plans", lambda: check_software.ask_plans(environment)),
        Probe("GPUs", lambda: check_gpus.ask_gpus(torch, environment)),
        Probe("ranks", lambda: check_host.ask_ranks(gpus, environment)),
        Probe("DRAM", check_host.ask_memory),
        Probe("locked memory", lambda: check_host.ask_locked_memory(torch)),
        Probe("/dev/shm", check_host.ask_shared_memory),
        Probe("cores", lambda: check_host.ask_cores(gpus, environment)),
        Probe("restarts", lambda: check_software.ask_restarts(environment)),
    )


def _wrapped(text: str, width: int) -> List[str]:
    return textwrap.wrap(text, width - len(_INDENT), break_long_words=False, break_on_hyphens=False)


def show(findings: Sequence[Finding], console: Console) -> None:
    """Prints a line per finding, and below it what to do. No word is broken, so that paths can be copied."""
    for finding in findings:
        mark, style = _MARKS[finding.verdict]
        first, *more = _wrapped(finding.found, console.width)
        advice = _wrapped(f"→ {finding.advice}", console.width) if finding.advice else []
        line = Text.assemble((f"{mark:<5}", style), f"{finding.what:<14}{first}",
                             *(f"\n{_INDENT}{text}" for text in more), *((f"\n{_INDENT}{text}", style) for text in advice))
        console.print(line, soft_wrap=True)
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in _MARKS}
    console.print(f"{counts[PROBLEM]} to fix before a job runs, {counts[NOTE]} to know, {counts[OK]} fine", highlight=False)

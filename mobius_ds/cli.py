"""The ``mobius-ds`` command."""

import argparse
import sys
from importlib import import_module
from typing import NamedTuple, Optional, Sequence


class Verb(NamedTuple):
    """What ``mobius-ds VERB`` does."""

    help: str
    module: str
    """Where it lives; imported only for this verb, as most take seconds."""
    add_arguments: str = "add_arguments"
    main: str = "main"
    """Its functions there: one adds its options to a parser, one runs it and returns the exit status."""


VERBS = {
    "run": Verb("start a training script with DeepSpeed's launcher and this plugin", "mobius_ds.plugin.launcher", main="run"),
    "compare": Verb("run one script under ZeRO-3 and under Mobius, side by side", "mobius_ds.reporting.compare"),
    "topology": Verb("show this machine's GPUs and links, or a known server's", "mobius_ds.reporting.topology_table"),
    "plan": Verb("plan a model on a topology, and say what a step will take", "mobius_ds.reporting.plan_report",
                 "add_plan_arguments", "plan"),
    "simulate": Verb("play a plan: figures, a trace, a picture", "mobius_ds.reporting.plan_report",
                     "add_simulate_arguments", "simulate"),
    "trace": Verb("say where the time of a recorded step went", "mobius_ds.reporting.trace_report"),
    "rehearse": Verb("run a step of a model on an emulated server, by the runtime itself", "mobius_ds.emulation.rehearse"),
    "advise": Verb("say whether ZeRO-3, GPipe or Mobius suits a model on a machine", "mobius_ds.reporting.advise"),
    "doctor": Verb("check this machine: what is fine, and what to do about the rest", "mobius_ds.machine.doctor"),
}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs ``mobius-ds ARGUMENTS`` and returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    chosen = arguments[0] if arguments else None
    if chosen == "run":
        # Every option belongs to DeepSpeed's launcher or to the script: argparse would reject or reorder them.
        return import_module(VERBS[chosen].module).run(arguments[1:])

    parser = argparse.ArgumentParser(prog="mobius-ds", description="Mobius pipeline training for DeepSpeed")
    verbs = parser.add_subparsers(metavar=f"{{{','.join(VERBS)}}}", required=True)
    parsers = {name: verbs.add_parser(name, help=verb.help) for name, verb in VERBS.items()}
    if chosen not in VERBS:
        parser.parse_args(arguments)  # which says what there is, and ends
        return 0
    verb = VERBS[chosen]
    module = import_module(verb.module)
    getattr(module, verb.add_arguments)(parsers[chosen])
    return getattr(module, verb.main)(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

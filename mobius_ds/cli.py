"""The ``mobius-ds`` command."""

import argparse
import sys
from typing import Optional, Sequence


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Runs ``mobius-ds ARGUMENTS`` and returns its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    verb = arguments[0] if arguments else None

    parser = argparse.ArgumentParser(prog="mobius-ds", description="Mobius pipeline training for DeepSpeed")
    verbs = parser.add_subparsers(metavar="{run,compare,topology,plan,simulate,trace,rehearse,advise,doctor}", required=True)
    verbs.add_parser("run", help="start a training script with DeepSpeed's launcher and this plugin")
    compare_parser = verbs.add_parser("compare", help="run one script under ZeRO-3 and under Mobius, side by side")
    topology_parser = verbs.add_parser("topology", help="show this machine's GPUs and links, or a known server's")
    plan_parser = verbs.add_parser("plan", help="plan a model on a topology, and say what a step will take")
    simulate_parser = verbs.add_parser("simulate", help="play a plan: figures, a trace, a picture")
    trace_parser = verbs.add_parser("trace", help="say where the time of a recorded step went")
    rehearse_parser = verbs.add_parser("rehearse", help="run a step of a model on an emulated server, by the runtime itself")
    advise_parser = verbs.add_parser("advise", help="say whether ZeRO-3, GPipe or Mobius suits a model on a machine")
    doctor_parser = verbs.add_parser("doctor", help="check this machine: what is fine, and what to do about the rest")

    if verb == "run":
        # Every option belongs to DeepSpeed's launcher or to the script: argparse would reject or reorder them.
        from mobius_ds.plugin import launcher

        return launcher.run(arguments[1:])
    if verb == "compare":
        from mobius_ds.reporting import compare

        compare.add_arguments(compare_parser)
        return compare.main(parser.parse_args(arguments))
    if verb == "topology":
        from mobius_ds.reporting import topology_table

        topology_table.add_arguments(topology_parser)
        return topology_table.main(parser.parse_args(arguments))
    if verb in ("plan", "simulate"):
        from mobius_ds.reporting import plan_report

        plan_report.add_plan_arguments(plan_parser)
        plan_report.add_simulate_arguments(simulate_parser)
        return getattr(plan_report, verb)(parser.parse_args(arguments))
    if verb == "rehearse":
        from mobius_ds.reporting import rehearse

        rehearse.add_arguments(rehearse_parser)
        return rehearse.main(parser.parse_args(arguments))
    if verb == "trace":
        from mobius_ds.reporting import trace_report

        trace_report.add_arguments(trace_parser)
        return trace_report.main(parser.parse_args(arguments))
    if verb == "advise":
        from mobius_ds.reporting import advise

        advise.add_arguments(advise_parser)
        return advise.main(parser.parse_args(arguments))
    if verb == "doctor":
        from mobius_ds.reporting.machine import doctor

        doctor.add_arguments(doctor_parser)
        return doctor.main(parser.parse_args(arguments))
    parser.parse_args(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())

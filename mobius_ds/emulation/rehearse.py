"""``mobius-ds rehearse``: a step of a model on a server, neither of which is there, by the runtime itself."""

import argparse
import json
from pathlib import Path
from typing import Any, Dict, NamedTuple, Optional

from rich.console import Console
from rich.markup import escape

from mobius_ds.emulation import rehearsal_ranks
from mobius_ds.emulation.rehearsal_report import (SAYS, RehearsalOutcome, ablation_table, bytes_table, link_table,
                                                  sentences, time_table)
from mobius_ds.inputs.topology import Topology
from mobius_ds.machine.topology_detection import topology_by_name
from mobius_ds.model.errors import NotSplittable
from mobius_ds.planner.plan_files import from_json
from mobius_ds.planner.planner import Planned, Request, make_best_plan
from mobius_ds.prediction.mobius import predict_mobius
from mobius_ds.profiling.computed import Profiled, profile_description
from mobius_ds.reporting import plan_report
from mobius_ds.reporting.interruption import INTERRUPTED, ended_by_signal
from mobius_ds.schedule.tasks import DEPTH

STARTING_SECONDS = 120.0
SLOWER = 10
"""A rehearsal that takes so many times what is simulated is given up."""


class Variant(NamedTuple):
    """What an ablation changes."""

    strategy: str
    mapping: str
    slots: int = DEPTH

    def plans_like(self, other: "Variant") -> bool:
        """Whether the plan is the same: a solver that is asked twice may answer differently."""
        return self[:2] == other[:2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``rehearse``."""
    parser.add_argument("--model", required=True, help="folder or file with a Hugging Face config, or a GPT size such as "
                        "gpt-8b")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--topology", help=f"{plan_report.TOPOLOGIES}, or 'detect'")
    where.add_argument("--plan", type=Path, help="a plan file to rehearse, with its topology and number of micro-batches")
    plan_report.add_batch_arguments(parser)
    plan_report.add_choice_arguments(parser)
    parser.add_argument("--steps", type=int, default=3, help="steps to measure, after one that warms up (default: 3)")
    parser.add_argument("--no-prefetch", action="store_true", help="copy no stage in while another one runs")
    parser.add_argument("--ablate", action="store_true", help="rehearse again with max and min stages, sequential mapping, "
                        "and without prefetching")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace here, the simulated step beside the emulated ones")
    parser.add_argument("--out", type=Path, help="write rehearsal.json into this folder")


def main(args: argparse.Namespace) -> int:
    """Rehearses. Returns the exit status."""
    console = Console()
    try:
        with ended_by_signal():
            _rehearse(args, console)
    except KeyboardInterrupt:
        console.print("[red]mobius-ds rehearse:[/] interrupted; no process of it is left")
        return INTERRUPTED
    except (ValueError, OSError, NotSplittable, rehearsal_ranks.RehearsalFailed) as error:
        said = f"cannot write {error.filename}: {error.strerror}" if getattr(error, "filename", None) else str(error)
        console.print(f"[red]mobius-ds rehearse:[/] {escape(said)}", soft_wrap=True)
        return 1
    return 0


def _rehearse(args: argparse.Namespace, console: Console) -> None:
    if args.steps < 1:
        raise ValueError(f"--steps {args.steps} leaves nothing to measure; give 1 or more")
    if args.ablate and args.plan:
        raise ValueError("--ablate makes plans of its own; leave --plan out and name the --topology")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    read = from_json(args.plan) if args.plan else None
    topology = read.request.topology if read else topology_by_name(args.topology)
    rehearsal_ranks.load()  # beside the planning
    profiled = profile_description(args.model, args.micro_batch, args.seq, topology.gpus[0])
    asked = Variant(args.strategy, args.mapping, 1 if args.no_prefetch else DEPTH)
    first = _of_same_model(read, profiled, args) if read else _planned(profiled, topology, asked, args)
    outcomes: Dict[str, Any] = {"as asked": _run(args, profiled, first, asked.slots, console, args.trace)}
    for name, variant in _ablations(asked).items() if args.ablate else ():
        try:
            planned = first if variant.plans_like(asked) else _planned(profiled, topology, variant, args)
        except ValueError as error:
            outcomes[name] = str(error)  # a rule that finds no partition is a finding
        else:
            outcomes[name] = _run(args, profiled, planned, variant.slots, console)
    for table in (time_table, bytes_table, link_table):
        console.print(table(outcomes["as asked"]))
    for sentence in [*sentences(outcomes["as asked"]), SAYS]:
        console.print(sentence, highlight=False, soft_wrap=True)
    if args.ablate:
        console.print(ablation_table(outcomes))
    if args.trace:
        console.print(f"{escape(str(args.trace))} written")
    if args.out:
        _write(args.out / "rehearsal.json", outcomes, console)


def _ablations(asked: Variant) -> Dict[str, Variant]:
    """What differs from what was asked in one thing."""
    return {**{f"{strategy} stages": asked._replace(strategy=strategy) for strategy in ("mip", "max", "min")
               if strategy != asked.strategy},
            **{f"{mapping} mapping": asked._replace(mapping=mapping) for mapping in ("cross", "sequential")
               if mapping != asked.mapping},
            "no prefetch" if asked.slots > 1 else "prefetch": asked._replace(slots=1 if asked.slots > 1 else DEPTH)}


def _planned(profiled: Profiled, topology: Topology, variant: Variant, args: argparse.Namespace) -> Planned:
    microbatches = topology.size if args.microbatches is None else args.microbatches
    _check_dealt(microbatches, topology.size)
    return make_best_plan(Request(profiled.profile, topology, microbatches, variant.strategy, variant.mapping,
                                  args.time_limit))


def _check_dealt(microbatches: int, ranks: int) -> None:
    if microbatches > ranks and microbatches % ranks:
        raise ValueError(f"{microbatches} micro-batches cannot be dealt out to {ranks} ranks; give a multiple of {ranks}, "
                         "or fewer")


def _of_same_model(planned: Planned, profiled: Profiled, args: argparse.Namespace) -> Planned:
    """A plan that was read, if it is one of the model."""
    _check_dealt(planned.request.microbatches, planned.request.topology.size)

    def sizes(profile: Any) -> list:
        return [(layer.weight_bytes, layer.boundary_bytes) for layer in profile.layers]

    if sizes(planned.request.profile) != sizes(profiled.profile):
        raise ValueError(f"{args.plan} is a plan of {planned.request.profile.name}, and not of {args.model} with "
                         f"micro-batches of {args.micro_batch} x {args.seq} tokens; give the plan's --model, --micro-batch "
                         "and --seq")
    return planned


def _run(args: argparse.Namespace, profiled: Profiled, planned: Planned, slots: int, console: Console,
         trace: Optional[Path] = None) -> RehearsalOutcome:
    request = planned.request
    prediction = predict_mobius(request.profile, request.topology, planned.plan, request.microbatches, slots)
    seconds = (args.steps + 1) * prediction.sweep_seconds
    limit = STARTING_SECONDS + SLOWER * seconds
    console.print(f"{request.topology.size} ranks rehearse {args.steps + 1} steps of {prediction.sweep_seconds:.3f} s "
                  f"(emulated), about {seconds:.0f} s", highlight=False)
    rehearsal = rehearsal_ranks.Rehearsal(args.model, args.micro_batch, args.seq, profiled.program, planned, args.steps + 1,
                                          limit, slots, trace)
    return RehearsalOutcome(planned, prediction, rehearsal_ranks.run(rehearsal, limit))


def _write(path: Path, outcomes: Dict[str, Any], console: Console) -> None:
    data = {name: {"why": outcome} if isinstance(outcome, str) else outcome.as_data() for name, outcome in outcomes.items()}
    path.write_text(json.dumps(data) + "\n")
    console.print(f"{escape(str(path))} written")

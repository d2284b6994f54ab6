"""``mobius-ds advise``: whether ZeRO-3, GPipe, Mobius or plain data parallelism suits a model on a machine."""

import argparse
import json
from dataclasses import replace
from typing import List, NamedTuple, Optional, Union

from rich.console import Console
from rich.markup import escape

from mobius_ds.inputs.profile import ModelProfile
from mobius_ds.inputs.topology import Topology, TopologyError
from mobius_ds.planner.advice import (DDP, GPIPE, MOBIUS, ZERO2, ZERO3, ZERO3_OFFLOAD, Advice, Candidate, advise,
                                      candidates)
from mobius_ds.planner.planner import Planned, Request, make_best_plan
from mobius_ds.prediction.prediction import Prediction
from mobius_ds.reporting.plan_report import TOPOLOGIES, add_model_arguments, comparison_table, profile_of
from mobius_ds.schedule.plan import InfeasiblePlan

_OFFLOAD = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
SETTINGS = {
    DDP: {"zero_optimization": {"stage": 0}, "mobius": {"enabled": False}},
    ZERO2: {"zero_optimization": {"stage": 2}, "mobius": {"enabled": False}},
    ZERO3: {"zero_optimization": {"stage": 3}, "mobius": {"enabled": False}},
    ZERO3_OFFLOAD: {"zero_optimization": {"stage": 3, **_OFFLOAD}, "mobius": {"enabled": False}},
    MOBIUS: {"zero_optimization": {"stage": 3, **_OFFLOAD}, "mobius": {"enabled": True}},
    GPIPE: {"zero_optimization": {"stage": 0}, "mobius": {"enabled": False}},
}
"""What a DeepSpeed config says to train in each way."""

ARMS = {ZERO3_OFFLOAD: "zero3", MOBIUS: "mobius", GPIPE: "pipeline", DDP: "ddp"}
"""The arms of ``mobius-ds compare`` with the settings above. It has none for ZeRO-2 and ZeRO-3 without offload, as Mobius
runs in the place of what the config offloads, and both train with the same config."""


class Question(NamedTuple):
    """What advice is asked for."""

    profile: ModelProfile
    topology: Topology
    accumulation: int
    """Micro-batches of each rank in a step."""
    runs: Optional[str]
    """What the given config trains with now."""
    said: List[str]
    """What was read from the config, and what to know about it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's options to ``parser``."""
    add_model_arguments(parser)
    parser.add_argument("--topology", default="detect", help=f"{TOPOLOGIES}, or 'detect' (default), this machine")
    parser.set_defaults(micro_batch=None, time_limit=10.0)


def main(args: argparse.Namespace) -> int:
    """Prints the advice. Returns 0, or 1 where nothing fits or nothing can be said."""
    console = Console()
    try:
        question = _question(args, _topology(args.topology))
        planned = _plan(question, args.time_limit)
    except ValueError as error:  # an unknown model or topology, a config that is none, no time to plan
        console.print(f"[red]mobius-ds advise:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    mobius = planned if isinstance(planned, str) else planned.prediction()
    found = candidates(question.profile, question.topology, mobius, question.accumulation)
    advice = advise(found, question.topology)
    _show(question, planned, found, advice, console)
    return 0 if advice.chosen else 1


def _topology(name: str) -> Topology:
    from mobius_ds.machine.topology_detection import topology_by_name

    try:
        return topology_by_name(name)
    except TopologyError as error:
        if name != "detect":
            raise
        raise TopologyError(f"this machine does not tell what to advise for. Name a server with --topology: {TOPOLOGIES}. "
                            f"(Asked: {error})") from None


def _question(args: argparse.Namespace, topology: Topology) -> Question:
    config = None
    if args.config is not None:
        from mobius_ds.reporting.training_config import read_training_config  # loads DeepSpeed

        config = read_training_config(args.config, topology.size)
    if args.micro_batch is None:
        args.micro_batch = (config and config.micro_batch) or 1
    if config is None:
        return Question(profile_of(args, topology), topology, 1, None, [])
    said = [f"{args.config} trains with {config.runs_in_words}.", *config.warnings]
    if config.micro_batch is None and args.model is not None:
        said.append(f"It leaves the micro-batch open; figures are for {args.micro_batch} (--micro-batch takes another).")
    return Question(profile_of(args, topology), topology, config.accumulation, config.runs, said)


def _plan(question: Question, time_limit: float) -> Union[Planned, str]:
    """The best plan, or why there is none."""
    try:
        return make_best_plan(Request(question.profile, question.topology, question.topology.size, time_limit=time_limit))
    except InfeasiblePlan as error:
        return str(error)


def _show(question: Question, planned: Union[Planned, str], found: List[Candidate], advice: Advice,
          console: Console) -> None:
    profile, topology = question.profile, question.topology
    per_gpu = f"{question.accumulation} micro-batch{'es' * (question.accumulation > 1)} per GPU and step"
    console.print(f"{profile.name}: {profile.parameters / 1e9:.2f} B parameters on {topology.name}, {topology.size} "
                  f"GPU{'s' * (topology.size > 1)}, {per_gpu}", highlight=False)
    predictions: List[Prediction] = [one.prediction for one in found if one.prediction is not None]
    if question.accumulation > 1 and isinstance(planned, Planned):
        together = replace(planned, request=replace(planned.request, microbatches=question.accumulation * topology.size))
        predictions.insert(1, replace(together.prediction(), name="train_batch"))
    console.print(comparison_table(profile.model_bytes, predictions))
    first, *rest = advice.sentences
    console.print(f"[bold]{escape(first)}[/] {escape(' '.join(rest))}", highlight=False)
    for text in question.said:
        console.print(escape(text), highlight=False)
    if question.accumulation > 1 and isinstance(planned, Planned):
        console.print("Under Mobius engine.train_batch(data_iter) sweeps once for all micro-batches of a step (column "
                      "train_batch); a loop over forward and backward sweeps for each.", highlight=False)
    if advice.chosen is not None:
        _show_what_to_do(question, advice, console)


def _show_what_to_do(question: Question, advice: Advice, console: Console) -> None:
    chosen = advice.chosen.name
    if chosen == question.runs:
        console.print("There is nothing to change in the config.", highlight=False)
    else:
        console.print("In the DeepSpeed config:", highlight=False)
        for key, value in SETTINGS[chosen].items():
            console.print(f'  "{key}": {escape(json.dumps(value))}', highlight=False, soft_wrap=True)
    if chosen == GPIPE:
        console.print(f"and in the script a deepspeed.pipe.PipelineModule with num_stages={question.topology.size}, driven "
                      "by engine.train_batch.", highlight=False)
    arms = dict.fromkeys(ARMS[one.name] for one in (advice.chosen, *advice.equals) if one.name in ARMS)
    if len(arms) > 1:
        console.print(f"To measure it: mobius-ds compare --script train.py --config ds_config.json --ranks "
                      f"{question.topology.size} --arms {','.join(arms)}", highlight=False, soft_wrap=True)

"""``mobius-ds plan`` and ``mobius-ds simulate``: a plan explained before anything runs."""

import argparse
from pathlib import Path
from typing import List

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mobius_ds.inputs.profile import ModelProfile
from mobius_ds.inputs.topology import PRESETS, Topology
from mobius_ds.inputs.units import readable
from mobius_ds.planner.plan_files import from_json, write
from mobius_ds.planner.planner import MAPPINGS, STRATEGIES, Planned, Request, explained, make_best_plan
from mobius_ds.prediction.pipelines import predict_gpipe, predict_roundpipe
from mobius_ds.prediction.prediction import Prediction
from mobius_ds.prediction.zero import accumulated, predict_zero3_offload
from mobius_ds.reporting.script_profile import profile_of_script
from mobius_ds.reporting.trace_report import exposure_of
from mobius_ds.schedule.tasks import DELIVERED
from mobius_ds.simulation.chrome_trace import naming_lines, step_lines
from mobius_ds.simulation.costs import stages_of
from mobius_ds.simulation.exposure import quartiles
from mobius_ds.simulation.steps import Step

PERCENT = 100
TOPOLOGIES = f"a preset ({', '.join(PRESETS)}), a JSON file"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name a model, and how long to plan it."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="folder or file with a Hugging Face config, or a GPT size such as gpt-8b")
    source.add_argument("--script", type=Path, help="training script that takes --deepspeed_config; it runs on one rank up "
                        "to its first forward, which is profiled")
    parser.add_argument("--config", type=Path, help="the script's DeepSpeed config")
    add_batch_arguments(parser)
    parser.add_argument("script_args", nargs="*", metavar="-- SCRIPT_ARGS", help="passed on to the script")


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the shape of a micro-batch, and for how long to plan."""
    parser.add_argument("--micro-batch", type=int, default=1, help="samples in a micro-batch (default: 1)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens in a sample (default: 1024)")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for the solver (default: %(default)g)")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``plan``."""
    add_model_arguments(parser)
    parser.add_argument("--topology", required=True, help=f"{TOPOLOGIES}, or 'detect'")
    add_choice_arguments(parser)
    parser.add_argument("--out", type=Path, help="write the plan here")


def add_choice_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for what a plan is made for, and how."""
    parser.add_argument("--microbatches", type=int, help="micro-batches in a step (default: one per GPU)")
    parser.add_argument("--strategy", choices=STRATEGIES, default="mip", help="how to partition (default: mip)")
    parser.add_argument("--mapping", choices=MAPPINGS, default="cross", help="how to map stages to GPUs (default: cross)")


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``simulate``."""
    parser.add_argument("plan", type=Path, help="a plan file")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace here (JSON; opens in Perfetto)")
    parser.add_argument("--png", type=Path, help="draw the step here")


def plan(args: argparse.Namespace) -> int:
    """Plans, and shows the plan beside what others would take. Returns the exit status."""
    console = Console()
    try:
        from mobius_ds.machine.topology_detection import topology_by_name

        topology = topology_by_name(args.topology)
        planned = make_best_plan(Request(profile_of(args, topology), topology,
                                         topology.size if args.microbatches is None else args.microbatches,
                                         args.strategy, args.mapping, args.time_limit))
        show(planned, console)
        if args.out:
            write(planned, args.out)
            console.print(f"{escape(str(args.out))} written")
    except ValueError as error:  # every planning error is one: an unknown model, a topology, no room
        console.print(f"[red]mobius-ds plan:[/] {escape(str(error))}", soft_wrap=True)
        return 1
    return 0


def simulate(args: argparse.Namespace) -> int:
    """Plays a plan file. Returns the exit status."""
    console = Console()
    try:
        planned = from_json(args.plan)
        prediction = planned.prediction()
        console.print(comparison_table(planned.request.profile.model_bytes, [prediction]))
        if args.trace:
            _write_chrome_trace(prediction.step, args.trace, planned.request.topology.name)
            console.print(f"{escape(str(args.trace))} written")
        if args.png:
            from mobius_ds.reporting.page import png  # here: Matplotlib loads only for a picture

            png.draw_step(prediction.step, args.png, f"{planned.request.profile.name} on {planned.request.topology.name}")
            console.print(f"{escape(str(args.png))} written")
    except (ValueError, OSError) as error:  # no plan; or a place or a kind of file that cannot be written
        said = f"cannot write {error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        console.print(f"[red]mobius-ds simulate:[/] {escape(said)}", soft_wrap=True)
        return 1
    return 0


def _write_chrome_trace(step: Step, path: Path, says: str) -> None:
    """Writes a simulated step as a job writes its own, one process per GPU and one thread per stream.

    Args:
        says: what was simulated.
    """
    lines = [*naming_lines(step.gpus, f"simulated: {says}", simulated=True), *step_lines(step, 0.0, 1)]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def profile_of(args: argparse.Namespace, topology: Topology) -> ModelProfile:
    """The profile of the model that the options name, on the topology's GPU.

    Raises:
        ValueError: there is no such model, script or config, or the script has no forward.
    """
    if args.model is not None:
        from mobius_ds.profiling.computed import profile_description
        return profile_description(args.model, args.micro_batch, args.seq, topology.gpus[0]).profile
    for what, path in (("--script", args.script), ("--config", args.config)):
        if path is None or not path.is_file():
            raise ValueError(f"{what} {path} is no file; a script is planned with --script FILE --config FILE")
    return profile_of_script(args.script, args.config, args.script_args).on_gpu_of(topology.gpus[0].flops)


def show(planned: Planned, console: Console) -> None:
    """Prints a plan: its stages, how it was found, and what it and others would take."""
    request = planned.request
    profile, topology = request.profile, request.topology
    prediction = planned.prediction()
    console.print(f"{profile.name}: {profile.parameters / 1e9:.2f} B parameters in {len(profile.layers)} layers on "
                  f"{topology.name}, {topology.size} GPUs, {request.microbatches} micro-batches", highlight=False)
    console.print(stage_table(planned, prediction))
    console.print(explained(planned), highlight=False, soft_wrap=True)
    predictions = [prediction, predict_gpipe(profile, topology, request.microbatches)]
    rounds, left = divmod(request.microbatches, topology.size)
    if not left:  # ZeRO-3 and RoundPipe take rounds of as many micro-batches as GPUs
        predictions.insert(1, accumulated(predict_zero3_offload(profile, topology), rounds))
        predictions.append(predict_roundpipe(profile, topology, request.microbatches))
    console.print(comparison_table(profile.model_bytes, predictions))


def stage_table(planned: Planned, prediction: Prediction) -> Table:
    """A row per stage: its layers, bytes, GPU, and how much of its copy in the GPU waited for, forward and backward."""
    table = Table(title="stages", show_lines=False)
    for name, justify in (("stage", "right"), ("GPU", "right"), ("layers", "left"), ("weights", "right"),
                          ("handed on", "right"), ("forward, ms", "right"), ("backward, ms", "right"),
                          ("copy exposed, ms", "right")):
        table.add_column(name, justify=justify)
    exposed = {stage.stage: (stage.forward, stage.backward) for stage in prediction.figures.stages}
    for stage, layers in enumerate(stages_of(planned.request.profile, planned.plan)):
        first = planned.plan.first_layers()[stage]
        kinds = " ".join(dict.fromkeys(layer.name for layer in layers))
        table.add_row(str(stage), str(planned.plan.gpu_of_stage[stage]),
                      f"{first}" + (f"-{first + len(layers) - 1}" if len(layers) > 1 else "") + f" {escape(kinds)}",
                      readable(sum(layer.weight_bytes for layer in layers)), readable(layers[-1].boundary_bytes),
                      f"{sum(layer.forward_seconds for layer in layers) * 1e3:.1f}",
                      f"{sum(layer.backward_seconds for layer in layers) * 1e3:.1f}",
                      " / ".join(map(exposure_of, exposed[stage])))
    return table


def comparison_table(model_bytes: int, predictions: List[Prediction]) -> Table:
    """Predicted steps side by side.

    Args:
        model_bytes: the model's size, 4 bytes a parameter.
    """
    table = Table(title="predicted step")
    table.add_column("")
    for prediction in predictions:
        table.add_column(prediction.name, justify="right")
    rows = [
        ("step, s", lambda p: f"{p.step_seconds:.3f}"),
        ("without the CPU optimizer, s", lambda p: f"{p.sweep_seconds:.3f}"),
        ("GPU computes at most, s", lambda p: f"{p.busiest_compute_seconds:.3f}"),
        ("not computing (busiest GPU)", lambda p: f"{p.exposed_share * PERCENT:.0f} %"),
        ("bubble (all GPUs)", lambda p: f"{p.bubble * PERCENT:.0f} %"),
        ("bytes moved", lambda p: readable(sum(p.bytes_by_category.values()))),
        *((f"  {category}", lambda p, category=category: readable(p.bytes_by_category.get(category, 0)))
          for category in DELIVERED),
        ("bytes / model size", lambda p: f"{sum(p.bytes_by_category.values()) / model_bytes:.2f}"),
        ("weights and gradients, GB/s", lambda p: " / ".join(
            f"{rate / 1e9:.1f}" for rate in quartiles(p.bandwidth_distribution())) or "-"),
        ("memory per GPU", lambda p: readable(max(p.memory_bytes))),
        ("fits", lambda p: "yes" if p.fits else f"[red]OOM[/]: {readable(p.missing_bytes)} missing"),
    ]
    for name, figure in rows:
        table.add_row(name, *(figure(prediction) for prediction in predictions))
    return table

"""``mobius-ds plan`` and ``mobius-ds simulate``: a plan explained before anything runs."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import List, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mobius_ds.planning.costs import stages_of
from mobius_ds.planning.planner import MAPPINGS, STRATEGIES, Planned, Request, explained, from_json, make_best_plan, write
from mobius_ds.planning.prediction import Prediction, predict_gpipe, predict_roundpipe, predict_zero3_offload
from mobius_ds.planning.schedule import Kind, Stream
from mobius_ds.planning.profile import ModelProfile, profile_from_json
from mobius_ds.planning.topology import PRESETS, Topology
from mobius_ds.planning.units import readable

PERCENT = 100
OVERRIDE_VARIABLE, PROFILE_VARIABLE = "MOBIUS_DS", "MOBIUS_DS_PROFILE"
PACKAGE = Path(__file__).resolve().parents[1]
LAST_LINES = 30
CATEGORIES = ("parameters_in", "gradients_out", "activations_in", "activations_out")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``plan``."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="folder or file with a Hugging Face config, or a GPT size such as gpt-8b")
    source.add_argument("--script", type=Path, help="training script that takes --deepspeed_config; it runs on one rank up to "
                        "its first forward, which is profiled")
    parser.add_argument("--config", type=Path, help="the script's DeepSpeed config")
    parser.add_argument("--topology", required=True, help=f"a preset ({', '.join(PRESETS)}), a JSON file, or 'detect'")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples in a micro-batch (default: 1)")
    parser.add_argument("--seq", type=int, default=1024, help="tokens in a sample (default: 1024)")
    parser.add_argument("--microbatches", type=int, help="micro-batches in a step (default: one per GPU)")
    parser.add_argument("--strategy", choices=STRATEGIES, default="mip", help="how to partition (default: mip)")
    parser.add_argument("--mapping", choices=MAPPINGS, default="cross", help="how to map stages to GPUs (default: cross)")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for the solver (default: 30)")
    parser.add_argument("--out", type=Path, help="write the plan here")
    parser.add_argument("script_args", nargs="*", metavar="-- SCRIPT_ARGS", help="passed on to the script")


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``simulate``."""
    parser.add_argument("plan", type=Path, help="a plan file")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace here (JSON; opens in Perfetto)")
    parser.add_argument("--png", type=Path, help="draw the step here")


def plan(args: argparse.Namespace) -> int:
    """Plans, and shows the plan beside what others would take. Returns the exit status."""
    console = Console()
    try:
        from mobius_ds.runtime.topology_detection import topology_by_name

        topology = topology_by_name(args.topology)
        planned = make_best_plan(Request(_profile(args, topology), topology,
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
    from mobius_ds.reporting import timeline

    console = Console()
    try:
        planned = from_json(args.plan)
        prediction = planned.prediction()
        console.print(comparison_table(planned, [prediction]))
        if args.trace:
            timeline.write_chrome_trace(prediction.sweeps, args.trace)
            console.print(f"{escape(str(args.trace))} written")
        if args.png:
            timeline.draw(prediction.sweeps, args.png, f"{planned.request.profile.name} on {planned.request.topology.name}")
            console.print(f"{escape(str(args.png))} written")
    except (ValueError, OSError) as error:  # no plan; or a place or a kind of file that cannot be written
        said = f"cannot write {error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        console.print(f"[red]mobius-ds simulate:[/] {escape(said)}", soft_wrap=True)
        return 1
    return 0


def _profile(args: argparse.Namespace, topology: Topology) -> ModelProfile:
    if args.model is not None:
        from mobius_ds.model.profiling import profile_description
        return profile_description(args.model, args.micro_batch, args.seq, topology.gpus[0]).profile
    for what, path in (("--script", args.script), ("--config", args.config)):
        if path is None or not path.is_file():
            raise ValueError(f"{what} {path} is no file; a script is planned with --script FILE --config FILE")
    return profile_of_script(args.script, args.config, args.script_args).on_gpu_of(topology.gpus[0].flops)


def profile_of_script(script: Path, config: Path, arguments: Sequence[str]) -> ModelProfile:
    """Runs a training script on one rank up to its first forward, and takes that one's profile, for 1 FLOP/s.

    Raises:
        ValueError: the script ended without a forward of an engine.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "profile.json"
        environment = {**os.environ, OVERRIDE_VARIABLE: "1", PROFILE_VARIABLE: str(written)}
        # The plugin is loaded in the script's process whether or not the package is installed there.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
        ran = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1",
                              "--module", "mobius_ds.plugin.launcher", str(script), "--deepspeed_config", str(config),
                              *arguments], env=environment, capture_output=True, text=True)
        if not written.exists():
            last = "\n".join((ran.stdout + ran.stderr).splitlines()[-LAST_LINES:])
            raise ValueError(f"{script} ended (status {ran.returncode}) without a forward that could be profiled:\n{last}")
        return profile_from_json(json.loads(written.read_text()))


def show(planned: Planned, console: Console) -> None:
    """Prints a plan: its stages, how it was found, and what it and others would take."""
    request = planned.request
    profile, topology = request.profile, request.topology
    prediction = planned.prediction()
    console.print(f"{profile.name}: {profile.parameters / 1e9:.2f} B parameters in {len(profile.layers)} layers on "
                  f"{topology.name}, {topology.size} GPUs, {request.microbatches} micro-batches", highlight=False)
    console.print(stage_table(planned, prediction))
    console.print(explained(planned), highlight=False, soft_wrap=True)
    predictions = [prediction, predict_zero3_offload(profile, topology),
                   predict_gpipe(profile, topology, request.microbatches)]
    if request.microbatches % topology.size == 0:  # RoundPipe takes rounds of as many micro-batches as GPUs
        predictions.append(predict_roundpipe(profile, topology, request.microbatches))
    console.print(comparison_table(planned, predictions))


def stage_table(planned: Planned, prediction: Prediction) -> Table:
    """A row per stage: its layers, bytes, GPU, and how much of its copy in the GPU waited for, forward and backward."""
    table = Table(title="stages", show_lines=False)
    for name, justify in (("stage", "right"), ("GPU", "right"), ("layers", "left"), ("weights", "right"),
                          ("handed on", "right"), ("forward, ms", "right"), ("backward, ms", "right"),
                          ("copy exposed, ms", "right")):
        table.add_column(name, justify=justify)
    exposed = [exposed_copies(prediction, sweep) for sweep in range(2)]
    for stage, layers in enumerate(stages_of(planned.request.profile, planned.plan)):
        first = planned.plan.first_layers()[stage]
        kinds = " ".join(dict.fromkeys(layer.name for layer in layers))
        table.add_row(str(stage), str(planned.plan.gpu_of_stage[stage]),
                      f"{first}" + (f"-{first + len(layers) - 1}" if len(layers) > 1 else "") + f" {escape(kinds)}",
                      readable(sum(layer.weight_bytes for layer in layers)), readable(layers[-1].boundary_bytes),
                      f"{sum(layer.forward_seconds for layer in layers) * 1e3:.1f}",
                      f"{sum(layer.backward_seconds for layer in layers) * 1e3:.1f}",
                      " / ".join(_exposure(part.get(stage, 0.0)) for part in exposed))
    return table


def exposed_copies(prediction: Prediction, sweep: int) -> dict:
    """Seconds that each stage's first compute waited for its weights alone, in one of the sweeps."""
    _, timeline = prediction.sweeps[sweep]
    ends = {played.task.key: played.end for played in timeline.played}
    waited = {}
    for gpu in range(prediction.gpus):
        free = 0.0
        for played in timeline.of(gpu, Stream.COMPUTE):
            stage = played.task.key.stage
            others = [ends[key] for key in played.task.after if key.kind is not Kind.WEIGHTS and key in ends]
            if stage not in waited:
                ready = max([free, *others])
                copied = next(ends[key] for key in played.task.after if key.kind is Kind.WEIGHTS)
                waited[stage] = max(0.0, copied - ready)
            free = played.end
    return waited


def comparison_table(planned: Planned, predictions: List[Prediction]) -> Table:
    """Predicted steps side by side."""
    model_bytes = planned.request.profile.model_bytes
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
          for category in CATEGORIES),
        ("bytes / model size", lambda p: f"{sum(p.bytes_by_category.values()) / model_bytes:.2f}"),
        ("weights and gradients, GB/s", lambda p: " / ".join(f"{rate / 1e9:.1f}" for rate in quartiles(p)) or "-"),
        ("memory per GPU", lambda p: readable(max(p.memory_bytes))),
        ("fits", lambda p: "yes" if p.fits else f"[red]OOM[/]: {readable(p.missing_bytes)} missing"),
    ]
    for name, figure in rows:
        table.add_row(name, *(figure(prediction) for prediction in predictions))
    return table


def quartiles(prediction: Prediction) -> List[float]:
    """Bytes/s below which a quarter, half and three quarters of the weight and gradient bytes move; empty without any."""
    moved = prediction.bandwidth_distribution()
    total, found, passed = sum(nbytes for _, nbytes in moved), [], 0
    for rate, nbytes in moved:
        passed += nbytes
        while len(found) < 3 and passed >= (len(found) + 1) / 4 * total:
            found.append(rate)
    return found


def _exposure(seconds: float) -> str:
    return "hidden" if seconds < 5e-5 else f"{seconds * 1e3:.1f}"

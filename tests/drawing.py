"""The schedule that docs/how_it_works.md explains, played by the simulator and drawn as SVG."""

from dataclasses import replace
from typing import Dict, Iterator, List, Tuple
from xml.sax.saxutils import escape

from mobius_ds.inputs.topology import preset
from mobius_ds.prediction.mobius import predict_mobius, profile_volumes
from mobius_ds.prediction.prediction import Prediction
from mobius_ds.schedule.mobius import backward_schedule, forward_schedule
from mobius_ds.schedule.plan import Plan
from mobius_ds.schedule.schedule import Schedule
from mobius_ds.schedule.tasks import Kind, Stream
from mobius_ds.simulation.simulator import Played
from tests.planner.models import even_model

GPUS, STAGES = 2, 6
PLAN = Plan(GPUS, (1,) * STAGES, tuple(stage % GPUS for stage in range(STAGES)))
MODEL = even_model(STAGES, seconds=0.02, weight_bytes=500 * 10**6, boundary_bytes=64 * 10**6)
"""A layer's weights take 38 ms to copy in, its forward 20 ms a microbatch."""
MODEL = replace(MODEL, layers=(*MODEL.layers[:-1], replace(MODEL.layers[-1], boundary_bytes=4)))  # what it makes is a loss

DRAWN = {
    "forward": ((Kind.FORWARD,), "#56b4e9"),
    "recompute and backward": ((Kind.BACKWARD,), "#009e73"),
    "weights in": ((Kind.WEIGHTS,), "#e69f00"),
    "weight gradients out": ((Kind.WEIGHT_GRADIENTS,), "#d55e00"),
    "boundary activations": ((Kind.ACTIVATIONS, Kind.GIVE_ACTIVATIONS, Kind.OUTPUTS), "#cc79a7"),
    "their gradients": ((Kind.GRADIENTS, Kind.GIVE_GRADIENTS, Kind.GIVE_OUTPUT_GRADIENTS), "#f0e442"),
}
"""What each colour stands for; Okabe and Ito's, which the colour-blind tell apart."""
COLOUR_OF = {kind: colour for kinds, colour in DRAWN.values() for kind in kinds}
STREAMS = [stream for stream in Stream if stream is not Stream.UPDATE]

WIDTH, LEFT, TOP, ROW, GAP, LETTER = 1200, 130, 44, 22, 12, 6.5
STYLE = """<style>
text { font: 11px ui-monospace, monospace; fill: #1f2328 }
rect.page { fill: #ffffff }
line { stroke: #8c959f }
rect.task { stroke: #ffffff; stroke-width: .5 }
text.task { fill: #000000; text-anchor: middle; font-size: 10px }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } rect.page { fill: #0d1117 } text.task { fill: #000000 } }
</style>"""


def prediction() -> Prediction:
    """The step that is drawn."""
    return predict_mobius(MODEL, preset("3090-2"), PLAN)


def schedules() -> Tuple[Schedule, Schedule]:
    """Its forward and its backward sweep."""
    home, volumes = list(range(GPUS)), profile_volumes(MODEL, PLAN, GPUS)
    return forward_schedule(PLAN, home, volumes), backward_schedule(PLAN, home, volumes, {})


def tasks_of(gpu: int) -> str:
    """One GPU's forward tasks as a schedule prints them."""
    forward, _ = schedules()
    return str(Schedule(forward.name, forward.gpus, forward.of(gpu)))


def svg() -> str:
    """docs/schedule.svg: a row for each GPU's streams, time to the right, a task a box with its name."""
    step = prediction()
    scale = (WIDTH - LEFT - 10) / step.sweep_seconds
    height = TOP + GPUS * (len(STREAMS) * ROW + GAP) + 30
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
             f"<title>{STAGES} stages on {GPUS} GPUs, {GPUS} microbatches: forward, then backward</title>", STYLE,
             f'<rect class="page" width="{WIDTH}" height="{height}"/>', *_legend(), *_rows()]
    begin = 0.0
    for name, timeline in step.sweeps:
        for played in timeline.played:
            lines += _box(played, LEFT + (begin + played.start) * scale, played.seconds * scale)
        x = LEFT + begin * scale
        lines += [f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{height - 20}"/>',
                  f'<text x="{x:.1f}" y="{height - 6}">{name}, {timeline.makespan * 1e3:.0f} ms</text>']
        begin += timeline.makespan
    return "\n".join(lines + ["</svg>", ""])


def _legend() -> Iterator[str]:
    x = LEFT
    for name, (_, colour) in DRAWN.items():
        yield f'<rect x="{x:.0f}" y="14" width="12" height="12" fill="{colour}"/>'
        yield f'<text x="{x + 16:.0f}" y="24">{name}</text>'
        x += 16 + 6.8 * len(name) + 14


def _rows() -> Iterator[str]:
    for (gpu, stream), y in _places().items():
        yield f'<text x="8" y="{y + 15}">GPU {gpu} {stream.value}</text>'


def _places() -> Dict[Tuple[int, Stream], int]:
    """The height at which each row begins."""
    rows: List[Tuple[int, Stream]] = [(gpu, stream) for gpu in range(GPUS) for stream in STREAMS]
    return {row: TOP + number * ROW + row[0] * GAP for number, row in enumerate(rows)}


def _box(played: Played, x: float, width: float) -> Iterator[str]:
    task = played.task
    if played.seconds <= 0:  # the microbatches' inputs, which weigh nothing here
        return
    y, name = _places()[task.gpu, task.stream], str(task.key)
    what = f"{name}: {task.key.kind.name.lower().replace('_', ' ')}, {played.seconds * 1e3:.1f} ms"
    colour = COLOUR_OF[task.key.kind]
    yield (f'<rect class="task" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 3}" fill="{colour}">'
           f"<title>{escape(what)}</title></rect>")
    if width >= LETTER * len(name):
        yield f'<text class="task" x="{x + width / 2:.1f}" y="{y + 14}">{escape(name)}</text>'

"""One rank of the counting tests of ZeRO stages 0 and 2 and of ``PipelineEngine``: every case in one job."""

import json

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import nn

from mobius_ds.inputs.units import GIB
from mobius_ds.observation.recorder import EngineRecorder
from mobius_ds.observation.records import Told, rank_file, tell

WIDTH, LAYERS, SAMPLES = 32, 4, 2  # every parameter divides evenly among 1, 2 and 4 ranks
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
STEPS, MICROBATCHES = 3, 3

OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 4096}
CASES = {
    "ddp-fp32": dict(dtype="fp32", zero={"stage": 0}),
    "ddp-bf16": dict(dtype="bf16", zero={"stage": 0}, accumulation=MICROBATCHES),
    "zero2-fp32": dict(dtype="fp32", zero=OFFLOAD),
    "zero2-bf16": dict(dtype="bf16", zero=OFFLOAD),
    "zero2-bf16-accumulate": dict(dtype="bf16", zero=OFFLOAD, accumulation=MICROBATCHES),
    "zero2-bf16-sums-in-fp32": dict(dtype="bf16", zero=OFFLOAD, accumulation=MICROBATCHES, sums="fp32"),
}
PIPELINES = {
    "pipeline-fp32": dict(dtype="fp32", stages=4),
    "pipeline-bf16-data-parallel": dict(dtype="bf16", stages=2),
    "pipeline-tied": dict(dtype="fp32", stages=4, tied=True),
}


class Tied(nn.Linear):
    """A layer that is the first and the last one of a pipeline."""


def config_of(dtype, zero, accumulation=1, sums=None):
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    return {**config, "data_types": {"grad_accum_dtype": sums}} if sums else config


def data(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randn(SAMPLES, WIDTH, generator=generator).to(dtype)


def loss_of(output, _=None):
    return output.float().square().mean()


def recorded(engine, folder, train):
    recorder = EngineRecorder(engine, folder)
    recorder.attach()
    try:
        losses = [train() for _ in range(STEPS)]
    finally:
        engine.destroy()
    return {**json.loads(rank_file(folder, engine.global_rank).read_text()), "expected_losses": losses}


def run_case(name, folder, dtype, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_of(dtype, **settings))[0]
    samples = data(engine.global_rank, getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[dtype]))

    def train():
        losses = []
        for _ in range(engine.gradient_accumulation_steps()):
            loss = loss_of(engine(next(samples)))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    return recorded(engine, folder / name, train)


def run_pipeline(name, folder, dtype, stages, tied=False):
    torch.manual_seed(0)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(LAYERS)]
    if tied:
        layers[0] = layers[-1] = TiedLayerSpec("tied", Tied, WIDTH, WIDTH)
    model = PipelineModule(layers, num_stages=stages, loss_fn=loss_of, partition_method="uniform")
    engine = deepspeed.initialize(model=model, config=config_of(dtype, {"stage": 0}, accumulation=MICROBATCHES),
                                  model_parameters=[p for p in model.parameters() if p.requires_grad])[0]
    samples = data(0, getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[dtype]))
    batches = ((sample, sample) for sample in samples)
    return recorded(engine, folder / name, lambda: engine.train_batch(data_iter=batches).item())


def out_of_memory(folder):
    """What engines say on devices that lack a byte: for the model, the optimizer's moments, what is gathered at once."""
    said = {}
    for what, stage, parameters_held in (("at once", 0, 2), ("in the first step", 0, 3), ("gathered", 3, 1)):
        (folder / what).mkdir(exist_ok=True)
        tell(folder / what, Told(device_memory_gb=(parameters_held * PARAMETERS * 4 - 1) / GIB))  # every rank the same
        torch.distributed.barrier()  # for a file that another one is writing is empty
        try:
            run_case(what, folder, "fp32", zero={"stage": stage})
        except torch.OutOfMemoryError as error:
            said[what] = str(error)
    return said


def run_all(folder):
    """Every case, on four ranks: starting DeepSpeed takes longer than running them."""
    results = {name: run_case(name, folder, **case) for name, case in CASES.items()}
    results["out of memory"] = out_of_memory(folder)  # before pipelines, whose process groups stay
    return {**results, **{name: run_pipeline(name, folder, **case) for name, case in PIPELINES.items()}}

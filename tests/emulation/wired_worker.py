"""One rank of the tests of engines over emulated wires: every case in one job."""

import json
import os
import time
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from mobius_ds.emulation.server import EmulatedServer
from mobius_ds.inputs.topology import Gpu, Topology
from mobius_ds.observation.recorder import install
from mobius_ds.observation.records import rank_file

RANKS, WIDTH, LAYERS, STEPS = 2, 256, 4, 3
MODEL_BYTES = 4 * LAYERS * WIDTH * (WIDTH + 1)
BANDWIDTH = 2e9  # of the root complex that both GPUs share, and of each one's own link
COMPUTE_SECONDS = 0.4  # of a layer's forward, where it takes time
FAST, SLOW, SLOWER, VERY_SLOW = 0.01, 180.0, 600.0, 6000.0
MICROBATCHES = 3
TRACE = "trace.json"

ALWAYS_GATHERED = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 1, "stage3_prefetch_bucket_size": 0}
PREFETCHED = {"stage3_prefetch_bucket_size": WIDTH * (WIDTH + 1)}  # a layer
CASES = {
    "not emulated": dict(slowdown=None, settings=ALWAYS_GATHERED),
    "fast": dict(slowdown=FAST, settings=ALWAYS_GATHERED),
    "slow": dict(slowdown=SLOW, settings=ALWAYS_GATHERED),
    "prefetched": dict(slowdown=SLOWER, settings=PREFETCHED, compute_seconds=COMPUTE_SECONDS),
    "not prefetched": dict(slowdown=SLOWER, settings=ALWAYS_GATHERED, compute_seconds=COMPUTE_SECONDS),
}


class Layer(nn.Linear):
    """A layer that takes its time."""

    seconds = 0.0

    def forward(self, x):
        time.sleep(self.seconds)
        return super().forward(x)


def server(slowdown):
    topology = Topology("two GPUs", (Gpu("a GPU", 2**34, 1e13),) * RANKS, (0,) * RANKS, (BANDWIDTH,) * RANKS, (BANDWIDTH,))
    return EmulatedServer(topology, slowdown)


def config_of(settings, **others):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": settings,
        **others,
    }


def samples(rank):
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randn(2, WIDTH, generator=generator)


def recorded(folder, slowdown, build, step):
    """The record of an engine that was built and took its steps over a server's emulated wires."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    try:
        install(folder, None if slowdown is None else server(slowdown))
        engine = build()
        for _ in range(STEPS):
            step(engine)
        engine.destroy()
    finally:
        deepspeed.DeepSpeedEngine.__init__ = deepspeed.DeepSpeedEngine.__init__.__wrapped__
    return json.loads(rank_file(folder, rank).read_text())


def run_case(folder, slowdown, settings, compute_seconds=0.0, **others):
    offload = {"device": "cpu"}
    zero = {"stage": 3, "offload_optimizer": offload, "offload_param": offload, "stage3_param_persistence_threshold": 0,
            **settings}
    batches = samples(torch.distributed.get_rank())
    Layer.seconds = compute_seconds

    def build():
        model = nn.Sequential(*(Layer(WIDTH, WIDTH) for _ in range(LAYERS)))
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_of(zero, **others))[0]

    def step(engine):
        loss = engine(next(batches)).square().mean()
        engine.backward(loss)
        engine.step()

    return recorded(folder, slowdown, build, step)


def run_pipeline(folder):
    Layer.seconds = 0.0
    batches = ((batch, batch) for batch in samples(0))

    def build():
        model = PipelineModule([LayerSpec(Layer, WIDTH, WIDTH) for _ in range(LAYERS)], num_stages=RANKS,
                               loss_fn=lambda output, _: output.square().mean())
        return deepspeed.initialize(model=model, model_parameters=model.parameters(),
                                    config=config_of({"stage": 0}, gradient_accumulation_steps=MICROBATCHES))[0]

    return recorded(folder, VERY_SLOW, build, lambda engine: engine.train_batch(data_iter=batches))


def run_all(folder):
    """Every case's record."""
    folder = Path(folder)
    results = {name: run_case(folder / name, **case) for name, case in CASES.items()}
    os.environ["MOBIUS_DS"] = "1"
    topology = folder / f"topology{torch.distributed.get_rank()}.json"
    topology.write_text(json.dumps(server(SLOW).topology.to_json()))
    results["mobius"] = run_case(folder / "mobius", SLOW, ALWAYS_GATHERED, mobius={
        "enabled": True, "topology": str(topology), "trace": str(folder / TRACE)})
    os.environ["MOBIUS_DS"] = "0"
    return {**results, "pipeline": run_pipeline(folder / "pipeline")}  # the last, as its process groups stay

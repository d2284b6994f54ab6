"""One rank of the ZeRO-3 counting tests: runs every case and writes what it saw. ``test_zero3_traffic`` starts it."""

import json
import sys
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mobius_ds.observation.recorder import EngineRecorder
from mobius_ds.observation.records import rank_file

WIDTH, LAYERS = 32, 4  # every parameter divides evenly among 1, 2 and 4 ranks
STEPS = 3

# A size at which nothing is prefetched, kept or persistent: every layer is fetched for forward and for backward.
LIKE_A_BIG_MODEL = {
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 1,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 0,
}

CASES = {
    "fp32": dict(dtype="fp32", settings=LIKE_A_BIG_MODEL),
    "bf16": dict(dtype="bf16", settings=LIKE_A_BIG_MODEL),
    "bf16-evaluate": dict(dtype="bf16", settings=LIKE_A_BIG_MODEL, evaluate=True),
    "bf16-accumulate": dict(dtype="bf16", settings=LIKE_A_BIG_MODEL, accumulation=3),
    "bf16-defaults": dict(dtype="bf16", settings={}),
    "bf16-optimizer-only": dict(dtype="bf16", settings=LIKE_A_BIG_MODEL, offload_parameters=False),
}


class CollectiveBytes(TorchDispatchMode):
    """Full-size bytes of gathers and of reduce-scatters, seen by PyTorch's dispatcher instead of the observer."""

    def __init__(self):
        super().__init__()
        self.gathered = self.scattered = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            largest = max(t.numel() * t.element_size() for t in torch.utils._pytree.tree_leaves(args)
                          if isinstance(t, torch.Tensor))
            if "gather" in func.__name__:
                self.gathered += largest
            if "reduce_scatter" in func.__name__:
                self.scattered += largest
        return func(*args, **(kwargs or {}))


def build_engine(dtype, settings, accumulation=1, offload_parameters=True):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, **settings}
    if offload_parameters:
        zero["offload_param"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def run_case(name, folder, evaluate=False, **case):
    engine = build_engine(**case)
    recorder = EngineRecorder(engine, folder / name)
    recorder.attach()
    dtype = torch.bfloat16 if case["dtype"] == "bf16" else torch.float32
    generator = torch.Generator().manual_seed(engine.global_rank)
    losses = []

    for _ in range(STEPS):
        if evaluate:
            engine.eval()
            with torch.no_grad():
                engine(torch.ones(2, WIDTH, dtype=dtype))
            engine.train()
        step_losses = []
        with CollectiveBytes() as seen:
            for _ in range(engine.gradient_accumulation_steps()):
                loss = engine(torch.randn(2, WIDTH, generator=generator).to(dtype)).float().square().mean()
                engine.backward(loss)
                engine.step()
                step_losses.append(loss.item())
        losses.append(sum(step_losses) / len(step_losses))

    engine.destroy()
    record = json.loads(rank_file(folder / name, engine.global_rank).read_text())
    return {**record, "expected_losses": losses, "gathered": seen.gathered, "scattered": seen.scattered}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    results = {name: run_case(name, folder, **case) for name, case in CASES.items()}
    (folder / f"results{torch.distributed.get_rank()}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()

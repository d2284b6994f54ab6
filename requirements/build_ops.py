"""Compiles the DeepSpeed operators a run uses, so that no two processes ever compile the same one at once."""

import time

from deepspeed.accelerator import get_accelerator

if __name__ == "__main__":
    accelerator = get_accelerator()
    # The second is what gloo jobs on CPU use between ranks; GPUs do not have it.
    names = ["CPUAdamBuilder"] + ["ShareMemCommBuilder"] * (accelerator.device_name() == "cpu")
    for name in names:
        begun = time.monotonic()
        print(f"Compiling DeepSpeed's {name.removesuffix('Builder')}, once: up to a minute ...", flush=True)
        accelerator.create_op_builder(name).load()
        print(f"... in {time.monotonic() - begun:.0f} s", flush=True)

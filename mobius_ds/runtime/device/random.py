"""Random numbers of a forward: a pure function of the seed, the step, the microbatch and the call.

So a dropout mask does not depend on how many ranks there are or where the model is cut, is the same when
a stage is recomputed, and the same again after a restart.
"""

import hashlib
from typing import Callable

import torch

from mobius_ds.runtime.device.device import Device


def mixed(*numbers: int) -> int:
    """A 63-bit number that depends on all of ``numbers``."""
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def reseed_from(seed: int, device: Device) -> Callable[[int], None]:
    """The replay's reseeding for one microbatch with seed ``seed``."""

    def reseed(point: int) -> None:
        value = mixed(seed, point)
        torch.default_generator.manual_seed(value)
        if not device.is_cpu:
            device_generator(device).manual_seed(value)

    return reseed


def device_generator(device: Device) -> torch.Generator:
    """The accelerator's default generator."""
    return getattr(torch, device.torch_device.type).default_generators[device.torch_device.index or 0]

"""How a model comes to live in its node's store: the first rank's values, seen by all ranks."""

from itertools import chain
from typing import Dict, Mapping, Optional, Tuple

import torch
from torch import nn

from mobius_ds.runtime.device.device import Device
from mobius_ds.runtime.dram.memory_estimate import Dram, check_dram, training_parts
from mobius_ds.runtime.dram.shared_memory import Extent
from mobius_ds.runtime.dram.store import Layout, ParameterStore
from mobius_ds.runtime.dram.weights import is_shared, lying
from mobius_ds.runtime.ranks.errors import OutOfMemory, OutOfStep
from mobius_ds.runtime.ranks.mailbox import Mailbox


_ADVICE = ("Use a machine with more DRAM, freeze parameters, or train a smaller model. A model that is built under "
           "deepspeed.zero.Init is in memory once, instead of once on every rank until it is adopted.")


def move_into_store(model: nn.Module, mailbox: Mailbox, device: Device, state_tensors: int) -> ParameterStore:
    """Makes a store of a model's parameters and points them at it. All ranks call it.

    Parameters that lie in shared memory already, built under ``deepspeed.zero.Init`` or left by an earlier engine,
    stay where they are on the first rank; the others are copied in. Buffers move to the device.

    Args:
        state_tensors: how many tensors of a parameter's size the optimizer will keep.

    Raises:
        OutOfMemory: DRAM does not hold the model and its training state.
        OutOfStep: the ranks have built different models.
        ValueError: parameters are partitioned or have no values.
    """
    parameters = dict(model.named_parameters())
    _check_values(parameters)
    store, placed, offer = None, {}, None
    if mailbox.rank == 0:
        home, placed = lying(parameters)
        layout = Layout(parameters.items(), placed, home.end if home else 0)
        try:
            check_dram(training_parts(layout, state_tensors), {"weights": layout.placed_bytes}, Dram.here(), _ADVICE)
            store = ParameterStore(layout, None, device.register, home)
            offer = layout, store.handles
        except OutOfMemory as error:  # everyone's error, not this rank's alone
            offer = error
    offer = mailbox.gather("initialize", offer)[0]
    if isinstance(offer, OutOfMemory):
        raise offer
    layout, handles = offer
    _check_same(parameters, layout, mailbox.rank)
    store = store or ParameterStore(layout, handles, device.register)
    _move(parameters, store, placed, mailbox.rank == 0)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device.torch_device)
    used = mailbox.gather("initialize", store.home.used())
    if mailbox.rank == 0:
        store.home.release(chain(*used))
        for name in layout.trained(layout.entries):
            if layout.entries[name].dtype != torch.float32:
                store.master(name).copy_(store.weight(name))
    mailbox.gather("initialize", None)
    return store


def _move(parameters: Mapping[str, nn.Parameter], store: ParameterStore, placed: Dict[str, Extent], first: bool) -> None:
    for name, parameter in parameters.items():
        if first and not (name in placed and is_shared(parameter.data)):
            store.weight(name).copy_(parameter.data)
        parameter.data = store.weight(name)


def _check_values(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if hasattr(parameter, "ds_id"):
            raise ValueError(f"parameter {name!r} is partitioned: its model was built under a deepspeed.zero.Init that did "
                             "not know of Mobius. Give it the same config: deepspeed.zero.Init(config_dict_or_path=...).")
        if parameter.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device and has no values. Load or initialize it before "
                             "deepspeed.initialize.")
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"parameter {name!r} is one of a lazy module and has no shape yet. Call the model once before "
                             "deepspeed.initialize.")
        if parameter.requires_grad and parameter.is_complex():
            raise ValueError(f"parameter {name!r} is {parameter.dtype}, and Mobius keeps fp32 masters of what is trained. "
                             "Make it real (torch.view_as_real), or freeze it with requires_grad_(False).")


def _check_same(parameters: Mapping[str, nn.Parameter], layout: Layout, rank: int) -> None:
    mine = {name: (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
            for name, parameter in parameters.items()}
    first = {name: (entry.shape, entry.dtype, entry.trainable) for name, entry in layout.entries.items()}
    for name in (*first, *mine):
        if mine.get(name) != first.get(name):
            raise OutOfStep(f"rank {rank} has built another model than rank 0: parameter {name!r} is "
                            f"{_described(mine.get(name))} on rank {rank} and {_described(first.get(name))} on rank 0. "
                            "Build the same model on all ranks.")


def _described(parameter: Optional[Tuple[Tuple[int, ...], torch.dtype, bool]]) -> str:
    if parameter is None:
        return "missing"
    shape, dtype, trained = parameter
    return f"{dtype} of shape {shape}, {'trained' if trained else 'frozen'}"

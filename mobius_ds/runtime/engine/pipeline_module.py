"""A ``PipelineModule`` holds its own rank's layers only; Mobius needs all of them on every rank.

The missing layers are built from the specs, with the random numbers that a module of one stage would have drawn,
so that a run does not depend on ``num_stages``. What a script has written into its rank's layers since (weights it
loaded, ``requires_grad``) goes to all ranks.
"""

from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Union

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

from mobius_ds.names import RANDOM_STATE
from mobius_ds.runtime.ranks.exchange import exchange, host_group


class _Held(NamedTuple):
    """What one rank says of a tensor of its layers."""

    written: bool
    """Whether a script may have changed it since it was built."""
    requires_grad: bool


def complete(module: PipelineModule) -> Dict[int, str]:
    """Builds the layers of all stages on this rank, in place. All ranks call it together.

    Returns:
        The names of the parameters that the module had before, by ``id``. They are no longer its own.
    """
    before = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    held = {name: _Held(_written(tensor, fresh), tensor.requires_grad)
            for (name, tensor), fresh in zip(before.items(), _fresh(module, before))}
    _build(module, 0, len(module._layer_specs))
    module.tied_comms = {}
    after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    by_rank = exchange(held)
    with host_group() as group, torch.no_grad():
        for name, tensor in after.items():
            # Of a tied weight several ranks hold a copy; DeepSpeed takes the lowest one's for all.
            holder = next((rank for rank, theirs in enumerate(by_rank) if name in theirs), None)
            if holder is None:
                continue
            if by_rank[holder][name].written:
                value = torch.empty_like(tensor, device="cpu")
                if holder == dist.get_rank():
                    value.copy_(before[name])
                dist.broadcast(value, holder, group=group)
                tensor.copy_(value)
            tensor.requires_grad_(by_rank[holder][name].requires_grad)
    return names


def completed_groups(groups: Iterable, names: Mapping[int, str], module: PipelineModule) -> Union[List[Any], List[Dict]]:
    """What a script made of its own rank's parameters, made of all ranks'. All ranks call it together.

    Args:
        groups: parameters, or parameter groups as optimizers take them; equally many groups on every rank.
        names: of the parameters, by ``id``.

    Raises:
        ValueError: a parameter is not the module's, or the ranks have different numbers of groups.
    """
    groups = list(groups)
    if not (groups and isinstance(groups[0], dict)):
        [group] = completed_groups([{"params": groups}], names, module)
        return group["params"]
    mine = [[_name(names, parameter) for parameter in group["params"]] for group in groups]
    everyones = exchange(mine)
    if len({len(theirs) for theirs in everyones}) > 1:
        raise ValueError(f"the ranks made {[len(theirs) for theirs in everyones]} parameter groups of their layers; give "
                         "the optimizer equally many on every rank, empty ones included.")
    return [{**group, "params": [parameter for name, parameter in module.named_parameters()
                                 if any(name in theirs[index] for theirs in everyones)]}
            for index, group in enumerate(groups)]


def _name(names: Mapping[int, str], parameter: nn.Parameter) -> str:
    if id(parameter) not in names:
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} that is to be trained is not one of the "
                         "PipelineModule's. Mobius moves the model only.")
    return names[id(parameter)]


def _fresh(module: PipelineModule, before: Mapping[str, torch.Tensor]) -> List[torch.Tensor]:
    """What DeepSpeed put into this rank's layers when it built them."""
    _build(module, module._local_start, module._local_stop)
    built = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return [built[name] for name in before]


def _written(tensor: torch.Tensor, fresh: torch.Tensor) -> bool:
    # A layer that was given as a module, not as a spec, is the same object both times.
    return tensor is fresh or not torch.equal(tensor.detach().cpu(), fresh.detach().cpu())


def _build(module: PipelineModule, start: int, stop: int) -> None:
    for name in module.fwd_map:
        del module._modules[name]
    module.forward_funcs, module.fwd_map = [], {}
    module.tied_modules, module.tied_weight_attrs = nn.ModuleDict(), {}
    module._set_bounds(start, stop)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(getattr(module, RANDOM_STATE))
        module._build()

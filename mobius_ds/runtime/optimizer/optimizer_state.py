"""A torch optimizer's state as checkpoints carry it: by the names of parameters, and exact to the last bit.

What a checkpoint brings lies in memory that all ranks map; who updates which parameter is planned later.
"""

from typing import Any, Dict, FrozenSet, List, Mapping

import torch
from torch import nn


_ADAM = frozenset({"exp_avg", "exp_avg_sq"})
_NEEDED = {"Adam": _ADAM, "AdamW": _ADAM, "NAdam": _ADAM, "RAdam": _ADAM, "DeepSpeedCPUAdam": _ADAM,
           "Adagrad": frozenset({"sum"}), "DeepSpeedCPUAdagrad": frozenset({"exp_avg_sq"}),
           "RMSprop": frozenset({"square_avg"}), "DeepSpeedCPULion": frozenset({"exp_avg"})}


def needed_state(optimizer: torch.optim.Optimizer) -> FrozenSet[str]:
    """The state without which an optimizer cannot go on from a parameter's; empty where that is not known."""
    if type(optimizer).__name__ == "SGD" and any(group["momentum"] for group in optimizer.param_groups):
        return frozenset({"momentum_buffer"})
    return _NEEDED.get(type(optimizer).__name__, frozenset())


def named_groups(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> List[Dict[str, Any]]:
    """An optimizer's groups, with names in place of parameters."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [{**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups]


def restore(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], groups: List[Dict[str, Any]],
            states: Dict[str, Dict[str, Any]]) -> None:
    """Takes over hyperparameters, group by group, and every parameter's state. Tensors are used as they are."""
    for group, saved in zip(optimizer.param_groups, groups):
        group.update({key: value for key, value in saved.items() if key != "params"})
    optimizer.state.clear()
    for name, state in states.items():
        optimizer.state[parameters[name]] = {key: _step(optimizer, value) if key == "step" else value
                                             for key, value in state.items()}
    if type(optimizer).__name__ == "DeepSpeedCPUAdam":
        _prime(optimizer, max((int(state.get("step", 0)) for state in states.values()), default=0))


def _step(optimizer: torch.optim.Optimizer, saved: Any) -> Any:
    """A count of steps as the optimizer keeps it: DeepSpeed's as a number, torch's as a tensor each."""
    module = type(optimizer).__module__
    if module.startswith("deepspeed.ops"):
        return int(saved)
    if module.startswith("torch.optim"):
        return torch.tensor(float(saved), dtype=torch.float32)
    return saved.clone() if isinstance(saved, torch.Tensor) else saved


def _prime(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Brings the powers of beta inside DeepSpeed's Adam to where they are after so many steps.

    It multiplies them up step by step and takes a true power after a leap: a last bit's difference, which the
    uninterrupted run does not have. So it makes the steps again, of nothing, unless they have made the powers vanish.
    """
    if all(beta**steps < 2.0**-30 for beta in optimizer.param_groups[-1]["betas"]):
        return
    groups, nothing = optimizer.param_groups, nn.Parameter(torch.empty(0))
    nothing.grad = torch.empty(0)
    optimizer.param_groups = [{**groups[-1], "params": [nothing]}]
    optimizer.state[nothing] = {"step": 0, "exp_avg": torch.empty(0), "exp_avg_sq": torch.empty(0)}
    for _ in range(steps):
        optimizer.step()
    optimizer.param_groups = groups
    del optimizer.state[nothing]

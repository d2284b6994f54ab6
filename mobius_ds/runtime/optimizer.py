"""The optimizer of a pipeline: any torch optimizer, each rank stepping the parameters of its own stages.

It works on the fp32 masters in DRAM; where parameters are fp32 they are their own masters. Optimizer state is
made by the optimizer on the rank that owns a parameter, so it too exists once per node.
"""

import math
from typing import Any, Dict, List, Optional

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from torch import nn

from mobius_ds.runtime.pipeline import Pipeline

UPDATES_EACH_PARAMETER_ALONE = {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad",
                                "DeepSpeedCPULion"}
"""Optimizers whose update of a parameter depends on that parameter alone, and that skip one without a gradient."""


class MobiusOptimizer(ZeROOptimizer):
    """Wraps a torch optimizer for a Mobius engine, as DeepSpeed's ZeRO optimizers do for theirs.

    Args:
        optimizer: built on the model's parameters; its groups are pointed at the masters.
        parameters: the model's parameters by name.
        clip: largest gradient norm, or 0 for no clipping.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pipeline: Pipeline, parameters: Dict[str, nn.Parameter],
                 clip: float):
        super().__init__()
        self.optimizer = optimizer
        self.overflow = False
        # Its product is a tensor of its own, by which DeepSpeed tells engine.backward's gradients from loss.backward's
        # before the hooks on the model's outputs divide them by the accumulation steps.
        self.loss_scaler = LossScaler(1.0)
        self.loss_scale = self.cur_scale = 1.0
        self.custom_loss_scaler = False
        self.torch_autocast_gradscaler = None
        self._global_grad_norm: Optional[torch.Tensor] = None
        self._pipeline = pipeline
        self._clip = clip
        self._masters: Dict[str, nn.Parameter] = {}
        self._squares: Dict[str, float] = {}
        names = {id(parameter): name for name, parameter in parameters.items()}
        for group in optimizer.param_groups:
            group["params"] = [self._master(names, parameter) for parameter in group["params"]
                               if parameter.requires_grad]

    def _master(self, names: Dict[int, str], parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in names:
            raise ValueError(f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not one of the "
                             "model's; Mobius moves the model only. Build the optimizer from model.parameters().")
        name = names[id(parameter)]
        master = parameter
        if parameter.dtype != torch.float32:
            master = nn.Parameter(self._pipeline.store.master(name))
            if parameter in self.optimizer.state:
                self.optimizer.state[master] = self.optimizer.state.pop(parameter)
        self._masters[name] = master
        return master

    def step(self, closure: Any = None) -> None:
        """Clips by the global norm and updates this rank's parameters; returns when every rank has."""
        assert closure is None, "closures are not supported with deepspeed, as with its other optimizers"
        gradients = {name: self._pipeline.gradient(name) for name in self._pipeline.owned()
                     if name in self._masters and name not in self._squares}
        self._add_squares(gradients)
        everyones: Dict[str, float] = {}
        for part in self._pipeline.step("engine.step", self._squares):
            everyones.update(part)
        self._squares = {}
        # Summed in the model's order, so the norm does not depend on which rank owns what.
        norm = math.sqrt(sum(everyones[name] for name in self._masters))
        self._global_grad_norm = torch.tensor(norm)  # as under ZeRO-3: scripts call its item()
        excess = (norm + 1e-6) / self._clip if self._clip > 0 else 0.0
        if excess > 1.0:
            for gradient in gradients.values():
                gradient.div_(excess)
        self._update(gradients)
        self._pipeline.start_accumulation()
        self._pipeline.finish_step()  # the script may read the parameters as soon as this returns

    @property
    def can_update_apart(self) -> bool:
        """Whether parameters may be updated one stage at a time, before all gradients are known."""
        return self._clip == 0 and type(self.optimizer).__name__ in UPDATES_EACH_PARAMETER_ALONE

    def update_apart(self, names: List[str]) -> None:
        """Updates some of this rank's parameters ahead of ``step``, beside a backward that has other stages to go."""
        gradients = {name: self._pipeline.store.gradient(name) for name in names if name in self._masters}
        self._add_squares(gradients)
        self._update(gradients)

    def _add_squares(self, gradients: Dict[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            self._squares[name] = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()**2

    def _update(self, gradients: Dict[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            self._masters[name].grad = gradient
        self.optimizer.step()
        for name in gradients:
            self._masters[name].grad = None
            if self._masters[name].dtype != self._pipeline.store.layout.entries[name].dtype:
                self._pipeline.store.weight(name).copy_(self._masters[name].data)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the accumulated gradients."""
        self._pipeline.start_accumulation()

    def refresh_fp32_params(self) -> None:
        """Takes the masters' values from 16-bit weights that the script has written; the others keep their precision."""
        for name, master in self._masters.items():
            weight = self._pipeline.store.weight(name)
            if weight.dtype != master.dtype:
                master.data.copy_(torch.where(weight == master.to(weight.dtype), master.data, weight.to(master.dtype)))

    @property
    def param_groups(self) -> List[Dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: List[Dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Dict[Any, Any]:
        """The wrapped optimizer's state: of this rank's parameters."""
        return self.optimizer.state

    @property
    def defaults(self) -> Dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def state_dict(self) -> Dict[str, Any]:
        """The wrapped optimizer's state: of this rank's parameters."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Dict[str, Any], **_: Any) -> None:
        """Loads what ``state_dict`` returned on this rank."""
        self.optimizer.load_state_dict(state_dict)

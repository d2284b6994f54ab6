"""The optimizer of a pipeline: any torch optimizer, each rank stepping the parameters of its own stages.

It works on the fp32 masters in DRAM; where parameters are fp32 they are their own masters. Optimizer state is
made by the optimizer on the rank that owns a parameter, so it too exists once per node.

As under ZeRO-3 a step whose gradients are not finite is skipped, on all ranks, whatever the dtype; in fp16 DeepSpeed's
own scaler then lowers the loss scale.
"""

import inspect
import math
from typing import Any, Dict, Iterable, List, Optional, Tuple

import torch
from deepspeed.checkpoint.constants import LOSS_SCALER
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import LossScalerBase
from deepspeed.utils import logger
from torch import nn

from mobius_ds.runtime.optimizer.optimizer_state import named_groups, restore
from mobius_ds.runtime.sweeps.pipeline import Pipeline

UPDATES_EACH_PARAMETER_ALONE = {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad",
                                "DeepSpeedCPULion"}
"""Optimizers whose update of a parameter depends on that parameter alone, and that skip one without a gradient."""

_LARGEST_SQUARE = torch.finfo(torch.float32).max
"""ZeRO-3 adds the squares of the gradients up in fp32: it takes a sum beyond that for an overflow."""


class MobiusOptimizer(ZeROOptimizer):
    """Wraps a torch optimizer for a Mobius engine, as DeepSpeed's ZeRO optimizers do for theirs.

    Args:
        optimizer: built on the model's parameters; its groups are pointed at the masters.
        parameters: the model's parameters by name.
        clip: largest gradient norm, or 0 for no clipping.
        loss_scaler: of DeepSpeed's, for the dtype of the model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, pipeline: Pipeline, parameters: Dict[str, nn.Parameter],
                 clip: float, loss_scaler: LossScalerBase):
        super().__init__()
        _refuse_needing_a_closure(optimizer)
        self.optimizer = optimizer
        self.overflow = False
        # Also where it scales by one: its product is a tensor of its own, by which DeepSpeed tells engine.backward's
        # gradients from loss.backward's before the hooks on the model's outputs divide them by the accumulation steps.
        self.loss_scaler = loss_scaler
        self.dynamic_loss_scale = loss_scaler.dynamic
        self.custom_loss_scaler = False
        self.torch_autocast_gradscaler = None
        self._global_grad_norm: Optional[torch.Tensor] = None
        self._pipeline = pipeline
        self._clip = clip
        self._masters: Dict[str, nn.Parameter] = {}
        self._squares: Dict[str, float] = {}
        self._updated_apart: List[str] = []
        self._parameters = parameters
        for parameter in parameters.values():
            parameter.grad = None  # of a backward before there was an engine
        names = {id(parameter): name for name, parameter in parameters.items()}
        for group in optimizer.param_groups:
            group["params"] = [self._master(names, parameter) for parameter in group["params"]
                               if parameter.requires_grad]
        if not self._masters and pipeline.rank == 0:
            logger.warning("Mobius: the optimizer holds no parameter that is trained, so engine.step() will change nothing. "
                           "Build it from model.parameters(), and freeze parameters before that.")

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
        """Clips by the global norm and updates this rank's parameters, or skips the step where gradients are not finite.

        Returns when every rank has; ``overflow`` says whether the step was skipped.
        """
        assert closure is None, "closures are not supported with deepspeed, as with its other optimizers"
        self._refuse_lost_gradients()
        gradients = {name: self._pipeline.gradient(name) for name in self._pipeline.owned()
                     if self._is_updated(name) and name not in self._squares}
        self._add_squares(gradients)
        square = self._sum_of_squares()
        self.overflow = not square <= _LARGEST_SQUARE
        self.loss_scaler.update_scale(self.overflow)  # raises, on all ranks alike, where it is at its smallest
        # By the scale as it is from now on, as under ZeRO-3, also where it has just grown.
        norm = math.inf if self.overflow else math.sqrt(square) / self.loss_scale
        self._global_grad_norm = torch.tensor(norm)  # a tensor: scripts call its item()
        if self.overflow:
            self._warn_of_half_a_step()
        else:
            self._unscale_and_clip(gradients, norm)
            self._update(gradients)
        self._updated_apart = []
        self._pipeline.start_accumulation()
        self._pipeline.finish_step()  # the script may read the parameters as soon as this returns

    def _sum_of_squares(self) -> float:
        """Of all ranks' gradients, in the model's order: it does not depend on which rank owns what."""
        everyones: Dict[str, float] = {}
        for part in self._pipeline.step("engine.step", self._squares):
            everyones.update(part)
        self._squares = {}
        return sum(everyones[name] for name in self._masters if self._is_updated(name))

    def _unscale_and_clip(self, gradients: Dict[str, torch.Tensor], norm: float) -> None:
        excess = (norm + 1e-6) / self._clip if self._clip > 0 else 0.0
        divisor = self.loss_scale * max(excess, 1.0)
        if divisor != 1.0:
            for gradient in gradients.values():
                gradient.div_(divisor)

    def _warn_of_half_a_step(self) -> None:
        if self._updated_apart:
            logger.warning("Mobius: gradients of this step are not finite and it is skipped, but "
                           f"{len(self._updated_apart)} parameters, {self._updated_apart[0]!r} for one, got finite ones and "
                           "were updated by them before the others were known: train_batch updates beside its backward. "
                           'With "gradient_clipping" set it waits for all gradients.')

    def _refuse_lost_gradients(self) -> None:
        with self._pipeline.mailbox.told():
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    raise RuntimeError(
                        f"parameter {name!r} got a gradient past the pipeline, where it would be lost: the script called a "
                        "part of the model by itself, such as model.model(...), or computed a loss from parameters. Call "
                        "the whole model, and make such a loss part of what its forward returns.")

    @property
    def can_update_apart(self) -> bool:
        """Whether parameters may be updated one stage at a time, before all gradients are known.

        Not in fp16, where a step that overflows is a matter of course, and not where the script has hooks on the
        optimizer's step, which may look at the model while stages run.
        """
        hooked = self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks
        return (self._clip == 0 and not hooked and type(self.optimizer).__name__ in UPDATES_EACH_PARAMETER_ALONE
                and all(parameter.dtype != torch.float16 for parameter in self._parameters.values()))

    def update_apart(self, names: List[str]) -> None:
        """Updates some of this rank's parameters ahead of ``step``, beside a backward that has other stages to go.

        Leaves them as they are where a gradient among them is not finite, as ``step`` does with all.
        """
        gradients = {name: self._pipeline.store.gradient(name) for name in names if self._is_updated(name)}
        self._add_squares(gradients)
        if all(math.isfinite(self._squares[name]) for name in gradients):
            self._update(gradients)
            self._updated_apart += gradients

    def _is_updated(self, name: str) -> bool:
        """Not while the script has frozen it: it keeps its values, as under torch's own optimizers."""
        return name in self._masters and self._parameters[name].requires_grad

    def _add_squares(self, gradients: Dict[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            self._squares[name] = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()**2
            # ZeRO-3 adds gradients up in the parameter's dtype: what fp16 cannot hold has overflowed, even in fp32.
            largest = torch.finfo(self._pipeline.store.layout.entries[name].dtype).max
            if self._squares[name] > largest * largest and gradient.abs().max() > largest:
                self._squares[name] = math.inf

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

    def refresh_fp32_params(self, names: Optional[Iterable[str]] = None) -> None:
        """Takes the masters' values from 16-bit weights that the script has written; the others keep their precision.

        Args:
            names: of the parameters it has written; all by default.
        """
        for name in self._masters if names is None else names:
            master, weight = self._masters[name], self._pipeline.store.weight(name)
            if weight.dtype != master.dtype:
                master.data.copy_(torch.where(weight == master.to(weight.dtype), master.data, weight.to(master.dtype)))

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by."""
        return self.loss_scaler.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    cur_scale = loss_scale

    @property
    def param_groups(self) -> List[Dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: List[Dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def state(self) -> Dict[Any, Any]:
        """The wrapped optimizer's state: of this rank's parameters, and of the others' as it was last loaded."""
        return self.optimizer.state

    @property
    def defaults(self) -> Dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    # What checkpoints ask: by the parameters' names.

    @property
    def trains(self) -> Tuple[str, ...]:
        """The parameters in its groups."""
        return tuple(self._masters)

    def state_of(self, name: str) -> Dict[str, Any]:
        """The state of a parameter; empty where it has made none yet, which it has for its own only."""
        return self.optimizer.state.get(self._masters[name], {}) if name in self._masters else {}

    def hyperparameters(self) -> List[Dict[str, Any]]:
        """The groups, with names in place of parameters."""
        return named_groups(self.optimizer, self._masters)

    def scaling(self) -> Dict[str, Any]:
        """What DeepSpeed's checkpoints say of the loss scale."""
        return {LOSS_SCALER: self.loss_scaler, "dynamic_loss_scale": self.dynamic_loss_scale, "overflow": self.overflow}

    def restore(self, hyperparameters: List[Dict[str, Any]], states: Dict[str, Dict[str, Any]],
                scaler: Optional[LossScalerBase]) -> None:
        """Takes over hyperparameters, group by group, and every parameter's state. Tensors are used as they are.

        Args:
            scaler: the checkpoint's. A scale that follows the gradients goes on where it was; a fixed one is the config's.
        """
        self._squares, self._updated_apart = {}, []
        restore(self.optimizer, self._masters, hyperparameters, states)
        if self.dynamic_loss_scale and scaler is not None and scaler.dynamic:
            self.loss_scaler = scaler

    def state_dict(self) -> Dict[str, Any]:
        """The wrapped optimizer's state: of this rank's parameters."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Dict[str, Any], **_: Any) -> None:
        """Loads what ``state_dict`` returned on this rank."""
        self.optimizer.load_state_dict(state_dict)


def _refuse_needing_a_closure(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{type(optimizer).__name__} computes losses of its own inside its step (a closure), which "
                         "DeepSpeed's engine.step() cannot give it. Choose one that needs gradients alone, such as AdamW.")

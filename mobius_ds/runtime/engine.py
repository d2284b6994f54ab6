"""The engine: what ``deepspeed.initialize`` returns when the config enables Mobius.

A ``DeepSpeedEngine`` whose module runs as a pipeline. Config, optimizers, schedulers, monitors, timers and data
loaders are DeepSpeed's own; this file replaces what moves parameters and gradients.
"""

import functools
from collections.abc import Mapping
from typing import Any, Callable, Dict, Iterator, List, NoReturn, Optional, Tuple

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from deepspeed.utils import logger
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from mobius_ds.plugin.config import mobius_config
from mobius_ds.runtime import differentiable
from mobius_ds.runtime.exchange import exchange
from mobius_ds.runtime.ledger import Bytes
from mobius_ds.runtime.optimizer import MobiusOptimizer
from mobius_ds.runtime.pipeline import Pipeline
from mobius_ds.runtime.sweep import Sweep


class MobiusEngine(DeepSpeedEngine):
    """DeepSpeed's engine API on top of a Mobius pipeline.

    Raises:
        NotSplittable: the model has no layers to cut between.
        OutOfMemory: DRAM does not hold the model and its training state.
        ValueError: the config asks for what Mobius does not do.
    """

    def __init__(self, *args: Any, config: Any = None, config_class: Any = None, **kwargs: Any):
        self.mobius = mobius_config(config)
        _refuse_what_mobius_does_not_do(config_class, kwargs.get("mpu"))
        # The parameters stay in DRAM; only their stages' copies reach the device.
        super().__init__(*args, config=config, config_class=config_class, dont_change_device=True, **kwargs)
        self.enable_backward_allreduce = False

    # The model.

    def _configure_distributed_model(self, model: nn.Module) -> None:
        if isinstance(model.__dict__.get("forward"), _Routed):
            del model.__dict__["forward"]  # of an earlier engine that was not destroyed
        super()._configure_distributed_model(model)
        self.pipeline = Pipeline(model, self.mobius, self.global_rank, self.world_size, self.device, exchange,
                                 self._layers(model))
        self._adopted = {name: _place(parameter) for name, parameter in model.named_parameters()}
        self._forwards: Dict[bool, int] = {}
        self._forwards_step = -1
        # The raw module's calls reach the pipeline as well: evaluation loops often call it.
        model.__dict__["forward"] = _Routed(model, self._forward)

    _loss_function: Optional[Callable] = None
    """What ``train_batch`` runs instead of the module's own forward."""

    def _layers(self, model: nn.Module) -> Optional[List[nn.Module]]:
        """The layers of a model that lists them."""
        return None

    def _forward(self, args: tuple, kwargs: dict) -> Any:
        self._check_parameters()
        return differentiable.run(self.pipeline, args, kwargs, self._next_seed())

    def _check_parameters(self) -> None:
        """Raises RuntimeError where the script's parameters are no longer the ones that are trained."""
        with self.pipeline.mailbox.told():
            present = {name: _place(parameter) for name, parameter in self.module.named_parameters()}
            for name, (address, trained) in self._adopted.items():
                if present.get(name, (None, None))[0] != address:
                    raise RuntimeError(
                        f"parameter {name!r} has left the memory that Mobius trains it in: its data was replaced after "
                        "deepspeed.initialize, as module.to(), .cuda(), .half(), load_state_dict(assign=True) or "
                        "parameter.data = ... do. Do that before deepspeed.initialize, or write into it with copy_().")
                if present[name][1] != trained and torch.is_grad_enabled():
                    raise RuntimeError(
                        f"requires_grad of parameter {name!r} was {trained} at deepspeed.initialize and is "
                        f"{not trained} now. Mobius plans for what is trained then: set it before, or keep a parameter "
                        "from changing by a learning rate and weight decay of 0 for its group.")

    def _broadcast_model(self) -> None:
        """The pipeline takes the first rank's values for all."""

    def _next_seed(self) -> Tuple[int, int]:
        """(step, number of the microbatch within the step, over all replicas), which its random numbers depend on.

        Forwards without gradients are counted apart, below zero.
        """
        if self._forwards_step != self.global_steps:
            self._forwards, self._forwards_step = {}, self.global_steps
        graded = torch.is_grad_enabled()
        number = self._forwards.get(graded, 0)
        self._forwards[graded] = number + 1
        replicas, replica = self._replicas()
        return self.global_steps, (number if graded else -1 - number) * replicas + replica

    def _replicas(self) -> Tuple[int, int]:
        """How many ranks put microbatches into a batch, and the number of this one among them."""
        return self.world_size, self.global_rank

    # What DeepSpeed asks before it does things of its own.

    def zero_optimization(self) -> bool:
        """True: the optimizer is wrapped."""
        return True

    def zero_optimization_partition_weights(self) -> bool:
        """False: every rank sees whole parameters."""
        return False

    def zero_optimization_partition_gradients(self) -> bool:
        """False: gradients live in the node's store."""
        return False

    def zero_use_cpu_optimizer(self) -> bool:
        """True: masters and moments live in DRAM."""
        return True

    def zero_force_ds_cpu_optimizer(self) -> bool:
        """False: any torch optimizer works on the masters."""
        return False

    def zero_allow_untested_optimizer(self) -> bool:
        """True: any torch optimizer works on the masters."""
        return True

    # The optimizer.

    def get_optimizer_configuration(self, optimizer_parameters: Dict[str, Any], adam_w_mode: bool,
                                    allow_legacy_fallback: bool = False):
        """DeepSpeed's CPU Adam, or torch's where its extension cannot be built."""
        if not optimizer_parameters.get("torch_adam", False):
            try:
                from deepspeed.ops.op_builder import CPUAdamBuilder
                CPUAdamBuilder().load()
            except Exception as error:  # whatever a compiler run can raise
                logger.warning(f"Mobius: DeepSpeedCPUAdam cannot be built ({error}); using torch's Adam, which is slower.")
                optimizer_parameters["torch_adam"] = True
                if optimizer_parameters.get("bias_correction", True):
                    optimizer_parameters.pop("bias_correction", None)  # torch's Adam always corrects, and has no such key
        return super().get_optimizer_configuration(optimizer_parameters, adam_w_mode, allow_legacy_fallback)

    _load_hook: Optional[RemovableHandle] = None

    def _configure_zero_optimizer(self, optimizer: Optional[torch.optim.Optimizer]) -> Optional[MobiusOptimizer]:
        if optimizer is None:
            return None
        wrapped = MobiusOptimizer(optimizer, self.pipeline, dict(self.module.named_parameters()), self.gradient_clipping())
        # Without it, the next step would overwrite loaded 16-bit weights by what the masters still hold.
        self._load_hook = self.module.register_load_state_dict_post_hook(
            lambda module, keys: wrapped.refresh_fp32_params())
        return wrapped

    # Whole batches at once.

    def train_batch(self, data_iter: Optional[Iterator] = None) -> torch.Tensor:
        """Trains on one batch: all its micro-batches go through the pipeline in one sweep.

        Args:
            data_iter: yields micro-batches: for a ``PipelineModule`` (inputs, labels), otherwise the arguments of
                the module, as a tuple or a dict. Default: the engine's own data loader.

        Returns:
            The mean loss over micro-batches and ranks.
        """
        assert self.optimizer is not None, "must provide optimizer during init in order to use train_batch"
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
        count = self.gradient_accumulation_steps()
        self.module.train()
        self.tput_timer.start()
        with autocast_if_enabled(self), differentiable.computing(self.device):
            sweep, losses = self._run_batch(data_iter, count)
            self.pipeline.backward(sweep, [{leaf: torch.full_like(loss, 1 / (count * self._replicas()[0]))}
                                           for leaf, loss in losses],
                                   self.optimizer.update_apart if self.optimizer.can_update_apart else None)
        self.pipeline.release(sweep)
        self._take_model_step(None)
        self.micro_steps += count
        self.tput_timer.stop(global_step=True, report_speed=self.global_rank == 0)
        loss = self._mean([loss for _, loss in losses])
        if self.monitor.enabled and self.global_rank == 0:
            self.monitor.write_events([("Train/Samples/train_loss", loss.item(), self.global_samples),
                                       ("Train/Samples/lr", self.get_lr()[0], self.global_samples)])
        return loss

    def eval_batch(self, data_iter: Iterator, return_logits: bool = False, compute_loss: bool = True,
                   reduce_output: str = "avg", bcast_loss: bool = True,
                   num_micro_batches: Optional[int] = None) -> torch.Tensor:
        """The mean loss over one batch's micro-batches and over ranks, without training."""
        if return_logits or not compute_loss or reduce_output != "avg":
            raise NotImplementedError("under Mobius eval_batch returns the mean loss. For other outputs call the engine "
                                      "itself under torch.no_grad().")
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad(), autocast_if_enabled(self), differentiable.computing(self.device):
                sweep, losses = self._run_batch(data_iter, num_micro_batches or self.gradient_accumulation_steps())
        finally:
            self.module.train(training)
        self.pipeline.release(sweep)
        return self._mean([loss for _, loss in losses])

    def _run_batch(self, data_iter: Optional[Iterator], count: int) -> Tuple[Sweep, List[Tuple[int, torch.Tensor]]]:
        self._check_parameters()
        with self.pipeline.mailbox.told():
            batches = [self._arguments(batch) for batch in self._microbatches(data_iter, count)]
        sweep, outputs = self.pipeline.forward(batches, [self._next_seed() for _ in batches], self._loss_function)
        return sweep, [_loss_among(leaves) for leaves, _ in outputs]

    _data_iterator: Optional[Iterator] = None

    def _microbatches(self, data_iter: Optional[Iterator], count: int) -> List[Any]:
        """The next microbatches that this rank puts into a batch."""
        if data_iter is None:
            if self._data_iterator is None:
                if self.training_dataloader is None:
                    raise ValueError("train_batch has no data: give it an iterator, or training_data to "
                                     "deepspeed.initialize.")
                self._data_iterator = _repeating(self.training_dataloader)
            data_iter = self._data_iterator
        return [next(data_iter) for _ in range(count)]

    def _arguments(self, batch: Any) -> Tuple[tuple, dict]:
        if isinstance(batch, Mapping):
            batch = dict(batch)  # tokenizers return mappings of their own
        batch = tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), batch)
        if isinstance(batch, dict):
            return (), batch
        return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})

    def _mean(self, losses: List[torch.Tensor]) -> torch.Tensor:
        mine = [loss.detach().float().item() for loss in losses]
        everyones = [loss for part in self.pipeline.step("the mean loss of a batch", mine) for loss in part]
        return torch.tensor(sum(everyones) / len(everyones), device=self.device)

    # Figures.

    def take_traffic(self) -> Bytes:
        """Bytes this rank's GPU moved since the last call, by category."""
        return self.pipeline.device.ledger.take()

    def take_predicted_traffic(self) -> Bytes:
        """What the schedules said about the same bytes."""
        return self.pipeline.take_predicted()

    def peak_device_bytes(self) -> int:
        """The most device memory this rank has used."""
        return self.pipeline.device.peak_bytes()

    def host_bytes_per_node(self) -> int:
        """DRAM of the node's shared store."""
        return self.pipeline.host_bytes()

    # The rest of its life.

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported yet."""
        raise NotImplementedError("save_checkpoint is not supported under Mobius yet. To save the weights use "
                                  "engine.save_16bit_model(folder) or torch.save(engine.module.state_dict(), path), "
                                  "which hold the whole model on every rank.")

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported yet."""
        raise NotImplementedError("load_checkpoint is not supported under Mobius yet. To load weights use "
                                  "engine.module.load_state_dict(state_dict) on every rank, or load them into the model "
                                  "before deepspeed.initialize.")

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Optional[Dict[str, Any]]:
        if self.global_rank != 0:
            return None
        return self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    def destroy(self) -> None:
        """Leaves the pipeline; the module works on its own again, on CPU."""
        pipeline = self.__dict__.pop("pipeline", None)
        if pipeline is not None:
            self.module.__dict__.pop("forward", None)
            if self._load_hook is not None:
                self._load_hook.remove()
            pipeline.close()
        super().destroy()


class _Routed:
    """A module's forward that runs in the pipeline. A copy of the module gets its own forward back."""

    def __init__(self, model: nn.Module, run: Callable[[tuple, dict], Any]):
        self._model = model
        self._run = run
        functools.update_wrapper(self, model.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(args, kwargs)

    def __reduce__(self):
        return getattr, (self._model, "forward")


def _place(parameter: nn.Parameter) -> Tuple[int, bool]:
    """Where a parameter's data lies, and whether it is trained."""
    return parameter.data_ptr(), parameter.requires_grad


def _refuse_what_mobius_does_not_do(config: Any, mpu: Any) -> None:
    if bwc_tensor_model_parallel_world_size(mpu) > 1:
        raise ValueError("Mobius does not run tensor parallelism, and this job splits its tensors over "
                         f"{bwc_tensor_model_parallel_world_size(mpu)} ranks. Use 1 (of a PipelineModule, "
                         'num_stages=... instead of a topology), or "mobius": {"enabled": false}.')
    if config.float16_config.enabled:
        raise ValueError("Mobius trains in fp32 and bf16. Set \"fp16\": {\"enabled\": false} and "
                         "\"bf16\": {\"enabled\": true}, or \"mobius\": {\"enabled\": false}.")


def _loss_among(leaves: List[Any]) -> Tuple[int, torch.Tensor]:
    """Which of a model's output leaves is its loss, and the loss: the first scalar."""
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1:
            return index, leaf
    raise ValueError("train_batch and eval_batch need a model that returns its loss: give the PipelineModule a loss_fn, "
                     "or return a scalar.")


def _repeating(loader: Any) -> Iterator:
    while True:
        yield from loader

"""DeepSpeed's pipeline calls: a whole batch at once, all its micro-batches in one sweep."""

from collections.abc import Mapping
from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch.utils._pytree import tree_map_only

from mobius_ds.runtime.sweeps import differentiable
from mobius_ds.runtime.sweeps.pipeline import Pipeline
from mobius_ds.runtime.sweeps.sweep import Sweep


class WholeBatches(DeepSpeedEngine):
    """``train_batch`` and ``eval_batch`` of an engine whose module runs in a pipeline."""

    pipeline: Pipeline
    _loss_function: Optional[Callable] = None
    """What they run instead of the module's own forward."""

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
            self.pipeline.backward(sweep, [{leaf: self.optimizer.loss_scaler.scale_loss(torch.ones_like(loss)) / count}
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
        self._check_module()
        self._check_parameters()
        with self.pipeline.mailbox.told():
            batches = [self._arguments(batch) for batch in self._microbatches(data_iter, count)]
        sweep, outputs = self.pipeline.forward(batches, [self._next_seed() for _ in batches], self._loss_function)
        with self.pipeline.mailbox.told():
            losses = [_loss_among(leaves) for leaves, _ in outputs]
            mine = (microbatch.program for microbatch in sweep.microbatches if microbatch.home == self.global_rank)
            if torch.is_grad_enabled() and not all(program.outputs.returns[leaf].requires_grad
                                                   for (leaf, _), program in zip(losses, mine)):
                raise RuntimeError("train_batch takes the model's first floating-point scalar for the loss, and it does not "
                                   "require grad. Return the loss first, computed from trained parameters.")
        return sweep, losses

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
        if self.fp16_auto_cast():
            batch = self._cast_inputs_half(batch)
        if isinstance(batch, dict):
            return (), batch
        return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})

    def _mean(self, losses: List[torch.Tensor]) -> torch.Tensor:
        mine = [loss.detach().float().item() for loss in losses]
        everyones = [loss for part in self.pipeline.step("the mean loss of a batch", mine) for loss in part]
        return torch.tensor(sum(everyones) / len(everyones), device=self.device)


def _loss_among(leaves: List[Any]) -> Tuple[int, torch.Tensor]:
    """Which of a model's output leaves is its loss, and the loss: the first floating-point scalar."""
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 and leaf.is_floating_point():
            return index, leaf
    raise ValueError("train_batch and eval_batch need a model that returns its loss: give the PipelineModule a loss_fn, "
                     "or return a scalar.")


def _repeating(loader: Any) -> Iterator:
    while True:
        yield from loader

"""DeepSpeed's pipeline scripts under Mobius: a ``PipelineModule`` and the calls of a ``PipelineEngine``.

A script that cuts its model into ``num_stages`` keeps its batch arithmetic: the stages of one replica read the same
data, so with 2 stages on 2 ranks a batch is ``train_batch_size / micro_batch`` microbatches of one replica. How the
model is really cut is the plan's business, as for every other model.
"""

from typing import Any, Callable, Iterable, Iterator, List, Optional, Tuple, Union

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.pipe.engine import PipelineError
from torch import nn
from torch.utils.data.distributed import DistributedSampler

from mobius_ds.runtime.engine.engine import MobiusEngine
from mobius_ds.runtime.engine.pipeline_module import complete, completed_groups


class MobiusPipelineEngine(MobiusEngine):
    """A ``MobiusEngine`` for a ``PipelineModule``."""

    def __init__(self, *args: Any, model: PipelineModule, optimizer: Union[torch.optim.Optimizer, Callable, None] = None,
                 model_parameters: Optional[Iterable] = None, **kwargs: Any):
        self.grid = model.mpu()
        self.num_stages, self.stage_id = self.grid.pipe_parallel_size, self.grid.get_stage_id()
        self.batch_fn: Optional[Callable] = None
        if self.num_stages > 1:
            names = complete(model)
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.param_groups[:] = completed_groups(optimizer.param_groups, names, model)
            if model_parameters is not None:
                model_parameters = completed_groups(model_parameters, names, model)
        super().__init__(*args, model=model, optimizer=optimizer, model_parameters=model_parameters, **kwargs)
        if self.training_data is not None:
            # As PipelineEngine: every stage of a replica must see the same samples, in the order of the data.
            sampler = DistributedSampler(self.training_data, num_replicas=self.grid.data_parallel_size,
                                         rank=self.grid.data_parallel_id, shuffle=False)
            self.set_dataloader(RepeatingLoader(self.deepspeed_io(self.training_data, data_sampler=sampler)))

    def _layers(self, model: PipelineModule) -> List[nn.Module]:
        if model.loss_fn is not None:
            self._loss_function = _with_loss(model.forward, model.loss_fn)
        model.activation_checkpoint_interval = 0  # a stage is recomputed anyway
        return [layer for layer in model.forward_funcs if isinstance(layer, nn.Module)]

    def _forward(self, args: tuple, kwargs: dict) -> Any:
        if self.num_stages > 1 and torch.is_grad_enabled():
            raise PipelineError("Only train_batch() is accessible in pipeline mode.")
        return super()._forward(args, kwargs)

    def _replicas(self) -> Tuple[int, int]:
        return self.grid.data_parallel_size, self.grid.data_parallel_id

    # Data.

    def train_batch(self, data_iter: Optional[Iterator] = None) -> torch.Tensor:
        """Trains on one batch: ``gradient_accumulation_steps()`` microbatches of each replica.

        Args:
            data_iter: yields (inputs, labels); kept for the calls after this one. Default: the one given before,
                or the engine's own data loader. Only the ranks of the first and the last stage read theirs.

        Returns:
            The mean loss over the batch.
        """
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        return super().train_batch()

    def _microbatches(self, data_iter: Optional[Iterator], count: int) -> List[Any]:
        if not (self.is_first_stage() or self.is_last_stage()):
            return []
        microbatches = super()._microbatches(data_iter, count)
        # The last stage reads along, so that its iterator stands where DeepSpeed would have left it.
        return [self.batch_fn(batch) if self.batch_fn else batch for batch in microbatches if self.is_first_stage()]

    def set_dataloader(self, loader: Iterable) -> None:
        """Takes the data of coming batches from a loader."""
        self.training_dataloader = loader
        self._data_iterator = iter(loader)

    def set_dataiterator(self, iterator: Iterator) -> None:
        """Takes the data of coming batches from an iterator."""
        self.training_dataloader = None
        self._data_iterator = iterator

    def set_batch_fn(self, fn: Callable) -> None:
        """Calls ``fn`` on what the data iterator yields; it returns (inputs, labels)."""
        self.batch_fn = fn

    # Questions that pipeline scripts ask.

    def is_first_stage(self) -> bool:
        """Whether DeepSpeed would run the first stage here, and so this rank's data goes in."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether DeepSpeed would run the last stage here."""
        return self.stage_id == self.num_stages - 1

    def get_pipeline_parallel_rank(self) -> int:
        """The stage DeepSpeed would run here."""
        return self.stage_id

    @property
    def micro_batches(self) -> int:
        """Microbatches of one replica in a batch."""
        return self.gradient_accumulation_steps()

    def reset_activation_shape(self) -> None:
        """Nothing to do: shapes may change at any time."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Nothing to do: a boundary may be made of any tensors."""


def _with_loss(forward: Callable, loss_fn: Callable) -> Callable:
    # Its name is the same on every rank, as those of functions and unlike those of partial ones.
    def with_loss(inputs: Any, labels: Any) -> Any:
        return loss_fn(forward(inputs), labels)

    return with_loss

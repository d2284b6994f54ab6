"""What scripts and libraries ask of a parameter under ZeRO-3: whether it is gathered, its fp32 values, its gradient, its
optimizer state, and leave to write it. Here a parameter of a pipeline's model answers.

DeepSpeed's ``safe_get_full_*`` and ``safe_set_full_*`` ask the parameter itself; the plugin leads
``zero.GatheredParameters`` here. They are called on all ranks, as under ZeRO-3.
"""

from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, List, Optional, Sequence

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn

from mobius_ds.names import ADOPTED
from mobius_ds.runtime.optimizer.optimizer import MobiusOptimizer
from mobius_ds.runtime.sweeps.pipeline import Pipeline

ATTRIBUTES = ("ds_status", ADOPTED, "_hp_mapping", "get_full_hp_param", "set_full_hp_param", "get_full_hp_grad",
              "set_full_hp_grad")


class Adopted:
    """A parameter that lies in a pipeline's store.

    Args:
        optimizer: what trains it; None where it is frozen or nothing trains.
    """

    def __init__(self, name: str, pipeline: Optional[Pipeline], optimizer: Optional[MobiusOptimizer]):
        self.name = name
        self.pipeline = pipeline
        self.optimizer = optimizer

    def __reduce__(self):
        return Adopted, (self.name, None, None)  # a saved parameter knows of no pipeline

    def values(self, key: Optional[str] = None) -> Optional[torch.Tensor]:
        """A copy of the fp32 values; with a key, of what the optimizer keeps under it, None before its first step."""
        if self.optimizer is None:
            return None
        if key is None:
            return self.pipeline.store.master(self.name).detach().clone()
        mine = self._state().get(key) if self._is_owned() else None
        return next((state for state in self._meet("safe_get_full_optimizer_state", mine) if state is not None), None)

    def set_values(self, value: torch.Tensor, key: Optional[str] = None) -> None:
        """Sets what ``values`` returns."""
        with self.pipeline.mailbox.told(), torch.no_grad():
            if self._is_owned() and key is not None:
                self._state()[key].copy_(value)
            elif self._is_owned():
                self.pipeline.store.master(self.name).copy_(value)
                self.pipeline.store.weight(self.name).copy_(value)
        self._meet("safe_set_full_fp32_param" if key is None else "safe_set_full_optimizer_state")

    def gradient(self) -> Optional[torch.Tensor]:
        """A copy of the accumulated fp32 gradient, the mean over ranks; zeros where no backward reached it."""
        if self.optimizer is None:
            return None
        self._meet("safe_get_full_grad")  # every rank's share has arrived
        return self.pipeline.gradient(self.name).clone()

    def set_gradient(self, value: torch.Tensor) -> None:
        """Sets what ``gradient`` returns and the next step uses."""
        self._meet("safe_set_full_grad")
        self.pipeline.gradient(self.name).copy_(value)  # each rank writes the same
        self.pipeline.gave_gradient(self.name)

    def _is_owned(self) -> bool:
        return self.name in self.pipeline.owned()

    def _state(self) -> Dict[str, Any]:
        return self.optimizer.state_of(self.name)

    def _meet(self, call: str, content: Any = None) -> List[Any]:
        return self.pipeline.step(f"{call} of {self.name!r}", content)


def adopt(model: nn.Module, pipeline: Pipeline, optimizer: Optional[MobiusOptimizer]) -> None:
    """Lets a model's parameters answer for a pipeline."""
    trained = frozenset(optimizer.trains) if optimizer is not None else frozenset()
    forget(model)
    for name, parameter in model.named_parameters():
        adopted = Adopted(name, pipeline, optimizer if name in trained else None)
        parameter.ds_status = ZeroParamStatus.AVAILABLE  # always whole
        setattr(parameter, ADOPTED, adopted)
        if name in trained:
            parameter._hp_mapping = adopted
            parameter.get_full_hp_param, parameter.set_full_hp_param = adopted.values, adopted.set_values
            parameter.get_full_hp_grad, parameter.set_full_hp_grad = adopted.gradient, adopted.set_gradient


def forget(model: nn.Module) -> None:
    """Makes a model's parameters ordinary ones again."""
    for parameter in model.parameters():
        for attribute in ATTRIBUTES:
            parameter.__dict__.pop(attribute, None)


@contextmanager
def written_by(rank: int, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Lets one rank write adopted parameters while the block runs; what others write into them is forgotten.

    The masters and the other ranks know what was written when it ends.
    """
    of_pipeline: Dict[Pipeline, List[nn.Parameter]] = {}
    for parameter in parameters:
        of_pipeline.setdefault(getattr(parameter, ADOPTED).pipeline, []).append(parameter)
    with ExitStack() as stack:
        for pipeline, members in of_pipeline.items():
            stack.enter_context(_written_by(rank, pipeline, members))
        yield


@contextmanager
def _written_by(rank: int, pipeline: Pipeline, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    pipeline.step("entering GatheredParameters", None)  # nobody reads them any more
    shared = [parameter.data for parameter in parameters]
    try:
        with pipeline.mailbox.told():
            for parameter in parameters if pipeline.rank != rank else ():
                parameter.data = parameter.data.clone()
            yield
    finally:
        for parameter, data in zip(parameters, shared):
            parameter.data = data
    if pipeline.rank == rank:
        for adopted in (getattr(parameter, ADOPTED) for parameter in parameters):
            if adopted.optimizer is not None:
                adopted.optimizer.refresh_fp32_params((adopted.name,))
    pipeline.step("leaving GatheredParameters", None)

"""Counts the bytes of DeepSpeed's ``PipelineEngine``: stages that stay on their GPUs, with data parallelism beside.

Activations and their gradients are sent from stage to stage, each once per microbatch: ``activations_out`` at the
sender, ``activations_in`` at the receiver. What describes them (shapes and types, sent when they are new) is ``other``,
and so is the loss that the last stage broadcasts. Gradients of parameters that several stages share (tied) are all-reduced
among them and count, like those of data parallelism, as ``data_parallel_traffic`` says.
"""

from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine

from mobius_ds.observation.collectives import ACTIVATIONS, ANYTHING, GRADIENTS, observed_by
from mobius_ds.observation.data_parallel_traffic import DataParallelTraffic

_CARRIES = {
    schedule.SendActivation: ACTIVATIONS,
    schedule.RecvActivation: ACTIVATIONS,
    schedule.SendGrad: ACTIVATIONS,
    schedule.RecvGrad: ACTIVATIONS,
    schedule.ReduceTiedGrads: GRADIENTS,
}


class PipelineTraffic(DataParallelTraffic):
    """Counts this rank's bytes under ``PipelineEngine``. See ``ObservedTraffic``."""

    def _observe(self) -> None:
        super()._observe()
        # The engine looks instructions up here; its methods of the same names are not asked.
        instructions = PipelineEngine._INSTRUCTION_MAP
        observed = {kind: observed_by(self.carrying_all(purpose), instructions[kind]) for kind, purpose in _CARRIES.items()}
        self.replace(PipelineEngine, "_INSTRUCTION_MAP", {**instructions, **observed})
        for name in ("_send_tensor_meta", "_recv_tensor_meta"):
            self.wrap(PipelineEngine, name, self.carrying_all(ANYTHING))

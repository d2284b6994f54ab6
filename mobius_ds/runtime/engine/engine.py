"""The engine: what ``deepspeed.initialize`` returns when the config enables Mobius.

A ``DeepSpeedEngine`` whose module runs as a pipeline. Config, optimizers, schedulers, monitors, timers and data
loaders are DeepSpeed's own; this file replaces what moves parameters and gradients.
"""

from typing import Any, Callable, Dict, List, Optional, Tuple, Type

import torch
from deepspeed.runtime.engine import ZERO_OPTIMIZATION
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.utils import logger
from deepspeed.utils.logging import print_dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from mobius_ds.config import mobius_config
from mobius_ds.inputs.profile import BYTES_PER_PARAMETER
from mobius_ds.runtime.checkpoint.load import load
from mobius_ds.runtime.checkpoint.save import save
from mobius_ds.runtime.device.ledger import Bytes
from mobius_ds.runtime.dram.memory_estimate import OptimizerMemory, state_bytes, state_tensors
from mobius_ds.runtime.dram.weights import piece_of
from mobius_ds.runtime.engine import parameters
from mobius_ds.runtime.engine.refusals import refuse
from mobius_ds.runtime.engine.routed_forward import RoutedForward
from mobius_ds.runtime.engine.step_report import breakdown, scalars
from mobius_ds.runtime.engine.whole_batches import WholeBatches
from mobius_ds.runtime.optimizer import extensions
from mobius_ds.runtime.optimizer.optimizer import MobiusOptimizer
from mobius_ds.runtime.ranks.exchange import exchange
from mobius_ds.runtime.sweeps import differentiable
from mobius_ds.runtime.sweeps.pipeline import Pipeline
from mobius_ds.simulation.exposure import figures
from mobius_ds.simulation.steps import Step


class MobiusEngine(WholeBatches):
    """DeepSpeed's engine API on top of a Mobius pipeline.

    Raises:
        NotSplittable: the model has no layers to cut between.
        OutOfMemory: DRAM does not hold the model and its training state.
        ValueError: the config asks for what Mobius does not do.
    """

    def __init__(self, *args: Any, model: nn.Module, config: Any = None, config_class: Any = None, **kwargs: Any):
        self.mobius = mobius_config(config)
        refuse(config_class, kwargs.get("mpu"), kwargs.get("mesh_device"), model)
        # The parameters stay in DRAM; only their stages' copies reach the device.
        super().__init__(*args, model=model, config=config, config_class=config_class, dont_change_device=True, **kwargs)
        self.enable_backward_allreduce = False

    # The model.

    pipeline_class: Type[Pipeline] = Pipeline
    """Another one where the forward is to be profiled, not run."""

    def _configure_distributed_model(self, model: nn.Module) -> None:
        earlier = model.__dict__.get("forward")
        if isinstance(earlier, RoutedForward):
            earlier.put_back()  # of an engine that was not destroyed
            earlier.replaced = True
        super()._configure_distributed_model(model)
        self.pipeline = self.pipeline_class(model, self.mobius, self.global_rank, self.world_size, self.device, exchange,
                                            self._optimizer_memory(), self._layers(model),
                                            figures=self.monitor.enabled or self.wall_clock_breakdown())
        self._adopted = {name: _place(parameter) for name, parameter in model.named_parameters()}
        self._forwards: Dict[bool, int] = {}
        self._forwards_step = -1
        parameters.adopt(model, self.pipeline, None)
        # The raw module's calls reach the pipeline as well: evaluation loops often call it.
        self._routed = model.__dict__["forward"] = RoutedForward(model, self._forward)

    def _cast_module_mixed_precision(self, param_dtype: Optional[torch.dtype], buffer_dtype: Optional[torch.dtype],
                                     is_zero_init_model: bool, keep_pattern: Any = None) -> None:
        """Leaves a model that was built under ``zero.Init`` as it is, as ZeRO-3 does: adapters added to it stay fp32."""
        built_in_place = any(piece_of(parameter) for parameter in self.module.parameters())
        super()._cast_module_mixed_precision(param_dtype, buffer_dtype, built_in_place, keep_pattern)

    def _layers(self, model: nn.Module) -> Optional[List[nn.Module]]:
        """The layers of a model that lists them."""
        return None

    def _optimizer_memory(self) -> OptimizerMemory:
        """What the optimizer, which is made only after the pipeline, will keep in DRAM."""
        client = self.client_optimizer
        settings = getattr(client, "defaults", None) if client else self.optimizer_params()
        return OptimizerMemory(state_tensors(self.optimizer_name(), (settings or {}).get("momentum", 0)),
                               lambda: state_bytes(self.optimizer.optimizer.state.values()) if self.optimizer else 0)

    def _forward(self, args: tuple, kwargs: dict) -> Any:
        self._check_parameters()
        return differentiable.run(self.pipeline, args, kwargs, self._next_seed())

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's outputs, by way of the pipeline.

        Raises:
            RuntimeError: a later engine has taken the module over.
        """
        self._check_module()
        return super().forward(*inputs, **kwargs)

    def _check_module(self) -> None:
        if self._routed.replaced:
            raise RuntimeError("this engine's module belongs to a later engine: deepspeed.initialize was called on it again "
                               "since. Use that engine, or give each its own copy of the module.")

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Has no effect, and says so: a stage runs the model's modules as they are written."""
        if self.global_rank == 0:
            logger.warning("Mobius runs a model's modules as they are written: engine.compile() (torch_compile=True in Hugging "
                           "Face's TrainingArguments) has no effect.")

    def _check_parameters(self) -> None:
        """Raises RuntimeError where the script's parameters are no longer the ones that are trained."""
        with self.pipeline.mailbox.told():
            present = {name: _place(parameter) for name, parameter in self.module.named_parameters()}
            for name, (address, trained) in self._adopted.items():
                if present.get(name, (None, None))[0] != address:
                    raise RuntimeError(
                        f"parameter {name!r} has left the memory that Mobius trains it in: its data was replaced after "
                        "deepspeed.initialize, as module.to(), .cuda(), .half(), load_state_dict(assign=True), "
                        "parameter.data = ... or another engine on a model that shares it do. Do that before "
                        "deepspeed.initialize, or write into it with copy_().")
                if present[name][1] and not trained and torch.is_grad_enabled():
                    raise RuntimeError(
                        f"parameter {name!r} was frozen at deepspeed.initialize and requires a gradient now. Mobius plans "
                        "for what is trained then: call requires_grad_(True) before it, and requires_grad_(False) after it "
                        "if the parameter is to be trained later.")

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

    def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
        """Wraps any optimizer: DeepSpeed's check of its type imports its Muon, and with that torch's compiler."""
        return ZERO_OPTIMIZATION

    def get_optimizer_configuration(self, optimizer_parameters: Dict[str, Any], adam_w_mode: bool,
                                    allow_legacy_fallback: bool = False):
        """DeepSpeed's CPU Adam, or torch's on all ranks where one cannot build its extension."""
        if not optimizer_parameters.get("torch_adam", False):
            failures = self.pipeline.step("initialize", self._failure_of_cpu_adam())
            failed = [rank for rank, failure in enumerate(failures) if failure is not None]
            if failed:
                # One rank builds and knows what went wrong; those that waited for it only find no library to import.
                builder = min(failed, key=lambda rank: failures[rank].startswith(ImportError.__name__))
                if self.global_rank == 0:
                    logger.warning(f"Mobius: DeepSpeedCPUAdam cannot be built on rank {builder} ({failures[builder]}); "
                                   "using torch's Adam, which is slower.")
                optimizer_parameters["torch_adam"] = True
                if optimizer_parameters.get("bias_correction", True):
                    optimizer_parameters.pop("bias_correction", None)  # torch's Adam always corrects, and has no such key
        return super().get_optimizer_configuration(optimizer_parameters, adam_w_mode, allow_legacy_fallback)

    def _failure_of_cpu_adam(self) -> Optional[str]:
        with self.pipeline.mailbox.told():
            try:
                from deepspeed.ops.op_builder import CPUAdamBuilder
                extensions.load(CPUAdamBuilder())
            except Exception as error:  # whatever a compiler run can raise
                return f"{type(error).__name__}: {error}"
        return None

    _load_hook: Optional[RemovableHandle] = None

    def _configure_zero_optimizer(self, optimizer: Optional[torch.optim.Optimizer]) -> Optional[MobiusOptimizer]:
        if optimizer is None:
            return None
        scaler = CreateLossScaler(self.get_data_types()[0], self.loss_scale(), self.dynamic_loss_scale(),
                                  self.dynamic_loss_scale_args())
        wrapped = MobiusOptimizer(optimizer, self.pipeline, dict(self.module.named_parameters()), self.gradient_clipping(),
                                  scaler)
        parameters.adopt(self.module, self.pipeline, wrapped)
        def accept(module: nn.Module, keys: Any) -> None:
            # The next step would overwrite loaded 16-bit weights by what the masters still hold, and buffers by a copy of
            # a rank that did not run their layer but has just written them.
            wrapped.refresh_fp32_params()
            self.pipeline.accept_buffers()

        self._load_hook = self.module.register_load_state_dict_post_hook(accept)
        return wrapped

    def _take_model_step(self, lr_kwargs: Optional[Dict[str, Any]]) -> None:
        super()._take_model_step(lr_kwargs)
        recorder = self.pipeline.recorder
        if self.global_rank == 0 and recorder is not None and recorder.last_step is not None:
            self._report_step(recorder.last_step)

    def _report_step(self, step: Step) -> None:
        """Tells the monitors, and the log at the steps at which DeepSpeed reports, where a step's time and bytes went."""
        printed = self.wall_clock_breakdown() and self.steps_per_print() is not None \
            and self.global_steps % self.steps_per_print() == 0
        if not (printed or self.monitor.enabled):
            return
        measured = figures(step, self.world_size)
        model_bytes = BYTES_PER_PARAMETER * sum(parameter.numel() for parameter in self.module.parameters())
        if printed:
            # Not by the logger, whose level hides it unless the config sets "log_level": DeepSpeed prints its timers so.
            print_dist(f"Mobius: step={self.global_steps}, {breakdown(measured, model_bytes)}", ranks=[0])
        self.monitor.write_events([(f"Train/Mobius/{name}", value, self.global_samples)
                                   for name, value in scalars(measured, model_bytes).items()])

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

    def pinned_bytes(self) -> int:
        """Host memory this rank has pinned; 0 where the device needs none."""
        return self.pipeline.device.pinning.pinned_bytes

    def pageable_bytes(self) -> int:
        """Host memory that should be pinned and could not be."""
        return self.pipeline.device.pinning.refused_bytes

    # The rest of its life.

    def save_checkpoint(self, save_dir: str, tag: Optional[str] = None, client_state: Dict[str, Any] = {},
                        save_latest: bool = True, exclude_frozen_parameters: bool = False) -> bool:
        """Saves the job as a Universal Checkpoint, which ZeRO loads as well. All ranks call it together.

        Raises:
            CheckpointError: a rank could not write; what was there before is untouched.
        """
        return save(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def load_checkpoint(self, load_dir: str, tag: Optional[str] = None, load_module_strict: bool = True,
                        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True,
                        load_module_only: bool = False, custom_load_fn: Optional[Callable] = None
                        ) -> Tuple[Optional[str], Optional[Dict[str, Any]]]:
        """Loads a checkpoint of Mobius, of ZeRO-3, or a Universal Checkpoint. All ranks call it together.

        Returns:
            The path of its model states and the client state; (None, None) if there is no file that names the latest.

        Raises:
            CheckpointError: it is damaged, incomplete or of another model.
        """
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn is not supported under Mobius: a checkpoint holds parameters one by one, not "
                             "a module's state dict. Load with load_module_strict=False, and the rest by hand.")
        return load(self, load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states,
                    load_module_only)

    def _get_zero_param_shapes(self) -> List[Dict[str, torch.Size]]:
        entries = self.pipeline.store.layout.entries
        return [{name: torch.Size(entries[name].shape) for name in group["params"]}
                for group in self.optimizer.hyperparameters()]

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: the whole weights are always there."""
        return True

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Optional[Dict[str, Any]]:
        if self.global_rank != 0:
            return None
        return self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    def destroy(self) -> None:
        """Leaves the pipeline; the module works on its own again, on CPU."""
        pipeline = self.__dict__.pop("pipeline", None)
        if pipeline is not None:
            if self.module.__dict__.get("forward") is self._routed:  # and not a later engine's
                self._routed.put_back()
                parameters.forget(self.module)
            if self._load_hook is not None:
                self._load_hook.remove()
            pipeline.close()
        super().destroy()


def _place(parameter: nn.Parameter) -> Tuple[int, bool]:
    """Where a parameter's data lies, and whether it is trained."""
    return parameter.data_ptr(), parameter.requires_grad

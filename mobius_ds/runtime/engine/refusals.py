"""What DeepSpeed does and Mobius does not: refused by name, before anything is built.

Settings of how ZeRO partitions, gathers, quantizes or prefetches are not here: they ask for nothing that a pipeline
does, change no result, and may stay in the config.
"""

from typing import Any, Iterator, NamedTuple, Optional, Tuple

import torch
from deepspeed.moe.layer import MoE
from deepspeed.runtime.config import MUON_OPTIMIZER, DeepSpeedConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel


class Refusal(NamedTuple):
    """Something that Mobius does not do."""

    what: str
    why: str
    way_out: str


def refuse(config: DeepSpeedConfig, mpu: Any, mesh: Any, model: nn.Module) -> None:
    """Raises ValueError if a job needs what Mobius does not do.

    Args:
        mpu, mesh: the model-parallel unit and the device mesh given to ``deepspeed.initialize``, if any.
    """
    for refusal in (*_of_parallelism(config, mpu, mesh), *_of_settings(config), *_of_model(model)):
        raise ValueError(f"Mobius does not run {refusal.what}: {refusal.why}. {refusal.way_out}, or set "
                         '"mobius": {"enabled": false}.')


def refused_settings(config: DeepSpeedConfig) -> Tuple[Refusal, ...]:
    """What a config asks for that Mobius does not do, whatever the model."""
    return (*_of_parallelism(config, None, None), *_of_settings(config))


def _of_parallelism(config: DeepSpeedConfig, mpu: Any, mesh: Any) -> Iterator[Refusal]:
    ranks = max(bwc_tensor_model_parallel_world_size(mpu), config.tensor_parallel_config.autotp_size)
    if ranks > 1:
        yield Refusal("tensor parallelism", f"this job splits its tensors over {ranks} ranks",
                      'Use 1 ("tensor_parallel": {"autotp_size": 1}; of a PipelineModule, num_stages=... for a topology)')
    if mesh is not None or _sequence_ranks(config, mpu) > 1:
        yield Refusal("sequence parallelism", "each rank's micro-batch must hold whole sequences",
                      'Leave "sequence_parallel_size" and mesh_param out')
    if config.expert_parallel_config.enabled:
        yield Refusal("expert parallelism", "a stage runs on one GPU, with all its experts", 'Leave "expert_parallel" out')


def _sequence_ranks(config: DeepSpeedConfig, mpu: Any) -> int:
    of_mpu = getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)()
    return max(of_mpu, config._param_dict.get("sequence_parallel_size", 1))


def _of_settings(config: DeepSpeedConfig) -> Iterator[Refusal]:
    zero = config.zero_config
    for key, section in (("offload_param", zero.offload_param), ("offload_optimizer", zero.offload_optimizer)):
        if section is not None and section.device == OffloadDeviceEnum.nvme:
            yield Refusal(f'"{key}" to nvme', "the model and its training state lie in DRAM",
                          f'Set "{key}": {{"device": "cpu"}} if they fit there')
    if zero.zenflow is not None:
        yield Refusal('"zenflow"', "every parameter is updated at every step", 'Leave "zenflow" out')
    if config.optimizer_name == MUON_OPTIMIZER:
        yield Refusal("DeepSpeed's Muon", "its update gathers gradients from all ranks, and here each is on one",
                      "Choose another optimizer")
    if config.torch_autocast_enabled and config.torch_autocast_dtype == torch.float16:
        yield Refusal('"torch_autocast" in float16', "it needs a gradient scaler, which only the fp16 section brings",
                      'Use "dtype": "bfloat16", or "fp16": {"enabled": true}')
    for section, low in (("fp16", config.float16_config.fp16_master_weights_and_grads),
                         ("bf16", config.bfloat16_config.bf16_master_weights_and_grads)):
        if low:
            yield Refusal(f'"{section}_master_weights_and_grads"', "its masters and gradients are fp32",
                          "Leave it out if there is DRAM for them")
    if not config.managed_gradient_accumulation:
        yield Refusal('"managed_gradient_accumulation": false', "gradients are averaged over the micro-batches that the "
                      "config counts", "Leave it out")


def _of_model(model: nn.Module) -> Iterator[Refusal]:
    for name, module in model.named_modules():
        refusal = _of_module(module)
        if refusal is not None:
            yield refusal._replace(what=f"{refusal.what} (module {name!r})" if name else refusal.what)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            yield Refusal(f"parameters that are split over ranks ({name!r} is a DTensor)", "it makes stages of whole ones",
                          "Give deepspeed.initialize the model as it was before it was sharded")


def _of_module(module: nn.Module) -> Optional[Refusal]:
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return Refusal(f"a model in {type(module).__name__}", "it distributes the model itself",
                       "Give deepspeed.initialize the module inside")
    if isinstance(module, nn.SyncBatchNorm):
        return Refusal("SyncBatchNorm", "its statistics come from all ranks at once, and here they run different stages",
                       "Use BatchNorm, whose statistics are those of one micro-batch")
    if isinstance(module, MoE) and module.ep_size > 1:
        return Refusal("DeepSpeed's MoE with ep_size > 1", "a stage runs on one GPU, with all its experts", "Set ep_size=1")
    return None

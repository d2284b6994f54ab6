"""What every rank of a test imports anyway: loaded once by the fork server instead of once per rank."""

import deepspeed  # noqa: F401
import torch  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.distributed.tensor  # noqa: F401
import transformers  # noqa: F401
from deepspeed.runtime.zero import partition_parameters, stage3  # noqa: F401
from transformers import modeling_utils  # noqa: F401

import mobius_ds.runtime.engine.engine  # noqa: F401

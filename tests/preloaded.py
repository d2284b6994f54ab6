"""What every rank of a test imports anyway: loaded once by the fork server instead of once per rank.

Only what starts no thread: a forked rank has the locks of its parent's threads, but not the threads.
"""

import deepspeed
import deepspeed.module_inject.auto_ep_layer  # noqa: F401
import deepspeed.runtime.pipe.engine  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.distributed.tensor  # noqa: F401
import transformers  # noqa: F401
from deepspeed.runtime.zero import partition_parameters, stage3, stage_1_and_2  # noqa: F401
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401, which loads torch's compiler
from transformers import modeling_utils  # noqa: F401

import mobius_ds.runtime.engine  # noqa: F401
import mobius_ds.runtime.pipeline_engine  # noqa: F401

deepspeed.ops.__compatible_ops__  # the first to ask compiles a probe and loads setuptools

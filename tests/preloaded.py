"""What every rank of a test imports anyway: loaded once by the fork server instead of once per rank.

Nothing here may start a thread: a forked rank would have what its locks guard, but not the thread.
"""

import gc
import os

os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # pyarrow's allocator cleans up in a thread by default

import accelerate  # noqa: E402, F401
import datasets  # noqa: E402, F401
import deepspeed  # noqa: E402
import deepspeed.module_inject.auto_ep_layer  # noqa: E402, F401
import deepspeed.runtime.pipe.engine  # noqa: E402, F401
import hypothesis  # noqa: E402, F401
import peft  # noqa: E402, F401
import pytest  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401
import torch.distributed.tensor  # noqa: E402, F401
from deepspeed.runtime.zero import partition_parameters, stage3, stage_1_and_2  # noqa: E402, F401
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: E402, F401, which loads torch's compiler
from transformers import (AutoModelForCausalLM, AutoModelForSeq2SeqLM, Trainer,  # noqa: E402, F401
                          TrainingArguments, modeling_utils)

import mobius_ds.runtime.engine.pipeline_engine  # noqa: E402, F401
import tests.features  # noqa: E402, F401
import tests.integrations.jobs  # noqa: E402, F401, and with it what compares, reports and draws
import tests.runtime.jobs  # noqa: E402, F401

deepspeed.ops.__compatible_ops__  # the first to ask compiles a probe and loads setuptools

assert len(os.listdir("/proc/self/task")) == 1, "something that is loaded here has started a thread"
# A rank's garbage collections leave alone what it has been given; otherwise they would copy the memory of all of it.
gc.collect()
gc.freeze()

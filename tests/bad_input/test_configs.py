"""Wrong DeepSpeed configs: refused by the name of what is wrong, on every rank alike, or harmless."""

from typing import Any, Dict

import pytest
from deepspeed.accelerator import get_accelerator

from mobius_ds.names import CACHE_VARIABLE
from tests.bad_input.cases import Case, check
from tests.features import refused, survives
from tests.ranks import run_ranks
from tests.runtime.jobs import config, failure, initialize, language_model, mine

DRAM = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/tmp"}


def zero(**settings: Any) -> Dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "offload_param": DRAM, "offload_optimizer": DRAM, **settings}}


SECTION = [
    Case("not a dictionary", True, "the 'mobius' section must be a dictionary such as"),
    Case("a misspelt key", {"stagse": 3}, "unknown key 'stagse' in the 'mobius' section: did you mean 'stages'?"),
    Case("auto", {"stages": "auto"}, "leave the key out to have it chosen"),
    Case("enabled is no flag", {"enabled": "maybe"}, "enabled: Input should be a valid boolean, got 'maybe'"),
    Case("no stages", {"stages": 0}, "stages: Input should be greater than or equal to 1, got 0"),
    Case("stages is a flag", {"stages": True}, "stages: Input should be a valid integer, got True"),
    Case("layers_per_stage as text", {"layers_per_stage": "2"}, "should be a positive number, or a list of them"),
    Case("no layers_per_stage", {"layers_per_stage": []}, "should be a positive number, or a list of them"),
    Case("more stages than layers", {"stages": 7}, "the model has only 6 layers. Ask for 6 at most. If its layers run "
         "several times in a forward, list layers_per_stage instead"),
    Case("stages and layers_per_stage", {"stages": 3, "layers_per_stage": 2}, "leave one of the two out"),
    Case("plan and stages", {"plan": "plan.json", "stages": 3}, "plan fixes the stages; leave stages"),
    Case("layers is no list", {"layers": "blocks.*"}, "layers: Input should be a valid list, got 'blocks.*'"),
    Case("layers is empty", {"layers": []}, "layers: List should have at least 1 item"),
    Case("a misspelt layer", {"layers": ["blocks.0", "blokcs.1"]},
         "no module of LanguageModel matches the pattern 'blokcs.1' in \"mobius\": {\"layers\": ...}; did you mean "
         "'blocks.1'?"),
    Case("layers that are none", {"layers": ["transformer.h.*"]}, "Its modules are tokens, blocks, blocks.0"),
    Case("negative device memory", {"device_memory_gb": -1}, "device_memory_gb: Input should be greater than 0, got -1"),
    Case("endless device memory", {"device_memory_gb": float("inf")}, "device_memory_gb: Input should be a finite number"),
    Case("no time", {"timeout_seconds": 0}, "timeout_seconds: Input should be greater than 0, got 0"),
    Case("more time than a clock has", {"timeout_seconds": 1e300}, "timeout_seconds: Input should be less than or equal"),
    Case("a trace without a name", {"trace": ""}, "trace: String should have at least 1 character"),
    Case("a trace where none can be", {"trace": "/proc/trace.json"},
         '"mobius": {"trace": "/proc/trace.json"} cannot be written: No such file or directory. Name a file in a folder'),
    Case("a trace over a folder", {"trace": "/tmp"}, "cannot be written: it is there and is no file. Name a file"),
    Case("a plan that is not there", {"plan": "/nowhere/plan.json"},
         "cannot read the plan /nowhere/plan.json: No such file or directory. Make one with mobius-ds plan"),
    Case("a plan that is a folder", {"plan": "/tmp"}, "cannot read the plan /tmp: Is a directory"),
    Case("a plan without a name", {"plan": ""}, "plan: String should have at least 1 character"),
    Case("a misspelt topology", {"topology": "3090ti-8-4+5"}, "(did you mean '3090ti-8-4+4'?). Presets are 3090ti-4,"),
    Case("a topology that is not there", {"topology": "/nowhere/server.json"}, "cannot read topology /nowhere/server.json"),
    Case("a topology of fewer GPUs than ranks", {"topology": "4090-1"},
         "topology '4090-1' has 1 GPUs, but the job has 2 ranks. Start 1 at most, or name a larger one"),
]
"""Of the "mobius" section, said by ``deepspeed.initialize`` itself."""

AT_FIRST_FORWARD = [
    Case("layers_per_stage do not add up", {"layers_per_stage": [1, 1]}, "adds up to 2 layers, but the model has 6"),
    Case("no room on the device", {"device_memory_gb": 1e-6}, "are missing. Use more stages or fewer layers_per_stage"),
]
"""Of the "mobius" section as well, where only a forward shows which layers are run, and with what."""

DEEPSPEED = [
    Case("NVMe for parameters", zero(offload_param=NVME), 'Mobius does not run "offload_param" to nvme: the model and its '
         'training state lie in DRAM. Set "offload_param": {"device": "cpu"}'),
    Case("NVMe for the optimizer", zero(offload_optimizer=NVME), 'Mobius does not run "offload_optimizer" to nvme'),
    Case("ZenFlow", zero(zenflow={"topk_ratio": 0.1}), 'Mobius does not run "zenflow"'),
    Case("expert parallelism", {"expert_parallel": {"enabled": True, "autoep_size": 2}}, "does not run expert parallelism"),
    Case("a hybrid engine", {"hybrid_engine": {"enabled": True}},
         'Remove from the DeepSpeed config what asks for it (such as '
         '"hybrid_engine")'),
    Case("Muon", {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}, "Mobius does not run DeepSpeed's Muon"),
    Case("an optimizer that needs a closure", {"optimizer": {"type": "LBFGS", "params": {"lr": 1e-2}}},
         "LBFGS computes losses of its own inside its step (a closure)"),
    Case("unmanaged accumulation", {"managed_gradient_accumulation": False},
         "does not run \"managed_gradient_accumulation\""),
    # What DeepSpeed itself refuses stays its own message.
    Case("amp", {"amp": {"enabled": True}}, "Use DeepSpeed 'fp16', 'bf16', or 'torch_autocast' instead"),
    Case("sparse attention", {"sparse_attention": {"mode": "fixed"}}, "Sparse Attention has been removed"),
    Case("elasticity", {"elasticity": {"enabled": True}}, "Elastic training has been removed"),
    Case("the old curriculum", {"curriculum_learning": {"enabled": True}}, "'curriculum_learning' has been removed"),
    Case("a batch that does not divide", {"train_batch_size": 7}, "Check batch related parameters"),
    # Last, as DeepSpeed's own initialize remembers them beyond the error.
    Case("sequence parallelism", {"sequence_parallel_size": 2, "train_micro_batch_size_per_gpu": 2},
         "Mobius does not run sequence parallelism"),
    Case("tensor parallelism", {"tensor_parallel": {"autotp_size": 2}},
         "Mobius does not run tensor parallelism: this job splits its tensors over 2 ranks"),
]
"""Of the rest of the config."""

HARMLESS = {
    "stage 0": {"zero_optimization": {"stage": 0}}, "stage 1": {"zero_optimization": {"stage": 1}},
    "stage 2": {"zero_optimization": {"stage": 2, "offload_optimizer": DRAM}}, "no stage": {"zero_optimization": {}},
    "ZeRO++": zero(zero_quantized_weights=True, zero_quantized_gradients=True, zero_hpz_partition_size=2),
    "SuperOffload": zero(offload_optimizer={**DRAM, "super_offload": True}),
    "activation checkpointing": {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}},
    "DeepCompile": {"compile": {"deepcompile": True}},
    "gradient predivision": {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
    "node-local checkpoints": {"checkpoint": {"use_node_local_storage": True}},
}
"""Settings of what Mobius replaces or ignores."""


def with_section(section: Any, settings: Dict[str, Any]) -> Dict[str, Any]:
    """``section``: in the "mobius" section, or in place of it."""
    if isinstance(section, dict):
        settings["mobius"].update(section)
    elif section is not None:
        settings["mobius"] = section
    return settings


def trained(sections: Dict[str, Any], section: Any = None, steps: int = 1) -> list:
    """The losses of a job with these sections; for ``section`` see ``with_section``."""
    engine = initialize(language_model(), with_section(section, config(timeout_seconds=20.0, **sections)))
    losses = []
    try:
        for step in range(steps):
            loss = engine(*mine(step)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    finally:
        engine.destroy()
    return losses


def in_fp16(mobius: bool) -> Any:
    """The losses in fp16; or, as text, what is said where the device does not compute it, which DeepSpeed decides."""
    try:
        return trained({"fp16": {"enabled": True}}, {"enabled": mobius}, steps=3)
    except ValueError as error:
        return str(error)


def built(section: Any) -> None:
    """Only ``deepspeed.initialize``."""
    initialize(language_model(), with_section(section, config(timeout_seconds=20.0))).destroy()


def every_config() -> Dict[str, Any]:
    said = {case.what: failure(lambda: built(case.input)) for case in SECTION}
    said.update({case.what: failure(lambda: trained({}, case.input)) for case in AT_FIRST_FORWARD})
    plain = trained({}, steps=2)
    harmless = {what: trained(sections, steps=2) == plain for what, sections in HARMLESS.items()}
    harmless["nested patterns"] = trained({}, {"layers": ["blocks.*", "blocks.*.up"]}, steps=2) == plain
    fp16 = in_fp16(False), in_fp16(True)
    said.update({case.what: failure(lambda: trained(case.input)) for case in DEEPSPEED})
    return {"said": said, "harmless": harmless, "fp16": fp16}


@survives("Bad input", "a wrong value anywhere in the config",
          "one error on every rank that names the key, the value and what it may be; nothing has been built")
@survives("Bad input", "settings of ZeRO that a pipeline has no use for (any stage, ZeRO++, DeepCompile, ...)",
          "ignored; the losses are the same to the last bit")
@refused("Loops", "NVMe offload, tensor, sequence and expert parallelism, ZenFlow, Muon, L-BFGS", "Mobius does not run")
def test_configs(tmp_path):
    results = run_ranks(2, every_config, env={CACHE_VARIABLE: str(tmp_path)})
    check(SECTION + AT_FIRST_FORWARD + DEEPSPEED, [result["said"] for result in results])
    assert all(all(result["harmless"].values()) for result in results), results[0]["harmless"]
    for theirs, ours in (result["fp16"] for result in results):
        if get_accelerator().is_fp16_supported():
            assert ours == pytest.approx(theirs, abs=1e-2)
        else:
            assert ours == theirs == "Type fp16 is not supported on your device."

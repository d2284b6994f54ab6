"""What each arm of a comparison is, and which scripts cannot run as one."""

import json
from pathlib import Path

import pytest

from mobius_ds.reporting.comparison.arms import (ARMS, DDP, DEFAULTS_ARM_STEPS, MOBIUS, PEERS, PIPELINE, REQUIRED,
                                                 SIZE_SETTINGS, ZERO2, ZERO3, ZERO3_DEFAULTS, CompareError, choose_arms,
                                                 device_memory, read_config, with_batch_per_rank, with_dtype,
                                                 with_micro_batch, with_mobius)
from mobius_ds.reporting.comparison.config_file import batch_of

CHECKOUT = Path(__file__).parents[3]
CONFIG = CHECKOUT / "ds_configs" / "gpt_offload.json"
SCRIPT = CHECKOUT / "comparisons" / "train_gpt.py"
RANKS, STEPS = 4, 20


@pytest.fixture
def config():
    return read_config(CONFIG)


def arms(config, names=None, script=SCRIPT):
    return {arm.name: arm for arm in choose_arms(names, config, script, RANKS, STEPS)}


def differing(one, other):
    return {key for key in {*one, *other} if one.get(key) != other.get(key)}


def test_default_arms_differ_as_promised(config):
    chosen = arms(config)
    assert list(chosen) == [ZERO3, MOBIUS, ZERO3_DEFAULTS]
    assert chosen[ZERO3].config == chosen[MOBIUS].config == config
    assert [arm.flag for arm in chosen.values()] == ["0", "1", "0"]
    removed = set(config["zero_optimization"]) - set(chosen[ZERO3_DEFAULTS].config["zero_optimization"])
    assert removed == set(SIZE_SETTINGS)
    assert [arm.steps for arm in chosen.values()] == [STEPS, STEPS, DEFAULTS_ARM_STEPS]


def test_a_config_at_defaults_has_no_extra_arm():
    assert list(arms({"zero_optimization": {"stage": 3}})) == [ZERO3, MOBIUS]


def test_only_what_peers_are_about_differs(config):
    config["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "pin_memory": True}
    config["zero_optimization"]["overlap_comm"] = False
    chosen = arms(config, ",".join(ARMS))
    assert all(chosen[name].required for name in REQUIRED) and not any(chosen[name].required for name in PEERS)
    assert all(chosen[name].flag == "0" and chosen[name].unsuitable is None for name in PEERS)

    assert differing(config, chosen[ZERO2].config) == {"zero_optimization"}
    assert chosen[ZERO2].config["zero_optimization"] == {
        "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "overlap_comm": False,
        "reduce_bucket_size": config["zero_optimization"]["reduce_bucket_size"]}

    for name, others in ((DDP, set()), (PIPELINE, {"gradient_accumulation_steps"})):
        assert differing(config, chosen[name].config) == {"zero_optimization", "optimizer"} | others
        assert chosen[name].config["zero_optimization"] == {"stage": 0}
        optimizer = chosen[name].config["optimizer"]
        assert optimizer["params"] == {**config["optimizer"]["params"], "torch_adam": True}
    assert chosen[PIPELINE].config["gradient_accumulation_steps"] == RANKS
    assert chosen[PIPELINE].options == ("--pipeline", ) and chosen[DDP].options == ()


def test_other_optimizers_are_left_alone(config):
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    assert arms(config, DDP)[DDP].config["optimizer"] == config["optimizer"]
    del config["optimizer"]
    assert "optimizer" not in arms(config, DDP)[DDP].config


def test_a_pipeline_has_the_global_batch_of_the_others():
    config = {"zero_optimization": {"stage": 3}, "train_batch_size": 48, "train_micro_batch_size_per_gpu": 2}
    assert batch_of(config, RANKS) == (2, 6)
    pipeline = arms(config, PIPELINE)[PIPELINE].config
    assert pipeline["gradient_accumulation_steps"] * pipeline["train_micro_batch_size_per_gpu"] == 48


def test_scripts_without_the_option_do_not_suit_the_pipeline(config):
    script = CHECKOUT / "comparisons" / "finetune_lora.py"
    chosen = arms(config, ",".join(ARMS), script)
    assert "finetune_lora.py" in chosen[PIPELINE].unsuitable and "--pipeline" in chosen[PIPELINE].unsuitable
    assert all(arm.unsuitable is None for name, arm in chosen.items() if name != PIPELINE)


def test_an_unknown_arm_is_named(config):
    with pytest.raises(CompareError, match="unknown arm 'moebius'.*zero3, mobius"):
        choose_arms("zero3,moebius", config, SCRIPT, RANKS, STEPS)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_dtype_changes_nothing_else(config, dtype):
    changed = with_dtype(config, dtype)
    assert changed["bf16"] == {"enabled": dtype == "bf16"}
    assert changed.get("fp16", {"enabled": False}) == {"enabled": dtype == "fp16"}
    assert differing(config, changed) <= {"bf16", "fp16"}
    assert with_dtype(config, None) == config


def test_another_micro_batch_keeps_the_accumulation():
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}
    assert with_micro_batch(config, 8, ranks=2) == {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4}
    assert with_micro_batch(config, None, ranks=2) == config
    with pytest.raises(CompareError, match="the script decides it"):
        with_micro_batch({"train_micro_batch_size_per_gpu": "auto"}, 8, ranks=2)


def test_settings_of_mobius_are_added(config):
    assert with_mobius(config, device_memory_gb=None, topology=None) == config
    limited = with_mobius(config, device_memory_gb=2.5, topology=None)
    assert limited["mobius"] == {"enabled": True, "device_memory_gb": 2.5}
    assert device_memory(limited) == 2.5 and device_memory(config) is None


@pytest.mark.parametrize("text, reason", [
    ("{", "not valid JSON"),
    ("[]", "holds a list, where a DeepSpeed config is an object"),
    ('{"mobius": true}', "mobius in .* must be an object"),
    ('{"bf16": "auto"}', "bf16 in .* is 'auto'; it must be an object"),
    ('{"optimizer": {"params": 3}}', r"optimizer.params in .* must be an object"),
    ('{"zero_optimization": {"stage": 3, "offload_optimizer": "cpu"}}', "offload_optimizer in .* must be an object"),
    ('{"zero_optimization": {"stage": 3}, "train_batch_size": 0}', "train_batch_size .* is 0; it must be a number"),
    (json.dumps({"zero_optimization": {"stage": 2}}), "only stage 3"),
])
def test_other_configs_are_refused(tmp_path, text, reason):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CompareError, match=reason):
        read_config(path)


@pytest.mark.parametrize("text, names", [
    ('{"optimizer": null, "zero_optimization": {"stage": 3}}', "ddp"),
    ('{"optimizer": {"type": "Adam", "params": null}, "zero_optimization": {"stage": 3}}', "ddp,pipeline"),
    ('{"zero_optimization": {"stage": 3, "offload_optimizer": null}}', "zero2"),
    ('{"bf16": null, "mobius": null, /* as DeepSpeed reads it */ "zero_optimization": {"stage": 3}}', "zero3,mobius"),
])
def test_what_is_null_is_left_out_in_every_arm(tmp_path, text, names):
    (tmp_path / "config.json").write_text(text)
    config = with_mobius(with_dtype(read_config(tmp_path / "config.json"), "bf16"), device_memory_gb=1)
    assert set(arms(config, names)) == set(names.split(",")) and config["bf16"] == {"enabled": True}


def test_ranks_keep_their_share_of_a_batch():
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for given, expected in (((32, None, None), (8, 1)), ((32, 2, None), (2, 4)), ((32, None, 2), (4, 2))):
        config = {key: value for key, value in zip(keys, given) if value}
        kept = with_batch_per_rank(config, ranks=4)
        assert "train_batch_size" not in kept and batch_of(kept, 1) == batch_of(kept, 64) == expected
    free = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    assert with_batch_per_rank(free, ranks=4) == free
    with pytest.raises(CompareError, match="30 cannot be dealt out to 4 ranks"):
        with_batch_per_rank({"train_batch_size": 30}, ranks=4)
    with pytest.raises(CompareError, match="the script decides"):
        with_batch_per_rank({"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto"}, ranks=4)

"""The "mobius" section of a DeepSpeed config."""

import copy

import pytest
from deepspeed.runtime.config import DeepSpeedConfig

from mobius_ds.config import mobius_config
from mobius_ds.names import FLAG_VARIABLE


@pytest.fixture(autouse=True)
def no_override(monkeypatch):
    monkeypatch.delenv(FLAG_VARIABLE, raising=False)


def test_off_and_automatic_when_left_out():
    config = mobius_config({"train_batch_size": 1})
    assert config.enabled is False
    assert config.stages is None and config.layers_per_stage is None and config.layers is None
    assert mobius_config({"mobius": {}}) == config


def test_reads_every_key():
    section = {"enabled": True, "layers_per_stage": [2, 1], "layers": ["model.layers.*"], "device_memory_gb": 1.5,
               "timeout_seconds": 60}
    config = mobius_config({"mobius": section})
    assert {key: getattr(config, key) for key in section} == section


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("key, hint", [("enable", "did you mean 'enabled'?"), ("layer_per_stage", "layers_per_stage"),
                                       ("Stages", "stages"), ("qqqq", "valid keys are enabled, stages")])
def test_unknown_key_names_the_nearest(enabled, key, hint):
    with pytest.raises(ValueError, match=f"unknown key '{key}' in the 'mobius' section") as error:
        mobius_config({"mobius": {"enabled": enabled, key: 1}})
    assert hint in str(error.value)


@pytest.mark.parametrize("section", [{"stages": 0}, {"stages": "many"}, {"stages": 1.5}, {"layers_per_stage": 0},
                                     {"layers_per_stage": [1, -1]}, {"layers": 3}, {"enabled": "perhaps"},
                                     {"device_memory_gb": 0}, {"timeout_seconds": -1},
                                     {"stages": 3, "layers_per_stage": [1, 1]}, {"stages": 3, "layers_per_stage": 1}])
def test_wrong_values_name_the_key(section):
    with pytest.raises(ValueError) as error:
        mobius_config({"mobius": section})
    assert list(section)[0] in str(error.value)


@pytest.mark.parametrize("section", [True, None, ["enabled"], "on"])
def test_section_must_be_a_dictionary(section):
    with pytest.raises(ValueError, match="must be a dictionary"):
        mobius_config({"mobius": section})


@pytest.mark.parametrize("value, enabled", [("0", False), ("1", True)])
def test_variable_overrides_the_flag_only(monkeypatch, value, enabled):
    monkeypatch.setenv(FLAG_VARIABLE, value)
    for ds_config in ({}, {"mobius": {"enabled": True, "stages": 4}}, {"mobius": {"enabled": False, "stages": 4}}):
        config = mobius_config(ds_config)
        assert config.enabled is enabled
        assert config.stages == ds_config.get("mobius", {}).get("stages")


@pytest.mark.parametrize("value", ["", "true", "2"])
def test_variable_must_be_0_or_1(monkeypatch, value):
    monkeypatch.setenv(FLAG_VARIABLE, value)
    with pytest.raises(ValueError, match="MOBIUS_DS must be 0 or 1"):
        mobius_config({"mobius": {"enabled": True}})


def test_deepspeed_accepts_the_same_file():
    ds_config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "mobius": {"enabled": True, "stages": 4}}
    before = copy.deepcopy(ds_config)
    parsed = DeepSpeedConfig(ds_config)
    assert ds_config == before
    assert parsed.zero_config.stage == 3

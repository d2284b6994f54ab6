"""transformers' own models, one layer per stage, against themselves unsplit: in one process, and through real ranks."""

from typing import Any, Dict, List, Sequence

import pytest
import torch

from mobius_ds.model.errors import NotSplittable
from tests.model.splitting import assert_same, check, layers_of, run_split, run_unsplit
from tests.model.zoo import ZOO, batch, build
from tests.ranks import run_ranks


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ZOO)
def test_loss_and_gradients_are_those_of_the_unsplit_model(name, masked):
    split = check(build(name), **batch(name, masked=masked))
    assert len(split.program.layer_starts()) >= 5, "embedding, three blocks and head are stages of their own"


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_hidden_states_of_all_layers_can_be_returned(name):

    def loss(outputs):
        states = getattr(outputs, "hidden_states", None) or outputs.decoder_hidden_states
        assert len(states) == 4
        return outputs.loss + sum(state.pow(2).mean() for state in states)

    check(build(name), loss=loss, close=True, output_hidden_states=True, **batch(name))


def test_a_loss_computed_from_returned_logits():
    inputs = batch("llama")
    labels = inputs.pop("labels")
    check(build("llama"), loss=lambda outputs: torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1),
                                                                              labels.flatten()), **inputs)


def test_embeddings_given_instead_of_ids():
    model = build("llama")
    inputs = batch("llama")
    inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    check(model, **inputs)


def test_frozen_weights_have_no_gradient():
    model = build("gpt2")
    for block in model.transformer.h[:2]:
        block.requires_grad_(False)
    split = check(model, **batch("gpt2"))
    assert split.gradients["transformer.h.1.attn.c_attn.weight"] is None


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "bert", "t5"])
def test_dropout_masks_do_not_depend_on_where_the_model_is_cut(name):
    model = build(name, dropout=0.1)
    whole = run_split(model, stages=1, seed=3, **batch(name))
    for stages in (3, None):
        # T5 drops out of its encoder states in its own code, which every decoder stage runs: sums have another order.
        assert_same(run_split(model, stages=stages, seed=3, **batch(name)), whole, close=name == "t5")
    assert not torch.equal(run_split(model, stages=1, seed=4, **batch(name)).loss, whole.loss)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_activation_checkpointing_that_the_user_has_on(name, reentrant, dropout):
    without = build(name, dropout)
    without.config.use_cache = False  # as with activation checkpointing
    plain = run_split(without, seed=5, **batch(name))
    model = build(name, dropout)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    # T5 hands its blocks their arguments otherwise then. Another dropout mask would be far off.
    assert_same(run_split(model, seed=5, **batch(name)), plain, close=name == "t5")
    if dropout == 0:
        assert_same(run_split(model, **batch(name)), run_unsplit(model, **batch(name)), close=name == "t5")


def test_the_blocks_are_the_layers():
    assert layers_of(build("t5")) == [f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(3)]
    assert layers_of(build("mixtral")) == [f"model.layers.{i}" for i in range(3)]


def test_layer_drop_is_refused():
    """OPT's layerdrop decides by a random number which blocks to call, so no two stages would take the same path."""
    model = build("opt")
    model.model.decoder.layerdrop = 0.5
    with pytest.raises(NotSplittable, match="path depends on more than the inputs' shapes|returned after"):
        for seed in range(8):
            run_split(model, seed=seed, **batch("opt"))


# Real ranks.


def train_one_step(names: Sequence[str]) -> Dict[str, Any]:
    """Trains each model for one step, each rank on its own micro-batch; lr 1 makes the change the gradient."""
    import deepspeed
    import torch.distributed as dist
    ranks, rank = dist.get_world_size(), dist.get_rank()
    results = {}
    for name in names:
        model = build(name)
        config = {"train_batch_size": 2 * ranks, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0,
                  "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
                  "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
                  "mobius": {"enabled": True, "layers_per_stage": 1}}
        engine, *_ = deepspeed.initialize(model=model, config=config)
        generator = torch.get_rng_state()
        loss = engine(**batch(name, rank)).loss
        engine.backward(loss)
        drew_nothing = torch.equal(torch.get_rng_state(), generator)
        engine.step()
        results[name] = {"loss": loss.item(), "drew_nothing": drew_nothing, "stages": engine.pipeline.plan.stages,
                         "shared": _shared(engine.pipeline),
                         "after": {key: p.detach().clone() for key, p in model.named_parameters()} if rank == 0 else None,
                         "measured": engine.take_traffic(), "predicted": engine.take_predicted_traffic()}
        engine.destroy()
    return results


def _shared(pipeline) -> List[str]:
    program, units = pipeline._reference, pipeline.units.parameters
    starts = [*program.layer_starts(), program.end]
    every = [name for span in zip(starts, starts[1:]) for name in program.parameters_of(*span, units)]
    return sorted({name for name in every if every.count(name) > 1})


def unsplit_step(name: str, ranks: int) -> Dict[str, Any]:
    """The same step by one process: the gradients of the ranks' micro-batches, each halved first, add up in order."""
    model = build(name)
    losses = []
    for number in range(ranks):
        loss = model(**batch(name, number)).loss
        (loss / ranks).backward()
        losses.append(loss.item())
    return {"losses": losses, "after": {key: p.detach() - p.grad for key, p in model.named_parameters()}}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_training_step_through_real_ranks_is_the_unsplit_models(ranks):
    names = ["gpt2", "llama", "bert", "mixtral", "t5"]
    results = run_ranks(ranks, train_one_step, names)
    for name in names:
        expected = unsplit_step(name, ranks)
        mine = [result[name] for result in results]
        assert [result["loss"] for result in mine] == expected["losses"], name
        assert mine[0]["stages"] >= 5
        for key, weight in expected["after"].items():
            if key in mine[0]["shared"]:
                torch.testing.assert_close(mine[0]["after"][key], weight, rtol=0, atol=1e-6)
            else:
                assert torch.equal(mine[0]["after"][key], weight), (name, key, (mine[0]["after"][key] - weight).abs().max())
        for result in mine:
            assert result["drew_nothing"], "the script's random numbers are its own"
            assert result["measured"] == result["predicted"]

"""What a forward returns: the loss at once, large outputs when they are read, everything in evaluation."""

import copy
import gc
import io
import pickle
from typing import Any, Dict

import pytest
import torch

from tests.ranks import outcomes_of_ranks, run_ranks
from tests.runtime.jobs import config, failure, initialize, rank_and_size

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=41, n_positions=16, n_embd=16, n_layer=3, n_head=2, resid_pdrop=0.0,
                                      embd_pdrop=0.0, attn_pdrop=0.0))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=41, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
                                        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16))


def batch(number: int = 0) -> Dict[str, torch.Tensor]:
    rank, size = rank_and_size()
    ids = torch.randint(41, (2, 8), generator=torch.Generator().manual_seed(number * size + rank))
    return {"input_ids": ids, "labels": ids.clone()}


def deferred(tensor: Any) -> bool:
    return type(tensor).__name__ == "DeferredTensor"


def through_one_training(make: Any) -> Dict[str, Any]:
    """Reads logits at every moment of a training, and compares them with the unsplit model's."""
    alone = make()
    with torch.no_grad():
        expected = [alone(**batch(number)) for number in range(5)]
    engine = initialize(make(), config(optimizer={"type": "SGD", "params": {"lr": 0.0}}))
    right = {}

    output = engine(**batch(0))
    logits = output.logits
    right["class"] = type(output) is type(expected[0])
    right["loss"] = output.loss.item() == expected[0].loss.item() and not deferred(output.loss)
    right["deferred"] = deferred(logits) and torch.is_tensor(logits) and isinstance(logits, torch.Tensor)
    engine.take_traffic()
    right["known unread"] = (
        logits.shape == expected[0].logits.shape and logits.dtype == torch.float32 and logits.size(-1) == 41
        and logits.ndim == 3 and logits.numel() == 2 * 8 * 41 and logits.device == torch.device("cpu")
        and logits.requires_grad and logits.grad_fn is not None and len(logits) == 2 and "fetched when" in repr(logits) and "fetched" in f"{output}")
    right["no byte for that"] = sum(engine.take_traffic().values()) == 0
    engine.backward(output.loss)
    right["read after backward"] = torch.equal(logits.detach(), expected[0].logits)
    right["read again for nothing"] = sum(engine.take_traffic().values()) > 0 and torch.equal(
        logits.argmax(-1), expected[0].logits.argmax(-1)) and sum(engine.take_traffic().values()) == 0
    engine.step()

    output = engine(**batch(1))
    right["kept from now on"] = not deferred(output.logits) and torch.equal(output.logits.detach(), expected[1].logits)
    engine.backward(output.loss)
    engine.step()

    as_tuple = engine(**batch(2), return_dict=False)
    right["tuple"] = type(as_tuple) is tuple and torch.equal(as_tuple[1].detach(), expected[2].logits)
    engine.backward(as_tuple[0])
    engine.step()

    engine.eval()
    with torch.no_grad():
        output = engine(**batch(3))
        raw = engine.module(**batch(4))
    right["evaluation"] = all(
        not deferred(got.logits) and torch.equal(got.logits, want.logits) and got.loss.item() == want.loss.item()
        for got, want in ((output, expected[3]), (raw, expected[4])))
    cache = output.past_key_values
    right["no cache"] = cache is not None and "use_cache=False" in failure(lambda: cache.get_seq_length()) \
        and "does not leave the Mobius pipeline" in failure(lambda: cache.layers)
    del output, raw, as_tuple, logits
    gc.collect()
    engine.pipeline.step("settle", None)
    right["nothing kept"] = not engine.pipeline._lifetimes._sweeps
    engine.destroy()
    return right


@pytest.mark.parametrize("make", [gpt2, llama])
def test_logits_are_right_whenever_they_are_read(make):
    for right in run_ranks(2, through_one_training, make):
        assert [what for what, correct in right.items() if not correct] == []


FIRST_READS = {
    "argmax": lambda logits: logits.argmax(-1),
    "detach().numpy()": lambda logits: torch.from_numpy(logits.detach().numpy()),
    "indexing": lambda logits: logits[..., :-1, :],
    "float()": lambda logits: logits.float(),
    "addition": lambda logits: 1 + logits,
    "cat": lambda logits: torch.cat([logits, logits]),
    "torch.save": lambda logits: saved_and_loaded(logits),
    "pickle": lambda logits: pickle.loads(pickle.dumps(logits.detach())),
    "deepcopy": lambda logits: copy.deepcopy(logits.detach()),
    "iteration": lambda logits: torch.stack([row for row in logits]),
    "tolist": lambda logits: torch.tensor(logits.tolist()),
    "to": lambda logits: logits.to(torch.float64),
    "cross entropy": lambda logits: torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(16).long()),
}


def saved_and_loaded(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


def every_first_read() -> Dict[str, bool]:
    engine = initialize(gpt2(), config(optimizer=SGD))
    real = gpt2()(**batch()).logits
    right = {}
    for how, read in FIRST_READS.items():
        engine.pipeline.keep_outputs = False  # as in a job that has read nothing so far
        output = engine(**batch())
        assert deferred(output.logits)
        right[how] = torch.equal(read(output.logits), read(real))
    engine.destroy()
    return right


def test_any_operation_may_be_the_first_read():
    [right] = run_ranks(1, every_first_read)
    assert [how for how, correct in right.items() if not correct] == []


def generation() -> Dict[str, Any]:
    prompt = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3).long()}
    greedy = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    engine = initialize(gpt2(), config(optimizer=SGD))
    engine.eval()
    result = {"equal": torch.equal(engine.module.generate(**prompt, **greedy, use_cache=False),
                                   gpt2().eval().generate(**prompt, **greedy)),
              "cached": failure(lambda: engine.module.generate(**prompt, **greedy))}
    engine.destroy()
    return result


def test_generate_works_without_a_cache_and_says_so():
    for result in run_ranks(2, generation):
        assert result["equal"]
        assert result["cached"].startswith("ValueError") and "use_cache=False" in result["cached"]


def too_late() -> Dict[str, Any]:
    engine = initialize(gpt2(), config(optimizer=SGD))
    output = engine(**batch())
    engine.backward(output.loss)
    engine.step()
    said = failure(lambda: output.logits.sum())
    again = failure(lambda: output.logits.sum())
    del output
    gc.collect()
    loss = engine(**batch(1)).loss  # the job goes on
    engine.backward(loss)
    engine.step()
    engine.destroy()
    return {"said": said, "again": again, "loss": loss.item()}


def test_a_read_after_the_step_is_one_clear_error_and_the_job_goes_on():
    for result in run_ranks(2, too_late):
        assert "before the optimizer step" in result["said"] and result["again"] == result["said"]
        assert result["loss"] > 0


def gradients_through_deferred_logits() -> Dict[str, bool]:
    """The loss and something of logits that were still deferred, in one backward and in two."""
    def grads(backward):
        model = gpt2()
        backward(model(**batch()), lambda loss: loss.backward(retain_graph=True))
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def ours(backward):
        engine = initialize(gpt2(), config(optimizer={"type": "SGD", "params": {"lr": 1.0}}))
        before = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
        backward(engine(**batch()), engine.backward)
        engine.step()
        changed = {name: before[name] - parameter.detach() for name, parameter in engine.module.named_parameters()}
        engine.destroy()
        return changed

    def together(output, backward):
        backward(output.loss + output.logits.pow(2).mean())

    def apart(output, backward):
        penalty = output.logits.pow(2).mean()
        backward(output.loss)
        backward(penalty)

    def only_logits(output, backward):
        backward(output["logits"].pow(2).mean())

    return {use.__name__: all(torch.allclose(changed, grad, atol=1e-6) for changed, grad in
                              zip(ours(use).values(), grads(use).values())) for use in (together, apart, only_logits)}


def test_gradients_flow_through_outputs_that_were_deferred():
    [result] = run_ranks(1, gradients_through_deferred_logits)
    assert [use for use, equal in result.items() if not equal] == []


def read_on_rank_0_only() -> str:
    engine = initialize(gpt2(), config(optimizer=SGD))
    output = engine(**batch())
    engine.pipeline.mailbox._timeout = 3.0  # not before: first uses take their time on a busy machine
    if rank_and_size()[0] == 0:
        output.logits.sum()
    engine.backward(output.loss)
    return "no error"


def test_a_read_on_one_rank_only_is_an_error_and_no_hang():
    outcomes = outcomes_of_ranks(2, read_on_rank_0_only)
    assert all(outcome.error and outcome.exit_code == 1 for outcome in outcomes), outcomes
    told = "\n".join(outcome.error for outcome in outcomes)
    assert "reading the outputs of a forward" in told and "same calls" in told


def read_on_rank_0_while_others_wait() -> str:
    engine = initialize(gpt2(), config(optimizer=SGD))
    output = engine(**batch())
    engine.pipeline.mailbox._timeout = 2.0
    said = failure(lambda: output.logits.sum()) if rank_and_size()[0] == 0 else "idle"
    torch.distributed.barrier()
    return said


def test_a_read_that_nobody_joins_ends_with_the_timeout():
    first, second = run_ranks(2, read_on_rank_0_while_others_wait)
    assert first.startswith("PeerTimeout") and "reading the outputs of a forward" in first
    assert second == "idle"

"""How a stage enters and leaves a forward: paths that change, what stays behind, random numbers, recomputation."""

from functools import partial

import pytest
import torch
from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from mobius_ds.model.discovery import find_units
from mobius_ds.model.errors import NotSplittable
from mobius_ds.model.intercept import Entry
from mobius_ds.model.program import Span
from mobius_ds.model.replay import replayed
from mobius_ds.model.trace import trace
from tests.model.splitting import CPU, assert_same, check, left_as_it_was, run_split, run_unsplit
from tests.model.toys import IDS, WIDTH, X, Base, NanoGPT, first, linear


# Paths that change.


class Toggles(Base):
    """Its path depends on an attribute, which no trace can see."""

    def __init__(self, short=2, long=3):
        super().__init__(count=4)
        self.lengths, self.count = (short, long), 3
        self.order = [0, 1, 2, 3]

    def forward(self, x):
        for number in self.order[:self.count]:
            x = self.blocks[number](x)
        return x


@pytest.mark.parametrize("count, order, message", [
    (2, [0, 1, 2, 3], "returned after 2 calls.*where 3 were made"),
    (4, [0, 1, 2, 3], "called module 'blocks.3' where it called 'nothing more'"),
    (3, [0, 2, 1, 3], "called module 'blocks.2' where it called 'blocks.1'"),
])
@pytest.mark.parametrize("stages", [1, 3])
def test_a_path_that_changes_is_an_error(stages, count, order, message):
    model = Toggles()
    program = trace(Entry(model), find_units(model), (X, ), {}, CPU)
    model.count, model.order = count, order
    with pytest.raises(NotSplittable, match=message):
        run_split(model, X, stages=stages, program=program)


@pytest.mark.parametrize("changed, message", [
    (lambda y: y[:, :4], r"returned \(3, 4\).*where \(3, 8\).*was traced"),
    (lambda y: (y, y), "where .* was traced: what layers return must be the same"),
])
def test_layers_that_return_something_else_than_traced_are_an_error(changed, message):

    class Layer(nn.Linear):
        change = staticmethod(lambda y: y)

        def forward(self, x):
            return self.change(super().forward(x))

    model = nn.Sequential(Layer(WIDTH, WIDTH), linear())
    program = trace(Entry(model), find_units(model), (X, ), {}, CPU)
    Layer.change = staticmethod(changed)
    with pytest.raises(NotSplittable, match=message):
        run_split(model, X, program=program)


# How a stage leaves the forward.


def test_a_model_that_catches_exceptions_does_not_catch_the_stages_end():

    class Model(Base):

        def forward(self, x):
            for block in self.blocks:
                try:
                    x = block(x)
                except Exception:
                    raise AssertionError("caught what is not the model's") from None
            return x

    check(Model(), X)


def test_a_model_that_catches_everything_is_told():

    class Model(Base):

        def forward(self, x):
            for block in self.blocks:
                try:
                    x = block(x)
                except:  # noqa: E722
                    pass
            return x

    with pytest.raises(NotSplittable, match="caught the exception by which a stage leaves it.*Catch Exception"):
        run_split(Model(), X)


def test_context_managers_of_the_model_are_left_properly():
    entered = []

    class Model(Base):

        def forward(self, x):
            entered.append(+1)
            try:
                with torch.autocast("cpu", enabled=False):
                    for block in self.blocks:
                        x = block(x)
            finally:
                entered.append(-1)
            return x

    check(Model(), X)
    assert sum(entered) == 0 and not torch.is_autocast_enabled("cpu")


# Nothing stays behind.


def test_a_users_own_forward_on_a_layer_comes_back():
    model = nn.Sequential(linear(), linear())
    original = model[0].forward
    model[0].forward = lambda x: original(x) * 2
    check(model, X)
    assert model[0].__dict__["forward"](X).equal(original(X) * 2)


def test_the_module_is_as_before_after_a_stage_that_raised():

    class Fails(nn.Linear):
        fails = False

        def forward(self, x):
            if self.fails:
                raise KeyError("mine")
            return super().forward(x)

    model = nn.Sequential(linear(), Fails(WIDTH, WIDTH))
    entry, units = Entry(model), find_units(model)
    program = trace(entry, units, (X, ), {}, CPU)
    Fails.fails = True
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    with left_as_it_was(model), pytest.raises(KeyError, match="mine"):
        with replayed(entry, units, program, Span(0, 2), parameters, {}, (X, ), {}, lambda point: None):
            raise AssertionError("not reached")
    with left_as_it_was(model), pytest.raises(ZeroDivisionError), torch.no_grad():
        with replayed(entry, units, program, Span(0, 1), parameters, {}, (X, ), {}, lambda point: None):
            raise ZeroDivisionError


def test_a_stage_touches_no_weight_of_another():
    """The model's own parameters hold NaN meanwhile, so that reading one where a stage's copy belongs would show."""
    model = NanoGPT()
    expected = run_unsplit(model, IDS, IDS, loss=first)
    entry, units = Entry(model), find_units(model)
    program = trace(entry, units, (IDS, IDS), {}, CPU)
    copies = {name: p.detach().clone() for name, p in model.named_parameters()}
    boundary = {}
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
        starts = [*program.layer_starts(), program.end]
        for span in map(Span, starts, starts[1:]):
            own = {name: copies[name] for name in program.parameters_of(*span, units.parameters)}
            received = {value: boundary[value] for value in program.live(span.start)}
            with replayed(entry, units, program, span, own, received, (IDS, IDS), {}, torch.manual_seed) as handover:
                boundary.update(handover.values)
    assert torch.equal(handover.outputs[0][0], expected.loss)


# Random numbers and recomputation.


class Noisy(Base):
    """Random numbers in the layers and in the code between them."""

    def __init__(self):
        super().__init__(lambda: nn.Sequential(linear(), nn.Dropout(0.5)), count=4)

    def forward(self, x):
        for block in self.blocks:
            x = functional.dropout(block[1](block[0](x)) if isinstance(block, nn.Sequential) else block(x), 0.2)
        return x


def test_random_numbers_depend_on_the_call_and_not_on_the_cut():
    model = Noisy()
    whole = run_split(model, X, stages=1, seed=7)
    for stages in (2, 3, 4):
        assert_same(run_split(model, X, stages=stages, seed=7), whole)
    assert not torch.equal(run_split(model, X, stages=4, seed=8).loss, whole.loss)


class Dropped(nn.Module):

    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, x):
        return functional.dropout(self.inner(x), 0.5).relu()


class Checkpoints(Base):
    """Every layer under activation checkpointing, the first one twice."""

    def __init__(self, checkpoint=None):
        super().__init__(Dropped)
        self.checkpoint = checkpoint

    def forward(self, x):
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x) if self.checkpoint is None else self.checkpoint(block, x)
        return x


def checkpointed(checkpoint):
    """Trains alike models without and with checkpoints: both runs, and how often each ran a block."""
    plain, model = Checkpoints(), Checkpoints(checkpoint)
    model.load_state_dict(plain.state_dict())
    calls = {plain: [], model: []}
    for each in calls:
        for block in each.blocks:
            block.register_forward_pre_hook(lambda *_, seen=calls[each]: seen.append(1))
    return plain, model, calls


TORCHS_CHECKPOINTS = [partial(checkpoint, use_reentrant=reentrant) for reentrant in (False, True)]


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("kind", TORCHS_CHECKPOINTS, ids=["non-reentrant", "reentrant"])
def test_checkpointed_layers_are_recomputed_once_with_the_same_masks(kind, stages):
    plain, model, calls = checkpointed(kind)
    assert_same(run_split(model, X, stages=stages, seed=9), run_split(plain, X, stages=stages, seed=9))
    assert len(calls[model]) == len(calls[plain])


def test_a_checkpointing_function_of_its_own_draws_the_same_masks_again():
    plain, model, calls = checkpointed(non_reentrant_checkpoint)
    assert_same(run_split(model, X, seed=9), run_split(plain, X, seed=9))
    assert len(calls[model]) > len(calls[plain])  # nobody knows it for one, so it recomputes


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_layers_of_two_stages(reentrant):
    model = checkpointed_in_pairs(lambda layers, x: checkpoint_sequential(layers, 2, x, use_reentrant=reentrant))
    assert_same(run_split(model, X.clone().requires_grad_(), stages=4), run_unsplit(model, X.clone().requires_grad_()))


def test_a_checkpointing_function_of_its_own_around_layers_of_two_stages_is_an_error():
    model = checkpointed_in_pairs(lambda layers, x: non_reentrant_checkpoint(nn.Sequential(*layers), x))
    with pytest.raises(NotSplittable, match="Turn activation checkpointing off"):
        run_split(model, X, stages=4)


def checkpointed_in_pairs(run) -> nn.Module:

    class Model(Base):

        def __init__(self):
            super().__init__(count=4)

        def forward(self, x):
            return run(list(self.blocks), x)

    return Model()


class OwnReentrantCheckpoint(torch.autograd.Function):

    @staticmethod
    def forward(ctx, block, x):
        return block(x)


def test_a_reentrant_checkpointing_function_of_its_own_is_refused():
    model = Checkpoints(OwnReentrantCheckpoint.apply)
    with pytest.raises(NotSplittable, match="'blocks.0' is called without gradients.*use torch.utils.checkpoint"):
        run_split(model, X.clone().requires_grad_())


def test_layers_that_the_model_runs_without_gradients():

    class Model(Base):

        def forward(self, x):
            with torch.no_grad():
                x = self.blocks[0](x)
            return self.blocks[2](self.blocks[1](x))

    assert check(Model(), X).gradients["blocks.0.weight"] is None


def test_positions_selected_by_a_mask_of_the_inputs():

    class Model(Base):

        def forward(self, x, mask):
            for block in self.blocks:
                x = functional.gelu(block(x))
            return x.new_zeros(mask.shape).masked_scatter(mask, x[mask].pow(2).sum(-1))

    check(Model(), X, torch.tensor([True, False, True]))


class Holder:
    """An object that the model fills and hands to its layers, which add to it: a cache that starts with a prefix."""

    def __init__(self, start):
        self.entries = {"start": [start]}


class Prefixed(Base):

    class Layer(nn.Module):

        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x, holder):
            holder.entries["start"].append(x)
            return self.inner(x) * holder.entries["start"][0]

    def __init__(self):
        super().__init__(self.Layer)
        self.prefix = nn.Embedding(3, WIDTH)

    def forward(self, x):
        holder = Holder(self.prefix(torch.arange(3)))
        for block in self.blocks:
            x = block(x, holder)
        return x


def test_what_an_object_holds_for_the_layers_reaches_every_stage():
    check(Prefixed(), X)

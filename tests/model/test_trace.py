"""What a trace writes down, and what it refuses."""

import pickle

import pytest
import torch
from torch import nn

from mobius_ds.model.discovery import find_units
from mobius_ds.model.errors import NotSplittable
from mobius_ds.model.intercept import Entry
from mobius_ds.model.program import Program, SameAsArgument, Value, spans
from mobius_ds.model.trace import trace
from tests.model.splitting import CPU, check, left_as_it_was, loss_of, run_split


def traced(model: nn.Module, *args, **kwargs) -> Program:
    with left_as_it_was(model):
        return trace(Entry(model), find_units(model), args, kwargs, CPU)


class Blocks(nn.Module):
    """Three layers with the code between them given: ``step(model, number, h)`` returns what goes on."""

    def __init__(self, step, layer=lambda: nn.Linear(4, 4)):
        super().__init__()
        self.blocks = nn.ModuleList([layer() for _ in range(3)])
        self.step = step

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = self.step(self, number, block(x))
        return x


INPUT = torch.linspace(-1, 1, 8).view(2, 4)


def test_a_program_names_calls_needs_and_boundaries():
    program = traced(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), INPUT)
    assert [call.unit for call in program.calls] == ["0", "2", ""]
    assert program.calls[1].needs == {Value(0, 0)}
    assert program.live(1) == (Value(0, 0), ) and program.boundary_bytes(1) == 2 * 3 * 4
    assert program.spec(Value(0, 0)).requires_grad
    assert program.layer_starts() == (0, 1)


def test_a_program_can_be_sent_to_another_rank():
    program = traced(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), INPUT)
    assert pickle.loads(pickle.dumps(program)) == program


def test_layers_alike_are_asked_once_and_without_arithmetic():
    ran = []

    class Layer(nn.Linear):

        def __init__(self, layer_idx):
            super().__init__(4, 4)
            self.layer_idx = layer_idx

        def forward(self, x):
            x = super().forward(x)
            ran.append((self.layer_idx, type(x).__name__))
            return x

    traced(nn.Sequential(*map(Layer, range(4))), INPUT)
    # The input needs no gradient, what layer 0 returns does: layers 2 and 3 are like layer 1.
    assert ran == [(0, "FakeTensor"), (1, "FakeTensor")]


def test_layers_with_equal_weights_may_return_other_shapes():
    model = nn.Sequential(nn.Conv2d(2, 2, 3, stride=2), nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(50, 3))
    check(model, torch.rand(1, 2, 15, 15))

    class Narrowed(nn.Linear):  # by an attribute that only its own code knows of

        def __init__(self, width):
            super().__init__(4, 4)
            self.width = width

        def forward(self, x):
            return super().forward(x)[:, :self.width]

    check(nn.Sequential(*map(Narrowed, (4, 4, 4, 3))), INPUT)


def test_a_layer_may_look_at_its_data():

    class Router(nn.Linear):

        def forward(self, x):
            y = super().forward(x)
            rows = (y.sum(-1) > 0).nonzero().flatten()
            return y.index_add(0, rows, y[rows]) if len(rows) else y

    check(nn.Sequential(*[Router(4, 4) for _ in range(3)]), INPUT)


DECISIONS = {
    "truth": lambda model, number, h: h * 2 if h.sum() > 0 else h,
    "item": lambda model, number, h: h * h.abs().max().item(),
    "tolist": lambda model, number, h: h[:len(h.flatten().tolist())],
    "nonzero": lambda model, number, h: h[(h.sum(-1) > -100).nonzero().flatten()],
    "mask": lambda model, number, h: h[h.sum(-1) > -100],
    "equal": lambda model, number, h: h if torch.equal(h, h) else 2 * h,
}


@pytest.mark.parametrize("decision", DECISIONS)
def test_decisions_on_computed_values_are_refused_with_the_place(decision):
    with pytest.raises(NotSplittable, match=r"Blocks decides on a computed value.*after its module 'blocks.0'.*layers"):
        traced(Blocks(DECISIONS[decision]), INPUT)


def test_decisions_on_inputs_are_fine():

    class Chooses(nn.Module):

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x, mask):
            x = self.blocks[0](x)
            if mask is not None and not mask.all():
                x = x * mask
            return self.blocks[1](x)

    model = Chooses()
    check(model, INPUT, None)
    check(model, INPUT, torch.tensor([[True, True, False, True]]))


def test_an_error_of_the_model_is_its_own_and_leaves_nothing_behind():
    with pytest.raises(RuntimeError, match="mat1 and mat2|size|shape"):
        traced(nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3)), INPUT)


def test_a_layer_that_keeps_a_tensor_for_others_is_refused():

    class Counts(nn.Linear):

        def forward(self, x):
            x = super().forward(x)
            self.aside = x.pow(2).mean()
            return x

    with pytest.raises(NotSplittable, match="the return of Blocks uses a tensor that module 'blocks.0' made.*Return it"):
        trace_of = Blocks(lambda model, number, h: h + model.blocks[0].aside if number == 2 else h,
                          lambda: Counts(4, 4))
        trace(Entry(trace_of), find_units(trace_of), (INPUT, ), {}, CPU)


class AddsInPlace(nn.Linear):

    def forward(self, x):
        x += self.weight[0]
        return x


class LooksAndAddsInPlace(nn.Linear):

    def forward(self, x):
        x += self.weight[0] * (1 if x.sum() > 1000 else 2)
        return x


@pytest.mark.parametrize("layer", [AddsInPlace, LooksAndAddsInPlace])
def test_a_layer_that_writes_into_its_argument_returns_a_new_value(layer):
    model = nn.Sequential(nn.Linear(4, 4), layer(4, 4), layer(4, 4))
    program = traced(model, INPUT)
    assert not any(isinstance(leaf, SameAsArgument) for call in program.calls for leaf in call.returns)
    assert program.overwritten == {Value(0, 0), Value(1, 0)}
    check(model, INPUT)


@pytest.mark.parametrize("layer", [AddsInPlace, LooksAndAddsInPlace])
def test_what_a_layer_wrote_into_is_not_used_as_if_it_had_not(layer):

    class Remembers(Blocks):

        def forward(self, x):
            first = self.blocks[0](x)
            return self.blocks[2](self.blocks[1](first)) + first

    model = Remembers(None)
    model.blocks[1] = layer(4, 4)
    with pytest.raises(NotSplittable, match="module 'blocks.1' made or changed without returning it"):
        run_split(model, INPUT, loss=loss_of)


def test_a_partition_fits_other_inputs_of_the_same_model():

    class Embeds(nn.Module):

        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

        def forward(self, ids=None, embeds=None, skip=False):
            x = self.embed(ids) if embeds is None else embeds
            for block in self.blocks[:1] if skip else self.blocks:
                x = block(x)
            return x

    model = Embeds()
    reference = traced(model, torch.tensor([[1, 2]]))
    shorter = traced(model, embeds=torch.rand(1, 2, 4))
    assert spans(reference, [0, 1, 2], shorter) == ((0, 0), (0, 1), (1, 2))
    with pytest.raises(NotSplittable, match="starts at layer 'blocks.1', which this forward does not call"):
        spans(reference, [0, 1, 2], traced(model, torch.tensor([[1, 2]]), skip=True))

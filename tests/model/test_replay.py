"""Values on their way through models of many shapes, stage by stage against themselves unsplit: equal bit for bit."""

from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.model.splitting import check
from tests.model.toys import IDS, WIDTH, X, Base, NanoGPT, blocks, first, linear


# Where the layers are.


def test_nested_chains_with_layers_that_own_nothing():
    check(nn.Sequential(nn.Sequential(linear(), nn.ReLU()), nn.Tanh(), nn.Sequential(linear(), nn.Sequential(linear()))), X)


def test_lists_of_lists():

    class Model(nn.Module):

        def __init__(self):
            super().__init__()
            self.groups = nn.ModuleList([blocks(2), blocks(1), blocks(2)])

        def forward(self, x):
            for group in self.groups:
                for block in group:
                    x = functional.gelu(block(x))
            return x

    check(Model(), X)


def test_a_dictionary_that_holds_everything():
    assert check(NanoGPT(), IDS, IDS.flip(1), loss=first).shared == {"transformer.wte.weight"}


def test_layers_named_by_patterns():

    class Model(nn.Module):

        def __init__(self):
            super().__init__()
            self.one, self.two, self.head = linear(), linear(), linear()

        def forward(self, x):
            return self.head(self.two(self.one(x).relu()).relu())

    assert [call.unit for call in check(Model(), X, patterns=["one", "two"]).program.calls] == ["one", "two", "head", ""]


# Parameters in the model's own code.


def test_raw_parameters_before_and_after_the_layers():

    class Model(Base):

        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, WIDTH)
            self.position = nn.Parameter(torch.rand(4, WIDTH))
            self.scale = nn.Parameter(torch.rand(WIDTH))

        def forward(self, ids):
            x = self.embed(ids) + self.position[:ids.shape[1]]
            for block in self.blocks:
                x = block(x)
            return x * self.scale

    assert not check(Model(), IDS).shared


def test_a_head_that_uses_the_embeddings_weight():

    class Model(Base):

        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, WIDTH)

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return functional.linear(x, self.embed.weight)

    assert check(Model(), IDS).shared == {"embed.weight"}


def test_a_parameter_of_a_layer_used_by_the_models_own_code():

    class Model(Base):

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x @ self.blocks[0].weight

    assert check(Model(), X).shared == {"blocks.0.weight"}


def test_a_module_used_twice():
    shared = linear()
    assert check(nn.Sequential(shared, nn.ReLU(), linear(), shared), X).shared == {"0.weight", "0.bias"}


def test_a_module_with_two_names():

    class Model(Base):

        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.alias = self.norm

        def forward(self, x):
            x = self.norm(x)
            for block in self.blocks:
                x = block(x)
            return self.alias(x)

    assert check(Model(), X).shared == {"norm.weight", "norm.bias"}


def test_a_parameter_nobody_uses_has_no_gradient():

    class Model(Base):

        def forward(self, x):
            return self.blocks[2](self.blocks[0](x))

    assert check(Model(), X).gradients["blocks.1.weight"] is None


# Values that skip layers.


def test_a_residual_around_all_layers():

    class Model(Base):

        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(8, WIDTH)

        def forward(self, ids):
            first = x = self.embed(ids)
            for block in self.blocks:
                x = block(x).relu()
            return x + first

    program = check(Model(), IDS).program
    assert all(len(program.live(cut)) == 2 for cut in (2, 3)), "the embedding passes through every stage"


def test_residuals_in_the_models_own_code():

    class Model(Base):

        def __init__(self):
            super().__init__()
            self.embed, self.position = nn.Embedding(8, WIDTH), nn.Embedding(4, WIDTH)

        def forward(self, ids):
            x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
            for block in self.blocks:
                x = x + block(x)
            return x

    # Every stage sums up what the layers before it returned, so gradients of the summands add up in another order.
    check(Model(), IDS, close=True)


def test_skips_between_layers_as_in_a_unet():

    class Model(Base):

        def __init__(self):
            super().__init__(count=6)

        def forward(self, x):
            skips = []
            for block in self.blocks[:3]:
                x = block(x).tanh()
                skips.append(x)
            for block in self.blocks[3:]:
                x = block(x + skips.pop())
            return x

    # A skipped value is recomputed by the code between the layers wherever it is needed: sums have another order.
    check(Model(), X, close=True)


def test_an_encoder_and_a_decoder():

    class Decodes(nn.Module):

        def __init__(self):
            super().__init__()
            self.own, self.other = linear(), linear()

        def forward(self, x, *, memory):
            return x + self.own(x) * self.other(memory)

    class Model(nn.Module):

        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = blocks(2), blocks(3, Decodes)

        def forward(self, x, y):
            for block in self.encoder:
                x = block(x)
            for block in self.decoder:
                y = block(y, memory=x)
            return y

    check(Model(), X, X.flip(0))


# In place.


@pytest.mark.parametrize("write", [
    lambda x: x.mul_(2), lambda x: functional.relu_(x), lambda x: x.__iadd__(1), lambda x: x[:, 0].zero_(),
    lambda x: x.masked_fill_(X > 1, 0), lambda x: torch.mul(x.detach(), 3, out=torch.empty(0))], ids=range(6))
def test_the_models_code_may_write_into_what_layers_return(write):

    class Model(Base):

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
                write(x)
            return x

    check(Model(), X)


def test_activations_in_place_between_layers():
    check(nn.Sequential(linear(), nn.ReLU(inplace=True), linear(), nn.ReLU(inplace=True), linear()), X)


def test_a_layer_that_starts_with_an_activation_in_place():

    class Layer(nn.Linear):

        def forward(self, x):
            return super().forward(functional.relu(x, inplace=True))

    check(nn.Sequential(linear(), Layer(WIDTH, WIDTH), Layer(WIDTH, WIDTH)), X)


# What layers take and return.


class Rich(nn.Module):
    """Returns floats, a bool tensor, None, a string and nested tuples in a dictionary."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, carried, rope, *, shift=None, training=True):
        x = carried["x"] @ self.weight
        cos, (sin, ) = rope
        x = x * cos + x.roll(1, -1) * sin
        if shift is not None:
            x = x + shift
        return {"x": x, "positive": x > 0, "nothing": None, "name": "rich", "pair": (x.detach() * 2, [x.sum()])}


def test_dictionaries_none_bools_nested_tuples_and_keywords():

    class Model(nn.Module):

        def __init__(self):
            super().__init__()
            self.blocks = blocks(3, Rich)

        def forward(self, x):
            carried = {"x": x}
            for number, block in enumerate(self.blocks):
                carried = block(carried, (X.cos(), (X.sin(), )), shift=carried.get("pair", (None, ))[0], training=True)
                assert carried["nothing"] is None and carried["name"] == "rich"
                carried["x"] = torch.where(carried["positive"], carried["x"], -carried["x"])
            return carried["x"] + carried["pair"][1][0]

    check(Model(), X, close=True)


class Pair(NamedTuple):
    hidden: torch.Tensor
    aside: torch.Tensor


def test_named_tuples_and_the_same_object_handed_through():

    class Layer(nn.Module):

        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, pair):
            return Pair(self.inner(pair.hidden) + pair.aside, pair.aside)

    class Model(Base):

        def __init__(self):
            super().__init__(Layer)
            self.embed = linear()

        def forward(self, x):
            pair = Pair(x, self.embed(x))
            for block in self.blocks:
                pair = block(pair)
            return pair.hidden

    program = check(Model(), X).program
    assert len(program.live(3)) == 2, "what is handed through is one value, not one per layer"


def test_buffers_and_tables_computed_by_the_model():

    class Model(Base):

        def __init__(self):
            super().__init__(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True))
            self.register_buffer("table", torch.rand(4, WIDTH))

        def forward(self, x):
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            x = x + self.table[:x.shape[1]]
            for block in self.blocks:
                x = block(x, src_mask=mask, is_causal=True)
            return x

    check(Model(), torch.rand(2, 4, WIDTH))

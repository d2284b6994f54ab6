"""Which modules are found to be layers, and which parameters belong to them."""

import pytest
from torch import nn

from mobius_ds.model.discovery import declared_layers, find_units
from mobius_ds.model.errors import NotSplittable
from tests.model.splitting import layers_of


def linear() -> nn.Module:
    return nn.Linear(4, 4)


class Model(nn.Module):
    """Holds whatever it is given."""

    def __init__(self, **children: nn.Module):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def outer_of(model: nn.Module):
    units = find_units(model)
    return [name for name in units.modules if name not in units.layers]


def test_entries_of_a_list():
    model = Model(embed=nn.Embedding(4, 4), blocks=nn.ModuleList([linear(), linear()]), norm=nn.LayerNorm(4))
    assert layers_of(model) == ["blocks.0", "blocks.1"]
    assert outer_of(model) == ["embed", "norm"]


def test_nested_chains_are_entered():
    assert layers_of(nn.Sequential(nn.Sequential(linear(), nn.ReLU()), linear())) == ["0.0", "1"]


def test_lists_of_lists_are_entered():
    model = Model(stages=nn.ModuleList([nn.ModuleList([linear(), linear()]), nn.ModuleList([linear()])]))
    assert layers_of(model) == ["stages.0.0", "stages.0.1", "stages.1.0"]


def test_a_dictionary_that_holds_everything():
    model = Model(transformer=nn.ModuleDict({"wte": nn.Embedding(4, 4), "h": nn.ModuleList([linear()]),
                                             "ln_f": nn.LayerNorm(4)}), lm_head=linear())
    assert layers_of(model) == ["transformer.h.0"]
    assert outer_of(model) == ["transformer.wte", "transformer.ln_f", "lm_head"]


def test_lists_inside_a_layer_are_its_own_affair():
    model = Model(blocks=nn.ModuleList([Model(experts=nn.ModuleList([linear(), linear()])) for _ in range(2)]))
    assert layers_of(model) == ["blocks.0", "blocks.1"]


def test_a_chain_with_its_own_forward_is_one_layer():

    class Residual(nn.Sequential):

        def forward(self, x):
            return x + super().forward(x)

    assert layers_of(nn.Sequential(Residual(linear(), nn.ReLU()), linear())) == ["0", "1"]


def test_layers_without_parameters_are_no_units():
    assert list(find_units(nn.Sequential(linear(), nn.ReLU(), nn.Flatten(), linear())).modules) == ["0", "3"]


def test_a_layer_used_twice_is_found_once():
    shared = linear()
    assert layers_of(nn.Sequential(shared, linear(), shared)) == ["0", "1"]


@pytest.mark.parametrize("patterns, found", [(["a", "b"], ["a", "b"]), (["*.proj"], ["b.proj"]), (["b*"], ["b"])])
def test_patterns_name_the_layers(patterns, found):
    model = Model(a=linear(), b=Model(proj=linear()), c=linear())
    assert layers_of(model, patterns) == found


def test_a_model_without_layers_is_told_the_way_out():
    with pytest.raises(NotSplittable, match=r'no layers.*"layers": \["pattern".*nn.Sequential.*PipelineModule'):
        find_units(Model(a=linear(), b=linear()))
    with pytest.raises(NotSplittable, match="no module of Model matches the pattern 'nowhere'.* Its modules are a, b"):
        find_units(Model(a=linear(), b=linear()), patterns=["a", "nowhere"])
    with pytest.raises(NotSplittable, match="no layers with parameters"):
        find_units(nn.Sequential(nn.ReLU(), nn.ReLU()))


def test_tied_parameters_have_one_name():
    model = Model(embed=nn.Embedding(4, 4), blocks=nn.ModuleList([linear()]), head=nn.Linear(4, 4, bias=False))
    model.head.weight = model.embed.weight
    assert find_units(model).parameters["head"] == find_units(model).parameters["embed"] == ("embed.weight",)


def test_layers_are_counted_before_any_forward():
    """Outer units between two layers are one."""
    model = nn.ModuleDict({"tokens": linear(), "blocks": nn.ModuleList([linear(), linear()]), "norm": linear(),
                           "head": linear()})
    assert declared_layers(model, find_units(model)) == 4
    alone = nn.Sequential(linear(), linear())
    assert declared_layers(alone, find_units(alone)) == 2

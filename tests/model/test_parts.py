"""Where a model's parameters and buffers hang."""

import torch
from torch import nn

from mobius_ds.model.discovery import find_units
from mobius_ds.model.intercept import Entry
from mobius_ds.model.parts import Parts
from mobius_ds.model.replay import Replayer
from mobius_ds.model.program import Span, spans
from mobius_ds.model.trace import trace

CPU = torch.device("cpu")
X = torch.ones(2, 4)


def deep(layers: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(layers)))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


def test_a_tied_parameter_is_replaced_in_every_place_and_put_back():
    model = tied()
    weight, other = model[0].weight, torch.zeros(4, 4)
    with Parts(model).replaced({"0.weight": other}):
        assert model[0].weight is other and model[1].weight is other
    assert model[0].weight is weight and model[1].weight is weight


def test_what_libraries_note_on_a_parameter_is_noted_on_what_takes_its_place():
    model = tied()
    model[0].weight.note = "of a library"
    parts, copy = Parts(model), torch.zeros(4, 4)
    assert parts.like_parameters({"0.weight": copy})["0.weight"] is copy and copy.note == "of a library"
    assert parts.stand_ins(CPU)["0.weight"].note == "of a library"


def test_what_is_replaced_twice_is_put_back_in_turn():
    model = tied()
    weight, outer, inner, parts = model[0].weight, torch.zeros(4, 4), torch.ones(4, 4), Parts(model)
    with parts.replaced({"0.weight": outer}):
        with parts.replaced({"0.weight": inner}):
            assert model[1].weight is inner
        assert model[1].weight is outer
    assert model[1].weight is weight


def test_stand_ins_have_the_shapes_of_all_parameters_and_the_memory_of_one_number():
    model = deep()
    stand_ins = Parts(model).stand_ins(CPU)
    assert {name: tensor.shape for name, tensor in stand_ins.items()} == \
        {name: parameter.shape for name, parameter in model.named_parameters()}
    assert {tensor.untyped_storage().nbytes() for tensor in stand_ins.values()} == {4}


def test_scratch_buffers_keep_what_is_written_into_them():
    model = deep(1)
    with Parts(model).scratch_buffers({"0.1.running_mean"}) as copies:
        model(X + torch.randn(2, 4))
        assert set(copies) == {"0.1.running_mean"}
    assert not model[0][1].running_mean.any() and model[0][1].running_var.ne(1).all()


def test_running_a_stage_does_not_walk_through_the_model(monkeypatch):
    """A stage runs for every microbatch, and a walk through a deep model takes longer than its own work does."""
    model = deep()
    entry, units = Entry(model), find_units(model)
    program = trace(entry, units, (X, ), {}, CPU)
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    replayer = Replayer(entry, units, Parts(model))
    walks = []
    named_modules = nn.Module.named_modules
    monkeypatch.setattr(nn.Module, "named_modules", lambda *args, **kwargs: walks.append(1) or named_modules(*args, **kwargs))
    with replayer.ready(CPU):
        for span in spans(program, [0], program):
            names = program.parameters_of(*span, units.parameters)
            with replayer.replayed(program, span, {name: parameters[name] for name in names}, {}, (X, ), {}, lambda n: None):
                pass
    assert not walks
    with Parts(model).scratch_buffers():
        assert walks


def test_between_two_stages_the_model_is_the_scripts():
    """A sweep waits for other ranks there, and a signal handler may save or even run the model."""
    model = deep(2).eval()
    expected = model(X)
    entry, units = Entry(model), find_units(model)
    program = trace(entry, units, (X, ), {}, CPU)
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    replayer = Replayer(entry, units, Parts(model))
    with replayer.ready(CPU):
        assert torch.equal(model(X), expected)
        with replayer.replayed(program, Span(0, program.end), zeros, {}, (X, ), {}, lambda n: None) as handover:
            assert not handover.outputs[0][0].any()
        assert torch.equal(model(X), expected)

"""Ways to call a model, or only a part of it: compiled by the script, and past the pipeline."""

from typing import Any, Dict, List

import torch
from torch import nn

from tests.features import refused, works
from tests.ranks import run_ranks
from tests.runtime.jobs import config, failure, initialize, language_model, mine

def layers_wrapped(model: nn.Module) -> nn.Module:
    model.blocks = nn.ModuleList(torch.compile(block) for block in model.blocks)
    return model


def in_place(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_submodule(name).compile()
    return model


BLOCKS = [f"blocks.{number}" for number in range(4)]
COMPILED_BEFORE = {
    "torch.compile(layer)": layers_wrapped,
    "layer.compile()": lambda model: in_place(model, *BLOCKS),
    "a part of each layer": lambda model: in_place(model, *(f"{block}.up" for block in BLOCKS)),
    "torch.compile(model)": torch.compile,
    "model.compile()": lambda model: in_place(model, ""),
}
COMPILED_AFTER = {
    "engine.compile()": lambda engine: engine.compile(),
    "engine.module.compile()": lambda engine: in_place(engine.module, ""),
    "layer.compile() of the engine's": lambda engine: in_place(engine.module, *BLOCKS),
}


def losses_of(model: nn.Module, after: Any = None) -> List[float]:
    engine = initialize(model, config())
    if after:
        after(engine)
    losses = []
    for step in range(3):
        loss = engine(*mine(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(engine.module(*mine(9)).loss.item())
    engine.destroy()
    return losses


def compiled_in_every_way() -> Dict[str, List[float]]:
    losses = {"not at all": losses_of(language_model())}
    for way, compiled in COMPILED_BEFORE.items():
        model = language_model()
        losses[way] = losses_of(compiled(model))
    for way, compiled in COMPILED_AFTER.items():
        losses[way] = losses_of(language_model(), compiled)
    return losses


@works("Loops", "torch.compile on layers, the model or the engine: they run as they are written, and a warning says so")
def test_what_is_compiled_runs_as_it_is_written():
    for losses in run_ranks(2, compiled_in_every_way):
        assert {way: seen for way, seen in losses.items() if seen != losses["not at all"]} == {}


def compiled_and_left() -> bool:
    model = torch.compile(language_model())
    own = model.__dict__["forward"]
    initialize(model, config()).destroy()
    return model.__dict__["forward"] is own


def test_a_compiled_model_is_left_as_it_was():
    assert run_ranks(1, compiled_and_left) == [True]


def a_part_by_itself() -> Dict[str, str]:
    def said_of(loss_of: Any) -> str:
        engine = initialize(model, config())
        engine.backward(loss_of(engine, engine(*mine(0))))
        said = failure(engine.step)
        engine.destroy()
        return said

    model = language_model()
    model(*mine(0)).loss.backward()  # before there is an engine: forgotten
    return {"whole": said_of(lambda engine, output: output.loss),
            "layer": said_of(lambda engine, output: output.loss + engine.module.blocks[1](torch.ones(2, 16)).mean()),
            "weights": said_of(lambda engine, output: output.loss + engine.module.norm.weight.pow(2).sum())}


@refused("Loops", "a loss from a part of the model called by itself, or from parameters", "got a gradient past the pipeline")
def test_a_gradient_past_the_pipeline_is_an_error_and_not_lost():
    for said in run_ranks(2, a_part_by_itself):
        assert said["whole"] == "nothing was raised"
        assert "'blocks.1." in said["layer"] and "got a gradient past the pipeline" in said["layer"]
        assert "'norm.weight' got a gradient past the pipeline" in said["weights"]

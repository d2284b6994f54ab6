"""Models, optimizers and calls that cannot be right, and unusual ones that are."""

import copy
import random
from typing import Any, Callable, Dict, NamedTuple, Optional

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.bad_input.cases import Case, check
from tests.features import survives
from tests.ranks import run_ranks
from tests.runtime.jobs import config, failure, initialize, rank_and_size, train_alone

SGD = {"type": "SGD", "params": {"lr": 0.1}}


class Chain(nn.Module):
    """Layers one after another; the loss is a mean square."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList(layers or [nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.float().pow(2).mean()


class DecidesOnValues(Chain):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if x.sum() > 0:
                x = -x
        return x.pow(2).mean()


class RunsNoLayer(Chain):
    def forward(self, x):
        return x.pow(2).mean()


class ChangesItsOrder(Chain):
    turned = False

    def forward(self, x):
        for block in reversed(self.blocks) if self.turned else self.blocks:
            x = block(x)
        return x.pow(2).mean()


class SkipsAtRandom(Chain):
    def forward(self, x):
        for block in self.blocks:
            x = block(x) if random.random() < 0.5 else x
        return x.pow(2).mean()


class FailsOnOneRank(Chain):
    def forward(self, x):
        if rank_and_size()[0] == 1:
            raise KeyError("the script's own mistake")
        return super().forward(x)


class ComplexLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight).real


class WholeNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2), requires_grad=False)

    def forward(self, x):
        return x * self.scale


class Embedded(nn.Module):
    def __init__(self, sparse: bool):
        super().__init__()
        self.tokens = nn.Embedding(8, 4, sparse=sparse)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        x = self.tokens(x.long())
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def with_meta() -> nn.Module:
    return Chain(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))


def with_experts() -> nn.Module:
    from deepspeed.moe.layer import MoE
    return Chain(nn.Linear(4, 4), MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2))


def views() -> nn.Module:
    """Weights that are parts of one tensor, one of them turned."""
    torch.manual_seed(2)
    base = torch.randn(8, 4)
    model = Chain(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model.blocks[0].weight, model.blocks[1].weight = nn.Parameter(base[:4]), nn.Parameter(base[4:].t())
    return model


def normed(norm: Callable) -> Callable[[], nn.Module]:
    return lambda: Chain(*(norm(nn.Linear(4, 4)) for _ in range(3)))


class Wrong(NamedTuple):
    """A model and what is made of it."""

    model: Callable[[], nn.Module]
    optimizer: Optional[Callable[[nn.Module], torch.optim.Optimizer]] = None
    before_the_second: Callable[[nn.Module], Any] = lambda model: None


def foreign(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)


WRONG = [
    Case("no layers", Wrong(lambda: nn.Linear(4, 4)), "has no layers with parameters in an nn.ModuleList or nn.Sequential"),
    Case("no parameters", Wrong(lambda: Chain(nn.ReLU())), "has no layers with parameters"),
    Case("a script module", Wrong(lambda: torch.jit.script(nn.Linear(4, 4))), "has no layers with parameters"),
    Case("on the meta device", Wrong(with_meta), "parameter 'blocks.1.weight' is on the meta device and has no values"),
    Case("a lazy module", Wrong(lambda: Chain(nn.Linear(4, 4), nn.LazyLinear(4))),
         "'blocks.1.weight' is one of a lazy module and has no shape yet. Call the model once"),
    Case("complex parameters", Wrong(lambda: Chain(nn.Linear(4, 4), ComplexLayer())),
         "parameter 'blocks.1.weight' is torch.complex64, and Mobius keeps fp32 masters"),
    Case("SyncBatchNorm", Wrong(lambda: Chain(nn.Linear(4, 4), nn.SyncBatchNorm(4))),
         "does not run SyncBatchNorm (module 'blocks.1'): its statistics come from all ranks at once"),
    Case("experts on several ranks", Wrong(with_experts), "DeepSpeed's MoE with ep_size > 1 (module 'blocks.1')"),
    Case("DistributedDataParallel", Wrong(lambda: nn.parallel.DistributedDataParallel(Chain())),
         "a model in DistributedDataParallel: it distributes the model itself. Give deepspeed.initialize the module inside"),
    Case("it decides on values", Wrong(DecidesOnValues), "decides on a computed value in its own forward, after its module "
         "'blocks.0', outside any layer"),
    Case("it runs no layer", Wrong(RunsNoLayer), "the first forward ran none of the model's layers"),
    Case("a parameter of another model", Wrong(Chain, foreign),
         "holds a parameter of shape (3,) that is not one of the model's"),
    Case("an optimizer with a closure", Wrong(Chain, lambda model: torch.optim.LBFGS(model.parameters())),
         "LBFGS computes losses of its own inside its step (a closure)"),
    Case("an optimizer of sparse gradients", Wrong(lambda: Embedded(sparse=True),
                                                   lambda model: torch.optim.SparseAdam(list(model.parameters()))),
         "SparseAdam does not support dense gradients"),
    Case("no argument", Wrong(lambda: Chain(nn.Linear(4, 4), nn.Bilinear(4, 4, 4))),
         "missing 1 required positional argument"),
    Case("another dtype", Wrong(Chain, None, lambda model: model.double()), "has left the memory that Mobius trains it in"),
]

ON_ONE_RANK = [
    Case("its order changes", Wrong(ChangesItsOrder, None, lambda model: setattr(model, "turned", True)),
         "the model called module 'blocks.2' where it called 'blocks.0'"),
    Case("it skips layers at random", Wrong(SkipsAtRandom), "the model called module"),
    Case("it raises on one rank", Wrong(FailsOnOneRank), "the script's own mistake"),
]
"""One rank meets the mistake; the others name that rank."""

HARMLESS = {
    "one layer and two ranks": lambda: Chain(nn.Linear(4, 4)), "sparse embeddings": lambda: Embedded(sparse=True),
    "whole numbers": lambda: Chain(nn.Linear(4, 4), WholeNumbers()), "views of one tensor": views,
    "weight_norm": normed(parametrizations.weight_norm), "the old weight_norm": normed(nn.utils.weight_norm),
    "orthogonal": normed(parametrizations.orthogonal),
}
"""Unusual models, which train as they do on their own."""


def inputs(number: int = 0) -> torch.Tensor:
    return torch.tensor([[1.0, 2.0, 3.0, 1.0], [2.0, 1.0, 1.0, 3.0]])


def trained(wrong: Wrong, steps: int = 2) -> list:
    torch.manual_seed(1)
    random.seed(3)
    model = wrong.model()
    options = {"optimizer": wrong.optimizer(model)} if wrong.optimizer else {}
    engine = initialize(model, config(timeout_seconds=20.0, optimizer=SGD), **options)
    losses = []
    try:
        for step in range(steps):
            loss = engine(inputs())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            wrong.before_the_second(model)
    finally:
        engine.destroy()
    return losses


def alone(make: Callable[[], nn.Module]) -> list:
    torch.manual_seed(1)
    model = make()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.sparse = False
    return train_alone(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), 2, 1,
                       lambda model, batch: model(batch), inputs)


def of_two_engines() -> Dict[str, str]:
    """Two engines that want the same parameters."""
    model, layer = Chain(), nn.Linear(4, 4)
    first, second = (initialize(model, config(timeout_seconds=20.0, optimizer=SGD)) for _ in range(2))
    said = {"one module": failure(lambda: first(inputs()))}
    second.backward(second(inputs()))
    second.destroy(), first.destroy()
    engines = [initialize(Chain(layer, nn.Linear(4, 4)), config(timeout_seconds=20.0, optimizer=SGD)) for _ in range(2)]
    said["one layer"] = failure(lambda: engines[0](inputs()))
    return said


TWO_ENGINES = [
    Case("one module", None, "this engine's module belongs to a later engine"),
    Case("one layer", None, "or another engine on a model that shares it do"),
]


def every_model() -> Dict[str, Any]:
    said = {case.what: failure(lambda: trained(case.input)) for case in WRONG}
    harmless = {what: (trained(Wrong(make)), alone(copy.deepcopy(make))) for what, make in HARMLESS.items()}
    said.update(of_two_engines())
    return {"said": said, "harmless": harmless,
            "on one rank": {case.what: failure(lambda: trained(case.input, steps=6)) for case in ON_ONE_RANK}}


@survives("Bad input", "a model that cannot be cut, or an optimizer that is not its own",
          "one error on every rank that names the module or parameter and the way out")
@survives("Bad input", "sparse embeddings, whole-number parameters, weights that are views of one tensor, weight_norm",
          "trained as without Mobius")
@survives("Bad input", "a model whose path changes from call to call, or that raises on one rank",
          "the rank that meets it says where; the others name that rank")
def test_models():
    results = run_ranks(2, every_model)
    check(WRONG + TWO_ENGINES, [result["said"] for result in results])
    for what, (mine, own) in results[0]["harmless"].items():
        assert mine == results[1]["harmless"][what][0], what
        assert torch.allclose(torch.tensor(mine), torch.tensor(own), atol=1e-6), (what, mine, own)
    for case in ON_ONE_RANK:
        messages = [result["on one rank"][case.what] for result in results]
        met = [rank for rank, message in enumerate(messages)
               if case.words in message and not message.startswith("PeerLost")]
        assert met and all(rank in met or f"PeerLost: rank {met[0]} is gone" in message
                           for rank, message in enumerate(messages)), messages

"""Which modules of a model are its layers, and which are the modules around them.

A *unit* is a module whose calls replay intercepts: it either runs whole on one stage or is bypassed
whole. There are two kinds. *Layers* are the entries of the model's outermost ``nn.ModuleList``s and
``nn.Sequential``s (the repeated blocks), or whatever the user names. *Outer units* are the largest
modules that own parameters and hold no layer: embeddings, final norms, heads.
"""

import difflib
import fnmatch
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from torch import nn

from mobius_ds.model.errors import WAY_OUT, NotSplittable


@dataclass(frozen=True)
class Units:
    """The intercepted modules of one model."""

    modules: Dict[str, nn.Module]
    """Every unit by its name in the model."""
    layers: frozenset
    """Names of the units that are layers; the others are outer units."""
    parameters: Dict[str, Tuple[str, ...]]
    """Names of each unit's parameters. A tied parameter has one name, its first in ``named_parameters()``."""


def declared_layers(model: nn.Module, units: Units) -> int:
    """How many layers there are to cut between if a forward runs every unit once, in the order in which the model has them.
    Outer units between two layers are one. Only a forward shows which of them it runs, and how often."""
    kinds = [name in units.layers for name, _ in model.named_modules() if name in units.modules]
    between = sum(not is_layer and (index == 0 or kinds[index - 1]) for index, is_layer in enumerate(kinds))
    return sum(kinds) + between


def find_units(model: nn.Module, patterns: Optional[Sequence[str]] = None,
               layers: Optional[Sequence[nn.Module]] = None) -> Units:
    """Finds the units of ``model``.

    Args:
        patterns: shell patterns on module names; the outermost matches are the layers.
        layers: the layers themselves, for models that list them (a pipeline module).

    Raises:
        NotSplittable: no layers were found, or none by one of the patterns.
    """
    if layers is None:
        layers = _matching(model, patterns) if patterns else list(_container_entries(model))
    # What owns no parameters (an activation between two layers) is cheap enough to run wherever it is needed.
    layers = [layer for layer in layers if _owns_parameters(layer)]
    if not layers:
        looked_for = f"matching {list(patterns)}" if patterns else "in an nn.ModuleList or nn.Sequential"
        raise NotSplittable(f"{type(model).__name__} has no layers with parameters {looked_for}, "
                            f"so it cannot be cut into stages. {WAY_OUT}")
    names = {id(module): name for name, module in model.named_modules()}
    modules = {names[id(module)]: module for module in [*layers, *_outer_units(model, {id(m) for m in layers})]}
    parameter_names = {id(p): name for name, p in model.named_parameters()}
    parameters = {name: tuple(parameter_names[id(p)] for p in module.parameters()) for name, module in modules.items()}
    return Units(modules, frozenset(names[id(layer)] for layer in layers), parameters)


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_chain(module: nn.Module) -> bool:
    # A subclass of nn.Sequential that has its own forward is a module like any other.
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _is_holder(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _container_entries(module: nn.Module) -> Iterator[nn.Module]:
    """The entries of the outermost lists and chains. An entry that is itself a list or a chain is entered."""
    inside = isinstance(module, nn.ModuleList) or _is_chain(module)
    for child in module._modules.values():
        if child is None:
            continue
        if inside and not (_is_chain(child) or _is_holder(child)):
            yield child
        else:
            yield from _container_entries(child)


def _matching(model: nn.Module, patterns: Sequence[str]) -> List[nn.Module]:
    found: List[str] = []
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f". Its modules are {', '.join(names[:10])}, ..."
            raise NotSplittable(f"no module of {type(model).__name__} matches the pattern {pattern!r} in "
                                f"\"mobius\": {{\"layers\": ...}}{hint}")
    for name in names:
        inside_match = any(name.startswith(outer + ".") for outer in found)
        if not inside_match and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            found.append(name)
    return [model.get_submodule(name) for name in found]


def _outer_units(module: nn.Module, layers: set) -> Iterator[nn.Module]:
    for child in module.children():
        if id(child) in layers or not _owns_parameters(child):
            continue
        if _is_holder(child) or any(id(inner) in layers for inner in child.modules()):
            yield from _outer_units(child, layers)
        else:
            yield child

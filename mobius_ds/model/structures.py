"""How nested arguments and outputs come apart into leaves: torch's pytrees, which dataclasses of tensors join when met."""

from dataclasses import fields, is_dataclass
from typing import Any, Iterable, List, Tuple

import torch
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, register_dataclass, tree_flatten, tree_unflatten


def flatten(tree: Any) -> Tuple[List[Any], TreeSpec]:
    """The leaves of a tree and how they nest."""
    leaves, structure = tree_flatten(tree)
    unknown = {type(leaf) for leaf in leaves if _holds_tensors(leaf)}
    if not unknown:
        return leaves, structure
    for kind in unknown:
        register_dataclass(kind)
    return flatten(tree)


def unflatten(leaves: Iterable[Any], structure: TreeSpec) -> Any:
    """The tree of some leaves. The structure may come from another process, where its dataclasses were met."""
    _register(structure)
    return tree_unflatten(leaves, structure)


def _holds_tensors(leaf: Any) -> bool:
    """Whether a leaf is a dataclass of tensors that its fields alone can make again."""
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return False
    parts = fields(leaf)
    return all(part.init for part in parts) and any(isinstance(getattr(leaf, part.name), torch.Tensor) for part in parts)


def _register(structure: TreeSpec) -> None:
    if structure.type not in SUPPORTED_NODES and is_dataclass(structure.type):
        register_dataclass(structure.type)
    for part in structure.children():
        _register(part)

"""Ranks make sure that they are about to do the same, before the first collective of many."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from fullshard.checkpoint.tree import Tree
from fullshard.comm import all_same, broadcast_object_from_first
from fullshard.errors import ConfigError


def check_alike(what: str, tree: Tree, keys: Iterable[tuple[str, str]]) -> None:
    """Make sure that this is what all ranks are about to gather or to receive, in this order.

    Raises:
        ConfigError: it is not; on all ranks.
    """
    mesh, own = tree.mesh, list(keys)
    if mesh is None or all_same(sha256(repr(own).encode()).digest(), mesh):
        return
    first = broadcast_object_from_first(own, mesh)
    apart = [f"{key} of {name}" for name, key in own if (name, key) not in first]
    lacks = [f"{key} of {name}" for name, key in first if (name, key) not in own]
    raise _Disagreement(
        f"{what}: ranks have the state of different parameters; beside the first rank, this one "
        f"lacks {lacks[:8]} and has {apart[:8]} besides. Give the optimizers of all ranks the "
        "same parameters, and step all of them"
    )


class _Disagreement(ConfigError, RuntimeError):
    """PyTorch raises a RuntimeError here."""

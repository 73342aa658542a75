"""Check that ranks agree on a series of collectives before the first one starts."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from fullshard.checkpoint.tree import Tree
from fullshard.comm import all_same, broadcast_object_from_first
from fullshard.errors import ConfigError


def check_alike(what: str, tree: Tree, keys: Iterable[tuple[str, str]]) -> None:
    """Check that all ranks will gather or receive the same ``keys`` in one order; a collective.

    Raises:
        ConfigError: on all ranks, if the (parameter name, state name) pairs of any ranks differ.
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
    """A ``RuntimeError`` as well, because PyTorch raises one here."""

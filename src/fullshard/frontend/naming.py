"""Names of parameters in errors, from the outermost module, which a call need not be given."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence

from torch import nn

from fullshard.frontend.places import Place

_WRAPPED = "_fsdp_wrapped_module."
_MOST = 8  # names looked for; a module in more places than that needs no list of all


def names_of(place: Place) -> list[str]:
    """Return the FQNs of ``place`` from the outermost modules around it, shortest first.

    ``fully_shard`` is given a part of a model and is not told its name in the whole. So this looks
    for modules around the part among all objects of the process, which takes as long as a garbage
    collection: call it for errors only.
    """
    parents = _parents()
    found = {
        name.replace(_WRAPPED, "")
        for path in _paths(place.module, parents, frozenset())
        for name in (".".join((*path, place.name)),)
    }
    return sorted(found, key=lambda name: (len(name), name))


def name_of(place: Place) -> str:
    """Return the FQN of ``place``, with the class of its module, such as "head.weight (Linear)"."""
    kind = type(place.module).__name__.removeprefix("FSDP")
    return f"{' = '.join(names_of(place))} ({kind})"


def _parents() -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the parents of all modules by id, with the name that the child has there."""
    parents: dict[int, list[tuple[nn.Module, str]]] = {}
    for one in gc.get_objects():
        if issubclass(type(one), nn.Module):  # isinstance() asks proxies, which may do anything
            children = vars(one).get("_modules") or {}
            for name, child in children.items():
                parents.setdefault(id(child), []).append((one, name))
    return parents


def _paths(
    module: nn.Module, parents: dict[int, list[tuple[nn.Module, str]]], below: frozenset[int]
) -> Iterator[Sequence[str]]:
    """Yield the ways to ``module`` from modules that are in no other, at most ``_MOST``."""
    around = [pair for pair in parents.get(id(module), ()) if id(pair[0]) not in below]
    if not around:
        yield ()
    num_left = _MOST
    for parent, name in around:
        for path in _paths(parent, parents, below | {id(module)}):
            yield (*path, name)
            num_left -= 1
            if not num_left:
                return

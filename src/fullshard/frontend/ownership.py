"""Ownership: the parameters that a call of ``fully_shard`` owns, and their places."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fullshard import _torch
from fullshard.engine import Unit
from fullshard.frontend.places import Place

# Modules that were given to fully_shard, and the units they are members of.
# References to units are weak, because units refer to modules; hooks keep the units alive.
_members: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Unit]] = weakref.WeakKeyDictionary()
# Modules whose own parameters are sharded, and the units those belong to.
_owners: weakref.WeakKeyDictionary[nn.Module, dict[str, weakref.ref[Unit]]]
_owners = weakref.WeakKeyDictionary()
# Whole parameters that were sharded but stay alive, because something outside refers to them.
_originals: MutableMapping[Tensor, tuple[str, weakref.ref[Unit]]] = WeakIdKeyDictionary()


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that ``module`` is a member of, if any."""
    reference = _members.get(module)
    return None if reference is None else reference()


def owner_of(place: Place) -> Unit | None:
    """Return the unit that owns the parameter at ``place``, if any."""
    reference = _owners.get(place.module, {}).get(place.name)
    return None if reference is None else reference()


def twin_of(param: nn.Parameter) -> tuple[str, Unit] | None:
    """Return the name and unit with which ``param`` itself was sharded before, if it was."""
    name, reference = _originals.get(param, ("", None))
    unit = None if reference is None else reference()
    return None if unit is None else (name, unit)


def sharded_twin_of(param: nn.Parameter) -> tuple[str, nn.Parameter | None]:
    """Return the FQN of ``param``, and the sharded parameter that replaced it, if any."""
    twin = twin_of(param)
    if twin is None:
        return "", None
    name, unit = twin
    named = (pair for b in unit.buckets for pair in zip(b.names, b.sharded_params, strict=True))
    full_name = ".".join(part for part in (unit.name, name) if part)
    return full_name, next((sharded for own, sharded in named if own == name), None)


def enlist(modules: Iterable[nn.Module], owned: Iterable[OwnedParam], unit: Unit) -> None:
    """Make ``modules`` the members of ``unit``, and ``unit`` the owner of ``owned``."""
    reference = weakref.ref(unit)
    for module in modules:
        _members[module] = reference
    for one in owned:
        _originals[one.param] = (one.name, reference)
        for place in one.places:
            _owners.setdefault(place.module, {})[place.name] = reference


def enlist_copy(modules: Iterable[nn.Module], memo: Mapping[Any, Any]) -> None:
    """Register the copies of ``modules`` with the copies of their units, all found in ``memo``."""
    for module in modules:
        new = memo[id(module)]
        unit = unit_of(module)
        if unit is not None:
            _members[new] = weakref.ref(memo[id(unit)])
        for name, reference in _owners.get(module, {}).items():
            owner = reference()
            if owner is not None and id(owner) in memo:
                _owners.setdefault(new, {})[name] = weakref.ref(memo[id(owner)])


def units_below(modules: Iterable[nn.Module]) -> list[Unit]:
    """Return the units that have members inside ``modules``, in the order of ``modules()``."""
    found = (unit_of(inner) for module in modules for inner in module.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


@dataclass
class OwnedParam:
    """A parameter, its FQN below the modules of the call, and its places."""

    param: nn.Parameter
    name: str
    places: list[Place] = field(default_factory=list)


def collect(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[OwnedParam]:
    """Return the parameters below ``modules`` that no inner unit owns and the call does not ignore.

    Tied parameters occur once, with all their places. This includes places inside inner units whose
    calls ignored the parameter, even if all its places are in several inner units. The order is
    that of ``named_parameters``.
    """
    ignored_ids = {id(param) for param in ignored}
    owned: dict[int, OwnedParam] = {}
    for prefix, module in _named_managed(modules):
        for name, param in module._parameters.items():
            if param is None or id(param) in ignored_ids:
                continue
            entry = owned.setdefault(id(param), OwnedParam(param, prefix + name))
            entry.places.append(Place(module, name))
    for param, places in _left_by_inner_units(modules, ignored_ids).items():
        units = {unit for unit, _, _ in places}
        if id(param) in owned or len(units) > 1:
            entry = owned.setdefault(id(param), OwnedParam(param, places[0].full_name))
            entry.places.extend(left.place for left in places)
    return list(owned.values())


class _Left(NamedTuple):
    """A place inside an inner unit that no unit owns."""

    unit: Unit
    full_name: str
    place: Place


def _left_by_inner_units(
    modules: Sequence[nn.Module], ignored_ids: set[int]
) -> dict[nn.Parameter, list[_Left]]:
    """Return the parameters that calls for modules inside ``modules`` ignored, with places."""
    found: dict[nn.Parameter, list[_Left]] = {}
    seen: set[nn.Module] = set()

    def visit(prefix: str, module: nn.Module, around: Unit | None) -> None:
        if module in seen or _torch.is_replicated(module):
            return
        seen.add(module)
        unit = unit_of(module) or around
        for name, param in module._parameters.items():
            place = Place(module, name)
            if param is None or unit is None or id(param) in ignored_ids or owner_of(place):
                continue
            found.setdefault(param, []).append(_Left(unit, prefix + name, place))
        for name, child in module.named_children():
            visit(f"{prefix}{name}.", child, unit)

    for index, module in enumerate(modules):
        visit(f"{index}." if len(modules) > 1 else "", module, None)
    return found


def managed(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules below ``modules``, each once, except those of inner units and of DDP."""
    return [module for _, module in _named_managed(modules)]


def _named_managed(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of ``managed``, each with the prefix of the names of its parameters."""
    seen: set[nn.Module] = set()

    def visit(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or unit_of(module) is not None or _torch.is_replicated(module):
            return
        seen.add(module)
        yield prefix, module
        for name, child in module.named_children():
            yield from visit(f"{prefix}{name}.", child)

    for index, module in enumerate(modules):
        yield from visit(f"{index}." if len(modules) > 1 else "", module)

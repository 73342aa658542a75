"""Which parameters a call of ``fully_shard`` owns, and where they stand."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fullshard import _torch
from fullshard.engine import Bucket, Unit
from fullshard.errors import ConfigError

__all__ = [
    "OwnedParam",
    "Place",
    "Places",
    "collect",
    "enlist",
    "managed",
    "owner_of",
    "unit_of",
    "units_below",
]

# Modules that were given to fully_shard, and the units they are members of.
_members: weakref.WeakKeyDictionary[nn.Module, Unit] = weakref.WeakKeyDictionary()
# Modules whose own parameters are sharded, and the units those belong to.
_owners: weakref.WeakKeyDictionary[nn.Module, dict[str, Unit]] = weakref.WeakKeyDictionary()


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``module`` is a member of."""
    return _members.get(module)


def owner_of(place: Place) -> Unit | None:
    """The unit that owns the parameter at ``place``."""
    return _owners.get(place.module, {}).get(place.name)


def enlist(modules: Iterable[nn.Module], places: Places, unit: Unit) -> None:
    """Make ``modules`` the members of ``unit``, and ``unit`` the owner of ``places``."""
    for module in modules:
        _members[module] = unit
    for place in places.all():
        _owners.setdefault(place.module, {})[place.name] = unit


def units_below(modules: Iterable[nn.Module]) -> list[Unit]:
    """Units that have members inside ``modules``, in the order in which they are met."""
    found = (unit_of(inner) for module in modules for inner in module.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


@dataclass(frozen=True)
class Place:
    """One place where a parameter stands: an entry of a module's ``_parameters``."""

    module: nn.Module
    name: str

    @property
    def current(self) -> nn.Parameter | None:
        """What stands there."""
        return self.module._parameters[self.name]

    def put(self, param: nn.Parameter) -> None:
        """Let ``param`` stand there."""
        if _torch.overrides_setattr(self.module):
            setattr(self.module, self.name, param)  # nn.LSTM keeps a second list
        else:
            self.module._parameters[self.name] = param


@dataclass
class OwnedParam:
    """A parameter, its fully qualified name below the modules of the call, and its places."""

    param: nn.Parameter
    name: str
    places: list[Place] = field(default_factory=list)


def collect(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[OwnedParam]:
    """Parameters below ``modules`` that no inner unit owns and the call does not ignore.

    Tied ones come once, with all their places. The order is that of ``named_parameters``.
    """
    ignored_ids = {id(param) for param in ignored}
    owned: dict[int, OwnedParam] = {}
    for prefix, module in _named_managed(modules):
        for name, param in module._parameters.items():
            if param is None or id(param) in ignored_ids:
                continue
            entry = owned.setdefault(id(param), OwnedParam(param, prefix + name))
            entry.places.append(Place(module, name))
    return list(owned.values())


def managed(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules below ``modules``, each once, those of inner units left out."""
    return [module for _, module in _named_managed(modules)]


def _named_managed(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """``managed``, with the prefix of the names of what they hold."""
    seen: set[nn.Module] = set()

    def visit(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or unit_of(module) is not None:
            return
        seen.add(module)
        yield prefix, module
        for name, child in module.named_children():
            yield from visit(f"{prefix}{name}.", child)

    for index, module in enumerate(modules):
        yield from visit(f"{index}." if len(modules) > 1 else "", module)


class Places:
    """All places of a unit's parameters; what ``engine.Registration`` asks for."""

    def __init__(self, places: Sequence[Sequence[Sequence[Place]]]) -> None:
        """``places[bucket][parameter]`` are where that parameter stands."""
        self._places = places
        self.shows_sharded = True

    def modules(self) -> list[nn.Module]:
        """Modules that hold at least one of the parameters."""
        return list(dict.fromkeys(place.module for place in self.all()))

    def all(self) -> list[Place]:
        """All places."""
        return [place for place, _, _ in self._all()]

    def show_sharded(self, buckets: Sequence[Bucket]) -> None:
        """Let the modules show the sharded parameters."""
        self.shows_sharded = True
        for place, bucket, index in self._all():
            place.put(buckets[bucket].sharded_params[index])

    def show_unsharded(self, buckets: Sequence[Bucket]) -> None:
        """Let the modules show the unsharded parameters."""
        self.shows_sharded = False
        for place, bucket, index in self._all():
            whole = buckets[bucket].unsharded
            if whole is not None:
                place.put(whole.params[index])

    def check(self, unit: Unit) -> bool:
        """Take over parameters that were replaced or moved while they were sharded."""
        if not self.shows_sharded:
            return False
        replaced: dict[int, dict[int, nn.Parameter]] = {}
        for place, bucket, index in self._all():
            ours = unit.buckets[bucket].sharded_params[index]
            now = place.current
            if now is not ours:
                self._check_replacement(unit, place, ours, now)
                replaced.setdefault(bucket, {})[index] = now  # type: ignore[assignment]
        changed = False
        for number, own in enumerate(unit.buckets):
            if number in replaced or not own.is_current():
                own.adopt(replaced.get(number))
                changed = True
        if replaced:
            self.show_sharded(unit.buckets)
        return changed

    def _check_replacement(self, unit: Unit, place: Place, ours: nn.Parameter, now: Any) -> None:
        if type(now) is type(ours) and now.shape == ours.shape and _alike(now, ours):
            return
        what = "None" if now is None else f"{type(now.data).__name__} of shape {tuple(now.shape)}"
        raise ConfigError(
            f"parameter {place.name} of {type(place.module).__name__} in unit "
            f"{unit.name or '(root)'} was replaced after fully_shard by {what}; expected a sharded "
            f"parameter with the placement of the one it replaces ({tuple(ours.shape)}). Replace "
            "parameters before fully_shard, or write into the sharded one"
        )

    def _all(self) -> Iterator[tuple[Place, int, int]]:
        for bucket, params in enumerate(self._places):
            for index, places in enumerate(params):
                for place in places:
                    yield place, bucket, index


def _alike(one: Any, other: Any) -> bool:
    """Whether two DTensors lie in the same way."""
    return getattr(one, "placements", None) == getattr(other, "placements", None) and getattr(
        one, "device_mesh", None
    ) == getattr(other, "device_mesh", None)

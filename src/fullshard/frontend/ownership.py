"""Ownership: the parameters that a call of ``fully_shard`` owns, and those that nothing owns."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fullshard._torch import nn as _nn
from fullshard.comm.text import listed
from fullshard.engine import Unit
from fullshard.frontend.hooks import registrations
from fullshard.frontend.places import FLAT_PARAM, Place
from fullshard.wrap.units import Without

# Units by module: under None the unit that the module is a member of, under a parameter's name the
# owner of that parameter. References are weak, because units refer to modules; hooks keep the units
# alive.
_modules: weakref.WeakKeyDictionary[nn.Module, dict[str | None, weakref.ref[Unit]]] = (
    weakref.WeakKeyDictionary()
)
# Original parameters that were sharded but stay alive, because something outside refers to them.
_originals: MutableMapping[Tensor, _Original] = WeakIdKeyDictionary()


class _Original(NamedTuple):
    """The unit and the place of a parameter before it was sharded; all references are weak."""

    name: str
    unit: weakref.ref[Unit]
    module: weakref.ref[nn.Module]
    """The module of its first place."""
    own_name: str
    """Its name in that module."""


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that ``module`` is a member of, if any."""
    return _unit_at(module, None)


def members_of(unit: Unit) -> list[nn.Module]:
    """Return the modules of the call that made ``unit``, in their order."""
    return [module for module in list(_modules) if unit_of(module) is unit]


def owner_of(place: Place) -> Unit | None:
    """Return the unit that owns the parameter at ``place``, if any."""
    return _unit_at(place.module, place.name)


def _unit_at(module: nn.Module, name: str | None) -> Unit | None:
    reference = _modules.get(module, {}).get(name)
    return None if reference is None else reference()


def owned_places() -> Iterator[tuple[Place, Unit]]:
    """Yield the places of all sharded parameters in this process, with the units that own them."""
    for module, known in list(_modules.items()):
        for name, reference in known.items():
            unit = reference()
            if unit is not None and name is not None:
                yield Place(module, name), unit


def twin_of(param: nn.Parameter) -> tuple[str, Unit] | None:
    """Return the name and unit with which ``param`` itself was sharded before, if it was."""
    original = _originals.get(param)
    unit = None if original is None else original.unit()
    return None if original is None or unit is None else (original.name, unit)


def place_of_twin(param: nn.Parameter) -> Place | None:
    """Return the place at which ``param`` itself was sharded before, if the module still lives."""
    original = _originals.get(param)
    module = None if original is None else original.module()
    return None if original is None or module is None else Place(module, original.own_name)


def sharded_twin_of(param: nn.Parameter) -> tuple[str, nn.Parameter | None]:
    """Return the FQN of ``param``, and the sharded parameter that replaced it, if any."""
    twin = twin_of(param)
    if twin is None:
        return "", None
    name, unit = twin
    named = (pair for b in unit.buckets for pair in zip(b.names, b.sharded_params, strict=True))
    return full_name(unit, name), next((sharded for own, sharded in named if own == name), None)


def full_name(unit: Unit, name: str) -> str:
    """Return the FQN of the parameter that ``unit`` calls ``name``."""
    return ".".join(part for part in (unit.name, name) if part)


def names_of_stepped(params: Iterable[Tensor]) -> dict[nn.Parameter, str]:
    """Return those of ``params`` that are sharded parameters of their own, with their FQNs."""
    asked = {id(param) for param in params}
    units = {unit for module in list(_modules) if (unit := unit_of(module)) is not None}
    return {
        param: full_name(unit, name)
        for unit in units
        for bucket in unit.buckets
        if bucket.front is None
        for name, param in zip(bucket.names, bucket.sharded_params, strict=True)
        if id(param) in asked
    }


def enlist(modules: Iterable[nn.Module], owned: Iterable[PlacedParam], unit: Unit) -> None:
    """Make ``modules`` the members of ``unit``, and ``unit`` the owner of ``owned``."""
    reference = weakref.ref(unit)
    for module in modules:
        _modules.setdefault(module, {})[None] = reference
    for one in owned:
        first = one.places[0]
        _originals[one.param] = _Original(
            one.name, reference, weakref.ref(first.module), first.name
        )
        for place in one.places:
            _modules.setdefault(place.module, {})[place.name] = reference


def enlist_copy(modules: Iterable[nn.Module], memo: Mapping[Any, Any]) -> None:
    """Register the copies of ``modules`` with the copies of their units, all found in ``memo``."""
    for module in modules:
        for name, reference in _modules.get(module, {}).items():
            unit = reference()
            if unit is not None and id(unit) in memo:
                known = _modules.setdefault(memo[id(module)], {})
                known[name] = weakref.ref(memo[id(unit)])


def set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Set a buffer to ``value``; modules that share the buffer, if it is plain, still share it."""
    buffer = module._buffers[name]
    if type(buffer) is Tensor and type(value) is Tensor:
        buffer.data = value
    else:
        module._buffers[name] = value


def units_below(modules: Iterable[nn.Module]) -> list[Unit]:
    """Return the units that have members inside ``modules``, in the order of ``modules()``."""
    return list(members_below(modules))


def members_below(modules: Iterable[nn.Module]) -> Counter[Unit]:
    """Return how many members each unit has inside ``modules``, in the order of ``modules()``."""
    found = (unit_of(inner) for module in modules for inner in module.modules())
    return Counter(unit for unit in found if unit is not None)


@dataclass
class PlacedParam:
    """A parameter, its FQN below the modules of the call, and its places."""

    param: nn.Parameter
    name: str
    places: list[Place]


@dataclass(frozen=True)
class Subtree:
    """The modules and parameters below the modules of a call, as ``collect`` finds them."""

    units: list[Unit]
    """The units that have members inside, see ``units_below``."""
    modules: list[nn.Module]
    """The modules that are in no inner unit, see ``outside``."""
    params: list[PlacedParam]
    """The parameters that no inner unit owns and the call does not ignore."""


def collect(modules: Sequence[nn.Module], ignored: Collection[nn.Parameter]) -> Subtree:
    """Return all that lies below ``modules``, for a call that ignores the parameters ``ignored``.

    Tied parameters occur once, with all their places. This includes places inside inner units whose
    calls ignored the parameter, even if all its places are in several inner units. The order is
    that of ``named_parameters``.
    """
    ignored_ids = {id(param) for param in ignored}
    outer = outside(modules)
    homes: dict[nn.Module, tuple[str, Unit | None]]
    homes = {module: (prefix, None) for module, prefix in outer.items()}
    homes |= {module: at for module, at in _inside(modules).items() if module not in outer}
    found: dict[nn.Parameter, list[_Found]] = {}
    for module, (prefix, unit) in homes.items():
        for name, param in module._parameters.items():
            place = Place(module, name)
            is_owned = unit is not None and owner_of(place) is not None
            if param is not None and id(param) not in ignored_ids and not is_owned:
                found.setdefault(param, []).append(_Found(unit, prefix + name, place))
    params = []
    for param, places in found.items():
        units = {one.unit for one in places}
        if None in units or len(units) > 1:
            params.append(PlacedParam(param, places[0].full_name, [one.place for one in places]))
    return Subtree(units_below(modules), list(outer), params)


class _Found(NamedTuple):
    """A place of a parameter that no unit owns."""

    unit: Unit | None
    """The unit that its module is inside of, whose call ignored the parameter."""
    full_name: str
    place: Place


def outside(modules: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Return the modules outside of inner units and of DDP, with the prefix of parameter names."""
    named = _named(modules, lambda m: unit_of(m) is not None or _nn.is_replicated(m))
    return {module: f"{name}." if name else "" for name, module in named}


def _inside(modules: Sequence[nn.Module]) -> dict[nn.Module, tuple[str, Unit]]:
    """Return the modules in inner units, but not in DDP, with their prefix and innermost unit."""
    found: dict[nn.Module, tuple[str, Unit]] = {}
    around: dict[str, Unit | None] = {}
    for name, module in _named(modules, _nn.is_replicated):
        unit = around[name] = unit_of(module) or around.get(name.rpartition(".")[0])
        if unit is not None:
            found[module] = f"{name}.", unit
    return found


def _named(
    modules: Sequence[nn.Module], skips: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in ``modules`` once each, except what is only inside of skipped ones."""
    memo = Without(skips)
    for index, root in enumerate(modules):
        yield from root.named_modules(memo, str(index) if len(modules) > 1 else "")


class Additions:
    """The modules of a unit as they were, to notice the parameters that users add below them.

    Nothing shards these or reduces their gradients. PyTorch's FSDP says nothing of them, and ranks
    then train different values.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """Take the modules that the unit manages, see ``outside``.

        Units have taken their parameters. The other parameters were left out on purpose, and may
        be replaced.
        """
        self._modules = list(modules)
        self._known = [
            {FLAT_PARAM, *module._parameters, *_unowned(module, skips=lambda _: False)}
            for module in self._modules
        ]
        self._children = [module._modules for module in self._modules]
        self._params = [module._parameters for module in self._modules]
        self._seen = self._now()
        self._looked_at = registrations()[0]

    def _now(self) -> list[object]:
        """Return what is directly below the modules, and how many parameters they have."""
        children = chain.from_iterable(map(dict.values, self._children))
        return [*children, sum(map(len, self._params))]

    def warn(self, unit: Unit) -> None:
        """Warn, once each, of trainable parameters that were added below ``unit``."""
        looked_at, self._looked_at = self._looked_at, registrations()[0]
        if looked_at == self._looked_at:
            return
        seen, self._seen = self._seen, self._now()
        if seen == self._seen:
            return
        added = list(self._added())
        if added and any(bucket.spec.layout.world > 1 for bucket in unit.buckets):
            warnings.warn(
                f"parameters {listed(added, 8)} were added below unit "
                f"{unit.shown_name} after it was sharded: they are not sharded, and "
                "their gradients are not reduced, so ranks train different values. Add modules "
                "before fully_shard, or call fully_shard on the new module before the first step",
                stacklevel=2,
            )

    def _added(self) -> Iterator[str]:
        for module, known in zip(self._modules, self._known, strict=True):
            for path, place in _unowned(module, skips=_is_managed).items():
                param = place.module._parameters[place.name]
                is_trained = param is not None and param.requires_grad
                if path not in known and is_trained and not isinstance(param, DTensor):
                    yield f"{place.name} of {type(place.module).__name__}"
                    known.add(path)


def _is_managed(module: nn.Module) -> bool:
    is_sharded = _nn.is_managed(module) or unit_of(module) is not None
    return is_sharded or _nn.is_replicated(module)


def _unowned(module: nn.Module, skips: Callable[[nn.Module], bool]) -> dict[str, Place]:
    """Return the places in ``module`` of parameters that no unit owns, by path.

    Modules inside for which ``skips`` is true are left out, with all that is only inside of them.
    """
    memo = Without(lambda inner: inner is not module and skips(inner))
    return {
        f"{path}.{name}" if path else name: Place(inner, name)
        for path, inner in module.named_modules(memo)
        for name in sorted(inner._parameters)
        if owner_of(Place(inner, name)) is None
    }

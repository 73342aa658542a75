"""The places of a unit's parameters in modules, and the parameters that modules show there now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fullshard._torch import dtensor as _dtensor
from fullshard._torch import nn as _nn
from fullshard.engine import Bucket, FlatParameter, Unit
from fullshard.errors import ConfigError, ProtocolError
from fullshard.tensors import AbsentParameter, local_part
from fullshard.tensors.form import clean_name


@dataclass(frozen=True)
class Place:
    """A place of a parameter: an entry of a module's ``_parameters``."""

    module: nn.Module
    name: str


class _Slot(NamedTuple):
    """A place, flattened for loops that run several times per step."""

    params: dict[str, nn.Parameter | None]
    """The module's own dictionary; a direct write takes a twentieth of the time of ``setattr``."""
    name: str
    bucket: int
    number: int  # of the parameter in the bucket
    place: Place


_Targets = dict[int, tuple[int, int]]
"""The bucket and number of the parameter that a slot is to show, by the slot's index."""


class Places:
    """All places of a unit's parameters; an ``engine.Registration``."""

    def __init__(self, places: Sequence[Sequence[Sequence[Place]]]) -> None:
        """Take ``places[bucket][parameter]``, the places of each parameter."""
        self._slots = [
            _Slot(place.module._parameters, place.name, bucket, number, place)
            for bucket, params in enumerate(places)
            for number, alike in enumerate(params)
            for place in alike
        ]
        self._unplaced: list[tuple[int, int]] = []  # bucket and index, of parameters tied away
        self._index()
        self.shows_sharded = True
        self.hidden_by: nn.Module | None = None
        """The module whose state dict shows the sharded parameters for now."""
        self._lent: Sequence[Sequence[nn.Parameter] | None] | None = None
        self._lent_as: dict[int, _Facts] = {}  # by ``id`` of a lent parameter
        self._lent_ties: _Targets = {}  # found in the last ``take_back``
        self.warn_of_additions: Callable[[Unit], None] | None = None

    def _index(self) -> None:
        # nn.LSTM, for example, keeps a second list of its parameters, which setattr updates.
        self._by_setattr = [
            slot for slot in self._slots if _nn.overrides_setattr(slot.place.module)
        ]

    def _point(self, targets: _Targets) -> None:
        """Make slots show the parameters of the unit that the user tied them to.

        A parameter that no slot shows any more stays in its bucket. It gets no gradient.
        """
        placed = {(slot.bucket, slot.number) for slot in self._slots} | set(self._unplaced)
        for index, (bucket, number) in targets.items():
            self._slots[index] = self._slots[index]._replace(bucket=bucket, number=number)
        self._unplaced = sorted(placed - {(slot.bucket, slot.number) for slot in self._slots})
        self._index()

    def modules(self) -> list[nn.Module]:
        """Return the modules that hold at least one of the parameters."""
        return list(dict.fromkeys(slot.place.module for slot in self._slots))

    def slots(self) -> Sequence[_Slot]:
        """Return all places as slots."""
        return self._slots

    def shown(self) -> list[nn.Parameter]:
        """Return the parameters that modules show now; those of several places once each."""
        found = (own.get(name) for own, name, *_ in self._slots)
        return list({id(param): param for param in found if param is not None}.values())

    @contextmanager
    def showing_pieces(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Show sharded parameters to state dicts in the block; here hooks do so already."""
        yield

    @contextmanager
    def showing_sharded(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """Show in the block what modules show between steps; nothing is moved or freed."""
        before = self.shows_sharded, self.hidden_by
        self.show_sharded(buckets)
        try:
            yield
        finally:
            self.shows_sharded, self.hidden_by = before
            self._show_again(buckets)

    def in_their_place(self) -> Sequence[Place]:
        """Return the places of fronts, which modules show instead of sharded parameters."""
        return ()

    def show_sharded(self, buckets: Sequence[Bucket]) -> None:
        """Make the modules show the sharded parameters; keep ties that the user made meanwhile."""
        self._note_ties(buckets)
        self.shows_sharded, self.hidden_by = True, None
        self._show_again(buckets)

    def show_unsharded(self, buckets: Sequence[Bucket]) -> None:
        """Make the modules show the unsharded parameters."""
        self.shows_sharded, self.hidden_by = False, None
        self._show_again(buckets)

    def hide_unsharded(self, unit: Unit, module: nn.Module) -> None:
        """Show the sharded parameters, if modules do not yet, until ``end_hiding``."""
        is_lent = unit.lending is not None and unit.lending.is_shown
        if not self.shows_sharded and not is_lent:
            self.show_sharded(unit.buckets)
            self.hidden_by = module

    def end_hiding(self, unit: Unit) -> None:
        """Show the unsharded parameters if ``hide_unsharded`` hides them.

        Before that, adopt the parameters that the user put into modules.
        """
        if self.hidden_by is not None:
            self.take_over(unit, keeps_ties=True)
            self.show_unsharded(unit.buckets)

    def _show(self, params: Sequence[Sequence[nn.Parameter]]) -> None:
        if self._lent is not None:
            lent = self._lent
            params = [one if two is None else two for one, two in zip(params, lent, strict=True)]
        for own, name, bucket, number, _ in self._slots:
            own[name] = params[bucket][number]
        for slot in self._by_setattr:
            setattr(slot.place.module, slot.name, params[slot.bucket][slot.number])

    def _show_again(self, buckets: Sequence[Bucket]) -> None:
        """Repeat the last ``show_sharded`` or ``show_unsharded``."""
        if self.shows_sharded:
            self._show([bucket.sharded_params for bucket in buckets])
        else:
            self._show([bucket.materialized.params for bucket in buckets])

    def put_back(self, buckets: Sequence[Bucket]) -> list[str]:
        """See ``engine.Registration``."""
        if self.shows_sharded:
            return []
        changed = self._changed([bucket.materialized.params for bucket in buckets])
        if changed:
            self.show_unsharded(buckets)
        # torch.func.functional_call puts the sharded ones back that it found before the forward.
        slots = ((self._slots[index], now) for index, now in changed.items())
        found = ((buckets[slot.bucket], slot.number, now) for slot, now in slots)
        return [own.names[at] for own, at, now in found if now is not own.sharded_params[at]]

    def _changed(self, params: Sequence[Sequence[nn.Parameter]]) -> dict[int, nn.Parameter | None]:
        """Return what modules show in place of ``params``, by the index of the slot."""
        return {
            index: own.get(name)
            for index, (own, name, bucket, number, _) in enumerate(self._slots)
            if own.get(name) is not params[bucket][number]
        }

    def lend(
        self, buckets: Sequence[Bucket], params: Sequence[Sequence[nn.Parameter] | None]
    ) -> None:
        """See ``engine.Registration``."""
        self._lent = params
        self._lent_as = {id(param): _facts(param) for param, _ in _numbered(params)}
        self._show_again(buckets)

    def take_back(self, buckets: Sequence[Bucket]) -> list[list[Tensor] | None]:
        """See ``engine.Registration``."""
        lent, self._lent = self._lent or (), None
        own = {id(param): at for param, at in _numbered(lent)}
        found: dict[tuple[int, int], dict[int, Any]] = {}  # by parameter: all that is shown
        self._lent_ties = {}
        for index, slot in enumerate(self._slots):
            if lent[slot.bucket] is None:
                continue
            # A tensor that is not a Parameter is an attribute, which would hide ours.
            now = slot.params.get(slot.name, vars(slot.place.module).pop(slot.name, None))
            at = slot.bucket, slot.number
            if own.get(id(now), at) != at:
                self._lent_ties[index] = own[id(now)]
            else:
                found.setdefault(at, {})[id(now)] = now
        self._show_again(buckets)
        return [
            None
            if params is None
            else [
                self._taken(buckets[b], n, list(found.get((b, n), {0: param}).values()), param)
                for n, param in enumerate(params)
            ]
            for b, params in enumerate(lent)
        ]

    def lent(self) -> list[nn.Parameter]:
        """Return the parameters on loan."""
        return [param for param, _ in _numbered(self._lent or ())]

    def lent_ties(self, buckets: Sequence[Bucket]) -> list[str]:
        """See ``engine.Registration``."""
        tied = (self._slots[index] for index in self._lent_ties)
        return [buckets[slot.bucket].names[slot.number] for slot in tied]

    def tie(self, buckets: Sequence[Bucket]) -> None:
        """See ``engine.Registration``."""
        if self._lent_ties:
            self._point(self._lent_ties)
            self._lent_ties = {}
            self._show_again(buckets)

    def _taken(self, bucket: Bucket, number: int, shown: list[Any], lent: nn.Parameter) -> Tensor:
        """Return what the user left in the places of ``lent``; raise if it is unusable."""
        ours = self._lent_as[id(lent)]  # as it was lent: the user may have set its ``data``
        left = shown[0] if len(shown) == 1 else None
        if isinstance(left, Tensor) and _facts(left) == ours:
            return left
        what = " and ".join(
            _described(_facts(one)) if isinstance(one, Tensor) else type(one).__name__
            for one in shown
        )
        raise ConfigError(
            f"parameter {bucket.names[number]} was replaced inside of the with block by {what}; "
            f"expected one {_described(ours)} in all its places. Nothing was written back; write "
            "into the parameter instead"
        )

    def take_over(self, unit: Unit, *, keeps_ties: bool = False) -> None:
        """See ``engine.Registration``."""
        if self.warn_of_additions is not None and not keeps_ties:
            self.warn_of_additions(unit)
        if self.shows_sharded:
            self._take_over_sharded(unit, keeps_ties=keeps_ties)
        else:
            self._check_unsharded(unit)

    def _take_over_sharded(self, unit: Unit, *, keeps_ties: bool) -> None:
        changed = self._changed([bucket.sharded_params for bucket in unit.buckets])
        if changed:
            ties = _ties(changed, unit.buckets)
            new = {index: now for index, now in changed.items() if index not in ties}
            for index, now in new.items():
                self._check(unit, self._slots[index], now)
            if not keeps_ties:
                self._check_not_untied(unit, ties, new)
            self._point(ties)
            for index, now in new.items():
                slot = self._slots[index]
                assert now is not None
                unit.buckets[slot.bucket].replace(slot.number, now)
            self._show_again(unit.buckets)  # in the other places of a tied one, too
        for bucket, number in self._unplaced:
            unit.buckets[bucket].conform(number, {n for b, n in self._unplaced if b == bucket})

    def _check_not_untied(
        self, unit: Unit, ties: _Targets, new: Mapping[int, nn.Parameter | None]
    ) -> None:
        """Refuse a new parameter in some of the places of a tied one: it would need a shard."""
        slots = ((index, self._slots[index]) for index in new)
        replaced = {(slot.bucket, slot.number): index for index, slot in slots}
        for other, beside in enumerate(self._slots):
            index = replaced.get((beside.bucket, beside.number), other)
            if other not in ties and new.get(other) is not new.get(index):
                raise _CannotTakeOver(
                    f"Cannot writeback: parameter {_named(self._slots[index])} in unit "
                    f"{unit.shown_name} was tied to {_named(beside)} when it was sharded, "
                    "and got a parameter of its own after fully_shard. Untie parameters before "
                    "fully_shard, or put the same one in all places"
                )

    def note_ties(self, unit: Unit) -> None:
        """Keep ties that the user made while the unit was unsharded."""
        if self._note_ties(unit.buckets):
            self._show_again(unit.buckets)

    def _note_ties(self, buckets: Sequence[Bucket]) -> bool:
        """Point slots at the unsharded parameters that modules show; return whether any moved."""
        if self.shows_sharded or self._lent is not None:
            return False
        changed = self._changed([bucket.materialized.params for bucket in buckets])
        ties = _ties(changed, buckets) if changed else {}
        if ties:
            self._point(ties)
        return bool(ties)

    def _check_unsharded(self, unit: Unit) -> None:
        self.note_ties(unit)
        shown = [bucket.materialized for bucket in unit.buckets]
        for own, name, bucket, number, place in self._slots:
            unsharded = shown[bucket].params[number]
            if own.get(name) is not unsharded or not shown[bucket].owns(unsharded):
                raise ConfigError(
                    f"parameter {place.name} of {type(place.module).__name__} in unit "
                    f"{unit.shown_name} was replaced, moved or cast while it was unsharded; "
                    "call reshard() before, or move and cast the whole sharded module"
                )

    def _check(self, unit: Unit, slot: _Slot, now: nn.Parameter | None) -> None:
        """Raise if ``now``, found in ``slot``, cannot replace our parameter."""
        ours = unit.buckets[slot.bucket].sharded_params[slot.number]
        is_alike = now is not None and type(now) is type(ours) and now.shape == ours.shape
        if is_alike and isinstance(now, DTensor) and isinstance(ours, DTensor):
            is_alike = _dtensor.are_placed_alike(now, ours)
        if not is_alike:
            raise self._refusal(unit, slot, now)

    def _refusal(self, unit: Unit, slot: _Slot, now: nn.Parameter | None) -> ConfigError:
        ours = unit.buckets[slot.bucket].sharded_params[slot.number]
        what = "nothing" if now is None else f"{type(now.data).__name__} of {tuple(now.shape)}"
        engine: Any = unit.engine
        for other in engine.units:
            if any(now is param for bucket in other.buckets for param in bucket.sharded_params):
                what += f" (that of unit {other.shown_name})"
        return _CannotTakeOver(
            f"Cannot writeback: parameter {_named(slot)} in unit {unit.shown_name} was "
            f"replaced after fully_shard by {what}; expected a sharded parameter of "
            f"{tuple(ours.shape)} with the same placement. Replace parameters before fully_shard, "
            "tie them before it or within a unit, or write into the sharded ones"
        )


class _Facts(NamedTuple):
    """The facts that a tensor must have in common with the lent parameter in whose place it is."""

    kind: type[Tensor]
    shape: torch.Size
    local_shape: torch.Size
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...]


def _facts(tensor: Tensor) -> _Facts:
    place: tuple[Any, Any] = (None, ())
    if isinstance(tensor, DTensor):
        place = tensor.device_mesh, tuple(tensor.placements)
    return _Facts(type(tensor.data), tensor.shape, local_part(tensor).shape, *place)


def _described(facts: _Facts) -> str:
    local = f" on {facts.mesh}, {tuple(facts.local_shape)} on this rank"
    placed = f" placed as {facts.placements}{local}" if facts.placements else ""
    return f"{facts.kind.__name__} of {tuple(facts.shape)}{placed}"


def _named(slot: _Slot) -> str:
    return f"{slot.name} of {type(slot.place.module).__name__}"


def _ties(changed: Mapping[int, nn.Parameter | None], buckets: Sequence[Bucket]) -> _Targets:
    """Return those slots of ``changed`` that show another sharded or unsharded parameter of ours.

    ``torch.func.functional_call`` puts back what it found: unsharded parameters after the unit was
    resharded, and sharded ones while it is unsharded.
    """
    sharded = [bucket.sharded_params for bucket in buckets]
    unsharded = [
        None if bucket.unsharded is None else bucket.materialized.params for bucket in buckets
    ]
    ours = {id(param): at for params in (sharded, unsharded) for param, at in _numbered(params)}
    return {index: ours[id(now)] for index, now in changed.items() if id(now) in ours}


def _numbered(
    params: Sequence[Sequence[nn.Parameter] | None],
) -> Iterator[tuple[nn.Parameter, tuple[int, int]]]:
    """Yield the parameters of all buckets, each with its bucket and its index there."""
    for bucket, own in enumerate(params):
        for number, param in enumerate(own or ()):
            yield param, (bucket, number)


def places_of(unit: Unit) -> Places:
    """Return the places of the parameters of ``unit``."""
    places = unit.registration
    assert isinstance(places, Places)
    return places


FLAT_PARAM = "_flat_param"
"""Name of the flat parameter in the wrapped module."""


def innermost(module: nn.Module) -> nn.Module:
    """Return ``module`` without the activation checkpoint wrappers around it."""
    while hasattr(module, "_checkpoint_wrapped_module"):
        module = module._checkpoint_wrapped_module  # type: ignore[assignment]
    return module


class FlatPlaces(Places):
    """Places that hold no parameters while these are sharded; one module shows the flat parameter.

    As in PyTorch, attributes of the modules then replace the parameters and have their dtypes.
    """

    def __init__(
        self,
        places: Sequence[Sequence[Sequence[Place]]],
        holder: nn.Module,
        fronts: Sequence[FlatParameter],
    ) -> None:
        super().__init__(places)
        self._holder = holder
        self.fronts = fronts
        self._in_pieces = False
        self._absent: list[AbsentParameter] = []  # one for each slot, once there is a need
        self._absent_of: tuple[torch.dtype, torch.device, bool] | None = None

    def in_their_place(self) -> Sequence[Place]:
        """Return the place of the flat parameter."""
        return [Place(self._holder, FLAT_PARAM) for _ in self.fronts]

    def _show(self, params: Sequence[Sequence[nn.Parameter]]) -> None:
        lent = self._lent
        is_lent = lent is not None and any(one is not None for one in lent)
        hidden = self.shows_sharded and not is_lent and not self._in_pieces
        none: Any = [[None] * len(own) for own in params]
        super()._show(none if hidden else params)
        for front in self.fronts:
            own = self._holder._parameters
            if hidden:
                own[FLAT_PARAM] = front.param
            else:
                own.pop(FLAT_PARAM, None)
        self._stand_in(hidden)

    def _stand_in(self, hidden: bool) -> None:
        """Set attributes in place of parameters, or remove them, as they hide ``_parameters``."""
        for front in self.fronts if hidden else ():  # one at most
            dtype = front.spec.unsharded_dtype(front.shard.dtype)
            facts = (dtype, front.spec.device, front.param.requires_grad)
            if facts != self._absent_of:  # else the existing ones still describe the parameters
                self._absent_of = facts
                params = (front.spec.layout.params[slot.number] for slot in self._slots)
                self._absent = [
                    AbsentParameter.of(clean_name(param.name), param.shape, *facts)
                    for param in params
                ]
        for slot, absent in zip(self._slots, self._absent, strict=False):
            attributes = vars(slot.place.module)
            is_ours = isinstance(attributes.get(slot.name), AbsentParameter)
            if hidden and (is_ours or slot.name not in attributes):
                attributes[slot.name] = absent
            elif is_ours:
                del attributes[slot.name]

    @contextmanager
    def showing_pieces(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """See ``Places``; otherwise modules show the flat parameter or unsharded parameters."""
        for front in self.fronts:
            front.follow()
        with self.showing_sharded(buckets):
            self._in_pieces = True
            self._show_again(buckets)
            try:
                yield
            finally:
                self._in_pieces = False

    def take_over(self, unit: Unit, *, keeps_ties: bool = False) -> None:
        """See ``engine.Registration``."""
        for front in self.fronts:
            shown = self._holder._parameters.get(FLAT_PARAM)
            if shown is not None and shown is not front.param:
                front.param = shown
                front.introduce()
            front.follow()
        super().take_over(unit, keeps_ties=keeps_ties)

    def _take_over_sharded(self, unit: Unit, *, keeps_ties: bool) -> None:
        """Raise if a module holds a parameter that belongs to the flat parameter."""
        for slot in self._slots if self._lent is None and not self._in_pieces else ():
            now = slot.params.get(slot.name)
            if now is not None:
                raise self._refusal(unit, slot, now)

    def _point(self, targets: dict[int, tuple[int, int]]) -> None:
        super()._point(targets)
        self._absent_of = None


class _CannotTakeOver(ConfigError, ProtocolError):
    """A parameter that does not fit, where PyTorch raises a RuntimeError."""


class Held(NamedTuple):
    """A sharded parameter, given by unit, bucket and index."""

    unit: Unit
    bucket: Bucket
    number: int  # of the parameter in the bucket

    @property
    def param(self) -> nn.Parameter:
        """The sharded parameter."""
        return self.bucket.sharded_params[self.number]

    def as_dtensor(self, piece: Tensor | None = None) -> Tensor:
        """Return the parameter, or ``piece``, a tensor of its local layout, as a DTensor.

        Without ``piece``, a parameter that is a DTensor is returned itself. Otherwise the DTensor
        is new, and shares the memory of the parameter or of ``piece``.
        """
        if piece is None and isinstance(self.param, DTensor):
            return self.param
        local = self.param.data if piece is None else piece
        return self.bucket.spec.form.as_dtensor(self.number, local)

    @property
    def coordinate(self) -> Sequence[int]:
        """This rank's coordinate among the ranks that hold the sharded parameter."""
        param, spec = self.param, self.bucket.spec
        if isinstance(param, DTensor):
            return param.device_mesh.get_coordinate() or ()
        over_others = spec.parallel[self.number] if spec.parallel else None
        others = over_others.mesh.get_coordinate() if over_others is not None else None
        copy = 0 if spec.replicas is None else spec.replicas.rank
        return (copy, spec.comm.rank, *(others or ()))


def held_params(units: Iterable[Unit]) -> dict[Place, Held]:
    """Return the parameters of ``units`` by place."""
    found: dict[Place, Held] = {}
    for unit in units:
        for slot in places_of(unit).slots():
            found[slot.place] = Held(unit, unit.buckets[slot.bucket], slot.number)
    return found

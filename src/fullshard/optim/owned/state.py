"""The state of owned parameters, as the ranks hold it."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from fullshard._torch import dtensor as _dtensor
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.optim.flat import is_cut
from fullshard.optim.inner import Inner, Steppable
from fullshard.optim.owned.assign import OwnedBlock, ParamPlacement, Ranks
from fullshard.optim.probe import (
    BlockPiece,
    Units,
    loaded,
    padded_numel,
    plain,
    replace,
    unheld,
    unwrapped,
    wrapped,
)
from fullshard.tensors import RaggedShard, RaggedTensor, taken_by

Described = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of the state of a block, by the name that the class gives it."""


class StateEntry(NamedTuple):
    """One tensor of state as users see it: the state of some blocks, put together.

    Attributes:
        name: under which it is shown.
        key: the name that the class gives it.
        shape: of that tensor.
        members: by number of the block, the shape of its state.
        is_shared: all blocks have all of it; it is shown as that of the first.
    """

    name: str
    key: str
    shape: torch.Size
    members: dict[int, torch.Size]
    is_shared: bool = False


class Entries:
    """The entries that state of a parameter makes.

    Args:
        shape: the parameter's.
        blocks: its blocks, in the order of elements.
        units: for a parameter in pieces, see ``units_of``.
    """

    def __init__(
        self, shape: Sequence[int], blocks: Sequence[OwnedBlock], units: Units | None
    ) -> None:
        self._shape, self._blocks, self._units = torch.Size(shape), blocks, units

    def of(self, name: str, shape: torch.Size, scalars: Container[str]) -> StateEntry | None:
        """Return the entry that state of this name and shape makes; None: one value for all."""
        count = len(self._blocks)
        if self._units is not None:
            return self._of_pieces(name, shape, self._units.get(name))
        if is_cut(name, shape, self._shape, scalars):
            members = {at: torch.Size(block.shape) for at, block in enumerate(self._blocks)}
            return StateEntry(name, name, shape, members)
        if count == 1:
            return StateEntry(name, name, shape, {0: shape})
        key, _, number = name.rpartition(".")
        if key and number.isdigit() and int(number) < count:
            return StateEntry(name, key, shape, {int(number): shape})
        if shape and shape[0] == count:
            return StateEntry(name, name, shape, dict.fromkeys(range(count), shape[1:]))
        return None

    def _of_pieces(self, name: str, shape: torch.Size, unit: int | None) -> StateEntry:
        if not unit:
            members = dict.fromkeys(range(len(self._blocks)), shape)
            return StateEntry(name, name, shape, members, is_shared=True)
        rows, rest = (shape.numel(), ()) if shape == self._shape else (shape[0], tuple(shape[1:]))
        starts = [block.start // block.block_size * unit for block in self._blocks]
        lengths = (stop - start for start, stop in pairwise((*starts, rows)))
        members = {at: torch.Size((length, *rest)) for at, length in enumerate(lengths)}
        return StateEntry(name, name, shape, members)

    def merged(self, described: Sequence[Described], scalars: Container[str]) -> list[StateEntry]:
        """Return the entries that show state of the blocks, each of which is ``described``."""
        found: list[StateEntry] = []
        for key in described[0] if all(described) else ():
            if not all(key in one for one in described):
                continue
            shapes = [torch.Size(one[key][0]) for one in described]
            members = dict(enumerate(shapes))
            if self._units is not None:
                found.append(self._merged_pieces(key, members, self._units.get(key)))
                continue
            pairs = zip(shapes, self._blocks, strict=True)
            if all(is_cut(key, own, torch.Size(block.shape), scalars) for own, block in pairs):
                found.append(StateEntry(key, key, self._shape, members))
            elif len(members) == 1:
                found.append(StateEntry(key, key, shapes[0], members))
            elif len(set(shapes)) == 1:
                shape = torch.Size((len(members), *shapes[0]))
                found.append(StateEntry(key, key, shape, members))
            else:
                found += [
                    StateEntry(f"{key}.{at}", key, members[at], {at: members[at]}) for at in members
                ]
        return found

    def _merged_pieces(
        self, key: str, members: dict[int, torch.Size], unit: int | None
    ) -> StateEntry:
        first = members[0]
        if not unit:
            return StateEntry(key, key, first, {0: first})
        shape = torch.Size((sum(shape[0] for shape in members.values()), *first[1:]))
        is_like = shape == (self._shape.numel(),)
        return StateEntry(key, key, self._shape if is_like else shape, members)


Sample = Callable[[int, tuple[int, ...], torch.dtype], Mapping[str, Any]]
"""State that the class makes for a parameter of a group (number), shape and dtype."""


class OwnedParam:
    """A parameter, its blocks and their owners, and the state that they have.

    Attributes:
        param: the parameter.
        group: number of its group.
        placed: where its elements lie.
        blocks: its blocks, in the order of elements.
        owners: index of the owner of each block, ascending.
        ranks: the ranks of its mesh.
        units: for a parameter in pieces, see ``units_of``.
        own_blocks: the blocks that this rank owns, by number.
        is_announced: all ranks know the shapes of its state.
    """

    def __init__(
        self,
        param: Tensor,
        group: int,
        placed: ParamPlacement,
        blocks: Sequence[OwnedBlock],
        owners: Sequence[int],
        ranks: Ranks,
        units: Units | None = None,
    ) -> None:
        self.param, self.group, self.placed = param, group, placed
        self.blocks, self.owners, self.ranks, self.units = blocks, owners, ranks, units
        self.own_blocks = {at: Steppable() for at, owner in enumerate(owners) if owner == ranks.own}
        self.is_announced = False
        self._entries = Entries(placed.shape, blocks, units)
        self._described: list[Described] = [{} for _ in blocks]
        self._views: dict[tuple[int, str], Tensor] = {}  # by block and key: part of a shown tensor
        self._shown: dict[str, object] = {}

    # reading

    def is_untouched(self, state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Return whether ``state`` has the entries that were shown, whatever is in them."""
        own = state.get(self.param, {})
        return own.keys() == self._shown.keys() and all(
            value is self._shown[key] for key, value in own.items()
        )

    def piece(self, at: int) -> BlockPiece:
        """Return a block as a piece of the parameter."""
        block = self.blocks[at]
        return BlockPiece(
            block.start, block.numel, torch.Size(self.placed.shape).numel(), block.block_size
        )

    def like(self, name: str, shape: Sequence[int], scalars: Container[str]) -> DTensor | None:
        """Return an empty tensor cut as state under this name is; None: equal on all ranks."""
        entry = self._entries.of(name, torch.Size(shape), scalars)
        if entry is None or self.ranks.is_alone:
            return None
        if entry.is_shared:
            local = torch.empty(shape, device="meta")
            spec = self._spec(Replicate(), local.shape, local.dtype)
            return _dtensor.dtensor_from_spec(local, spec, requires_grad=False, cls=DTensor)
        local = torch.empty(self._lengths(entry)[self.ranks.own], device="meta")
        return self._placed(entry, local)

    def read(
        self, own: Mapping[str, Any], inner: Inner, numbers: Mapping[str, type], sample: Sample
    ) -> None:
        """Give the blocks copies of the state ``own``, as loaded or as set by hand.

        Args:
            own: by name; ``refuse`` has found nothing wrong with it.
            inner: the optimizer that steps the blocks.
            numbers: names of state that is a Python number there, with its type.
            sample: returns state that the class makes, see ``Probe.sample``.
        """
        own = loaded(own, self.param, numbers, lambda: self._sample(0, sample))
        values: dict[int, dict[str, Any]] = {at: {} for at in self.own_blocks}
        self._described = [{} for _ in self.blocks]
        for name, value in own.items():
            shape = value.shape if isinstance(value, Tensor) else None
            entry = None if shape is None else self._entries.of(name, shape, inner.scalars)
            if entry is None:
                for described in self._described:
                    described |= _described({name: value})
                for mine in values.values():
                    mine[name] = value.detach().clone() if isinstance(value, Tensor) else value
                continue
            kind = numbers.get(entry.key)
            for at, its_shape in entry.members.items():
                is_number = kind is not None and not its_shape
                dtype = _dtype(kind()) if kind is not None and is_number else value.dtype
                self._described[at][entry.key] = (tuple(its_shape), dtype)
            like = self.like(name, entry.shape, inner.scalars)
            local = value if like is None else taken_by(like, value)
            for at, view in self._cut(entry, local.detach().reshape(-1)).items():
                values[at][entry.key] = _for_the_class(view, kind)
        for at, block in self.own_blocks.items():
            if values[at]:
                shape = torch.Size(self.blocks[at].shape)
                has_inner = any("." in key for key in values[at])
                made = self._sample(at, sample) if has_inner else {}
                inner.set_state(block, wrapped(values[at], made, shape))
            else:
                inner.forget(block)
        self.is_announced = any(self._described)

    def refuse(self, own: Mapping[str, Any], scalars: Container[str], sample: Sample) -> None:
        """Refuse state that the class does not make, on all ranks alike, before it is read.

        Args:
            own: as for ``read``; only names and shapes matter.
            scalars: see ``is_cut``.
            sample: as for ``read``.

        Raises:
            ConfigError: it is not what the class makes.
        """
        held: dict[int, list[str]] = {}  # by block: names of tensors within wrappers
        for name, value in unwrapped(plain(own)).items():
            if "." not in name or not isinstance(value, Tensor):
                continue
            entry = self._entries.of(name, value.shape, scalars)
            key = name if entry is None else entry.key
            members = range(len(self.blocks)) if entry is None else entry.members
            for at in members if "." in key else ():
                held.setdefault(at, []).append(key)
        for at, names in held.items():
            odd = unheld(names, self._sample(at, sample))
            if odd:
                raise ConfigError(
                    f"OwnedOptimizer: state {odd} of a parameter of shape {self.placed.shape} is "
                    "of a class that keeps it so; this one does not. Load what the same class has "
                    "saved, or leave out the state"
                )

    def _sample(self, at: int, sample: Sample) -> Mapping[str, Any]:
        block = self.blocks[at]
        shape = block.shape
        if self.units is not None:
            shape = (padded_numel(0, torch.Size(self.placed.shape).numel(), block.block_size),)
        return sample(self.group, shape, self.param.dtype)

    # showing

    def describe(self, inner: Inner) -> dict[int, Described]:
        """Return the shapes and dtypes of the state of the blocks that this rank owns."""
        return {at: _described(inner.state_of(block)) for at, block in self.own_blocks.items()}

    def announce(
        self,
        described: Mapping[int, Described],
        inner: Inner,
        state: MutableMapping[Any, Any],
        *,
        makes_state: bool,
    ) -> None:
        """Show state in ``state``, given what owners say of blocks.

        If the class ``makes_state`` and a block has none, its first step has failed, and all ranks
        still have to learn the shapes.
        """
        news = [described.get(at, known) for at, known in enumerate(self._described)]
        self.is_announced = all(news) or not makes_state
        if news != self._described or not self.is_untouched(state):
            self._described = news
            self.show(inner, state)

    def show(self, inner: Inner, state: MutableMapping[Any, Any]) -> None:
        """Show in ``state`` what is known of the blocks."""
        self._views.clear()
        self._shown.clear()
        for entry in self._entries.merged(self._described, inner.scalars):
            self._show(entry, inner)
        if self._shown or self.param in state:
            own = state.setdefault(self.param, {})
            own.clear()
            own.update(self._shown)

    def refresh(
        self,
        inner: Inner,
        state: MutableMapping[Any, Any],
        bound: Container[int],
        *,
        may_change: bool,
    ) -> None:
        """Bring what is shown up to date after a step.

        Args:
            inner: the optimizer that has stepped.
            state: the user's.
            bound: addresses of memory that is released after the step.
            may_change: whether the class may change names or shapes of the state.

        Raises:
            UnsupportedError: the class has changed names or shapes of the state.
        """
        for at, block in self.own_blocks.items():
            values = inner.state_of(block) or {}
            known = self._described[at]
            if self.is_announced and not may_change and _described(values) != known:
                raise UnsupportedError(
                    f"OwnedOptimizer: the optimizer's state of a parameter of shape "
                    f"{self.placed.shape} changed from {known} to "
                    f"{_described(values)} in a step, which trials of the class did not show; "
                    "state must be made in the first step"
                )
            for key, value in unwrapped(values).items():
                view = self._views.get((at, key))
                if view is None:
                    if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in bound:
                        replace(values, key, value.clone())
                elif not isinstance(value, Tensor):
                    view.fill_(value)
                    if self.ranks.is_alone and len(self.blocks) == 1:  # shown as it is
                        self._shown[key] = state[self.param][key] = value
                elif value is not view and (value.shape, value.dtype) == (view.shape, view.dtype):
                    replace(values, key, view.copy_(value))

    def _show(self, entry: StateEntry, inner: Inner) -> None:
        mine = [at for at in entry.members if at in self.own_blocks]
        states = {at: inner.state_of(self.own_blocks[at]) or {} for at in mine}
        _, dtype = self._described[next(iter(entry.members))][entry.key]
        values = [unwrapped(states[at])[entry.key] for at in mine]
        device = self.param.device
        if len(values) == 1 and isinstance(values[0], Tensor) and values[0].is_contiguous():
            local = values[0].detach().view(-1)
        else:
            device = next((v.device for v in values if isinstance(v, Tensor)), device)
            flat = [torch.as_tensor(v, dtype=dtype, device=device).reshape(-1) for v in values]
            local = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        for (at, view), value in zip(self._cut(entry, local).items(), values, strict=True):
            self._views[at, entry.key] = view
            if isinstance(value, Tensor):
                replace(states[at], entry.key, view)
        shown: object
        if not self.ranks.is_alone:
            shown = self._placed(entry, local)
        elif len(self.blocks) > 1:
            shown = local.view(entry.shape)
        else:
            shown = values[0]
            if isinstance(shown, Tensor):
                self._views[0, entry.key] = shown
                replace(states[0], entry.key, shown)
        self._shown[entry.name] = shown

    def _cut(self, entry: StateEntry, local: Tensor) -> dict[int, Tensor]:
        """Return this rank's blocks' parts of ``local``, 1-D, in the shapes of their state."""
        views, start = {}, 0
        for at, shape in entry.members.items():
            if at in self.own_blocks:
                views[at] = local.narrow(0, start, shape.numel()).view(shape)
                start += 0 if entry.is_shared else shape.numel()
        return views

    def _lengths(self, entry: StateEntry) -> list[int]:
        lengths = [0] * len(self.ranks.numbers)
        for at, shape in entry.members.items():
            lengths[self.owners[at]] += shape.numel()
        return lengths

    def _placed(self, entry: StateEntry, local: Tensor) -> DTensor:
        placement = RaggedShard([(1, length) for length in self._lengths(entry)])
        spec = self._spec(placement, entry.shape, local.dtype)
        return _dtensor.dtensor_from_spec(local, spec, requires_grad=False, cls=RaggedTensor)

    def _spec(self, placement: Placement, shape: torch.Size, dtype: torch.dtype) -> Any:
        stride = torch.empty(shape, device="meta").stride()
        return _dtensor.dtensor_spec(
            self.ranks.mesh, (placement,), shape=shape, stride=stride, dtype=dtype
        )


def _described(values: Mapping[str, Any] | None) -> Described:
    return {
        key: (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else ((), _dtype(value))
        for key, value in unwrapped(values or {}).items()
        if value is not None
    }


def _dtype(value: object) -> torch.dtype:
    return torch.float64 if isinstance(value, float) else torch.int64


def _for_the_class(view: Tensor, kind: type | None) -> Any:
    """Return a copy, as a Python number if the class keeps one."""
    return view.clone() if kind is None or view.dim() else kind(view.item())

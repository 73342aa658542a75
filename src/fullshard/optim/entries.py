"""How state of the blocks of one parameter is joined to be shown, and cut again: names and shapes.

See ``owned_state`` for what it looks like.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from fullshard.optim.grain import Units
from fullshard.optim.owners import OwnedBlock
from fullshard.optim.states import is_cut

Described = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of the state of a block, by the name that the class gives it."""


class StateEntry(NamedTuple):
    """State as it is shown: of some blocks, joined.

    Attributes:
        name: under which it is shown.
        key: the name that the class gives it.
        shape: of the joined tensor.
        members: number of each block, and the shape of its state.
        is_shared: all blocks have all of it; it is shown as that of the first.
    """

    name: str
    key: str
    shape: tuple[int, ...]
    members: tuple[tuple[int, torch.Size], ...]
    is_shared: bool = False


class Entries:
    """The entries that state of a parameter makes.

    Args:
        shape: the parameter's.
        blocks: its blocks, in the order of elements.
        units: of a parameter in pieces, what belongs to a block of the class, see ``grain``.
    """

    def __init__(
        self, shape: Sequence[int], blocks: Sequence[OwnedBlock], units: Units | None
    ) -> None:
        self._shape, self._blocks, self._units = torch.Size(shape), blocks, units

    def of(self, name: str, shape: torch.Size, singles: Container[str]) -> StateEntry | None:
        """Return the entry that state of this name and shape makes; None: one value for all."""
        count = len(self._blocks)
        if self._units is not None:
            return self._of_pieces(name, shape, self._units.get(name))
        if is_cut(name, shape, self._shape, singles):
            members = [(at, torch.Size(block.shape)) for at, block in enumerate(self._blocks)]
            return StateEntry(name, name, tuple(shape), tuple(members))
        if count == 1:
            return StateEntry(name, name, tuple(shape), ((0, shape),))
        key, _, number = name.rpartition(".")
        if key and number.isdigit() and int(number) < count:
            return StateEntry(name, key, tuple(shape), ((int(number), shape),))
        if shape and shape[0] == count:
            return StateEntry(
                name, name, tuple(shape), tuple((at, shape[1:]) for at in range(count))
            )
        return None

    def _of_pieces(self, name: str, shape: torch.Size, unit: int | None) -> StateEntry:
        if not unit:
            members = tuple((at, shape) for at in range(len(self._blocks)))
            return StateEntry(name, name, tuple(shape), members, is_shared=True)
        rows, rest = (shape.numel(), ()) if shape == self._shape else (shape[0], tuple(shape[1:]))
        starts = [block.start // block.grain * unit for block in self._blocks]
        lengths = [stop - start for start, stop in pairwise((*starts, rows))]
        members = tuple((at, torch.Size((length, *rest))) for at, length in enumerate(lengths))
        return StateEntry(name, name, tuple(shape), members)

    def joined(self, described: Sequence[Described], singles: Container[str]) -> list[StateEntry]:
        """Return the entries that show state of the blocks, each of which is ``described``."""
        if not all(described):
            return []
        found: list[StateEntry] = []
        for key in described[0]:
            if not all(key in one for one in described):
                continue
            shapes = [torch.Size(one[key][0]) for one in described]
            members = tuple(enumerate(shapes))
            if self._units is not None:
                found.append(self._joined_pieces(key, shapes, self._units.get(key)))
                continue
            pairs = zip(shapes, self._blocks, strict=True)
            cut = (is_cut(key, own, torch.Size(block.shape), singles) for own, block in pairs)
            if all(cut):
                found.append(StateEntry(key, key, tuple(self._shape), members))
            elif len(members) == 1:
                found.append(StateEntry(key, key, tuple(shapes[0]), members))
            elif len(set(shapes)) == 1:
                found.append(StateEntry(key, key, (len(members), *shapes[0]), members))
            else:
                found += [
                    StateEntry(f"{key}.{at}", key, tuple(shape), ((at, shape),))
                    for at, shape in members
                ]
        return found

    def _joined_pieces(
        self, key: str, shapes: Sequence[torch.Size], unit: int | None
    ) -> StateEntry:
        if not unit:
            return StateEntry(key, key, tuple(shapes[0]), ((0, shapes[0]),))
        rows, rest = sum(shape[0] for shape in shapes), tuple(shapes[0][1:])
        is_like = rows == self._shape.numel() and not rest
        shape = tuple(self._shape) if is_like else (rows, *rest)
        return StateEntry(key, key, shape, tuple(enumerate(shapes)))

"""Keep the places of plain Parameters that hold a rank's pieces; DTensors carry their places."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fullshard.tensors.parallel import ShardPlace


class PlacedPart(NamedTuple):
    """Some elements of a plain Parameter, and of the Parameter's gradient, that share one place.

    Attributes:
        place: the mesh and placements of the elements.
        start: index of the first element, in 1-D.
        numel: number of elements.
    """

    place: ShardPlace
    start: int
    numel: int


_parts: MutableMapping[Tensor, tuple[PlacedPart, ...]] = WeakIdKeyDictionary()


def announce_parts(param: Tensor, parts: Sequence[PlacedPart]) -> None:
    """Announce the ``parts`` of ``param``, for ``placed_parts_of``, without keeping it alive."""
    _parts[param] = tuple(parts)


def placed_parts_of(param: Tensor) -> tuple[PlacedPart, ...]:
    """Return the parts that were announced for ``param``; an empty tuple if none were."""
    return _parts.get(param, ())

"""Where plain Parameters lie that hold a rank's pieces, which DTensors tell by themselves."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fullshard.tensors.parallel import ShardPlace


class PlacedPart(NamedTuple):
    """Some elements of a plain Parameter, and of its gradient, that lie on a mesh together.

    Attributes:
        place: the mesh, and how they lie over its dims.
        start: the first of them, in 1-D.
        numel: how many there are.
    """

    place: ShardPlace
    start: int
    numel: int


_parts: MutableMapping[Tensor, tuple[PlacedPart, ...]] = WeakIdKeyDictionary()


def announce_parts(param: Tensor, parts: Sequence[PlacedPart]) -> None:
    """Let it be found out over which ranks ``param``, which is not kept alive, is spread."""
    _parts[param] = tuple(parts)


def placed_parts_of(param: Tensor) -> tuple[PlacedPart, ...]:
    """What was announced; nothing for a tensor that is nobody's piece."""
    return _parts.get(param, ())

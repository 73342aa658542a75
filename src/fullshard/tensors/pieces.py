"""Keep the places of plain Parameters that hold a rank's pieces; DTensors carry their places."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fullshard.tensors.parallel import ShardPlace


class PlacedPiece(NamedTuple):
    """Some elements of a plain Parameter, and of the Parameter's gradient, that share one place.

    Attributes:
        place: the mesh and placements of the elements.
        start: index of the first element, in 1-D.
        numel: number of elements.
        whole: shape of the parameter of which they are a part; None in a flat parameter, which has
            parts of several.
    """

    place: ShardPlace
    start: int
    numel: int
    whole: torch.Size | None = None


_pieces: MutableMapping[Tensor, tuple[PlacedPiece, ...]] = WeakIdKeyDictionary()


def announce_pieces(param: Tensor, pieces: Sequence[PlacedPiece]) -> None:
    """Announce the ``pieces`` of ``param``, for ``placed_pieces_of``, without keeping it alive."""
    _pieces[param] = tuple(pieces)


def placed_pieces_of(param: Tensor) -> tuple[PlacedPiece, ...]:
    """Return the pieces that were announced for ``param``; an empty tuple if none were."""
    return _pieces.get(param, ())

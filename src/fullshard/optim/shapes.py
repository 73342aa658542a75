"""The shapes of whole parameters, of which a rank may hold a part."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.errors import UnsupportedError
from fullshard.tensors import placed_pieces_of


def whole_shape(param: Tensor) -> tuple[int, ...]:
    """Return the shape of the parameter of which ``param`` is all or this rank's part.

    Raises:
        UnsupportedError: ``param`` is a flat parameter that holds several.
    """
    pieces = () if isinstance(param, DTensor) else placed_pieces_of(param)
    if not pieces:
        return tuple(param.shape)
    shape = pieces[0].whole
    if shape is None:
        raise UnsupportedError(
            f"a flat parameter of {param.numel()} elements on this rank joins several parameters, "
            "and an optimizer of whole matrices has to tell them apart; wrap the model with "
            "use_orig_params=True"
        )
    return tuple(shape)

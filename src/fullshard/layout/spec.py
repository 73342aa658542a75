"""The input of a layout, and the packing that both builders share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.errors import LayoutError


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter as a layout sees it.

    >>> ParamSpec("mlp.up.weight", (5, 2)).numel
    10

    Attributes:
        name: fully qualified name.
        shape: global shape; sizes of zero are legal.
        shard_dim: the tensor dim that `PerParameter` cuts, not negative; `Ragged` ignores it.
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int = 0

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise LayoutError(
                f"parameter {self.name!r}: got shape {self.shape}, expected no negative size"
            )

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim parameter."""
        return math.prod(self.shape)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def pack(numels: Sequence[int], align: int) -> tuple[tuple[int, ...], int]:
    """Lay intervals end to end, each starting at a multiple of `align` elements.

    >>> pack([10, 5], align=4)
    ((0, 12), 17)

    Returns:
        The offset of each interval, and the end of the last one, which is not rounded up.
    """
    offsets = []
    end = 0
    for numel in numels:
        begin = round_up(end, align)
        offsets.append(begin)
        end = begin + numel
    return tuple(offsets), end


def check_build(*, world: int, align: int) -> None:
    """Check that a layout can have this number of ranks and this alignment.

    Raises:
        LayoutError: if either is less than 1.
    """
    if world < 1:
        raise LayoutError(f"got world={world}, expected the number of ranks to be at least 1")
    if align < 1:
        raise LayoutError(f"got align={align}, expected at least 1 element")

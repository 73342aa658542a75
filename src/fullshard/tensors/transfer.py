"""Move parts of tensors between ranks: the elements that two tensors share, packed in messages.

On the left are local shards of two tensors, w and b; a dot is an element of another rank. On the
right are the full blocks:

    rank 0   w w . . | b          one message         rank 0   w w w w
    rank 1   . . w w | . b b    for each rank         rank 1            b b b

Messages have no headers: both ends list the same parts in the same order. Each part begins at a
multiple of ``ALIGN`` bytes, which suits every dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fullshard.comm import all_to_all
from fullshard.layout import round_up
from fullshard.layout.region import Overlap, Region

ALIGN = 16  # bytes

Views = list[Tensor]
"""The elements of one part in a tensor that has them: a view for each overlap."""

Key = TypeVar("Key")


class Part(NamedTuple, Generic[Key]):
    """The elements that a flat or contiguous local tensor and a block have in common.

    Attributes:
        local: number or name of the local tensor.
        block: number of the block.
        overlaps: from the local tensor to the block.
    """

    local: Key
    block: int
    overlaps: tuple[Overlap, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(one.numel for one in self.overlaps)

    def of_local(self, local: Tensor) -> Views:
        """Return the views of the local tensor."""
        return [view_of(local, one) for one in self.overlaps]

    def of_block(self, block: Tensor) -> Views:
        """Return the views of the block."""
        return [
            _strided(block, one.sizes, one.other_strides, one.other_offset) for one in self.overlaps
        ]

    def as_slice(self, local: Tensor, numel: int) -> Tensor | None:
        """Return a flat slice of ``local`` if the part is a whole block in order; else None.

        Args:
            local: the local tensor.
            numel: number of elements of the block.
        """
        first, *others = self.overlaps
        if others or first.numel != numel or not first.is_flat:
            return None
        return local.view(-1)[first.offset : first.offset + numel]


def parts_of(local: Key, region: Region, block: int, wanted: Region) -> list[Part[Key]]:
    """Return the elements that ``region`` and ``wanted`` share, as one part; an empty list if none.

    Args:
        local: number or name of the local tensor.
        region: the elements of the local tensor.
        block: number of the block.
        wanted: the elements of the block.
    """
    found = tuple(region.stretches(wanted)) if region.numel and wanted.numel else ()
    return [Part(local, block, found)] if found else []


def view_of(tensor: Tensor, one: Overlap) -> Tensor:
    """Return the view of an overlap in the first of its two tensors."""
    return _strided(tensor, one.sizes, one.strides, one.offset)


def _strided(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)


def aligned(nbytes: int) -> int:
    """Return the next multiple of ``ALIGN``."""
    return round_up(nbytes, ALIGN)


def places(sizes: Iterable[int], start: int = 0) -> list[int]:
    """Return where parts of these sizes begin, and where the last one ends, in bytes."""
    return [*accumulate(map(aligned, sizes), initial=start)]


def pack(
    parts: Sequence[Views], message: Tensor, dtypes: Iterable[torch.dtype] | None = None
) -> None:
    """Copy parts to a message.

    Args:
        parts: the parts.
        message: flat bytes, at least as many as the parts need.
        dtypes: in which the parts travel; None: their own.
    """
    _copy(_in_message(parts, message, dtypes), [*chain(*parts)])


def unpack(message: Tensor, parts: Sequence[Views]) -> None:
    """Copy a message to the parts, which have the dtypes in which they travelled."""
    _copy([*chain(*parts)], _in_message(parts, message, None))


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Dtypes in which unsigned integers are copied, which CUDA's batched copy lacks."""


def _copy(targets: Views, sources: Views) -> None:
    if targets:
        to, of = (
            [one.view(_SIGNED[one.dtype]) if one.dtype in _SIGNED else one for one in its]
            for its in (targets, sources)
        )
        torch._foreach_copy_(to, of)


def _in_message(
    parts: Sequence[Views], message: Tensor, dtypes: Iterable[torch.dtype] | None
) -> Views:
    """Return the views of all parts in a message."""
    found: Views = []
    at = 0
    for views, kind in zip(parts, dtypes or (views[0].dtype for views in parts), strict=True):
        at = aligned(at)
        for one in views:
            start, at = at, at + one.numel() * kind.itemsize
            found.append(message[start:at].view(kind).view(one.shape))
    return found


def exchange(
    group: ProcessGroup,
    sent: Sequence[Sequence[Views]],
    taken: Sequence[Sequence[Views]],
    device: torch.device,
) -> None:
    """Send ``sent[r]`` to rank r, and fill ``taken[r]`` from rank r, in one all-to-all.

    Args:
        group: the ranks.
        sent: for each rank the parts for it.
        taken: for each rank the parts from it.
        device: the device of all parts.
    """
    lengths, sizes = ([_nbytes(parts) for parts in one] for one in (sent, taken))
    packed = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
    pack([*chain(*sent)], packed)
    given = all_to_all(packed, lengths, sizes, group)
    unpack(given, [*chain(*taken)])


def _nbytes(parts: Iterable[Views]) -> int:
    """Return the size of the message with these parts."""
    return places(sum(one.nbytes for one in views) for views in parts)[-1]

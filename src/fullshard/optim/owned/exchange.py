"""Send the parts of matrices to their owners, and updated parts back, packed.

    rank 0   w w . . | b        one all-to-all       rank 0   w w w w        full, at the owner
    rank 1   . . w w | . b b    ------------->       rank 1            b b b

Parts that an owner holds itself do not travel: they are copied, or, if they are the full matrix,
used in place. Each way is one exchange of bytes for all dtypes; both ends compute the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard.comm import all_to_all
from fullshard.layout.region import Overlap, Region
from fullshard.optim.owned.assign import OwnedBlock, Ranks

_ALIGN = 16  # bytes, as tensors of any dtype need


class BlockPart(NamedTuple):
    """Elements that a rank holds of a block, as strided views of the two.

    Attributes:
        param: number of the parameter among those of the round.
        block: number of the block among those of the round.
        overlap: from the local tensor of the rank to the block.
    """

    param: int
    block: int
    overlap: Overlap

    def of_local(self, local: Tensor) -> Tensor:
        """Return the view of the rank's local tensor."""
        return _view(local, self.overlap.sizes, self.overlap.strides, self.overlap.offset)

    def of_block(self, block: Tensor) -> Tensor:
        """Return the view of the block."""
        one = self.overlap
        return _view(block, one.sizes, one.other_strides, one.other_offset)


def _view(tensor: Tensor, sizes: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)


def parts_of(
    region: Region, full: tuple[int, ...], param: int, number: int, block: OwnedBlock
) -> list[BlockPart]:
    """Return what ``region`` of parameter number ``param`` has of block ``number``."""
    if not region.numel or not block.numel:
        return []
    return [BlockPart(param, number, one) for one in region.stretches(block.region(full))]


class Peers:
    """The parts that travel between this rank and each rank of a mesh.

    Attributes:
        held: for each rank what this one holds of the blocks which that rank owns.
        owned: for each rank what that one holds of the blocks which this rank owns.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.held: list[list[BlockPart]] = [[] for _ in ranks.numbers]
        self.owned: list[list[BlockPart]] = [[] for _ in ranks.numbers]

    def to_owners(self, *kinds: tuple[Sequence[Tensor], Mapping[int, Tensor]]) -> None:
        """Fill the blocks that this rank owns.

        ``kinds``: for each kind of tensor, such as gradients, the contiguous local tensors by
        parameter, and the contiguous blocks.
        """
        sent = [[p.of_local(own[p.param]) for own, _ in kinds for p in ps] for ps in self.held]
        taken = [[p.of_block(its[p.block]) for _, its in kinds for p in ps] for ps in self.owned]
        _exchange(self._ranks, sent, taken, kinds[0][0][0].device)

    def to_holders(self, locals_now: Sequence[Tensor], blocks: Mapping[int, Tensor]) -> None:
        """Write the blocks to the local tensors of all ranks; the inverse of ``to_owners``."""
        sent = [[part.of_block(blocks[part.block]) for part in parts] for parts in self.owned]
        taken = [[part.of_local(locals_now[part.param]) for part in parts] for parts in self.held]
        _exchange(self._ranks, sent, taken, locals_now[0].device)


def _exchange(
    ranks: Ranks,
    sent: list[list[Tensor]],
    taken: list[list[Tensor]],
    device: torch.device,
) -> None:
    """Copy the tensors in ``sent``, by rank, to those in ``taken`` on that rank."""
    sources, targets = list(chain(*sent)), list(chain(*taken))
    lengths, sizes = ([sum(map(_padded, those)) for those in one] for one in (sent, taken))
    packed = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
    if sources:
        torch._foreach_copy_(_views(packed, sources), sources)
    given = all_to_all(packed, lengths, sizes, ranks.mesh.get_group())
    if targets:
        torch._foreach_copy_(targets, _views(given, targets))


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN) * _ALIGN


def _views(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of ``buffer`` that are like ``tensors``, one after the other."""
    starts = accumulate(map(_padded, tensors), initial=0)
    return [
        buffer[at : at + one.nbytes].view(one.dtype).view(one.shape)
        for at, one in zip(starts, tensors, strict=False)
    ]

"""The parts of a layout: segments, bands of alike segments, and the copies that they imply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Segment:
    """One rank's part of one parameter: `count` stretches of `length` elements, `step` apart.

    An interval has ``count == 1``, and then `step` is the numel of the parameter.

    The example is the right half of a (2, 6) parameter cut on dim 1, first in rank 1's shard.

        0  1  2 [3  4  5]
        6  7  8 [9 10 11]       Segment(param=0, start=3, length=3, count=2, step=6, shard_offset=0)

        rank 1's shard:  3 4 5 9 10 11

    Attributes:
        param: index in `Layout.params`.
        start: first element, in the parameter's row-major order.
        length: elements of one stretch.
        count: number of stretches.
        step: distance between the starts of successive stretches, in the parameter.
        shard_offset: offset in the rank's shard, where the stretches are end to end.
    """

    param: int
    start: int
    length: int
    count: int
    step: int
    shard_offset: int

    @property
    def numel(self) -> int:
        """Number of elements that this rank keeps, possibly 0."""
        return self.length * self.count


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """A box that one strided copy moves between a parameter and a rank-major staging buffer.

    Element ``(i, j, k)`` of the box is at ``offset + i*strides[0] + j*strides[1] + k*strides[2]``
    on either side. The last dim is contiguous on both sides.

    Attributes:
        param: index in `Layout.params`.
        sizes: sizes of the box, 1 to 3 dims, the same on both sides.
        param_offset: offset of the box's first element in the parameter.
        param_strides: one stride per dim, in the parameter.
        staging_offset: offset of the box's first element in the staging buffer, where the slice of
            rank r starts at ``r * row``.
        staging_strides: one stride per dim, in the staging buffer.
    """

    param: int
    sizes: tuple[int, ...]
    param_offset: int
    param_strides: tuple[int, ...]
    staging_offset: int
    staging_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Band:
    """Neighboring ranks whose segments of a parameter are alike.

    Each rank of a band continues where the previous rank stopped, so rank ``first_rank + i`` keeps
    `segment` shifted by ``i * segment.length`` elements. A layout stores bands rather than one
    segment per rank: a parameter has at most a handful of bands, however many ranks there are.

    The example is a (2, 7) parameter cut on dim 1 over 5 ranks.

        0 1 | 2 3 |  4  5 |  6 |       ranks 0-2  length 2, count 2, step 7, start 0 (+2 per rank).
        7 8 | 9 10| 11 12 | 13 |       rank 3     length 1, count 2, step 7, start 6.
                                       rank 4     length 0, count 2, step 7, start 7.

    Attributes:
        first_rank: the first rank of the band.
        num_ranks: number of ranks in the band, at least 1.
        segment: the segment of `first_rank`.
        local_shape: shape of the local tensor on each rank of the band.
    """

    first_rank: int
    num_ranks: int
    segment: Segment
    local_shape: tuple[int, ...]

    @property
    def end_rank(self) -> int:
        """One past the last rank of the band."""
        return self.first_rank + self.num_ranks

    @property
    def numel(self) -> int:
        """Number of elements that all ranks of the band keep together."""
        return self.num_ranks * self.segment.numel

    def segment_of(self, rank: int) -> Segment:
        """Return the segment of `rank`, which must be in this band."""
        start = self.segment.start + (rank - self.first_rank) * self.segment.length
        return replace(self.segment, start=start)

    def copy(self, row: int) -> StridedCopy:
        """Return the box that holds this band's elements, for staging slices of `row` elements."""
        part = self.segment
        num_ranks, length = self.num_ranks, part.length
        if length == row:
            # The slices are full, so they touch: the band is contiguous on both sides.
            num_ranks, length = 1, length * num_ranks
        dims = (
            (part.count, part.step, part.length),
            (num_ranks, part.length, row),
            (length, 1, 1),
        )
        # Drop dims of size 1, but keep the last dim, so that a box always has a dim.
        sizes, param_strides, staging_strides = zip(
            *(dim for dim in dims[:-1] if dim[0] != 1), dims[-1], strict=True
        )
        return StridedCopy(
            param=part.param,
            sizes=sizes,
            param_offset=part.start,
            param_strides=param_strides,
            staging_offset=self.first_rank * row + part.shard_offset,
            staging_strides=staging_strides,
        )


def joined(copies: Sequence[StridedCopy]) -> list[StridedCopy]:
    """Return the same copies, with contiguous copies joined that adjoin on both sides."""
    result: list[StridedCopy] = []
    for copy in copies:
        if result and _adjoins(result[-1], copy):
            result[-1] = replace(result[-1], sizes=(result[-1].sizes[0] + copy.sizes[0],))
        else:
            result.append(copy)
    return result


def _adjoins(before: StridedCopy, copy: StridedCopy) -> bool:
    return (
        before.param == copy.param
        and len(before.sizes) == len(copy.sizes) == 1
        and before.param_offset + before.sizes[0] == copy.param_offset
        and before.staging_offset + before.sizes[0] == copy.staging_offset
    )

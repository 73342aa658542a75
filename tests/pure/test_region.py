"""Regions: an overlap holds exactly the common elements, once, at the right places."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard

from fullshard._torch.dtensor import StridedShard
from fullshard.layout.region import Interval, Region, cut, full_region
from fullshard.tensors import RaggedShard, coordinates_near, region_of


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    dims = []
    for size in shape:
        ends = sorted(draw(st.sets(st.integers(0, size), max_size=4)) | {0, size})
        pairs = [Interval(a, b - a) for a, b in itertools.pairwise(ends)]
        kept = [one for one in pairs if draw(st.booleans())]
        dims.append(tuple(kept) or (Interval(0, 0),))
    grid = math.prod(sum(one.length for one in intervals) for intervals in dims)
    start = draw(st.integers(0, grid))
    return Region(tuple(dims), start, draw(st.integers(start, grid)))


def elements(region: Region, shape: tuple[int, ...]) -> list[int]:
    """Return the numbers of a region's elements in the tensor, in the region's order."""
    indices = [
        [i for one in intervals for i in range(one.start, one.stop)] for intervals in region.dims
    ]
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    numbers = [
        sum(i * stride for i, stride in zip(index, strides, strict=True))
        for index in itertools.product(*indices)
    ]
    return numbers[region.start : region.stop]


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@given(st.data(), shapes)
def test_overlaps_are_all_common_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    one, other = data.draw(regions(shape)), data.draw(regions(shape))
    ours, theirs = elements(one, shape), elements(other, shape)
    found = []
    for overlap in one.overlaps(other):
        for index in itertools.product(*map(range, overlap.sizes)):
            own = sum(i * s for i, s in zip(index, overlap.strides, strict=True))
            its = sum(i * s for i, s in zip(index, overlap.other_strides, strict=True))
            own, its = own + overlap.offset, its + overlap.other_offset
            assert ours[own] == theirs[its]
            assert overlap.offset <= own < overlap.stop
            found.append(ours[own])
    assert sorted(found) == sorted(set(ours) & set(theirs))


@given(st.data(), shapes)
def test_a_part_of_a_region(data: st.DataObject, shape: tuple[int, ...]) -> None:
    region = data.draw(regions(shape))
    start = data.draw(st.integers(0, region.numel))
    stop = data.draw(st.integers(start, region.numel))
    assert elements(region.part(start, stop), shape) == elements(region, shape)[start:stop]


@given(st.data(), st.integers(1, 9))
def test_cut(data: st.DataObject, size: int) -> None:
    intervals = data.draw(regions((size,))).dims[0]
    indices = [i for one in intervals for i in range(one.start, one.stop)]
    start = data.draw(st.integers(0, len(indices)))
    length = data.draw(st.integers(0, len(indices) - start))
    found = cut(intervals, start, length)
    assert found
    assert [i for one in found for i in range(one.start, one.stop)] == indices[
        start : start + length
    ]


@given(shapes)
def test_the_region_of_a_whole_tensor(shape: tuple[int, ...]) -> None:
    assert elements(full_region(shape), shape) == list(range(math.prod(shape)))


def ragged(draw: st.DrawFn, numel: int, num_ranks: int) -> RaggedShard:
    ends = sorted(draw(st.integers(0, numel)) for _ in range(num_ranks - 1))
    return RaggedShard([(1, b - a) for a, b in itertools.pairwise((0, *ends, numel))])


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]:
    """Draw a shape, a mesh shape, and placements."""
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    dims = st.integers(0, len(shape) - 1)
    plain = st.one_of(st.just(Replicate()), dims.map(Shard))
    placements = [draw(plain) for _ in mesh]
    if draw(st.booleans()):  # a later mesh dim is cut before the first
        placements[0] = StridedShard(draw(dims), split_factor=draw(st.sampled_from([2, *mesh])))
    elif draw(st.booleans()):
        tails = itertools.product(*map(range, mesh[1:]))
        numels = {region_of(shape, placements[1:], mesh[1:], at).numel for at in tails}
        if len(numels) == 1:
            placements[0] = ragged(draw, numels.pop(), mesh[0])
    return shape, mesh, tuple(placements)


@given(st.data(), cuts())
def test_every_rank_with_something_in_a_box_is_found(
    data: st.DataObject, cut: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]]
) -> None:
    shape, mesh, placements = cut
    wanted = data.draw(regions(shape))
    fixed = tuple(data.draw(st.integers(0, size - 1)) for size in mesh)
    found = {
        coordinate
        for box in wanted.boxes()
        for coordinate in coordinates_near(box, shape, placements, mesh, fixed)
    }
    free = zip(placements, mesh, fixed, strict=True)
    for at in itertools.product(
        *((own,) if isinstance(one, Replicate) else range(size) for one, size, own in free)
    ):
        if any(region_of(shape, placements, mesh, at).overlaps(wanted)):
            assert at in found


@given(cuts())
def test_regions_make_up_a_tensor_once(
    cut: tuple[tuple[int, ...], tuple[int, ...], tuple[Placement, ...]],
) -> None:
    shape, mesh, placements = cut
    held = [
        number
        for at in itertools.product(
            *(
                range(1 if isinstance(p, Replicate) else s)
                for p, s in zip(placements, mesh, strict=True)
            )
        )
        for number in elements(region_of(shape, placements, mesh, at), shape)
    ]
    assert sorted(held) == list(range(math.prod(shape)))

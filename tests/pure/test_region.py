"""Regions: their overlaps are all the elements that both have, once, at the right places."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout.region import Interval, Region, cut, whole


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
    """The elements of a region, numbered in the tensor, in the order of the region."""
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
    assert elements(whole(shape), shape) == list(range(math.prod(shape)))

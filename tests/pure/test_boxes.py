"""Intervals as boxes: they are complete, in order, and few."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout.region import boxes


@st.composite
def intervals(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    numel = 1
    for size in shape:
        numel *= size
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(0, numel - start))


@given(intervals())
def test_boxes_hold_the_elements_of_the_interval_in_order(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    shape, start, length = case
    elements = list(itertools.product(*map(range, shape)))[start : start + length]
    found = [
        index
        for box in boxes(shape, start, length)
        for index in itertools.product(
            *(range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        )
    ]
    assert found == elements


@given(intervals())
def test_boxes_are_few(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, length = case
    assert len(boxes(shape, start, length)) <= max(1, 2 * len(shape) - 1)
    if length == 0:
        assert not boxes(shape, start, length)


def test_a_whole_tensor_is_one_box() -> None:
    (box,) = boxes((3, 4, 5), 0, 60)
    assert box.offsets == (0, 0, 0)
    assert box.sizes == (3, 4, 5)


def test_an_interval_that_needs_them_has_two_n_minus_one() -> None:
    assert len(boxes((4, 4, 4), 1, 62)) == 5


def test_an_empty_tensor_has_none() -> None:
    assert boxes((0, 5), 0, 0) == ()

"""A subset of a layout's parameters: elements stay on their ranks, in order, without gaps."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout import Layout, ParamSpec, PerParameter, Ragged, subset
from tests.pure.layout_model import layouts


@st.composite
def chosen(draw: st.DrawFn) -> tuple[Layout, list[int]]:
    layout = draw(layouts())
    flags = draw(st.lists(st.booleans(), min_size=len(layout.params), max_size=len(layout.params)))
    return layout, [param for param, flag in enumerate(flags) if flag]


@given(chosen())
def test_every_rank_keeps_the_same_of_each_parameter(case: tuple[Layout, list[int]]) -> None:
    """``Layout`` checks its own invariants; this test compares the segments with the old ones."""
    layout, params = case
    found = subset(layout, params)
    assert found.params == tuple(layout.params[param] for param in params)
    for rank in range(layout.world):
        before, after = layout.segments_of(rank), found.segments_of(rank)
        for number, param in enumerate(params):
            one, other = before[param], after[number]
            assert (one.start, one.length, one.count, one.step) == (
                other.start,
                other.length,
                other.count,
                other.step,
            )
            assert layout.local_shape(rank, param) == found.local_shape(rank, number)


@given(chosen())
def test_order_and_neighbours_stay(case: tuple[Layout, list[int]]) -> None:
    """On rank 0, which has the longest segments: an optimizer steps neighbours as one tensor."""
    layout, params = case
    after = subset(layout, params).segments_of(0)
    number_of = {param: number for number, param in enumerate(params)}
    kept = sorted((s for s in layout.segments_of(0) if s.numel), key=lambda s: s.shard_offset)
    for one, two in pairwise(kept):
        if one.param in number_of and two.param in number_of:
            distance = two.shard_offset - one.shard_offset
            moved = [after[number_of[segment.param]] for segment in (one, two)]
            assert moved[1].shard_offset - moved[0].shard_offset >= distance
            if layout.world == 1:
                assert moved[1].shard_offset - moved[0].shard_offset == distance
    order = [s.param for s in kept if s.param in number_of]
    ours = sorted(order, key=lambda param: after[number_of[param]].shard_offset)
    assert ours == order


@given(chosen())
def test_shards_are_as_short_as_what_a_rank_keeps(case: tuple[Layout, list[int]]) -> None:
    layout, params = case
    found = subset(layout, params)
    assert found.shard_numel <= layout.shard_numel
    most = max(
        sum(segment.numel for segment in found.segments_of(rank)) for rank in range(layout.world)
    )
    assert found.shard_numel >= most
    if len(params) == 1:
        assert found.shard_numel < most + 8


def test_a_few_small_ones_between_large_ones() -> None:
    """As adapters between frozen matrices, whose segments are scattered over the shards."""
    specs = [ParamSpec(f"p{i}", (64, 64) if i % 3 else (64, 2)) for i in range(12)]
    small = [number for number, spec in enumerate(specs) if spec.numel == 128]
    assert subset(PerParameter().build(specs, 4, 4), small).shard_numel == 128
    ragged = Ragged().build(specs, 4, 4)
    kept = [sum(ragged.segments_of(rank)[number].numel for number in small) for rank in range(4)]
    assert subset(ragged, small).shard_numel == max(kept) == 128


def test_the_picture() -> None:
    specs = [ParamSpec("a", (2,)), ParamSpec("b", (8,)), ParamSpec("c", (4,))]
    found = subset(Ragged().build(specs, 2, 1), [0, 2])
    kept = [
        [(s.param, s.shard_offset, s.numel) for s in found.segments_of(rank) if s.numel]
        for rank in range(2)
    ]
    assert found.shard_numel == 4 and kept == [[(0, 0, 2)], [(1, 0, 4)]]

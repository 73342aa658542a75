"""Moves between layouts against brute force."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import LayoutError
from fullshard.layout import Layout, LayoutStrategy, Move, ParamSpec, PerParameter, Ragged, remap
from tests.pure.layout_model import (
    PADDING,
    Buffer,
    aligns,
    layouts,
    scatter,
    spec_lists,
    strategies,
    values,
    worlds,
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Two layouts of the same parameters, in another order and cut on other dims."""
    params = draw(spec_lists())
    turned = [
        ParamSpec(spec.name, spec.shape, draw(st.integers(0, len(spec.shape) - 1)))
        for spec in draw(st.permutations(params))
    ]
    first, second = (
        draw(strategies).build(given, draw(worlds), draw(aligns)) for given in (params, turned)
    )
    return first, second


@given(pairs())
def test_moves_carry_each_element_once(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    params = {spec.name: param for spec, param in zip(source.params, values(source), strict=True)}
    sent = scatter(source, list(params.values()))
    expected = scatter(target, [params[spec.name] for spec in target.params])
    received: list[Buffer] = [[PADDING] * target.shard_numel for _ in range(target.world)]
    for move in remap(source, target):
        assert move.length > 0
        shard = sent[move.source_rank]
        for i in range(move.length):
            assert received[move.target_rank][move.target_offset + i] is PADDING
            received[move.target_rank][move.target_offset + i] = shard[move.source_offset + i]
    assert received == expected


@given(pairs())
def test_no_two_moves_could_be_one(pair: tuple[Layout, Layout]) -> None:
    moves = remap(*pair)
    ends = {
        (
            m.param,
            m.source_rank,
            m.source_offset + m.length,
            m.target_rank,
            m.target_offset + m.length,
        )
        for m in moves
    }
    starts = {
        (m.param, m.source_rank, m.source_offset, m.target_rank, m.target_offset) for m in moves
    }
    assert not ends & starts


@given(pairs())
def test_moves_are_the_same_each_time(pair: tuple[Layout, Layout]) -> None:
    assert remap(*pair) == remap(*pair)


@given(layouts())
def test_a_layout_to_itself_moves_each_segment_in_one_piece(layout: Layout) -> None:
    moves = sorted(remap(layout, layout), key=lambda move: (move.param, move.source_rank))
    assert moves == [
        Move(index, rank, part.shard_offset, rank, part.shard_offset, part.numel)
        for index in range(len(layout.params))
        for rank in range(layout.world)
        if (part := layout.segments_of(rank)[index]).numel
    ]


def test_the_example_of_the_docstring() -> None:
    params = [ParamSpec("p", (6,))]
    source, target = (PerParameter().build(params, world, 1) for world in (2, 3))
    assert remap(source, target) == (
        Move(0, source_rank=0, source_offset=0, target_rank=0, target_offset=0, length=2),
        Move(0, source_rank=0, source_offset=2, target_rank=1, target_offset=0, length=1),
        Move(0, source_rank=1, source_offset=0, target_rank=1, target_offset=1, length=1),
        Move(0, source_rank=1, source_offset=1, target_rank=2, target_offset=0, length=2),
    )


def test_the_number_of_moves_is_that_of_the_borders() -> None:
    params = [ParamSpec(f"p{i}", (1 << 12, 1 << 12)) for i in range(20)]
    for strategy in (PerParameter(), Ragged()):
        moves = remap(strategy.build(params, 8, 8), PerParameter().build(params, 12, 8))
        assert len(moves) <= 20 * (8 + 12)


@pytest.mark.parametrize("strategy", [PerParameter(), Ragged()])
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([ParamSpec("w", (5, 2))], r"only one layout has: 'b'"),
        ([ParamSpec("w", (5, 2)), ParamSpec("c", (5,))], r"only one layout has: 'b', 'c'"),
        ([ParamSpec("w", (2, 5)), ParamSpec("b", (5,))], r"'w': got shape \(5, 2\) in the source"),
        ([ParamSpec("w", (5, 2)), ParamSpec("w", (5,))], r"got 2 parameters with 1 different"),
    ],
)
def test_other_parameters_are_refused(
    strategy: LayoutStrategy, params: list[ParamSpec], message: str
) -> None:
    source = strategy.build([ParamSpec("w", (5, 2)), ParamSpec("b", (5,))], 2, 4)
    with pytest.raises(LayoutError, match=message):
        remap(source, PerParameter().build(params, 3, 1))

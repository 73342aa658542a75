"""Layouts equal a brute-force model, with lists of every element, and torch.chunk."""

from __future__ import annotations

import doctest
import importlib
import math
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fullshard.layout
from fullshard.errors import LayoutError
from fullshard.layout import Layout, LayoutStrategy, ParamSpec, PerParameter, Ragged, Segment
from tests.pure.layout_model import (
    PADDING,
    RAGGED,
    Buffer,
    aligns,
    elements,
    layouts,
    raggeds,
    scatter,
    spec_lists,
    specs,
    strategies,
    stretches,
    values,
    worlds,
)

W = ParamSpec("w", (5, 2))
B = ParamSpec("b", (5,))


# Properties of both kinds of layout.


@given(layouts())
def test_each_element_is_on_one_rank_once(layout: Layout) -> None:
    params = values(layout)
    kept = Counter(value for shard in scatter(layout, params) for value in shard)
    padding = kept.pop(PADDING, 0)
    assert kept == Counter(value for param in params for value in param)
    assert padding == layout.padding_numel


@given(layouts())
def test_a_local_shape_holds_the_elements_of_its_segment(layout: Layout) -> None:
    for rank in range(layout.world):
        segments = layout.segments_of(rank)
        assert len(segments) == len(layout.params)
        for param, segment in enumerate(segments):
            assert math.prod(layout.local_shape(rank, param)) == segment.numel


@given(layouts())
def test_unsharded_regions_are_disjoint_and_in_bounds(layout: Layout) -> None:
    unsharded: Buffer = [PADDING] * layout.unsharded_numel
    for offset, spec in zip(layout.unsharded_offsets, layout.params, strict=True):
        assert unsharded[offset : offset + spec.numel] == [PADDING] * spec.numel
        unsharded[offset : offset + spec.numel] = range(spec.numel)


@given(strategies, spec_lists(), worlds, aligns)
def test_parameters_and_buffers_are_aligned(
    strategy: LayoutStrategy, params: list[ParamSpec], world: int, align: int
) -> None:
    layout = strategy.build(params, world, align)
    numbers = [layout.shard_numel, layout.unsharded_numel, *layout.unsharded_offsets]
    assert all(number % align == 0 for number in numbers)


@given(layouts(), st.integers(0, 5))
def test_copies_carry_each_element_between_shards_and_parameters(
    layout: Layout, extra: int
) -> None:
    params, row = values(layout), layout.shard_numel + extra
    staging = [value for shard in scatter(layout, params) for value in [*shard, *[PADDING] * extra]]
    gathered: list[Buffer] = [[PADDING] * len(param) for param in params]
    for copy in layout.copies(row):
        assert 1 <= len(copy.sizes) <= 3 and copy.param_strides[-1] == copy.staging_strides[-1] == 1
        for place, staged in elements(copy):
            assert gathered[copy.param][place] is PADDING  # copied only once
            gathered[copy.param][place] = staging[staged]
    assert gathered == params


@given(layouts())
def test_zero_copy_says_whether_the_shards_are_the_unsharded_buffer(layout: Layout) -> None:
    params = values(layout)
    gathered = [value for shard in scatter(layout, params) for value in shard]
    in_place = len(gathered) == layout.unsharded_numel and all(
        gathered[offset : offset + len(param)] == param
        for offset, param in zip(layout.unsharded_offsets, params, strict=True)
    )
    assert layout.zero_copy == in_place


@given(layouts())
def test_runs_walk_through_each_parameter(layout: Layout) -> None:
    params = values(layout)
    shards = scatter(layout, params)
    for index, param in enumerate(params):
        walked: Buffer = []
        for stretch in stretches(layout, index):
            assert stretch.start == len(walked)
            walked += shards[stretch.rank][
                stretch.shard_offset : stretch.shard_offset + stretch.length
            ]
        assert walked == param


@given(strategies, spec_lists(), worlds, aligns)
def test_a_layout_is_a_value(
    strategy: LayoutStrategy, params: list[ParamSpec], world: int, align: int
) -> None:
    layout, again = (strategy.build(params, world, align) for _ in range(2))
    layout.segments_of(0)  # cached segments are not part of the value
    assert layout == again and hash(layout) == hash(again)
    assert str(layout) == str(again) and repr(layout) == repr(again)
    assert pickle.loads(pickle.dumps(layout)) == layout


@pytest.mark.parametrize("strategy", [PerParameter(), *RAGGED])
def test_the_size_of_a_layout_does_not_grow_with_the_number_of_ranks(
    strategy: LayoutStrategy,
) -> None:
    params = [ParamSpec(f"p{i}", (4099, 33), shard_dim=i % 2) for i in range(8)]
    layout = strategy.build(params, 1024, 8)
    assert max(map(len, layout.bands)) <= 5
    assert len(layout.copies(layout.shard_numel + 1)) <= 3 * len(params)
    assert sum(sum(part.numel for part in layout.segments_of(r)) for r in range(1024)) == sum(
        spec.numel for spec in params
    )


# PerParameter


@given(specs(), worlds, aligns)
def test_per_parameter_keeps_what_torch_chunk_gives(
    spec: ParamSpec, world: int, align: int
) -> None:
    layout = PerParameter().build([spec], world, align)
    full = torch.arange(spec.numel).view(spec.shape)
    chunks = full.chunk(world, spec.shard_dim)
    nothing = full.narrow(spec.shard_dim, 0, 0)
    for rank, shard in enumerate(scatter(layout, values(layout))):
        (segment,) = layout.segments_of(rank)
        expected = chunks[rank] if rank < len(chunks) else nothing
        assert layout.local_shape(rank, 0) == tuple(expected.shape)
        kept = shard[segment.shard_offset : segment.shard_offset + segment.numel]
        assert kept == expected.flatten().tolist()


@given(spec_lists(), worlds, aligns)
def test_per_parameter_has_the_same_slots_on_all_ranks(
    params: list[ParamSpec], world: int, align: int
) -> None:
    layout = PerParameter().build(params, world, align)
    slots = [[part.shard_offset for part in layout.segments_of(rank)] for rank in range(world)]
    assert all(slot % align == 0 for slot in slots[0])
    assert slots == [slots[0]] * world


@given(spec_lists(), aligns)
def test_per_parameter_on_one_rank_is_zero_copy(params: list[ParamSpec], align: int) -> None:
    layout = PerParameter().build(params, 1, align)
    assert layout.zero_copy
    assert [part.shard_offset for part in layout.segments_of(0)] == list(layout.unsharded_offsets)
    assert layout.shard_numel == layout.unsharded_numel


@given(spec_lists(), worlds, aligns)
def test_per_parameter_needs_a_box_per_size_of_piece(
    params: list[ParamSpec], world: int, align: int
) -> None:
    layout = PerParameter().build(params, world, align)
    boxes = Counter(copy.param for copy in layout.copies(layout.shard_numel + 1))
    for index, spec in enumerate(params):
        pieces = {layout.local_shape(rank, index) for rank in range(world)}
        with_elements = [piece for piece in pieces if math.prod(piece)]
        assert boxes[index] == len(with_elements) <= 2, spec


def test_per_parameter_segments_on_an_inner_dim() -> None:
    layout = PerParameter().build([ParamSpec("u", (2, 7, 3), shard_dim=1)], 5, 4)
    full, last, none = (layout.segments_of(rank)[0] for rank in (1, 3, 4))
    assert full == Segment(param=0, start=6, length=6, count=2, step=21, shard_offset=0)
    assert last == Segment(param=0, start=18, length=3, count=2, step=21, shard_offset=0)
    assert none == Segment(param=0, start=21, length=0, count=2, step=21, shard_offset=0)
    assert layout.local_shape(4, 0) == (2, 0, 3)
    whole, rest = layout.copies(row=12)
    assert (whole.sizes, whole.param_strides, whole.staging_strides) == (
        (2, 3, 6),
        (21, 6, 1),
        (6, 12, 1),
    )
    assert (rest.sizes, rest.param_offset, rest.staging_offset) == ((2, 3), 18, 36)


def test_per_parameter_copies_whole_rows_in_two_dims() -> None:
    layout = PerParameter().build([W, B], 2, 4)
    sizes = [copy.sizes for copy in layout.copies(layout.shard_numel)]
    assert sizes == [(6,), (4,), (3,), (2,)]
    even = PerParameter().build([ParamSpec("w", (6, 2)), B], 2, 4)
    assert even.copies(even.shard_numel)[0].sizes == (2, 6)


def test_per_parameter_refuses_a_parameter_without_dims() -> None:
    with pytest.raises(LayoutError, match=r"'scale'.*0-dim"):
        PerParameter().build([W, ParamSpec("scale", ())], 2, 1)


@pytest.mark.parametrize("dim", [-1, 2])
def test_per_parameter_refuses_a_dim_that_does_not_exist(dim: int) -> None:
    with pytest.raises(LayoutError, match=rf"'w'.*shard_dim={dim}, expected 0 to 1"):
        PerParameter().build([ParamSpec("w", (5, 2), dim)], 2, 1)


# Ragged


@given(raggeds, spec_lists(), worlds, aligns)
def test_ragged_is_zero_copy_with_one_box_per_parameter(
    ragged: Ragged, params: list[ParamSpec], world: int, align: int
) -> None:
    layout = ragged.build(params, world, align)
    assert layout.zero_copy
    boxes = [
        (copy.param, copy.sizes, copy.param_offset, copy.staging_offset)
        for copy in layout.copies(layout.shard_numel)
    ]
    assert boxes == [
        (index, (spec.numel,), 0, offset)
        for index, (spec, offset) in enumerate(zip(params, layout.unsharded_offsets, strict=True))
        if spec.numel
    ]


@given(raggeds, spec_lists(), worlds, aligns, st.integers(1, 5))
def test_ragged_copies_are_cut_at_the_borders_of_ranks(
    ragged: Ragged, params: list[ParamSpec], world: int, align: int, extra: int
) -> None:
    layout = ragged.build(params, world, align)
    boxes = Counter(copy.param for copy in layout.copies(layout.shard_numel + extra))
    assert all(count <= 3 for count in boxes.values())


@given(spec_lists(), worlds, aligns)
def test_ragged_shards_cut_anywhere_are_as_short_as_the_alignment_allows(
    params: list[ParamSpec], world: int, align: int
) -> None:
    layout = Ragged().build(params, world, align)
    end = max(
        (
            offset + spec.numel
            for offset, spec in zip(layout.unsharded_offsets, params, strict=True)
        ),
        default=0,
    )
    assert layout.shard_numel * world >= end
    assert (layout.shard_numel - align) * world < end or layout.shard_numel == 0


def test_ragged_spans_ranks_in_three_boxes() -> None:
    layout = Ragged().build([ParamSpec("a", (3,)), ParamSpec("b", (14,))], 4, 1)
    assert layout.shard_numel == 5
    assert [layout.local_shape(rank, 1) for rank in range(4)] == [(2,), (5,), (5,), (2,)]
    assert [copy.sizes for copy in layout.copies(6)] == [(3,), (2,), (2, 5), (2,)]


def test_ragged_takes_a_parameter_without_dims() -> None:
    layout = Ragged().build([ParamSpec("scale", ()), B], 2, 1)
    assert [layout.local_shape(rank, 0) for rank in range(2)] == [(1,), (0,)]


# Refusals and text.


@pytest.mark.parametrize("strategy", [PerParameter(), *RAGGED])
@pytest.mark.parametrize(("world", "align"), [(0, 1), (-1, 1), (1, 0)])
def test_no_ranks_and_no_alignment_are_refused(
    strategy: LayoutStrategy, world: int, align: int
) -> None:
    with pytest.raises(LayoutError, match=r"got (world|align)=-?\d, expected"):
        strategy.build([W], world, align)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"'w'.*no negative size"):
        ParamSpec("w", (5, -2))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    layout = PerParameter().build([W, B], 2, 4)
    for ask in (lambda: layout.segments_of(rank), lambda: layout.local_shape(rank, 0)):
        with pytest.raises(LayoutError, match=f"got rank {rank}, expected 0 to 1"):
            ask()


def test_staging_slices_shorter_than_a_shard_are_refused() -> None:
    layout = PerParameter().build([W, B], 2, 4)
    with pytest.raises(LayoutError, match="slices of 11 elements, expected at least the 12"):
        layout.copies(11)


def test_strategies_are_values() -> None:
    assert PerParameter() == PerParameter() and Ragged() == Ragged("element")
    assert len({PerParameter(), PerParameter(), Ragged(), Ragged()}) == 2


def test_a_layout_explains_itself() -> None:
    params = [ParamSpec("mlp.up", (5, 4)), ParamSpec("mlp.down", (4, 6), 1), ParamSpec("b", (5,))]
    layout = PerParameter().build(params, 4, 4)
    lines = [
        "Layout: 4 ranks, 20 elements per shard, 52 unsharded, 31 padding (38.75 %)",
        "  parameter  shape   offset  ranks  elements on each",
        "  mlp.up     (5, 4)       0  0-2    8 x2, 4",
        "  mlp.down   (4, 6)      20  0-2    8 x3",
        "  b          (5,)        44  0-2    2 x2, 1",
    ]
    assert str(layout) == layout.describe() == "\n".join(lines)
    lines[0] = lines[0].replace("20 elements", "20 elements (80 bytes)")
    assert layout.describe(itemsize=4) == "\n".join(lines)
    assert layout.efficiency == pytest.approx(49 / 80)


def test_a_layout_says_what_is_cut_where_in_the_order_of_the_buffer() -> None:
    params = [
        ParamSpec("norm", (6,)),
        ParamSpec("none", (0, 4)),
        ParamSpec("w", (9, 4)),
        ParamSpec("scale", (6,)),
    ]
    layout = Ragged("row").build(params, 3, 1)
    assert layout.unsharded_offsets == (0, 0, 12, 6)
    assert str(layout) == "\n".join(
        [
            "Layout: 3 ranks, 16 elements per shard, 48 unsharded, 0 padding (0.00 %)",
            "  parameter  shape   offset  ranks  elements on each",
            "  norm       (6,)         0  0      6",
            "  none       (0, 4)       0  none",
            "  scale      (6,)         6  0      6",
            "  w          (9, 4)      12  0-2    4, 16 x2",
        ]
    )


def test_a_layout_of_many_ranks_takes_a_short_line_for_each_parameter() -> None:
    params = [ParamSpec("experts", (128, 4096, 1536)), ParamSpec("w", (4096, 4097))]
    lines = str(Ragged("row").build(params, 1024, 8)).splitlines()
    assert len(lines) == 2 + len(params)
    assert max(map(len, lines)) < 100


@pytest.mark.parametrize("module", ["layout", "spec"])
def test_the_examples_in_docstrings_hold(module: str) -> None:
    found = doctest.testmod(
        importlib.import_module(f"fullshard.layout.{module}"),
        extraglobs=vars(fullshard.layout),
    )
    assert found.attempted and not found.failed


def test_a_layout_without_elements_wastes_nothing() -> None:
    for layout in (PerParameter().build([], 3, 4), Ragged().build([ParamSpec("e", (0, 4))], 3, 4)):
        assert (layout.shard_numel, layout.padding_numel, layout.efficiency) == (0, 0, 1.0)
        assert layout.zero_copy and layout.copies(0) == ()

"""A layout that breaks an invariant cannot be constructed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import LayoutError
from fullshard.layout import Band, Layout, ParamSpec, PerParameter, Ragged
from tests.pure.layout_model import PADDING, Buffer, layouts, scatter, values

PARAMS = [ParamSpec("w", (5, 2)), ParamSpec("b", (5,))]
LAYOUT = PerParameter().build(PARAMS, 2, 4)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Layout, dict[str, Any]]:
    """Draw a layout, and a change of one of its integers."""
    layout = draw(layouts().filter(lambda layout: layout.params))
    by = draw(st.sampled_from([-7, -2, -1, 1, 2, 7]))
    field = draw(
        st.sampled_from(
            ["world", "shard_numel", "unsharded_numel", "offset", "band", "segment", "shape"]
        )
    )
    index = draw(st.integers(0, len(layout.params) - 1))
    if field in ("world", "shard_numel", "unsharded_numel"):
        return layout, {field: getattr(layout, field) + by}
    if field == "offset":
        offsets = list(layout.unsharded_offsets)
        offsets[index] += by
        return layout, {"unsharded_offsets": tuple(offsets)}
    bands = list(layout.bands[index])
    at = draw(st.integers(0, len(bands) - 1))
    bands[at] = draw(_changed(bands[at], field, by))
    return layout, {"bands": (*layout.bands[:index], tuple(bands), *layout.bands[index + 1 :])}


@st.composite
def _changed(draw: st.DrawFn, band: Band, field: str, by: int) -> Band:
    if field == "shape":
        return replace(band, local_shape=(*band.local_shape[:-1], band.local_shape[-1] + by))
    if field == "band":
        name = draw(st.sampled_from(["first_rank", "num_ranks"]))
        return replace(band, **{name: getattr(band, name) + by})
    name = draw(st.sampled_from(["start", "length", "count", "step", "shard_offset", "param"]))
    segment = replace(band.segment, **{name: getattr(band.segment, name) + by})
    shape = (segment.numel,) if draw(st.booleans()) else band.local_shape
    return replace(band, segment=segment, local_shape=shape)


@settings(max_examples=500)
@given(damaged())
def test_what_is_not_refused_is_sound(case: tuple[Layout, dict[str, Any]]) -> None:
    layout, change = case
    try:
        changed = replace(layout, **change)
    except LayoutError:
        return
    params = values(changed)
    kept = Counter(value for shard in scatter(changed, params) for value in shard)
    kept.pop(PADDING, 0)
    assert kept == Counter(value for param in params for value in param)
    unsharded: Buffer = [PADDING] * changed.unsharded_numel
    for offset, param in zip(changed.unsharded_offsets, params, strict=True):
        if param:
            assert offset >= 0 and unsharded[offset : offset + len(param)] == [PADDING] * len(param)
            unsharded[offset : offset + len(param)] = param


def _with_band(index: int, at: int, band: Band) -> tuple[tuple[Band, ...], ...]:
    bands = [list(of_param) for of_param in LAYOUT.bands]
    bands[index][at] = band
    return tuple(map(tuple, bands))


def _with_segment(index: int, at: int, **change: int) -> tuple[tuple[Band, ...], ...]:
    band = LAYOUT.bands[index][at]
    return _with_band(index, at, replace(band, segment=replace(band.segment, **change)))


W_FIRST = LAYOUT.bands[0][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"world": 0}, "got 0 ranks"),
        ({"shard_numel": -1}, "shards of -1 elements"),
        ({"world": 3}, r"'w'.*bands for 2 ranks, expected 3"),
        ({"unsharded_offsets": (0,)}, "got 1 offsets and bands of 2 parameters, expected 2"),
        ({"bands": _with_band(0, 0, replace(W_FIRST, num_ranks=2))}, r"'w'.*expected 2"),
        ({"bands": _with_band(0, 0, replace(W_FIRST, num_ranks=0))}, r"'w'.*ranks 0 to -1"),
        ({"bands": _with_band(0, 0, replace(W_FIRST, local_shape=(3, 3)))}, r"'w'.*\(3, 3\)"),
        ({"bands": _with_segment(0, 1, start=5)}, r"'w'.*expected param 0 with start 6"),
        ({"bands": _with_segment(1, 0, param=0)}, r"'b'.*expected param 1 with start 0"),
        ({"bands": _with_segment(0, 1, step=11)}, r"'w'.*the count and step that rank 0 has"),
        ({"bands": _with_segment(1, 0, shard_offset=-1)}, r"'b'.*to lie in 12 elements"),
        ({"shard_numel": 10}, r"'b'.*to lie in 10 elements"),
        ({"bands": _with_segment(1, 0, shard_offset=5)}, r"'w' and 'b' overlap in a shard"),
        ({"unsharded_offsets": (0, 9)}, r"'w' and 'b' overlap in the unsharded buffer"),
        ({"unsharded_offsets": (0, 16)}, r"'b'.*16 to 21, expected to lie in 20"),
        ({"unsharded_offsets": (-1, 12)}, r"'w'.*-1 to 9, expected to lie in 20"),
        ({"params": (ParamSpec("w", (5, 3)), PARAMS[1])}, r"'w'.*expected all 15 elements once"),
    ],
)
def test_a_broken_layout_is_refused_with_the_reason(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        replace(LAYOUT, **change)


def test_overlaps_are_found_on_ranks_that_open_no_segment() -> None:
    """On rank 2, the second parameter begins inside the first, which began on rank 0."""
    params = [ParamSpec("a", (16,)), ParamSpec("b", (4,))]
    layout = Ragged().build(params, 4, 1)
    held = PerParameter().build([params[0]], 4, 1).bands[0]
    with pytest.raises(LayoutError, match="'a' and 'b' overlap in a shard"):
        replace(layout, bands=(held, layout.bands[1]))

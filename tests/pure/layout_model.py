"""A layout by brute force: Python lists with every element in them, and layouts to try it on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from hypothesis import strategies as st

from fullshard.layout import Layout, LayoutStrategy, ParamSpec, PerParameter, Ragged, StridedCopy

PADDING = None
Buffer = list[int | None]

strategies: st.SearchStrategy[LayoutStrategy] = st.sampled_from([PerParameter(), Ragged()])
worlds = st.integers(1, 9)
aligns = st.integers(1, 16)


@st.composite
def specs(draw: st.DrawFn, name: str = "p") -> ParamSpec:
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=4)))
    return ParamSpec(name, shape, draw(st.integers(0, len(shape) - 1)))


@st.composite
def spec_lists(draw: st.DrawFn) -> list[ParamSpec]:
    return [draw(specs(f"p{i}")) for i in range(draw(st.integers(0, 4)))]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return draw(strategies).build(draw(spec_lists()), draw(worlds), draw(aligns))


def values(layout: Layout) -> list[list[int]]:
    """The elements of each parameter in row-major order, all different."""
    bases = (1_000_000 * index for index in range(len(layout.params)))
    return [
        list(range(base, base + spec.numel))
        for base, spec in zip(bases, layout.params, strict=True)
    ]


def scatter(layout: Layout, params: list[list[int]]) -> list[Buffer]:
    """Every rank's shard, filled segment by segment; no element may be written twice."""
    shards: list[Buffer] = [[PADDING] * layout.shard_numel for _ in range(layout.world)]
    for rank, shard in enumerate(shards):
        for index, segment in enumerate(layout.segments_of(rank)):
            assert segment.param == index
            at = segment.shard_offset
            for run in range(segment.count):
                for element in range(segment.length):
                    assert 0 <= at < layout.shard_numel and shard[at] is PADDING
                    shard[at] = params[index][segment.start + run * segment.step + element]
                    at += 1
    return shards


def elements(copy: StridedCopy) -> Iterator[tuple[int, int]]:
    """The box, element by element: (place in the parameter, place in the staging buffer)."""
    for index in product(*map(range, copy.sizes)):
        yield (
            copy.param_offset + sum(map(int.__mul__, index, copy.param_strides)),
            copy.staging_offset + sum(map(int.__mul__, index, copy.staging_strides)),
        )

"""A brute-force model of layouts: Python lists with every element; and strategies for layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from hypothesis import strategies as st

from fullshard.layout import Layout, LayoutStrategy, ParamSpec, PerParameter, Ragged, StridedCopy

PADDING = None
Buffer = list[int | None]


def by_ndim(spec: ParamSpec) -> str | int:
    """Return a granularity that depends on the number of dims, to mix all kinds."""
    return ("tensor", "row", 3, "element")[spec.ndim - 1]


RAGGED = [Ragged(), Ragged("row"), Ragged(4), Ragged("tensor"), Ragged(by_ndim)]
raggeds = st.sampled_from(RAGGED)
strategies: st.SearchStrategy[LayoutStrategy] = st.sampled_from([PerParameter()]) | raggeds
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
    """Return distinct elements for each parameter, in row-major order."""
    bases = (1_000_000 * index for index in range(len(layout.params)))
    return [
        list(range(base, base + spec.numel))
        for base, spec in zip(bases, layout.params, strict=True)
    ]


def scatter(layout: Layout, params: list[list[int]]) -> list[Buffer]:
    """Fill every rank's shard segment by segment; fail if an element is written twice."""
    shards: list[Buffer] = [[PADDING] * layout.shard_numel for _ in range(layout.world)]
    for rank, shard in enumerate(shards):
        for index, segment in enumerate(layout.segments_of(rank)):
            assert segment.param == index
            at = segment.shard_offset
            for stretch in range(segment.count):
                for element in range(segment.length):
                    assert 0 <= at < layout.shard_numel and shard[at] is PADDING
                    shard[at] = params[index][segment.start + stretch * segment.step + element]
                    at += 1
    return shards


def elements(copy: StridedCopy) -> Iterator[tuple[int, int]]:
    """Yield (offset in the parameter, offset in the staging buffer) of each copied element."""
    for index in product(*map(range, copy.sizes)):
        yield (
            copy.param_offset + sum(map(int.__mul__, index, copy.param_strides)),
            copy.staging_offset + sum(map(int.__mul__, index, copy.staging_strides)),
        )


# Uncut blocks.

Blocks = Mapping[str, int]
Item = tuple[int, int]  # number of elements of a parameter, and of its blocks


@st.composite
def blocked(draw: st.DrawFn, most: int, largest: int) -> tuple[list[ParamSpec], Blocks]:
    """Draw at most `most` parameters with up to `largest` elements; blocks often divide them."""
    params = []
    blocks = {}
    for index in range(draw(st.integers(0, most))):
        block = draw(st.integers(1, largest))
        count = draw(st.integers(0, largest // block))
        rest = draw(st.sampled_from([0, 0, draw(st.integers(0, block - 1))]))
        numel = min(block * count + rest, largest)
        params.append(ParamSpec(f"p{index}", (numel,)))
        blocks[f"p{index}"] = block
    return params, blocks


def case_of(*items: Item) -> tuple[list[ParamSpec], Blocks]:
    params = [ParamSpec(f"p{index}", (numel,)) for index, (numel, _) in enumerate(items)]
    return params, {spec.name: block for spec, (_, block) in zip(params, items, strict=True)}


def ragged_of(blocks: Blocks) -> Ragged:
    return Ragged(lambda spec: blocks[spec.name])


def block_of(ragged: Ragged, spec: ParamSpec) -> int:
    """Return the block size of a granularity, by an independent implementation."""
    granularity = ragged.granularity
    given = granularity(spec) if callable(granularity) else granularity
    if given == "row" and len(spec.shape) > 1:
        return spec.shape[-1]
    return {"element": 1, "row": spec.numel, "tensor": spec.numel}.get(given, given)


class Stretch(NamedTuple):
    """Elements that are contiguous both in a parameter and in a rank's shard."""

    start: int  # first element, in the parameter's row-major order
    length: int
    rank: int
    shard_offset: int


def stretches(layout: Layout, param: int) -> list[Stretch]:
    """Return all stretches of a parameter, in element order."""
    return sorted(
        Stretch(s.start + i * s.step, s.length, rank, s.shard_offset + i * s.length)
        for rank in range(layout.world)
        for s in (layout.segments_of(rank)[param],)
        for i in range(s.count if s.length else 0)
    )


def starts_of_pieces(layout: Layout, param: int) -> list[int]:
    """Return the starts of uncut pieces, from bands, as listing every segment would be slow."""
    return [
        segment.start + i * segment.step
        for band in layout.bands[param]
        if band.segment.length
        for segment in map(band.segment_of, range(band.first_rank, band.end_rank))
        for i in range(segment.count)
    ]


def is_uncut(layout: Layout, ragged: Ragged) -> bool:
    return all(
        start % block_of(ragged, spec) == 0
        for index, spec in enumerate(layout.params)
        for start in starts_of_pieces(layout, index)
    )

"""Tensors of a checkpoint after some ranks are lost."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard

from fullshard.checkpoint.format.manifest import Contents, FileInfo, Manifest
from fullshard.checkpoint.format.placement import Grid, TensorEntry, problem_of
from fullshard.layout.region import Region
from fullshard.tensors import RaggedShard


@st.composite
def entries(draw: st.DrawFn) -> TensorEntry:
    """Draw entries on meshes of one to three dims; at most one dim has ragged shards."""
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=2)))
    ranks = draw(st.permutations(range(math.prod(sizes))))
    placements: list[Placement] | None = [
        draw(st.sampled_from([Replicate(), Replicate(), Shard(0)])) for _ in sizes
    ]
    if draw(st.booleans()):
        where = draw(st.integers(0, len(sizes) - 1))
        if all(isinstance(one, Replicate) for at, one in enumerate(placements) if at != where):
            cuts = sorted(
                draw(
                    st.lists(
                        st.integers(0, math.prod(shape)),
                        min_size=sizes[where] - 1,
                        max_size=sizes[where] - 1,
                    )
                )
            )
            ends = [0, *cuts, math.prod(shape)]
            placements[where] = RaggedShard([(1, b - a) for a, b in itertools.pairwise(ends)])
    elif draw(st.booleans()):
        placements = None
    entry = TensorEntry(
        "float32", shape, Grid(sizes, tuple(ranks)), placements and tuple(placements), 0
    )
    return entry._replace(writer=draw(st.integers(0, entry.num_copies - 1)))


def elements(shape: tuple[int, ...], region: Region) -> list[int]:
    """Return the numbers of a region's elements in the tensor."""
    numbers = torch.arange(math.prod(shape)).view(shape)
    return [
        int(one)
        for box in region.boxes()
        for one in numbers[tuple(slice(one.start, one.stop) for one in box)].flatten()
    ]


@given(entries(), st.data())
def test_those_who_are_left_have_each_element_once_or_lack_some(
    entry: TensorEntry, data: st.DataObject
) -> None:
    ranks = sorted(entry.grid.ranks)
    left = data.draw(st.lists(st.sampled_from(ranks), unique=True, min_size=1))
    numbers = {rank: number for number, rank in enumerate(left)}
    there = {one for rank in left for one in elements(entry.shape, entry.region(rank))}
    found = entry.left_to(numbers)
    if found is None:  # None: a rank with a part of its own is lost, even if that part is empty
        lost = [entry.region(rank) for rank in ranks if rank not in left]
        others = [entry.region(rank) for rank in left]
        assert any(not one.numel or one not in others for one in lost)
        return
    assert len(there) == math.prod(entry.shape)
    files = [FileInfo(f"{n}", n, 0, "", 0) for n in range(len(left))]
    manifest = Manifest(0, 0.0, {}, [Contents({"x": found}, {})], files, None)
    assert found.makes_sense() and not problem_of([(found, set(range(len(left))))])
    parts = [*manifest.parts("x")]
    written = sorted(one for part in parts for one in elements(entry.shape, part.region))
    assert written == list(range(math.prod(entry.shape)))
    for part in parts:  # the writer of a part holds it
        assert found.is_written_by(part.file.rank)
        assert part.region == entry.region(left[part.file.rank])


def test_writers_are_divided_among_those_who_are_left() -> None:
    """After one of four replicas is lost, the others each write a share of the tensors."""
    entry = TensorEntry("float32", (4,), Grid((4, 2), tuple(range(8))), (Replicate(), Shard(0)), 0)
    left = {rank: number for number, rank in enumerate([0, 1, 2, 3, 4, 6, 7])}
    found = [entry._replace(writer=one).left_to(left) for one in range(12 - 8)]
    assert all(one is not None for one in found)
    writers = [one.grid.ranks for one in found if one is not None]
    assert {ranks[0] for ranks in writers} == {left[0], left[2], left[4], left[6]}
    assert {ranks[1] for ranks in writers} == {left[1], left[3], left[7]}


@given(entries())
def test_the_parts_of_all_files_are_the_parts_of_all_tensors(entry: TensorEntry) -> None:
    world = max(entry.grid.ranks) + 1
    files = [FileInfo(f"{n}", n, 0, "", 0) for n in range(world)]
    manifest = Manifest(0, 0.0, {}, [Contents({"x": entry}, {})], files, None)
    in_files = [manifest.parts_in(file) for file in files]
    assert all(part.file is files[n] for n, found in enumerate(in_files) for part in found.values())
    apart = [found["x"] for found in in_files if found]
    assert sorted(apart, key=lambda part: part.file.rank) == sorted(
        manifest.parts("x"), key=lambda part: part.file.rank
    )


@pytest.mark.parametrize("world", [8, 256])
def test_the_parts_of_one_file_take_no_more_work_on_more_ranks(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid = Grid((world,), tuple(range(world)))
    entry = TensorEntry("float32", (world, 2), grid, (Shard(0),), 0)
    files = [FileInfo(f"{n}", n, 0, "", 0) for n in range(world)]
    tensors = {f"{n}": entry for n in range(10)}
    manifest = Manifest(0, 0.0, {}, [Contents(tensors, {})], files, None)
    asked: list[int] = []
    region = TensorEntry.region
    monkeypatch.setattr(TensorEntry, "region", lambda self, n: asked.append(n) or region(self, n))
    assert len(manifest.parts_in(files[3])) == 10
    assert asked == [3] * 10

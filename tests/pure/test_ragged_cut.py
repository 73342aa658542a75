"""The arithmetic of parts and cuts, for every rank of meshes larger than a test machine's."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from fullshard.errors import ConfigError
from fullshard.tensors.parts import chunk_of, own_part
from fullshard.tensors.ragged_cut import RaggedCut, _cut
from fullshard.tensors.ragged_shard import RaggedShard

MESHES: list[tuple[tuple[int, ...], tuple[Placement | None, ...]]] = [
    ((5,), (None,)),
    ((2, 3), (Replicate(), None)),
    ((3, 2), (None, Shard(0))),
    ((3, 4), (None, Shard(1))),
    ((3, 2), (None, Replicate())),
    ((2, 3, 2), (Replicate(), None, Shard(1))),
    ((2, 2, 3, 2), (Replicate(), None, Shard(0), Shard(0))),
    ((2, 2, 3, 2), (Replicate(), None, Shard(1), Shard(0))),
    ((1, 3, 2, 2), (Replicate(), None, Replicate(), Shard(0))),
]
SHAPES = [(7, 3), (1, 5), (4,), (3, 2, 5), (0, 3), (2, 9)]


def lengths_of(numel: int, num_ranks: int, seed: int) -> list[int]:
    cuts = sorted(random.Random(seed).randint(0, numel) for _ in range(num_ranks - 1))
    return [b - a for a, b in itertools.pairwise((0, *cuts, numel))]


def cut_at(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    template: tuple[Placement | None, ...],
    coordinate: tuple[int, ...],
) -> RaggedCut:
    """Return a cut whose lengths depend on the tp coordinate; ``own_part`` gives the tp part."""
    dim = template.index(None)
    tp = slice(dim + 1, None)
    kept = own_part(torch.empty(shape), list(template)[tp], mesh_shape[tp], coordinate[tp])  # type: ignore[arg-type]
    lengths = lengths_of(kept.numel(), mesh_shape[dim], seed=sum(coordinate[tp]))
    ragged = RaggedShard((1, length) for length in lengths)
    placements = tuple(ragged if one is None else one for one in template)
    return _cut(placements, shape, mesh_shape, coordinate)


@pytest.mark.parametrize("shape", [s for s in SHAPES if s])
@pytest.mark.parametrize(("mesh_shape", "template"), MESHES)
def test_boxes_of_all_ranks_are_the_whole_tensor(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], template: Any
) -> None:
    if any(isinstance(one, Shard) and one.dim >= len(shape) for one in template):
        return
    whole = torch.arange(math.prod(shape)).view(shape)
    written = torch.zeros(shape, dtype=torch.int64)
    for coordinate in itertools.product(*map(range, mesh_shape)):
        cut = cut_at(shape, mesh_shape, template, coordinate)
        mine = [
            whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))] for box in cut.boxes
        ]
        joined = torch.cat([part.flatten() for part in mine]) if mine else whole.new_empty(0)
        tp_part = whole
        for dim, own in enumerate(cut.region.dims):
            tp_part = tp_part.narrow(dim, *own[0])
        assert torch.equal(joined, cut.own_part(tp_part))
        placements = (*cut.tp_placements[: cut.mesh_dim], cut.ragged)
        placements += cut.tp_placements[cut.mesh_dim + 1 :]
        assert torch.equal(joined, own_part(whole, placements, mesh_shape, coordinate))
        assert len(joined) == cut.interval.length
        for part in mine if cut.is_first_copy else ():
            written.view(-1)[part.flatten()] += 1
    replicas = math.prod(mesh_shape[: template.index(None)])
    assert (written == replicas).all()


def test_chunks_are_those_of_torch() -> None:
    for size, num_chunks in itertools.product(range(12), range(1, 7)):
        chunks = torch.arange(size).chunk(num_chunks)
        for index in range(num_chunks):
            start, length = chunk_of(size, num_chunks, index)
            want = chunks[index].tolist() if index < len(chunks) else []
            assert list(range(start, start + length)) == want


def test_strided_parts_are_those_of_torch() -> None:
    for size, num_ranks, factor in itertools.product(range(14), range(1, 6), range(1, 5)):
        whole = torch.arange(size * 2).view(size, 2)
        at = _StridedShard(0, split_factor=factor)
        wants, _ = at._split_tensor(whole, num_ranks, with_padding=False)
        for rank, want in enumerate(wants):
            assert torch.equal(own_part(whole, [at], [num_ranks], [rank]), want)


def chunks_of(whole: torch.Tensor, *cuts: tuple[int, int]) -> torch.Tensor:
    """Apply ``torch.chunk`` for each (num, index) in turn; missing chunks are empty."""
    for num, index in cuts:
        chunks = whole.chunk(num)
        whole = chunks[index] if index < len(chunks) else whole[:0]
    return whole


def test_a_strided_cut_comes_after_those_of_later_mesh_dims() -> None:
    """Includes sizes that torch itself cuts differently, such as 7 rows over 3 x 2."""
    for size in range(20):
        whole = torch.arange(size)
        two: list[Placement] = [_StridedShard(0, split_factor=2), Shard(0)]
        for dp, tp in itertools.product(range(3), range(2)):
            want = chunks_of(whole, (2, tp), (3, dp))
            assert torch.equal(own_part(whole, two, (3, 2), (dp, tp)), want)
        three: list[Placement] = [Replicate(), _StridedShard(0, split_factor=6), Shard(0), Shard(0)]
        for dp, tp1, tp2 in itertools.product(range(2), range(2), range(3)):
            want = chunks_of(whole, (2, tp1), (3, tp2), (2, dp))
            assert torch.equal(own_part(whole, three, (2, 2, 2, 3), (1, dp, tp1, tp2)), want)


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), RaggedShard([(2, 2)])),
        (RaggedShard([(2, 2)]), RaggedShard([(2, 2)])),
        (RaggedShard([(2, 2)]), _StridedShard(0, split_factor=2)),
        (Replicate(), Shard(0)),
        (RaggedShard([(2, 3)]), Replicate()),
        (RaggedShard([(4, 1)]), Replicate()),
    ],
)
def test_placements_that_cannot_be_are_refused(placements: tuple[Placement, ...]) -> None:
    with pytest.raises(ConfigError, match=r"RaggedTensor.* expected"):
        _cut(placements, (4,), (2, 2), (0, 0))

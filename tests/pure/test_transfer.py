"""Parts of tensors in messages: for any shards of both sides, each element arrives once."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from fullshard.layout.region import full_region
from fullshard.tensors import region_of
from fullshard.tensors.parts import own_part
from fullshard.tensors.transfer import ALIGN, pack, parts_of, places, unpack

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@given(SHAPES, st.integers(1, 3), st.integers(0, 2), st.integers(1, 7), st.booleans())
def test_a_message_holds_each_element_once_and_aligned(
    shape: tuple[int, ...], world: int, dim: int, count: int, casts: bool
) -> None:
    full = torch.arange(float(math.prod(shape))).view(shape)
    placements = (Shard(dim) if dim < len(shape) else Replicate(),)
    dtype = torch.float64 if casts else torch.float32
    bounds = [full.numel() * at // count for at in range(count + 1)]
    wanted = [full_region(shape).part(*both) for both in itertools.pairwise(bounds)]
    blocks = [torch.full((one.numel,), -1.0, dtype=dtype) for one in wanted]
    for rank in range(world):
        region = region_of(shape, placements, (world,), (rank,))
        local = own_part(full, placements, (world,), (rank,)).contiguous()
        parts = [part for at, one in enumerate(wanted) for part in parts_of(0, region, at, one)]
        ends = places(part.numel * dtype.itemsize for part in parts)
        message = torch.full((ends[-1],), 255, dtype=torch.uint8)
        pack([part.of_local(local) for part in parts], message, [dtype] * len(parts))
        unpack(message, [part.of_block(blocks[part.block]) for part in parts])
        assert all(start % ALIGN == 0 for start in ends)
        for part in parts:
            own = part.as_slice(local, wanted[part.block].numel)
            assert own is None or torch.equal(own.to(dtype), blocks[part.block])
    assert torch.equal(torch.cat(blocks), full.view(-1).to(dtype))


def test_sizes_need_no_hash() -> None:
    """Sizes are symbolic while PyTorch compiles with dynamic shapes."""

    class Symbolic(int):
        __hash__ = None  # type: ignore[assignment]

    at = (Shard(0),), (2,), (1,)
    assert region_of((Symbolic(4), 2), *at) == region_of((4, 2), *at)

"""`PerParameter`: cuts each parameter on one of its dims, as DTensor's ``Shard(dim)`` does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.errors import LayoutError
from fullshard.layout.layout import Layout
from fullshard.layout.segment import Band, Segment
from fullshard.layout.spec import ParamSpec, check_build, pack, round_up


@dataclass(frozen=True, slots=True)
class PerParameter:
    """A strategy that cuts each parameter on one dim, into exactly the pieces of ``torch.chunk``.

    A dim of size d is cut into pieces of ``ceil(d / world)``; the last piece may be shorter, and
    later ranks keep nothing. Every parameter has a slot in the shard, at the same offset on all
    ranks, as large as a full piece.

    In the example, w of shape (5, 2) is cut on dim 0 and u of shape (2, 3) on dim 1, over 4 ranks
    with align=2. Full pieces are ceil(5 / 4) = 2 rows of w and ceil(3 / 4) = 1 column of u.

        rank 0   w0 w1 w2 w3 | u0 u3
        rank 1   w4 w5 w6 w7 | u1 u4
        rank 2   w8 w9 .  .  | u2 u5
        rank 3   .  .  .  .  | .  .

        unsharded   w0 ... w9 | u0 ... u5

    Since the pieces of a parameter are not adjacent when gathered, `Layout.copies` fills the
    unsharded buffer (except on 1 rank, where shard and unsharded buffer are alike). A parameter of
    which all ranks keep equal, undivided pieces can be gathered separately, in place. Such
    parameters have the last slots, larger ones later, so that `plan_gather` can take some of them.
    """

    def build(self, params: Sequence[ParamSpec], world: int, align: int) -> Layout:
        """Lay out `params` over `world` ranks.

        Args:
            params: the parameters; each is cut on its `shard_dim`.
            world: number of ranks, at least 1.
            align: each parameter starts at a multiple of this many elements, in the shards and in
                the unsharded buffer; the lengths of both are multiples of `align` too.

        Raises:
            LayoutError: if a parameter has no dim `shard_dim`, or is 0-dim on more than one rank,
                or if `world` or `align` is less than 1.
        """
        check_build(world=world, align=align)
        cuts = [_DimCut.of(spec, world) for spec in params]
        slots, shard_end = _slots(cuts, align)
        unsharded_offsets, unsharded_end = pack([spec.numel for spec in params], align)
        return Layout(
            params=tuple(params),
            world=world,
            shard_numel=round_up(shard_end, align),
            unsharded_numel=round_up(unsharded_end, align),
            unsharded_offsets=unsharded_offsets,
            bands=tuple(
                cut.bands(index, spec, slot)
                for index, (cut, spec, slot) in enumerate(zip(cuts, params, slots, strict=True))
            ),
        )


def _slots(cuts: Sequence[_DimCut], align: int) -> tuple[tuple[int, ...], int]:
    """Return the parameters' offsets in the shards, and the end of the last slot."""
    order = sorted(range(len(cuts)), key=lambda param: cuts[param].even_numel)
    offsets, end = pack([cuts[param].slot_numel for param in order], align)
    return tuple(offset for _, offset in sorted(zip(order, offsets, strict=True))), end


@dataclass(frozen=True, slots=True)
class _DimCut:
    """A parameter seen as (outer, size, inner), cut on the middle dim into pieces of `piece`."""

    outer: int  # product of the sizes of the dims before the cut dim
    size: int
    inner: int  # product of the sizes of the dims after the cut dim
    piece: int  # size of a full piece in the cut dim
    world: int

    @classmethod
    def of(cls, spec: ParamSpec, world: int) -> _DimCut:
        if not spec.shape:
            if world == 1:
                return cls(1, 1, 1, 1, 1)
            raise LayoutError(
                f"parameter {spec.name!r}: got a 0-dim parameter, expected at least one dim to "
                "shard; give it the shape (1,), or use the ragged layout"
            )
        dim = spec.shard_dim
        if not 0 <= dim < len(spec.shape):
            raise LayoutError(
                f"parameter {spec.name!r} of shape {spec.shape}: got shard_dim={dim}, expected "
                f"0 to {len(spec.shape) - 1}"
            )
        size = spec.shape[dim]
        outer, inner = math.prod(spec.shape[:dim]), math.prod(spec.shape[dim + 1 :])
        return cls(outer, size, inner, round_up(size, world) // world, world)

    @property
    def slot_numel(self) -> int:
        return self.outer * self.piece * self.inner

    @property
    def even_numel(self) -> int:
        """Number of elements of a piece if all ranks keep equal, undivided pieces, else 0."""
        is_even = self.outer == 1 and self.size == self.piece * self.world
        return self.slot_numel if is_even and self.world > 1 else 0

    def bands(self, index: int, spec: ParamSpec, slot: int) -> tuple[Band, ...]:
        """Return the bands of full pieces, of the shorter last piece and of empty pieces."""
        full, rest = divmod(self.size, self.piece) if self.piece else (self.world, 0)
        short = 1 if rest else 0
        # A piece that spans the whole dim is one run: the parameter is not cut at all.
        outer, inner = self.outer, self.inner
        if self.piece == self.size:
            outer, inner = 1, outer * inner
        before, after = spec.shape[: spec.shard_dim], spec.shape[spec.shard_dim + 1 :]
        rank = start = 0
        bands = []
        for num_ranks, piece in (
            (full, self.piece),
            (short, rest),
            (self.world - full - short, 0),
        ):
            if num_ranks:
                numel, step = piece * inner, self.size * inner
                segment = Segment(index, start, numel, outer, step, shard_offset=slot)
                shape = (*before, piece, *after) if spec.shape else ()
                bands.append(Band(rank, num_ranks, segment, shape))
                rank += num_ranks
                start += num_ranks * numel
        return tuple(bands)

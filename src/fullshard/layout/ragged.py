"""`Ragged`: cuts one buffer of parameters into equal shards, with nothing to rearrange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fullshard.errors import ArgumentTypeError, ConfigError
from fullshard.layout.bound import ShardSizes
from fullshard.layout.layout import Layout
from fullshard.layout.packing import Problem
from fullshard.layout.planner import plan
from fullshard.layout.segment import Band, Segment
from fullshard.layout.spec import ParamSpec, check_build

Granularity = str | int | Callable[[ParamSpec], str | int]

NAMES = ("element", "row", "tensor")


@dataclass(frozen=True, slots=True)
class Ragged:
    """A strategy that cuts one buffer into equal shards, only where its parameters may be cut.

    In the example, w has shape (5, 2) and b has shape (5,), on 3 ranks with align=1.

        Ragged()           w0 w1 w2 w3 w4 | w5 w6 w7 w8 w9 | b0 b1 b2 b3 b4
        Ragged("row")      w0 w1 w2 w3 w4 w5 | w6 w7 w8 w9 .  .  | b0 b1 b2 b3 b4 .
        Ragged(4)          .  .  w0 w1 w2 w3 | w4 w5 w6 w7 w8 w9 | b0 b1 b2 b3 b4 .
        Ragged("tensor")   w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 | b0 b1 b2 b3 b4 .  .  .  .  . | ...

    The shards, one rank after the other, are the unsharded buffer, so gathering and reducing
    rearrange nothing (`Layout.zero_copy`). In exchange, a rank keeps some elements of a parameter
    rather than a slice along one of its dims.

    Order and gaps are planned for short shards; the parameters stay as given if that is as short.
    No plan can beat `shard_numel_bound`, which layers of real models reach. Padding is due to one
    rule: a parameter with two cuts needs shards that are a multiple of its block, and all such
    parameters together need a common multiple. So blocks should be much smaller than shards, and
    of few sizes.

    Attributes:
        granularity: the allowed cuts in a parameter, counted from its first element.
            ``"element"``: anywhere.
            ``"row"``: between rows of the last dim, so stacked experts of shape (128, 768, 2048)
            between their 98,304 rows; a parameter with one dim is one row.
            An int: between blocks of that many elements, such as the blocks of a quantized
            optimizer; the last block may be shorter.
            ``"tensor"``: nowhere, for optimizers that need whole matrices.
            A function of the parameter that returns one of these, the same on all ranks, such as
            ``lambda spec: "tensor" if spec.ndim == 2 else "element"``.

    Raises:
        ConfigError: if the granularity is none of these.
        ArgumentTypeError: if the granularity has another type; it is a `ConfigError` too.
    """

    granularity: Granularity = "element"

    def __post_init__(self) -> None:
        if not callable(self.granularity):
            _check(self.granularity, "Ragged: got granularity=", ", or a function of the parameter")

    def build(self, params: Sequence[ParamSpec], world: int, align: int) -> Layout:
        """Lay out `params` over `world` ranks.

        Args:
            params: the parameters; 0-dim ones have one element, and `shard_dim` is ignored.
            world: number of ranks, at least 1.
            align: each parameter, each shard and each cut is at a multiple of this many elements.
                So blocks that `align` does not divide allow fewer cuts.

        Raises:
            LayoutError: if `world` or `align` is less than 1.
            ConfigError: if `granularity` is a function and returns no valid granularity.
            ArgumentTypeError: if the function returns another type; it is a `ConfigError` too.
        """
        check_build(world=world, align=align)
        planned = plan(self._problem(params, world, align))
        placed = (offset * align for offset in planned.offsets)
        offsets = tuple(next(placed) if spec.numel else 0 for spec in params)
        shard_numel = planned.shard * align
        return Layout(
            params=tuple(params),
            world=world,
            shard_numel=shard_numel,
            unsharded_numel=world * shard_numel,
            unsharded_offsets=offsets,
            bands=tuple(
                _bands(index, offset, spec.numel, world=world, shard_numel=shard_numel)
                for index, (spec, offset) in enumerate(zip(params, offsets, strict=True))
            ),
        )

    def shard_numel_bound(self, params: Sequence[ParamSpec], world: int, align: int) -> int:
        """Return a lower bound on the elements of a shard, for any order and any gaps.

        `ShardSizes` proves the bound. If `build` reaches the bound, no shorter shard exists.

        Raises:
            LayoutError, ConfigError, ArgumentTypeError: as `build` does.
        """
        check_build(world=world, align=align)
        problem = self._problem(params, world, align)
        return ShardSizes.of(problem).bound * align if problem.sizes else 0

    def _problem(self, params: Sequence[ParamSpec], world: int, align: int) -> Problem:
        """Return the packing problem of the non-empty parameters."""
        items = [(spec.numel, self._block(spec)) for spec in params if spec.numel]
        numels, blocks = zip(*items, strict=True) if items else ((), ())
        return Problem.of(numels, blocks, world=world, align=align)

    def _block(self, spec: ParamSpec) -> int:
        """Return the elements per block of a non-empty parameter; cuts are between blocks."""
        granularity = self.granularity
        if callable(granularity):
            granularity = granularity(spec)
            got = f"parameter {spec.name!r} of shape {spec.shape}: its granularity is "
            _check(granularity, got, "")
        if isinstance(granularity, int):
            return granularity
        if granularity == "row" and spec.ndim > 1:
            return spec.shape[-1]
        return 1 if granularity == "element" else spec.numel


def _check(granularity: object, got: str, or_else: str) -> None:
    """Raise unless `granularity` is valid."""
    error = ConfigError
    if isinstance(granularity, bool) or not isinstance(granularity, str | int):
        error = ArgumentTypeError
    elif granularity in NAMES or (isinstance(granularity, int) and granularity > 0):
        return
    names = ", ".join(map(repr, NAMES))
    raise error(f"{got}{granularity!r}, expected {names}, a positive number of elements{or_else}")


def _bands(
    index: int, offset: int, numel: int, *, world: int, shard_numel: int
) -> tuple[Band, ...]:
    """Cut ``[offset, offset + numel)`` of the unsharded buffer at the borders of the shards.

    Such an interval starts within one shard, fills the next shards and ends within another; the
    ranks of the filled shards are alike:

        | ... 0 1 | 2 3 4 5 6 | 7 8 9 10 11 | 12 13 ... |     shard_numel=5, numel=14
           head        filled, 2 ranks          tail
    """
    if not numel:
        return (Band(0, world, Segment(index, 0, 0, 1, 0, 0), local_shape=(0,)),)
    before, within = divmod(offset, shard_numel)
    head = min(shard_numel - within, numel) if within else 0
    filled, tail = divmod(numel - head, shard_numel)
    after = world - before - (head > 0) - filled - (tail > 0)
    rank = start = 0
    bands = []
    for num_ranks, length, shard_offset in (
        (before, 0, 0),
        (int(head > 0), head, within),
        (filled, shard_numel, 0),
        (int(tail > 0), tail, 0),
        (after, 0, 0),
    ):
        if num_ranks:
            segment = Segment(index, start, length, 1, numel, shard_offset)
            bands.append(Band(rank, num_ranks, segment, (length,)))
            rank += num_ranks
            start += num_ranks * length
    return tuple(bands)

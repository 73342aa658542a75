"""The `Layout` value: the place of every element on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from fullshard.errors import LayoutError
from fullshard.layout.invariants import check_param, check_shards, check_unsharded
from fullshard.layout.segment import Band, Segment, StridedCopy, joined
from fullshard.layout.spec import ParamSpec


@dataclass(frozen=True)
class Layout:
    """The place of each element of some parameters, in the shards and in the unsharded buffer.

    >>> print(PerParameter().build([ParamSpec("w", (5, 2)), ParamSpec("b", (5,))], 2, align=4))
    Layout: 2 ranks, 12 elements per shard, 20 unsharded, 9 padding (37.50 %)
      parameter  shape   offset  ranks  elements on each
      w          (5, 2)       0  0-1    6, 4
      b          (5,)        12  0-1    3, 2

        shard of rank 0   w0 w1 w2 w3 w4 w5 .  .  b0 b1 b2 .
        shard of rank 1   w6 w7 w8 w9 .  .  .  .  b3 b4 .  .
        unsharded         w0 w1 w2 w3 w4 w5 w6 w7 w8 w9 .  . b0 b1 b2 b3 b4 .  .  .

    A layout is frozen, equal on all ranks, and proved when it is built: each element of each
    parameter has exactly one owner, and nothing overlaps or exceeds its buffer. The size of a
    layout and the cost of its proof depend on the number of parameters, not on that of ranks.

    Attributes:
        params: the parameters, in the order that all indices refer to.
        world: number of ranks.
        shard_numel: length of a rank's shard, equal on all ranks.
        unsharded_numel: length of the unsharded buffer.
        unsharded_offsets: the offset of each parameter in the unsharded buffer.
        bands: for each parameter, bands of ranks with alike segments; read them through
            `segments_of` and `local_shape`.

    Raises:
        LayoutError: on construction, if the numbers break an invariant.
    """

    params: tuple[ParamSpec, ...]
    world: int
    shard_numel: int
    unsharded_numel: int
    unsharded_offsets: tuple[int, ...]
    bands: tuple[tuple[Band, ...], ...]
    # Filled by `segments_of`; derived from the fields above, so not part of the value.
    _segments: dict[int, tuple[Segment, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.world < 1 or self.shard_numel < 0:
            raise LayoutError(
                f"got {self.world} ranks with shards of {self.shard_numel} elements, "
                "expected at least one rank and no negative length"
            )
        if not len(self.params) == len(self.unsharded_offsets) == len(self.bands):
            raise LayoutError(
                f"got {len(self.unsharded_offsets)} offsets and bands of {len(self.bands)} "
                f"parameters, expected {len(self.params)} of each"
            )
        for index, (spec, bands) in enumerate(zip(self.params, self.bands, strict=True)):
            check_param(index, spec, bands, world=self.world)
        check_shards(self.params, self.bands, self.shard_numel)
        check_unsharded(self.params, self.unsharded_offsets, self.unsharded_numel)

    def segments_of(self, rank: int) -> tuple[Segment, ...]:
        """Return exactly one segment of `rank` per parameter, empty if `rank` keeps none of it.

        Raises:
            LayoutError: if there is no such rank.
        """
        segments = self._segments.get(rank)
        if segments is None:
            segments = tuple(
                self._band(rank, param).segment_of(rank) for param in range(len(self.params))
            )
            self._segments[rank] = segments
        return segments

    def local_shape(self, rank: int, param: int) -> tuple[int, ...]:
        """Return the shape of the local tensor that `rank` has for parameter `param`.

        `PerParameter` keeps all dims, such as ``(0, d)`` on a rank without rows; `Ragged` has the
        elements of the segment in one dim.

        Raises:
            LayoutError: if there is no such rank.
        """
        return self._band(rank, param).local_shape

    def copies(
        self, row: int, *, below: int | None = None, above: int = 0
    ) -> tuple[StridedCopy, ...]:
        """Return the strided copies between parameters and a rank-major staging buffer.

        Together the boxes hold each element exactly once. Their number depends only on the
        parameters: at most two for each with `PerParameter`, three with `Ragged`.

        Args:
            row: elements from the start of one rank's slice to the start of the next.
            below: copy only the first `below` elements of each shard, which must end where a
                parameter ends; None copies the whole shard.
            above: skip the first `above` elements of each shard, which must also end where a
                parameter ends; the slices begin there.

        Raises:
            LayoutError: if `row` is less than the number of elements copied from a shard.
        """
        stop = self.shard_numel if below is None else below
        if row < stop - above:
            raise LayoutError(
                f"got staging slices of {row} elements, expected at least the "
                f"{stop - above} elements of a shard"
            )
        return tuple(
            copy if not above else replace(copy, staging_offset=copy.staging_offset - above)
            for bands in self.bands
            for copy in joined(
                [b.copy(row) for b in bands if b.numel and above <= b.segment.shard_offset < stop]
            )
        )

    @cached_property
    def zero_copy(self) -> bool:
        """True if the shards, one rank after the other, are the unsharded buffer.

        Then an all-gather can write, and a reduce-scatter can read, an unsharded buffer without
        rearranging anything; otherwise `copies` says how to rearrange.
        """
        return self.unsharded_numel == self.world * self.shard_numel and all(
            self._in_place(band, offset)
            for offset, bands in zip(self.unsharded_offsets, self.bands, strict=True)
            for band in bands
            if band.numel
        )

    @property
    def padding_numel(self) -> int:
        """Number of elements in all shards together that belong to no parameter."""
        return self.world * self.shard_numel - sum(spec.numel for spec in self.params)

    @property
    def efficiency(self) -> float:
        """Fraction of the shards that belongs to parameters, 0 to 1; 1 if shards are empty."""
        total = self.world * self.shard_numel
        return (total - self.padding_numel) / total if total else 1.0

    def describe(self, *, itemsize: int | None = None) -> str:
        """Return the text that `str` gives: the padding, and the ranks that keep each parameter.

        Parameters are in the order of the unsharded buffer, each with the ranks that keep some of
        it. Ranks ``3-7`` with ``10, 16 x3, 6`` elements mean cuts after 10, 26, 42 and 58 of 64
        elements. The padding is also given as a percentage of the shards.

        Args:
            itemsize: bytes per element; if given, the text includes the bytes of a shard.
        """
        nbytes = "" if itemsize is None else f" ({itemsize * self.shard_numel:,} bytes)"
        summary = (
            f"Layout: {self.world} rank{'s' * (self.world != 1)}, "
            f"{self.shard_numel} elements{nbytes} per shard, {self.unsharded_numel} unsharded, "
            f"{self.padding_numel} padding ({100 * (1 - self.efficiency):.2f} %)"
        )
        head = ("parameter", "shape", "offset", "ranks", "elements on each")
        in_place = sorted(range(len(self.params)), key=self.unsharded_offsets.__getitem__)
        return "\n".join((summary, *_columns([head, *map(self._row, in_place)])))

    def __str__(self) -> str:
        return self.describe()

    def _row(self, param: int) -> tuple[str, ...]:
        spec = self.params[param]
        place = str(self.unsharded_offsets[param])
        return (spec.name, str(spec.shape), place, *_kept(self.bands[param]))

    def _band(self, rank: int, param: int) -> Band:
        if not 0 <= rank < self.world:
            raise LayoutError(f"got rank {rank}, expected 0 to {self.world - 1}")
        return next(band for band in self.bands[param] if rank < band.end_rank)

    def _in_place(self, band: Band, unsharded_offset: int) -> bool:
        """Return whether the band is at the same place in gathered shards and unsharded buffer."""
        part = band.segment
        return (
            part.count == 1
            and unsharded_offset + part.start
            == band.first_rank * self.shard_numel + part.shard_offset
            and (band.num_ranks == 1 or part.length == self.shard_numel)
        )


class LayoutStrategy(Protocol):
    """A way to lay out parameters, such as `PerParameter` or `Ragged`; a frozen value."""

    def build(self, params: Sequence[ParamSpec], world: int, align: int) -> Layout:
        """Lay out `params` over `world` ranks, each starting at a multiple of `align` elements."""
        ...


def _kept(bands: Sequence[Band]) -> tuple[str, str]:
    """Return texts such as ``("1-5", "6 x3, 2, 4")``: ranks 1-3 keep 6 each, rank 4 2, rank 5 4."""
    kept = [band for band in bands if band.numel]
    if not kept:
        return "none", ""
    first, last = kept[0].first_rank, kept[-1].end_rank - 1
    numels = (
        str(band.segment.numel) + f" x{band.num_ranks}" * (band.num_ranks > 1) for band in kept
    )
    return str(first) if first == last else f"{first}-{last}", ", ".join(numels)


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the rows as lines of a table; the third column has numbers and is right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        name, shape, offset, ranks, numels = map(str.ljust, row, widths)
        yield f"  {name}  {shape}  {row[2]:>{len(offset)}}  {ranks}  {numels}".rstrip()

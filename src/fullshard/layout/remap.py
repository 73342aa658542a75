"""Moves of elements from the shards of one layout to the shards of another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fullshard.errors import LayoutError
from fullshard.layout.layout import Layout
from fullshard.layout.segment import Stretch


@dataclass(frozen=True, slots=True)
class Move:
    """`length` elements of a parameter, contiguous in a source shard and in a target shard.

    Attributes:
        param: index of the parameter in the target layout.
        source_rank: the rank whose shard has the elements.
        source_offset: offset of the elements in the source shard.
        target_rank: the rank whose shard gets the elements.
        target_offset: offset of the elements in the target shard.
        length: number of elements.
    """

    param: int
    source_rank: int
    source_offset: int
    target_rank: int
    target_offset: int
    length: int


def remap(source: Layout, target: Layout) -> tuple[Move, ...]:
    """Return the moves that carry each element from `source` to `target` exactly once.

    Numbers of ranks, kinds of layout, shard dims, alignment and the order of the parameters may
    all differ. For example, a parameter of 6 elements, from 2 ranks to 3:

        source   | 0 1 2 | 3 4 5 |
        target   | 0 1 | 2 3 | 4 5 |       moves of length 2, 1, 1, 2

    Moves are in the order of the target's parameters and, within a parameter, of their first
    elements. Their number grows with the borders in both layouts, not with the elements.

    Raises:
        LayoutError: unless both layouts have the same parameters, by name and shape.
    """
    source_of = _match(source, target)
    moves: list[Move] = []
    for param, index in enumerate(source_of):
        moves += _merged(_sweep(param, source.stretches(index), target.stretches(param)))
    return tuple(moves)


def _match(source: Layout, target: Layout) -> list[int]:
    """Return the index in `source` of each parameter of `target`."""
    source_index = {spec.name: index for index, spec in enumerate(source.params)}
    target_names = {spec.name for spec in target.params}
    for layout, names in ((source, set(source_index)), (target, target_names)):
        if len(names) != len(layout.params):
            raise LayoutError(
                f"got {len(layout.params)} parameters with {len(names)} different names, expected "
                "every name once"
            )
    if differing := sorted(source_index.keys() ^ target_names):
        raise LayoutError(
            f"got parameters that only one layout has: {', '.join(map(repr, differing))}; "
            "expected the same names in both"
        )
    for spec in target.params:
        if (given := source.params[source_index[spec.name]].shape) != spec.shape:
            raise LayoutError(
                f"parameter {spec.name!r}: got shape {given} in the source, expected {spec.shape} "
                "as in the target"
            )
    return [source_index[spec.name] for spec in target.params]


def _sweep(param: int, sources: Iterator[Stretch], targets: Iterator[Stretch]) -> Iterator[Move]:
    """Cut the elements wherever either side cuts; both sides hold each element once, in order."""
    source, target = next(sources, None), next(targets, None)
    while source and target:
        start = max(source.start, target.start)
        source_end, target_end = source.start + source.length, target.start + target.length
        end = min(source_end, target_end)
        yield Move(
            param=param,
            source_rank=source.rank,
            source_offset=source.shard_offset + start - source.start,
            target_rank=target.rank,
            target_offset=target.shard_offset + start - target.start,
            length=end - start,
        )
        if source_end == end:
            source = next(sources, None)
        if target_end == end:
            target = next(targets, None)


def _merged(moves: Iterator[Move]) -> list[Move]:
    """Join moves that follow each other in both shards.

    Parameters cut on an inner dim return to the same two ranks again and again, with other ranks
    in between, so the move to extend is kept for each pair of ranks.
    """
    result: list[Move] = []
    last: dict[tuple[int, int], int] = {}
    for move in moves:
        pair = (move.source_rank, move.target_rank)
        at = last.get(pair)
        if at is not None and _continues(result[at], move):
            result[at] = replace(result[at], length=result[at].length + move.length)
        else:
            last[pair] = len(result)
            result.append(move)
    return result


def _continues(before: Move, move: Move) -> bool:
    return (
        before.source_offset + before.length == move.source_offset
        and before.target_offset + before.length == move.target_offset
    )

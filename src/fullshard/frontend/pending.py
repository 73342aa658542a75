"""Gradients that wait for a backward that reduces: what users can see of them, and drop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from fullshard.engine import Bucket, Partial, Unit
from fullshard.frontend.hooks import engine_of
from fullshard.schedule import triggers as when


class PendingGradient(NamedTuple):
    """What backwards that did not reduce to the end left of one parameter's gradient."""

    unreduced: Tensor | None
    """The sum of this rank's own, whole, in the dtype it adds up in."""
    partial: Tensor | None
    """This rank's piece of what is reduced over the shards, and not yet over the replicas."""


def pending_of(units: Iterable[Unit]) -> dict[nn.Parameter, PendingGradient]:
    """What waits, by sharded parameter; those for which nothing does are left out."""
    return {
        param: gradient
        for unit in units
        for bucket in unit.buckets
        for param, gradient in _of_bucket(bucket)
    }


def drop_pending(units: Iterable[Unit]) -> None:
    """Forget what waits, between steps.

    Raises:
        ProtocolError: in the middle of a forward or a backward; nothing was dropped.
    """
    units = list(units)
    for unit in units:
        engine_of(unit).check_idle("clear_pending_gradients")
    for unit in units:
        engine_of(unit).trigger(when.Forget(unit.key))


def _of_bucket(bucket: Bucket) -> Iterator[tuple[nn.Parameter, PendingGradient]]:
    waiting = bucket.waiting
    if not waiting:
        return
    whole = waiting.pending or [None] * len(bucket.sharded_params)
    partial = _partial_pieces(bucket, waiting.partial)
    for param, unreduced, piece in zip(bucket.sharded_params, whole, partial, strict=True):
        if unreduced is not None or piece is not None:
            yield param, PendingGradient(unreduced, piece)


def _partial_pieces(bucket: Bucket, partial: Partial | None) -> list[Tensor | None]:
    """The pieces in the row of parameters that some rank had a gradient for."""
    found: list[Tensor | None] = [None] * len(bucket.sharded_params)
    if partial is None:
        return found
    reduced, row = partial.reduced, partial.row
    present = reduced.present(reduced.flags(row).tolist())
    for number, piece, is_there in zip(reduced.numbers, reduced.spec.pieces, present, strict=True):
        if is_there:
            found[number] = row.narrow(0, piece.offset, piece.numel).view(piece.shape)
    return found

"""Pending gradients, which wait for a backward that reduces; users can see and drop them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from fullshard.engine import Bucket, Partial, Unit
from fullshard.frontend.hooks import engine_of
from fullshard.schedule import triggers as when


class PendingGradient(NamedTuple):
    """The gradient of one parameter after backwards that did not reduce it completely."""

    unreduced: Tensor | None
    """The sum of this rank's own whole gradients, in the accumulation dtype."""
    partial: Tensor | None
    """This rank's piece of the gradient reduced over shards, but not yet over replicas."""


def pending_of(units: Iterable[Unit]) -> dict[nn.Parameter, PendingGradient]:
    """Return pending gradients by sharded parameter, without parameters that have none."""
    return {
        param: gradient
        for unit in units
        for bucket in unit.buckets
        for param, gradient in _of_bucket(bucket)
    }


def drop_pending(units: Iterable[Unit]) -> None:
    """Drop pending gradients, between steps.

    Raises:
        ProtocolError: during a forward or backward; nothing was dropped.
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
    """Return each parameter's piece of ``partial``; None where no rank had a gradient."""
    found: list[Tensor | None] = [None] * len(bucket.sharded_params)
    if partial is None:
        return found
    reduced, row = partial.reduced, partial.row
    present = reduced.present(reduced.flags(row).tolist())
    for number, piece, is_there in zip(reduced.numbers, reduced.spec.pieces, present, strict=True):
        if is_there:
            found[number] = row.narrow(0, piece.offset, piece.numel).view(piece.shape)
    return found

"""A wrapper that records every collective, so that tests can count them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard import comm
from fullshard.comm.c10d import C10d, Transport
from fullshard.comm.protocol import Pending, Wrapper


class CollectiveCall(NamedTuple):
    """One collective, with the number of elements that this rank contributes."""

    kind: str
    numel: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Recording(Wrapper):
    """A wrapper that appends each collective to ``calls`` and forwards it to ``inner``."""

    calls: list[CollectiveCall] = field(default_factory=list)

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        numel = sum(map(Tensor.numel, sources))
        self.calls.append(CollectiveCall("all_gather", numel, sources[0].dtype))
        return super().all_gather(outputs, sources)

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        self.calls.append(CollectiveCall("reduce_scatter", source.numel(), source.dtype))
        return super().reduce_scatter_mean(output, source)

    def all_to_all(self, output: Tensor, source: Tensor) -> Pending:
        self.calls.append(CollectiveCall("all_to_all", source.numel(), source.dtype))
        return super().all_to_all(output, source)

    def all_reduce_mean(self, values: Tensor) -> Pending:
        self.calls.append(CollectiveCall("all_reduce", values.numel(), values.dtype))
        return super().all_reduce_mean(values)

    def broadcast(self, values: Tensor, source: int) -> Pending:
        self.calls.append(CollectiveCall("broadcast", values.numel(), values.dtype))
        return super().broadcast(values, source)


@contextmanager
def recordings(transport: Transport | None = None) -> Iterator[list[Recording]]:
    """Record the collectives of each unit sharded in the block, in order.

    With ``transport``, units use this transport instead of their own.
    """
    made: list[Recording] = []

    def record(inner: comm.Collectives) -> comm.Collectives:
        if transport is not None and inner.group is not None:
            inner = C10d(inner.group, "cpu", transport)
        made.append(Recording(inner))
        return made[-1]

    with comm.wrapped(record):
        yield made

"""One process that plays rank 0 of several: what another rank would send is what this one sends.

Values are wrong then; accesses to memory are those of the real thing, in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard._torch import collectives as _collectives
from fullshard.comm import Done, Label, Pending, choose_wire

__all__ = ["solo"]


class Echo:
    """A wire on which all ranks have the same."""

    adds_wide = False

    def __init__(self, group: dist.ProcessGroup, device_type: str) -> None:
        self.group = group
        self.rank, self.world = group.rank(), group.size()

    def by_sums(self) -> Echo:
        """This one."""
        return self

    def over(self, group: dist.ProcessGroup) -> Echo:
        """On that."""
        return Echo(group, "cpu")

    def labelled(self, label: Label) -> Echo:
        """This one."""
        return self

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        """Repeat."""
        for output, source in zip(outputs, sources, strict=True):
            output.copy_(source.repeat(self.world))
        return Done()

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        """Cut."""
        output.copy_(source.view(self.world, -1)[self.rank])
        return Done()

    def all_reduce_mean(self, values: Tensor) -> Pending:
        """Nothing changes."""
        return Done()

    def all_to_all(self, output: Tensor, source: Tensor) -> Pending:
        """Repeat what goes to this one."""
        output.copy_(source.view(self.world, -1)[self.rank].repeat(self.world))
        return Done()

    def broadcast(self, values: Tensor, source: int) -> Pending:
        """Nothing changes."""
        return Done()


@contextmanager
def solo(world: int) -> Iterator[None]:
    """Be rank 0 of ``world``."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    last = choose_wire(Echo)
    try:
        with patch.object(_collectives, "timeout_of", lambda *_: timedelta(minutes=1)):
            yield
    finally:
        choose_wire(last)
        dist.destroy_process_group()

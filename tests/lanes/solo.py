"""One process that plays rank 0 of several; it receives its own data in place of the others'.

Values are wrong then; accesses to memory are those of real ranks, in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fullshard._torch import collectives as _collectives
from fullshard.comm import Done, choose_wire
from fullshard.comm.dry import MirrorWire


def _mirror(group: dist.ProcessGroup, device_type: str) -> MirrorWire:
    ranks = tuple(dist.get_process_group_ranks(group))
    return MirrorWire(group, ranks, adds_wide=False, carry=lambda exchange: Done())


@contextmanager
def solo(world: int) -> Iterator[None]:
    """Be rank 0 of ``world``.

    In a ``mirror_world`` the CPU would be the device, and offloading would do nothing.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    last = choose_wire(_mirror)
    try:
        with patch.object(_collectives, "timeout_of", lambda *_: timedelta(minutes=1)):
            yield
    finally:
        choose_wire(last)
        dist.destroy_process_group()

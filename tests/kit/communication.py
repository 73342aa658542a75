"""Collectives of users, tensors of different sizes, and simulated hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fullshard
from fullshard._torch import collectives as _collectives
from fullshard.comm import rendezvous
from tests.ranks.models import noise


class Gather(fullshard.AllGather):
    """An all-gather that counts its calls; it returns a work if ``asynchronous``, else it waits."""

    def __init__(self, *, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.allocated = self.called = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated += 1
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.called += 1
        work = _collectives.all_gather(group, [output_tensor], [input_tensor])
        if self.asynchronous:
            return work
        work.wait()
        return None


class Reduce(Gather):
    def __call__(  # type: ignore[override]
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self.called += 1
        work = _collectives.reduce_scatter(group, output_tensor, input_tensor, op)
        if self.asynchronous:
            return work
        work.wait()
        return None


NUMELS = [0, 1, 5, 4096, 100_003]


def part(numel: int, rank: int, dtype: torch.dtype) -> Tensor:
    return noise(numel, seed=rank + 1).to(dtype)


@contextmanager
def on(hosts: str) -> Iterator[None]:
    """Put ranks whose groups connect in the block on these simulated hosts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(rendezvous.HOST, hosts[dist.get_rank()])
        yield

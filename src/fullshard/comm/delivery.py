"""Messages of all ranks, delivered to some of them beside what they do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard import _torch

_TAG = 7201  # of point-to-point messages, which programs may send as well


class Delivery:
    """One message of bytes from each rank of the default group, to each of some ranks.

    Fill ``own``, call ``start`` on all ranks, then ``wait``.

    Args:
        sizes: of the messages of all ranks, in bytes; multiples of 16.
        receivers: the ranks that get all messages, in ascending order.
        device: where messages should be; where they are if the group serves it.
        last: a delivery that has ended, whose memory is not needed any longer.

    Attributes:
        own: the message of this rank.
        device: where messages are.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        receivers: Sequence[int],
        device: torch.device,
        last: Delivery | None = None,
    ) -> None:
        self._sizes, self._receivers = sizes, receivers
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._takes = self._rank in receivers
        self.device = _served(device)
        size = sum(sizes) if self._takes else sizes[self._rank]
        memory: Tensor | None = None
        if last is not None:
            memory = last.give_memory()
        if memory is None or len(memory) < size:
            del memory  # before there is more
            memory = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._memory: Tensor | None = memory
        self._messages = list(memory[: sum(sizes)].split([*sizes])) if self._takes else []
        self.own = self._messages[self._rank] if self._takes else memory[:size]
        self._works: list[dist.Work] = []

    def give_memory(self) -> Tensor | None:
        """Give the memory of all messages away, after the end; they are not to be used any more."""
        memory, self._memory = self._memory, None
        self._messages, self.own = [], torch.empty(0)
        return memory

    def start(self) -> None:
        """Begin to send and to receive; nobody may write to ``own`` until ``wait`` returns."""
        if len(self._sizes) == 1:
            return
        if len(self._receivers) == len(self._sizes):
            self._works = [
                dist.broadcast(message, rank, async_op=True)
                for rank, message in enumerate(self._messages)
                if len(message)
            ]
            return
        calls = []
        for other in self._receivers if len(self.own) else ():
            if other != self._rank:
                calls.append(dist.P2POp(dist.isend, self.own, other, tag=_TAG))
        for other, message in enumerate(self._messages):
            if other != self._rank and len(message):
                calls.append(dist.P2POp(dist.irecv, message, other, tag=_TAG))
        self._works = dist.batch_isend_irecv(calls) if calls else []

    def wait(self) -> list[Tensor]:
        """Wait for the end; return the messages in rank order, none if this rank gets none."""
        works, self._works = self._works, []
        for work in works:
            work.wait()
        return self._messages


def _served(device: torch.device) -> torch.device:
    """Return ``device`` if the default group serves it, else a device that this serves."""
    if not dist.is_initialized():
        return device
    group = dist.group.WORLD
    assert group is not None
    served = _torch.device_types(group)
    if device.type in served:
        return device
    kind = next(iter(served))
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())

"""Gathers of bytes, bucket by bucket, to some ranks, beside what the ranks compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.comm.c10d import issued
from fullshard.comm.ledger import TRANSFER
from fullshard.comm.mesh import collectives_of_group, served_by
from fullshard.comm.protocol import Pending, WorkGroup

_PADDED = 1.02
_TAG = 7201  # of point-to-point messages, which programs may send as well


class BucketedGather:
    """Rounds of one message of bytes from each rank of the default group to each of some ranks.

    In each round fill what ``begin`` returns, call ``start`` on all ranks, then ``wait``. All
    rounds have the same memory.

    Args:
        rounds: for each round the sizes of the messages of all ranks, in bytes, multiples of 16.
        receivers: the ranks that get all messages, in ascending order.
        device: where messages should be.

    Attributes:
        device: where messages are; another one if the group does not serve that.
    """

    def __init__(
        self, rounds: Sequence[Sequence[int]], receivers: Sequence[int], device: torch.device
    ) -> None:
        self._rounds, self._receivers = rounds, receivers
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._takes = self._rank in receivers
        group = dist.group.WORLD
        self.device = device if group is None else served_by(group, device)
        most = max(sum(self._places(sizes)) for sizes in rounds)
        self._memory = torch.empty(most, dtype=torch.uint8, device=self.device)
        self._messages: list[Tensor] = []
        self._works: list[Pending] = []

    def _places(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the sizes of places for messages, all alike if there is one all-gather for all.

        A rank that gets no messages has a place for its own only.
        """
        if not self._takes:
            return [size if rank == self._rank else 0 for rank, size in enumerate(sizes)]
        world, row = len(sizes), max(sizes)
        is_even = len(self._receivers) == world and row * world <= _PADDED * sum(sizes)
        return [row] * world if is_even else sizes

    def begin(self, number: int) -> Tensor:
        """Begin a round, after the end of the last one; return this rank's message, to be filled.

        The messages of the last round are not to be used any more.
        """
        sizes = self._rounds[number]
        places = self._places(sizes)
        self._rows = self._memory[: sum(places)].split([*places])
        self._messages = [row[:n] for row, n in zip(self._rows, sizes, strict=True)]
        return self._messages[self._rank]

    def start(self) -> None:
        """Begin to send and to receive; nobody may write to the message until ``wait`` returns."""
        world = len(self._rounds[0])
        if world == 1:
            return
        if len(self._receivers) == world:
            row = len(self._rows[0])
            assert dist.group.WORLD is not None
            wire = collectives_of_group(dist.group.WORLD, self.device.type)
            if row and all(len(one) == row for one in self._rows):
                whole = self._memory[: row * world]
                self._works = [wire.all_gather([whole], [self._rows[self._rank]])]
                return
            self._works = [
                wire.broadcast(message, rank)
                for rank, message in enumerate(self._messages)
                if len(message)
            ]
            return
        assert dist.group.WORLD is not None
        group, kind = dist.group.WORLD, self.device.type
        self._works = [issued(group, kind, TRANSFER, self._send, label="weights")]

    def _send(self) -> Pending:
        """Begin to send this rank's message to those who take it, and to take theirs."""
        own = self._messages[self._rank]
        others = [rank for rank in range(len(self._messages)) if rank != self._rank]
        receivers = [rank for rank in others if rank in self._receivers and len(own)]
        senders = [rank for rank in others if len(self._messages[rank])]
        calls = [dist.P2POp(dist.isend, own, rank, tag=_TAG) for rank in receivers]
        calls += [dist.P2POp(dist.irecv, self._messages[rank], rank, tag=_TAG) for rank in senders]
        return WorkGroup(dist.batch_isend_irecv(calls) if calls else [])

    def wait(self) -> list[Tensor]:
        """Wait for the end; return the messages in rank order, none if this rank gets none."""
        while self._works:  # if one raises, a later call waits for the rest
            self._works.pop(0).wait()
        return self._messages if self._takes else []

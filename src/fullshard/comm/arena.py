"""Allocation of a rank's shared memory: a range stays taken until all readers are done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from torch import Tensor

from fullshard.comm.memory import Memory


class Arena:
    """The ranges of a ``Memory`` that exchanges occupy, each until all its readers are done."""

    def __init__(self, memory: Memory, num_readers: int) -> None:
        """``num_readers``: the number of readers of each exchange."""
        self.memory = memory
        self._num_readers = num_readers
        self._starts: dict[int, int] = {}  # start of the data still to be read, by exchange
        self._num_acks: Counter[int] = Counter()  # by exchange; a peer may be done before we begin

    def allocate(
        self, number: int, nbytes: int, read: Callable[[], Iterable[int]]
    ) -> tuple[int, Tensor]:
        """Take ``nbytes`` for exchange ``number``; return their start, and the bytes.

        If no gap is large enough, call ``read`` for exchanges that peers are done with, then grow.
        """
        start = self.memory.take(nbytes)
        if start is None:
            self.count_acks(read())
            start = self.memory.take(nbytes)
        if start is None:
            self.memory.grow(nbytes)
            start = self.memory.take(nbytes)
        assert start is not None
        self._starts[number] = start
        return start, self.memory.bytes[start : start + nbytes]

    def count_acks(self, numbers: Iterable[int]) -> None:
        """Count one reader of each of these exchanges as done."""
        for number in numbers:
            self._num_acks[number] += 1
            if self._num_acks[number] == self._num_readers:
                del self._num_acks[number]
                self.memory.give_back(self._starts.pop(number))

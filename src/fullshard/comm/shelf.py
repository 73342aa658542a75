"""What lies in a rank's memory for its neighbours, until all have read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from torch import Tensor

from fullshard.comm.memory import Memory


class Shelf:
    """The ranges of a ``Memory`` that exchanges occupy, and who has still to read them."""

    def __init__(self, memory: Memory, num_readers: int) -> None:
        """``num_readers`` says how often ``count_done`` has to hear of an exchange."""
        self.memory = memory
        self._num_readers = num_readers
        self._laid: dict[int, int] = {}  # start of the data still to be read, by exchange
        self._num_done: Counter[int] = Counter()  # readers done with an exchange; some are ahead

    def lay(
        self, number: int, nbytes: int, read: Callable[[], Iterable[int]]
    ) -> tuple[int, Tensor]:
        """Take ``nbytes`` for exchange ``number``; return their start, and the bytes.

        If no gap is large enough, ``read`` is asked for exchanges that readers are done with.
        """
        start = self.memory.take(nbytes)
        if start is None:
            self.count_done(read())
            start = self.memory.take(nbytes)
        if start is None:
            self.memory.grow(nbytes)
            start = self.memory.take(nbytes)
        assert start is not None
        self._laid[number] = start
        return start, self.memory.bytes[start : start + nbytes]

    def count_done(self, numbers: Iterable[int]) -> None:
        """Count one reader of each of these exchanges as done."""
        for number in numbers:
            self._num_done[number] += 1
            if self._num_done[number] == self._num_readers:
                del self._num_done[number]
                self.memory.give_back(self._laid.pop(number))

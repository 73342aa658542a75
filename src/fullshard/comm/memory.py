"""Memory that the processes of a host share. Linux only."""

from __future__ import annotations

import bisect
import os
import weakref

import torch
from torch import Tensor

_ALIGNMENT = 64


class Memory:
    """One anonymous file of this process, which grows; ranges of it are in use or free.

    A range is cut from the first gap that is large enough, so what was never in use at one time
    takes no memory: the pages of a file are there once they are written.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("fullshard")
        weakref.finalize(self, os.close, self._fd)
        os.fchmod(self._fd, 0o600)  # else whoever gets hold of it could open it for writing
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        """All of it."""
        self._gaps: list[tuple[int, int]] = []  # start and end, in order; no two touch
        self._ends: dict[int, int] = {}  # of the ranges in use, by their start

    def opened_for_reading(self) -> int:
        """A new file descriptor, with which others can map it but not write; the caller closes."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def take(self, nbytes: int) -> int | None:
        """Where ``nbytes`` that nobody uses begin; None if there is no such gap."""
        nbytes = max(_ALIGNMENT, aligned(nbytes))
        for i, (start, end) in enumerate(self._gaps):
            if end - start >= nbytes:
                self._gaps[i : i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                self._ends[start] = start + nbytes
                return start
        return None

    def give_back(self, start: int) -> None:
        """Let others use the range that begins at ``start``."""
        self._add_gap(start, self._ends.pop(start))

    def grow(self, nbytes: int) -> None:
        """Have a gap of at least ``nbytes`` at the end."""
        size = self.bytes.numel()
        larger = max(2 * size, size + aligned(nbytes), 1 << 16)
        os.ftruncate(self._fd, larger)  # ``from_file`` would do it, but write a 0 at the beginning
        # By name, since Python's own mappings each keep a file descriptor.
        self.bytes = _mapped(f"/proc/self/fd/{self._fd}", shared=True, size=larger)
        self._add_gap(size, larger)

    def _add_gap(self, start: int, end: int) -> None:
        i = bisect.bisect(self._gaps, (start, end))
        if i < len(self._gaps) and self._gaps[i][0] == end:
            end = self._gaps.pop(i)[1]
        if i > 0 and self._gaps[i - 1][1] == start:
            i -= 1
            start = self._gaps.pop(i)[0]
        self._gaps.insert(i, (start, end))


class LentMemory:
    """The memory of another process, to be read."""

    def __init__(self, fd: int) -> None:
        """Take over a file descriptor that is open for reading."""
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read(self, start: int, nbytes: int) -> Tensor:
        """What the other process has in this range, as it is there, as uint8."""
        if start + nbytes > self._bytes.numel():
            # A private mapping shows what others write, since its pages are those of the file
            # until it is written itself, which nobody does; a shared one would let us write.
            name, size = f"/proc/self/fd/{self._fd}", os.fstat(self._fd).st_size
            self._bytes = _mapped(name, shared=False, size=size)
        return self._bytes[start : start + nbytes]


def _mapped(name: str, *, shared: bool, size: int) -> Tensor:
    """The first ``size`` bytes of a file, which has so many."""
    with torch.inference_mode(False):
        return torch.from_file(name, shared=shared, size=size, dtype=torch.uint8, device="cpu")


def aligned(nbytes: int) -> int:
    """The next multiple of what every dtype may start at."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

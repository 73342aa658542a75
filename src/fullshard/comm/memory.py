"""Memory that the processes of a host share; Linux only."""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import weakref

import torch
from torch import Tensor

from fullshard.errors import ProtocolError

_ALIGNMENT = 64


class Memory:
    """A growing anonymous file of this process, divided into ranges in use and gaps.

    A range is taken from the first gap that is large enough. A page of a file is allocated when it
    is first written, so the unused end of the file takes no memory.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("fullshard")
        weakref.finalize(self, os.close, self._fd)
        os.fchmod(self._fd, 0o600)  # other users cannot reopen it for writing
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        """The whole file, as uint8."""
        self._gaps: list[tuple[int, int]] = []  # (start, end), ascending; no two gaps touch
        self._ends: dict[int, int] = {}  # ends of the ranges in use, by start

    def opened_for_reading(self) -> int:
        """Return a new file descriptor for mapping the file read-only; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def take(self, nbytes: int) -> int | None:
        """Take ``nbytes`` from a gap and return their start; None if no gap is large enough."""
        nbytes = max(_ALIGNMENT, aligned(nbytes))
        for i, (start, end) in enumerate(self._gaps):
            if end - start >= nbytes:
                self._gaps[i : i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                self._ends[start] = start + nbytes
                return start
        return None

    def give_back(self, start: int) -> None:
        """Free the range that begins at ``start``."""
        self._add_gap(start, self._ends.pop(start))

    def grow(self, nbytes: int) -> None:
        """Enlarge the file so that a gap of at least ``nbytes`` is at the end."""
        size = self.bytes.numel()
        larger = max(2 * size, size + aligned(nbytes), 1 << 16)
        os.ftruncate(self._fd, larger)  # ``from_file`` would too, but write a 0 at the beginning
        # Mapped by name, since each of Python's own mappings keeps a file descriptor open.
        name = f"/proc/self/fd/{self._fd}"
        with torch.inference_mode(False):
            self.bytes = torch.from_file(
                name, shared=True, size=larger, dtype=torch.uint8, device="cpu"
            )
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
    """The memory of another process, read-only."""

    def __init__(self, fd: int) -> None:
        """Take ownership of ``fd``, a file descriptor that is open for reading."""
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def read(self, start: int, nbytes: int) -> Tensor:
        """Return this range of the other process's memory as uint8, without a copy."""
        if start + nbytes > self._bytes.numel():
            self._bytes = _mapped_read_only(self._fd, os.fstat(self._fd).st_size)
        return self._bytes[start : start + nbytes]


def _mapped_read_only(fd: int, size: int) -> Tensor:
    """Map the first ``size`` bytes of a file, shared and read-only.

    With a read-only descriptor, ``torch.from_file`` can only make a private writable mapping. Each
    of these counts as committed memory, so strict overcommit would refuse it.
    """
    address = _mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address in (None, _FAILED):
        raise ProtocolError(
            f"cannot map {size} bytes of another rank's memory: {os.strerror(ctypes.get_errno())}; "
            "raise the limit (ulimit -v), or set FULLSHARD_TRANSPORT=backend"
        )
    own = (ctypes.c_ubyte * size).from_address(address)
    # Once no tensor refers to it any more. Not at exit: tensors may outlive the interpreter.
    weakref.finalize(own, _munmap, address, size).atexit = False
    with torch.inference_mode(False):
        return torch.frombuffer(own, dtype=torch.uint8)


_libc = ctypes.CDLL(None, use_errno=True)
_FAILED = ctypes.c_void_p(-1).value
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to an alignment that suits every dtype."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

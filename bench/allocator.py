"""A model of PyTorch's caching allocator of CUDA memory, with its default settings.

The model follows the rules of c10/cuda/CUDACachingAllocator.cpp (PyTorch 2.13) for reserving
memory. Memory is reserved in segments, each for one stream, and never returned. Blocks are cut from
segments and joined with free neighbours again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

MB = 1 << 20
GRANULE = 512
SMALL = MB
"""The largest request served from small segments; large blocks are split if more remains."""


@dataclass(eq=False)
class _Block:
    nbytes: int
    is_free: bool = True
    before: _Block | None = None
    behind: _Block | None = None


class _Given(NamedTuple):
    block: _Block
    pool: list[_Block]
    stream: str


class CachingAllocator:
    """The bytes reserved on each stream for its allocations."""

    def __init__(self) -> None:
        self.reserved: Counter[str] = Counter()
        self._pools: defaultdict[tuple[str, bool], list[_Block]] = defaultdict(list)
        self._given: dict[int, _Given] = {}

    def allocate(self, address: int, nbytes: int, stream: str) -> None:
        """Allocate ``nbytes`` on ``stream``; ``address`` names them until they are freed."""
        nbytes = max(GRANULE, _up(nbytes, GRANULE))
        is_small = nbytes <= SMALL
        pool = self._pools[stream, is_small]
        fitting = (block for block in pool if block.is_free and block.nbytes >= nbytes)
        block = min(fitting, key=lambda block: block.nbytes, default=None)
        if block is None:
            block = _Block(_segment_nbytes(nbytes))
            pool.append(block)
            self.reserved[stream] += block.nbytes
        rest = block.nbytes - nbytes
        if rest >= GRANULE if is_small else rest > SMALL:
            behind = _Block(rest, before=block, behind=block.behind)
            if block.behind is not None:
                block.behind.before = behind
            block.nbytes, block.behind = nbytes, behind
            pool.append(behind)
        block.is_free = False
        self._given[address] = _Given(block, pool, stream)

    def free(self, address: int) -> None:
        """Take back what is at ``address``, for the stream that it was given to."""
        block, pool, _ = self._given.pop(address)
        block.is_free = True
        if block.behind is not None and block.behind.is_free:
            _join(block, block.behind, pool)
        if block.before is not None and block.before.is_free:
            _join(block.before, block, pool)

    def holds(self, address: int) -> bool:
        """Return whether an allocation is at ``address``."""
        return address in self._given


def _join(block: _Block, behind: _Block, pool: list[_Block]) -> None:
    block.nbytes += behind.nbytes
    block.behind = behind.behind
    if behind.behind is not None:
        behind.behind.before = block
    pool.remove(behind)


def _segment_nbytes(nbytes: int) -> int:
    if nbytes <= SMALL:
        return 2 * MB
    return 20 * MB if nbytes < 10 * MB else _up(nbytes, 2 * MB)


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple

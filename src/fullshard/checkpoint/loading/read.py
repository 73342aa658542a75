"""Read parts of tensors from the data files of a checkpoint, verified, and each byte seldom twice.

A rank reads whole blocks, as their digests are of whole blocks. When rows were saved and columns
are loaded, the blocks that a rank needs hold many elements for other ranks. Then the ranks exchange
the tensor: each reads a share of all blocks, in proportion to the elements that it keeps, and gets
the rest from the other ranks.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard.checkpoint.format import (
    BLOCK_NBYTES,
    Bytes,
    DataFile,
    FileInfo,
    FilePart,
    Manifest,
    datafile,
)
from fullshard.comm.blocking import all_gather_bytes
from fullshard.errors import CheckpointError
from fullshard.layout.region import Region
from fullshard.progress import Operation
from fullshard.tensors.transfer import ALIGN, Part, parts_of, places

_TOLERATED = 1.05
"""Bytes read for each byte kept above which ranks exchange a tensor."""

_EXCHANGED_NBYTES = 64 << 20  # at once, in the memory of each rank
_CHUNK_NBYTES = 4 << 20  # a multiple of the blocks
_MOST_OPEN = 128  # data files at a time; the usual limit of a process is 1,024
_LARGEST = 4  # share of a rank, in shares of a rank if all had the same


class WantedPart(NamedTuple):
    """A part of a tensor that this rank needs, and flat memory for it on the CPU."""

    region: Region
    memory: Tensor


class _Run(NamedTuple):
    """Neighboring blocks of a tensor's data in one file: bytes ``start`` to ``stop``.

    A rank that reads alone reads at most ``_CHUNK_NBYTES`` at once.
    """

    name: str
    part: FilePart
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Reader:
    """Fills the memory of ``wanted``; a context that closes files.

    Args:
        opened: opens a data file of the checkpoint.
        manifest: of the checkpoint.
        wanted: what this rank needs, by the names of tensors.
        rank, world: of those who read together.
        work: counts the bytes of ``wanted`` that are filled.
    """

    def __init__(
        self,
        opened: Callable[[FileInfo], Bytes],
        manifest: Manifest,
        wanted: Mapping[str, WantedPart],
        *,
        rank: int = 0,
        world: int = 1,
        work: Operation | None = None,
    ) -> None:
        self._opened = opened
        self.manifest = manifest
        self._wanted = wanted
        self._rank = rank
        self._world = world
        self._work = work
        self._files: dict[str, DataFile] = {}
        self._filled = dict.fromkeys(wanted, 0)
        self._buffer = torch.empty(_CHUNK_NBYTES, dtype=torch.uint8, device="cpu")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def to_exchange(self) -> list[str]:
        """Return the tensors that this rank had better not read alone."""
        if self._world == 1:
            return []
        return [
            name
            for name, wanted in self._wanted.items()
            if sum(run.nbytes for run in self._runs(name)) > _TOLERATED * wanted.memory.nbytes
        ]

    def kept_of(self, names: Sequence[str]) -> int:
        """Return the bytes that this rank keeps of these tensors."""
        return sum(self._wanted[name].memory.nbytes for name in names if name in self._wanted)

    def read(self, exchanged: Sequence[str], kept: Sequence[int] = ()) -> None:
        """Fill all memory; a collective for the tensors that are ``exchanged``.

        Args:
            exchanged: names, equal on all ranks.
            kept: for each rank the result of ``kept_of``; empty if nothing is exchanged.

        Raises:
            CheckpointError: on this rank or another; memory has undefined contents.
        """
        failure: Exception | None = None
        try:
            for name in self._wanted.keys() - set(exchanged):
                for run in self._runs(name):
                    self._read_and_use(run)
        except Exception as error:
            failure = error
        parts = _parts_of_ranks(kept)
        for batch in self._batches(exchanged, parts):
            given = self._exchange(batch, parts, failure)
            if given is None:
                break
            try:
                for run, data in given:
                    self._use(run, data)
            except Exception as error:
                failure = error  # the next exchange says so
        else:
            for name, wanted in self._wanted.items() if failure is None else ():
                if self._filled[name] != wanted.region.numel:
                    raise CheckpointError(
                        f"{name}: the files have {self._filled[name]} of {wanted.region.numel} "
                        "elements"
                    )
        if failure is not None:
            raise failure

    def _runs(self, name: str) -> Iterator[_Run]:
        """Yield the blocks that hold wanted elements of a tensor."""
        wanted = self._wanted[name]
        itemsize = wanted.memory.element_size()
        for part in self.manifest.parts(name, wanted.region):
            blocks: set[int] = set()
            for overlap in part.region.overlaps(wanted.region):
                last = (overlap.stop * itemsize - 1) // BLOCK_NBYTES
                blocks.update(range(overlap.offset * itemsize // BLOCK_NBYTES, last + 1))
            nbytes = part.region.numel * itemsize
            for first, end in _series(sorted(blocks)):
                stop = min(end * BLOCK_NBYTES, nbytes)
                for start in range(first * BLOCK_NBYTES, stop, _CHUNK_NBYTES):
                    yield _Run(name, part, start, min(start + _CHUNK_NBYTES, stop))

    def _read(self, run: _Run, into: Tensor) -> None:
        info = run.part.file
        file = self._files.get(info.name)
        if file is None:
            if len(self._files) == _MOST_OPEN:
                self._files.pop(next(iter(self._files))).close()
            file = self._files[info.name] = DataFile(self._opened(info), info)
        file.check(run.name, datafile.dtype_of(run.part.dtype), run.part.shape)
        for start in range(0, run.nbytes, _CHUNK_NBYTES):
            file.read(run.name, run.start + start, into[start : start + _CHUNK_NBYTES])

    def _read_and_use(self, run: _Run) -> None:
        """Read to where it is wanted if that is in one piece, else to the buffer, and copy."""
        memory = self._wanted[run.name].memory
        numel = run.nbytes // memory.element_size()
        in_place = next((part.as_slice(memory, numel) for part in self._parts(run)), None)
        if in_place is not None:
            self._read(run, in_place.view(torch.uint8))
            self._count(run.name, numel)
        else:
            data = self._buffer[: run.nbytes]
            self._read(run, data)
            self._use(run, data)

    def _count(self, name: str, numel: int) -> None:
        self._filled[name] += numel
        if self._work is not None:
            self._work.add(numel * self._wanted[name].memory.element_size())

    def _parts(self, run: _Run) -> list[Part[str]]:
        """Return the part of ``run`` that this rank loads, in a list of at most one."""
        wanted = self._wanted[run.name]
        size = wanted.memory.element_size()
        there = run.part.region.part(run.start // size, run.stop // size)
        return parts_of(run.name, wanted.region, 0, there)

    def _use(self, run: _Run, data: Tensor) -> None:
        """Copy what is wanted of ``data``, the bytes of ``run``."""
        if run.name not in self._wanted:
            return
        memory = self._wanted[run.name].memory
        for part in self._parts(run):
            torch._foreach_copy_(part.of_local(memory), part.of_block(data.view(memory.dtype)))
            self._count(run.name, part.numel)

    def _batches(self, exchanged: Sequence[str], parts: Sequence[float]) -> Iterator[list[_Run]]:
        """Yield all blocks of the ``exchanged`` tensors, a limited number of bytes at a time."""
        if not exchanged:
            return
        # The memory is that of the largest share for each rank.
        limit_nbytes = int(_EXCHANGED_NBYTES / (max(parts) * self._world))
        sizes = (
            ((name, part), part.region.numel * datafile.dtype_of(part.dtype).itemsize, BLOCK_NBYTES)
            for name in exchanged
            for part in self.manifest.parts(name)
        )
        for batch in datafile.batches(sizes, limit_nbytes):
            yield [_Run(name, part, start, stop) for (name, part), start, stop in batch]

    def _exchange(
        self, batch: Sequence[_Run], parts: Sequence[float], failure: Exception | None
    ) -> list[tuple[_Run, Tensor]] | None:
        """Read this rank's share of ``batch`` and return what all ranks read.

        Args:
            batch: equal on all ranks.
            parts: of the ranks.
            failure: why this rank cannot read its share; if it is None, raised afterwards.

        Returns:
            None on all ranks if one cannot read its share.
        """
        shares = [
            (runs, places((run.nbytes for run in runs), start=ALIGN))
            for runs in _shares(batch, parts)
        ]
        # The first byte says whether the rank could read its share.
        own = torch.zeros(max(ends[-1] for _, ends in shares), dtype=torch.uint8, device="cpu")
        try:
            if failure is None:
                for run, place in zip(*shares[self._rank], strict=False):
                    self._read(run, own[place : place + run.nbytes])
                own[0] = 1
        finally:
            given = all_gather_bytes(own, "parts of a checkpoint")
        if not given[:, 0].all():
            return None
        return [
            (run, data[place : place + run.nbytes])
            for share, data in zip(shares, given, strict=True)
            for run, place in zip(*share, strict=False)
        ]


def _parts_of_ranks(kept: Sequence[int]) -> list[float]:
    """Return the share of each rank in the exchanged blocks, by the size it keeps and capped."""
    if not kept:
        return []
    world, total = len(kept), sum(kept)
    parts = [min(nbytes / total, _LARGEST / world) if total else 0.0 for nbytes in kept]
    return [part + (1 - sum(parts)) / world for part in parts]


def _shares(batch: Sequence[_Run], parts: Sequence[float]) -> list[list[_Run]]:
    """Divide the blocks of ``batch`` among the ranks, in their ``parts`` as far as blocks allow."""
    shares: list[list[_Run]] = [[] for _ in parts]
    total, passed = sum(run.nbytes for run in batch), 0
    *ends, _ = itertools.accumulate(part * total for part in parts)
    for run in batch:
        start = run.start
        while start < run.stop:
            # A rank whose part of the batch ends within half a block has it already.
            rank = bisect.bisect_left(ends, passed + min(BLOCK_NBYTES, run.stop - start) / 2)
            left = ends[rank] - passed if rank < len(ends) else run.stop - start
            stop = min(start + max(round(left / BLOCK_NBYTES), 1) * BLOCK_NBYTES, run.stop)
            shares[rank].append(run._replace(start=start, stop=stop))
            passed += stop - start
            start = stop
    return shares


def _series(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield first and end of each series of neighboring numbers; ``numbers`` ascend."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield numbers[start], numbers[at - 1] + 1
            start = at

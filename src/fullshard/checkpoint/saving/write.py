"""Write a rank's parts of a checkpoint, at once or in the background."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fullshard._torch import autograd as _autograd
from fullshard.checkpoint.format import (
    CHUNK_NBYTES,
    DataWriter,
    Parts,
    digest_of,
    digests_of_blocks,
    flat_bytes,
    memory_of,
)
from fullshard.device import HostReader, host_tensor
from fullshard.errors import ProtocolError
from fullshard.progress import Operation

_STATE = "the state of the optimizer"


class _Chunk(NamedTuple):
    name: str
    start: int
    data: Tensor


class CopyMemory:
    """Host memory for copies.

    Args:
        budget_nbytes: the size of all of it at any time; None: as much as is asked for.
        is_kept: keep it for the next save; to write to new memory takes far longer.
    """

    def __init__(self, budget_nbytes: int | None, *, is_kept: bool = False) -> None:
        self._budget_nbytes = sys.maxsize if budget_nbytes is None else budget_nbytes
        self._is_kept = is_kept
        self._spare: dict[tuple[int, bool], list[Tensor]] = {}
        self._used_nbytes = 0
        self._nbytes = 0
        self.peak_nbytes = 0
        """The largest size that copies had at once."""

    def has_room(self, nbytes: int) -> bool:
        """Return whether so many bytes may be taken now."""
        return self._used_nbytes + nbytes <= self._budget_nbytes

    def take(self, nbytes: int, *, pinned: bool) -> Tensor:
        """Return memory for a copy of ``nbytes``, pinned or not, for which there is room."""
        spare = self._spare.get((nbytes, pinned))
        if spare:
            found = spare.pop()
        else:
            if self._nbytes + nbytes > self._budget_nbytes:
                self._spare.clear()
                self._nbytes = self._used_nbytes
            found = host_tensor(nbytes, torch.uint8, pinned=pinned)
            self._nbytes += nbytes
        self._used_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self._used_nbytes)
        return found

    def give_back(self, memory: Tensor) -> None:
        """Take back what ``take`` returned."""
        self._used_nbytes -= memory.nbytes
        if self._is_kept:
            self._spare.setdefault((memory.nbytes, memory.is_pinned()), []).append(memory)
        else:
            self._nbytes -= memory.nbytes


class Writing:
    """The writing of one file, a chunk at a time; chunks are copied first if there is room.

    Args:
        parts: what to write, plain tensors by name.
        params: by the same names, if they are parts of something that people write to.
        state: more that nobody may write to before ``wait_until_copied`` returns.
        replicas: parts of other ranks, too, by name; those that are not among ``parts`` are not
            written, but digested like those.
        waits: names of parts that nobody writes to before ``wait_until_copied`` returns; for all
            others that is ``wait_for_others``.
        memory: for copies; what has no room there is written from where it is.
    """

    def __init__(
        self,
        parts: Mapping[str, Tensor],
        params: Mapping[str, Tensor],
        state: Sequence[Tensor] = (),
        *,
        replicas: Mapping[str, Tensor],
        waits: Collection[str],
        memory: CopyMemory,
    ) -> None:
        self._written = parts.keys()
        self._work = Operation("saving", sum(part.nbytes for part in parts.values()))
        parts = {**parts, **replicas}
        # Large elements first, so that every tensor is aligned in a file that is written in order.
        names = sorted(parts, key=lambda name: -parts[name].itemsize)
        others = [name for name in names if name not in waits]
        self._num_others = len(others)
        self._parts = {name: parts[name] for name in dict.fromkeys((*others, *names))}
        self._digests: dict[str, list[str]] = {name: [] for name in replicas}  # of blocks
        self.digests: dict[str, str] = {}
        """Of the replicas, by name, once ``run`` has returned."""
        # A DTensor has a version of its own, and its local tensor keeps the one that it has.
        self._watched = {
            name: [one for one in (params.get(name, part), part) if not one.is_inference()]
            for name, part in parts.items()
        }
        self._watched[_STATE] = [one for one in state if not one.is_inference()]
        self._versions = {name: _autograd.versions(both) for name, both in self._watched.items()}
        self._readers = {one: HostReader(one) for one in {part.device for part in parts.values()}}
        self._memory = memory
        self._has_others = threading.Event()
        self._is_copied = threading.Event()
        self._is_awaited = threading.Event()
        self._end_is_awaited = False

    def wait_for_others(self) -> None:
        """Wait until all parts but those that wait are copied or written."""
        self._is_awaited.set()
        self._has_others.wait()

    def wait_until_copied(self) -> None:
        """Wait until all parts are copied or written."""
        if not self._is_copied.is_set():
            self._is_awaited.set()
            self._is_copied.wait()

    def release(self) -> None:
        """Let everybody go who waits for copies, as nothing is copied any longer."""
        self._has_others.set()
        self._is_copied.set()

    def _calm(self) -> None:
        """Rest again, as those who waited go on, unless somebody waits for the end."""
        self._is_awaited.clear()
        if self._end_is_awaited:
            self._is_awaited.set()

    def hurry(self) -> None:
        """Rest no longer: somebody waits for the end."""
        self._end_is_awaited = True
        self._is_awaited.set()

    def run(self, opened: Callable[[Parts], DataWriter], pace: Pace) -> tuple[int, str]:
        """Write the file; return its size and its digest in the manifest.

        Args:
            opened: opens the new file, given its parts in the order in which they are put.
            pace: of this thread.

        Raises:
            OSError, CheckpointError: it cannot be written.
            ProtocolError: a part was written to before it was copied.
        """
        copies: deque[_Chunk] = deque()
        try:
            kinds = {n: (p.dtype, p.shape) for n, p in self._parts.items() if n in self._written}
            with opened(kinds) as file:
                self._put_all(file, pace, copies)
                for name, blocks in self._digests.items():
                    is_written = name in self._written
                    own = file.digest(name) if is_written else digest_of("".join(blocks).encode())
                    self.digests[name] = own
                return file.finish()
        finally:
            for copy in copies:  # a save that failed leaves some
                self._memory.give_back(copy.data)
            self._parts, self._watched = {}, {}
            self.release()

    def _put_all(self, file: DataWriter, pace: Pace, copies: deque[_Chunk]) -> None:
        def put(chunk: _Chunk) -> None:
            file.put(*chunk)
            self._work.add(chunk.data.nbytes)
            pace.rest(self._is_awaited)

        def put_copy() -> None:
            put(copies[0])
            self._memory.give_back(copies.popleft().data)

        for chunk in self._chunks():
            nbytes = chunk.data.nbytes
            if chunk.name not in self._written:
                self._digest(chunk)
                pace.rest(self._is_awaited)
                continue
            while copies and not self._memory.has_room(nbytes):
                put_copy()
            if self._memory.has_room(nbytes):
                pinned = chunk.data.device.type != "cpu"
                copies.append(self._copied(chunk, self._memory.take(nbytes, pinned=pinned)))
            elif chunk.data.device.type == "cpu":
                put(chunk)
            else:
                put(self._copied(chunk, host_tensor(nbytes, torch.uint8, pinned=True)))
        self._is_copied.set()
        self._calm()
        while copies:
            put_copy()

    def _chunks(self) -> Iterator[_Chunk]:
        """Yield chunks; when the next one is asked for, the last one was copied or written."""
        for number, (name, part) in enumerate(self._parts.items()):
            if number == self._num_others:
                self._has_others.set()
                self._calm()
            with self._readers[part.device].on_own_stream():
                data = flat_bytes(part)
            for start in range(0, data.nbytes, CHUNK_NBYTES):
                yield _Chunk(name, start, data[start : start + CHUNK_NBYTES])
            self._check_version(name)
        self._check_version(_STATE)
        self._has_others.set()

    def _check_version(self, name: str) -> None:
        if _autograd.versions(self._watched[name]) != self._versions[name]:
            raise ProtocolError(
                f"{name} was written to while it was being saved: call wait_until_copied() of "
                "what save() returned before, unless it is the optimizer that writes"
            )

    def _digest(self, chunk: _Chunk) -> None:
        """Digest a chunk as if it were written."""
        data = chunk.data
        if data.device.type != "cpu":
            data = self._copied(chunk, host_tensor(data.nbytes, torch.uint8, pinned=True)).data
        self._digests[chunk.name] += digests_of_blocks(memory_of(data))

    def _copied(self, chunk: _Chunk, copy: Tensor) -> _Chunk:
        self._readers[chunk.data.device].read(chunk.data, copy)
        return chunk._replace(data=copy)


class Pace:
    """Keeps the thread that makes it to a share of the time of a processor.

    Args:
        share: from 0 to 1; 1: it never rests.
        rests_s: how long it rests at most in all, in seconds.
    """

    def __init__(self, share: float, rests_s: float) -> None:
        self._share = share
        self._rests_s = rests_s
        self._worked_s = time.thread_time()

    def rest(self, unless: threading.Event) -> None:
        """Wait as long as the thread should do nothing after its work.

        Returns at once when ``unless`` is set, and when the program is about to end.
        """
        now_s = time.thread_time()
        worked_s, self._worked_s = now_s - self._worked_s, now_s
        rest_s = min(worked_s * (1 / self._share - 1), self._rests_s)
        self._rests_s -= rest_s
        if threading.main_thread().is_alive():
            unless.wait(rest_s)

"""Data files in object stores, version 2 of the format: written front to back.

    8 bytes     length of the header
    header      JSON, as in version 1, without the digests
    data        the tensors' bytes, without gaps; "padding-0" and its like align the next tensor
    "digests"   the last tensor: the digests of all blocks before, 8 bytes each

The manifest has the digest of the header and that of the tensor "digests", one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fullshard.checkpoint.format.datafile import (
    BLOCK_NBYTES,
    DIGESTS,
    PADDING,
    array_of,
    digests_of_blocks,
    header_of,
    num_blocks,
)
from fullshard.checkpoint.format.manifest import digest_of
from fullshard.checkpoint.format.places import NewObject, ObjectUrl
from fullshard.errors import CheckpointError, ProtocolError

_ALIGN = 8  # complex128 is stored as pairs


class ObjectFile:
    """The bytes of an object.

    Raises:
        CheckpointError: the object is not there, or the store cannot be reached.
    """

    def __init__(self, url: ObjectUrl) -> None:
        self.name = str(url)
        self._url = url
        self.nbytes = url.nbytes()

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with what is at ``offset``, or raise ``CheckpointError``."""
        if not into.nbytes:
            return
        data = self._url.read_range(offset, offset + into.nbytes)
        if len(data) != into.nbytes:
            raise CheckpointError(f"{self.name}: ends at byte {offset + len(data)}")
        into[:] = data

    def close(self) -> None:
        """Return at once: each read is a request of its own."""


class StreamWriter:
    """A new data file in an object store, whose data come in order; a context.

    Args:
        url: of the object.
        parts: for each part that the rank writes its dtype and its shape, by name, in the order in
            which their data come.

    Raises:
        CheckpointError: here and in all methods.
    """

    def __init__(
        self, url: ObjectUrl, parts: Mapping[str, tuple[torch.dtype, Sequence[int]]]
    ) -> None:
        tensors: list[tuple[str, torch.dtype, Sequence[int]]] = []
        self._places: dict[str, tuple[int, int]] = {}
        offset = blocks = 0
        for name, (dtype, shape) in parts.items():
            gap = -offset % min(dtype.itemsize, _ALIGN)
            if gap:
                padding = f"{PADDING}{len(tensors)}"
                tensors.append((padding, torch.uint8, (gap,)))
                self._places[padding] = offset, offset + gap
                offset, blocks = offset + gap, blocks + 1
            tensors.append((name, dtype, shape))
            nbytes = math.prod(shape) * dtype.itemsize
            self._places[name] = offset, offset + nbytes
            offset, blocks = offset + nbytes, blocks + num_blocks(nbytes)
        tensors.append((DIGESTS, torch.uint8, (8 * blocks,)))
        self._header = header_of(tensors, {"block_nbytes": str(BLOCK_NBYTES)})
        self._nbytes = len(self._header) + offset + 8 * blocks
        self._written_nbytes = 0  # of data
        self._digests: dict[str, list[str]] = {name: [] for name in self._places}
        self._is_finished = False
        self._object = NewObject(url, self._nbytes)
        try:
            self._object.write(memoryview(self._header))
        except BaseException:
            self._object.discard()
            raise

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_finished:
            self._object.discard()

    def put(self, name: str, start: int, data: Tensor) -> None:
        """Write the next chunk; arguments as for ``FileWriter.put``."""
        at = self._places[name][0] + start
        if self._written_nbytes < at:
            gap = f"{PADDING}{[*self._places].index(name) - 1}"
            if start or self._places.get(gap) != (self._written_nbytes, at):
                raise ProtocolError(f"{name}: byte {start} is not what comes next in the file")
            self._put(gap, memoryview(bytes(at - self._written_nbytes)))
        self._put(name, memoryview(array_of(data)))

    def finish(self) -> tuple[int, str]:
        """Write the digests and let the object appear; return its size and its two digests."""
        stored = bytes.fromhex("".join(one for own in self._digests.values() for one in own))
        self._object.write(memoryview(stored))
        self._object.finish()
        self._is_finished = True
        return self._nbytes, digest_of(self._header) + digest_of(stored)

    def digest(self, name: str) -> str:
        """Return the digest of a part whose data were put: of the digests of its blocks."""
        return digest_of("".join(self._digests[name]).encode())

    def _put(self, name: str, data: memoryview) -> None:
        self._digests[name] += digests_of_blocks(data)
        self._object.write(data)
        self._written_nbytes += len(data)

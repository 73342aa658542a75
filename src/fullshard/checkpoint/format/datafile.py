"""The data files of a checkpoint: safetensors, which hold a digest of each block of data.

    8 bytes     length of the header
    header      JSON: for each tensor its dtype, the shape of this rank's part, and its bytes
    data        the tensors' bytes, without gaps; "padding-0" and its like align the next tensor
    "digests"   the last tensor: the digests of all blocks before, 8 bytes each

A block belongs to one tensor; the last block of a tensor may be short. The manifest has the digest
of the header and that of the tensor "digests", one after the other, so it vouches for every byte of
the file. Files of version 1 have the digests in the "__metadata__" of the header; ``DataFile``
reads both versions.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import xxhash
from torch import Tensor

from fullshard.checkpoint.format.manifest import FileInfo, FilePart, digest_of
from fullshard.checkpoint.format.places import ObjectUrl, Place, new_file, noting_damage
from fullshard.errors import CheckpointError, ProtocolError, StorageError, UnsupportedError

Divided = TypeVar("Divided")

Parts = Mapping[str, tuple[torch.dtype, Sequence[int]]]
"""Dtypes and shapes of parts of tensors, by name."""

BLOCK_NBYTES = 1 << 15
"""Size of the blocks; a multiple of every element's size."""

CHUNK_NBYTES = 128 * BLOCK_NBYTES
"""Bytes that are read or written at once."""

DIGESTS, PADDING = "digests", "padding-"
"""Names of tensors that belong to no model."""

_ALIGN = 8  # complex128 is stored as pairs
_DIGEST = 16  # characters
_HEADER_DIGEST = 32
_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def name_of(dtype: torch.dtype, what: str) -> str:
    """Return the name of ``dtype`` in a manifest.

    Raises:
        UnsupportedError: safetensors files cannot hold ``what``, a tensor of this dtype.
    """
    if not is_known(dtype):
        raise UnsupportedError(
            f"{what} is of {dtype}, which safetensors files do not know; convert it, for example "
            "to a buffer of torch.uint8"
        )
    return str(dtype).removeprefix("torch.")


def dtype_in_file(code: str) -> torch.dtype | None:
    """Return the dtype that a safetensors file calls ``code``; None if there is none."""
    return next((dtype for dtype, own in _CODES.items() if own == code), None)


def is_known(dtype: torch.dtype) -> bool:
    """Return whether a data file can hold tensors of ``dtype``."""
    return dtype in _CODES or dtype == torch.complex128


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that ``name_of`` named."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"it has tensors of an unknown dtype {name!r}")
    return dtype


def _code(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    """Return dtype and shape in a safetensors file, which knows no complex128: pairs of F64."""
    return ("F64", [*shape, 2]) if dtype == torch.complex128 else (_CODES[dtype], [*shape])


def num_blocks(nbytes: int) -> int:
    """Return the number of blocks of a tensor's data."""
    return -(-nbytes // BLOCK_NBYTES)


def batches(
    sizes: Iterable[tuple[Divided, int, int]], limit_nbytes: int
) -> Iterator[list[tuple[Divided, int, int]]]:
    """Divide data into batches of limited size; yield for each item its bytes, start to stop.

    Args:
        sizes: items with their sizes, and the multiples at which they may be divided, in bytes.
        limit_nbytes: the size of a batch, which exceeds it by less than one such multiple.
    """
    batch: list[tuple[Divided, int, int]] = []
    room = limit_nbytes
    for item, nbytes, unit in sizes:
        start = 0
        while start < nbytes:
            stop = min(start + max(room // unit, 1) * unit, nbytes)
            batch.append((item, start, stop))
            room -= stop - start
            start = stop
            if room <= 0:
                yield batch
                batch, room = [], limit_nbytes
    if batch:
        yield batch


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the elements of a plain tensor as bytes on the CPU, without a copy if possible."""
    return flat_bytes(tensor.detach().cpu())


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a plain tensor as bytes on its device, without a copy if possible."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def memory_of(data: Tensor) -> memoryview:
    """Return the memory of flat bytes on the CPU."""
    array: Any = data.numpy()
    return memoryview(array)


class DataWriter:
    """A new data file, whose data come in order; a context.

    Args:
        path: the file or object.
        parts: for each part that the rank writes its dtype and its shape, by name, in the order in
            which their data come.

    Raises:
        OSError, CheckpointError: here and in all methods, if the file cannot be written.
    """

    def __init__(self, path: Place, parts: Parts) -> None:
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
        self._written_nbytes = 0  # of data
        self._digests: dict[str, list[str]] = {name: [] for name in self._places}  # of blocks
        self._file = new_file(path, len(self._header) + offset + 8 * blocks, self._header)

    def __enter__(self) -> DataWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def put(self, name: str, start: int, data: Tensor) -> None:
        """Write the next chunk of a part.

        Args:
            name: the part.
            start: where the chunk begins in it, in bytes; a multiple of ``CHUNK_NBYTES``.
            data: bytes on the CPU, ``CHUNK_NBYTES`` or the rest of the part.
        """
        at = self._places[name][0] + start
        if self._written_nbytes < at:
            gap = f"{PADDING}{[*self._places].index(name) - 1}"
            if start or self._places.get(gap) != (self._written_nbytes, at):
                raise ProtocolError(f"{name}: byte {start} is not what comes next in the file")
            self._put(gap, memoryview(bytes(at - self._written_nbytes)))
        self._put(name, memory_of(data))

    def finish(self) -> tuple[int, str]:
        """Write the digests and close the file; return its size and its two digests."""
        stored = bytes.fromhex("".join(one for own in self._digests.values() for one in own))
        self._file.write(memoryview(stored))
        self._file.close()
        return self._file.nbytes, digest_of(self._header) + digest_of(stored)

    def digest(self, name: str) -> str:
        """Return the digest of a part whose data were put: of the digests of its blocks."""
        return digest_of("".join(self._digests[name]).encode())

    def _put(self, name: str, data: memoryview) -> None:
        self._digests[name] += digests_of_blocks(data)
        self._file.write(data)
        self._written_nbytes += len(data)


def digests_of_blocks(data: memoryview) -> list[str]:
    """Return the digest of each block of ``data``."""
    return [*map(xxhash.xxh3_64_hexdigest, _blocks(data))]


def _blocks(data: memoryview) -> Iterator[memoryview]:
    return (data[at : at + BLOCK_NBYTES] for at in range(0, len(data), BLOCK_NBYTES))


def header_of(
    tensors: Sequence[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the beginning of a safetensors file: names, dtypes and shapes in the order of data."""
    stored: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, dtype, shape in tensors:
        code, own_shape = _code(dtype, shape)
        end = offset + math.prod(shape) * dtype.itemsize
        stored[name] = {"dtype": code, "shape": own_shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(stored, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def header_in(file: Bytes) -> bytes:
    """Return the beginning of a safetensors file, up to the data.

    Raises:
        CheckpointError: the header does not fit in the file, or the file cannot be read.
    """
    length = memoryview(bytearray(8))
    file.read(0, length)
    end = 8 + int.from_bytes(length, "little")
    if end > file.nbytes:
        raise CheckpointError(f"{file.name}: has a damaged header")
    header = memoryview(bytearray(end))
    file.read(0, header)
    return bytes(header)


class _Stored(NamedTuple):
    """The place of a tensor's data in the file."""

    kind: tuple[str, list[int]]
    offset: int
    nbytes: int
    first_block: int


class Bytes(Protocol):
    """The bytes of a data file, wherever it is."""

    name: str
    """For messages."""
    nbytes: int

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset`` on, or raise ``CheckpointError``."""

    def close(self) -> None:
        """Read no more."""


_OF_THE_MACHINE = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE),
    errno.ETIMEDOUT,
}


def unreadable(error: Exception, text: str) -> CheckpointError:
    """Return the error of a file that cannot be read: ``StorageError`` if it may be intact."""
    may_be_intact = isinstance(error, OSError) and error.errno in _OF_THE_MACHINE
    return (StorageError if may_be_intact else CheckpointError)(f"{text} ({error})")


class LocalFile:
    """The bytes of a file that this rank sees.

    Raises:
        CheckpointError: it cannot be opened, or is no file.
        StorageError: the machine refuses to open it.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block
            self._file = os.fdopen(number, "rb", buffering=0)
        except (OSError, ValueError) as error:
            raise unreadable(error, f"{path}: cannot be opened") from error
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise CheckpointError(f"{path}: is no file")
        self.nbytes = status.st_size

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``offset`` on, or raise ``CheckpointError``."""
        while into:
            try:
                count = os.preadv(self._file.fileno(), [into], offset)
            except OSError as error:
                raise unreadable(error, f"{self.name}: cannot be read at byte {offset}") from error
            if not count:
                raise CheckpointError(f"{self.name}: ends at byte {offset}")
            offset, into = offset + count, into[count:]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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
        """Fill ``into`` with the bytes from ``offset`` on, or raise ``CheckpointError``."""
        if not into.nbytes:
            return
        data = self._url.read_range(offset, offset + into.nbytes)
        if len(data) != into.nbytes:
            raise CheckpointError(f"{self.name}: ends at byte {offset + len(data)}")
        into[:] = data

    def close(self) -> None:
        """Return at once: each read is a request of its own."""


class DataFile:
    """A data file of a checkpoint, open for reading; what it returns is verified.

    Args:
        file: its bytes; closed with this.
        info: what was written.

    Raises:
        CheckpointError: the file is not the one that was written, here and in all methods.
    """

    def __init__(self, file: Bytes, info: FileInfo) -> None:
        self._file = file
        self._digests: str = ""
        self._stored: dict[str, _Stored] = {}
        try:
            self._read_header(info)
        except CheckpointError:
            self.close()
            raise
        except Exception as error:  # it may hold anything
            self.close()
            raise CheckpointError(f"{file.name}: has a strange header ({error!r})") from error

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a ``with`` block does it, too."""
        self._file.close()

    def check(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Check that the file's part of a tensor has this dtype and this shape."""
        self._check(name in self._stored, f"has no data of {name}")
        self._check(is_known(dtype), f"has {name} as {dtype}, which safetensors do not know")
        found, expected = self._stored[name].kind, _code(dtype, shape)
        self._check(found == expected, f"has {name} as {found}, the manifest as {expected}")

    def read(self, name: str, start: int, into: Tensor) -> None:
        """Read the data of a part of a tensor from byte ``start`` on, and verify them.

        Args:
            name: the tensor, which ``check`` has found.
            start: offset in the part, at the beginning of a block.
            into: bytes on the CPU, as many whole blocks as fit, or the last ones of the part.
        """
        stored, data = self._stored[name], memory_of(into)
        block = stored.first_block + start // BLOCK_NBYTES
        self._file.read(stored.offset + start, data)
        for own in _blocks(data):
            expected = self._digests[block * _DIGEST : (block + 1) * _DIGEST]
            if xxhash.xxh3_64_hexdigest(own) != expected:
                first = stored.offset + (block - stored.first_block) * BLOCK_NBYTES
                self._fail(
                    f"bytes {first} to {first + len(own)}, of {name}, are not what was written"
                )
            block += 1

    def verify(
        self, expected: Mapping[str, FilePart], read: Callable[[int], None] | None = None
    ) -> Iterator[str]:
        """Read all data; yield what is wrong with each tensor, ``expected`` or not.

        Args:
            expected: the tensors that should be in the file.
            read: called with the bytes of each piece that was read.
        """
        for name in dict.fromkeys((*expected, *self._stored)):
            with noting_damage() as problems:
                if name in expected or not name.startswith(PADDING):
                    self._check(name in expected, f"has {name}, which the manifest has not")
                    self.check(name, dtype_of(expected[name].dtype), expected[name].shape)
                nbytes = self._stored[name].nbytes
                for start in range(0, nbytes, CHUNK_NBYTES):
                    size = min(CHUNK_NBYTES, nbytes - start)
                    self.read(name, start, torch.empty(size, dtype=torch.uint8, device="cpu"))
                    if read is not None:
                        read(size)
            yield from problems

    def _read_header(self, info: FileInfo) -> None:
        size = self._file.nbytes
        self._check(size == info.nbytes, f"has {size} bytes, {info.nbytes} were written")
        header = header_in(self._file)
        end = len(header)
        self._check(
            digest_of(header) == info.digest[:_HEADER_DIGEST],
            "has a damaged header, or is another file",
        )
        stored = json.loads(header[8:])
        metadata = stored.pop("__metadata__")
        self._check(metadata["block_nbytes"] == str(BLOCK_NBYTES), "has blocks of an unknown size")
        if len(info.digest) > _HEADER_DIGEST:
            start, stop = stored.pop(DIGESTS)["data_offsets"]
            digests = memoryview(bytearray(stop - start))
            self._file.read(end + start, digests)
            self._check(digest_of(digests) == info.digest[_HEADER_DIGEST:], "has damaged digests")
            self._digests = digests.hex()
        else:
            self._digests = metadata["digests"]
        first = 0
        for name, tensor in stored.items():
            start, stop = tensor["data_offsets"]
            kind = (tensor["dtype"], tensor["shape"])
            self._stored[name] = _Stored(kind, end + start, stop - start, first)
            first += num_blocks(stop - start)

    def _check(self, is_right: bool, otherwise: str) -> None:
        if not is_right:
            self._fail(otherwise)

    def _fail(self, problem: str) -> None:
        raise CheckpointError(f"{self._file.name}: {problem}")

"""Safetensors files in object stores: read by ranges."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from fullshard.checkpoint.format import ObjectFile, ObjectUrl, Place, datafile
from fullshard.errors import CheckpointError

_LARGEST_READ_NBYTES = 32 << 20


@contextmanager
def opened_weights(path: Place) -> Iterator[Any]:
    """Open a safetensors file; yields what ``safe_open`` does, as far as it is used here.

    Raises:
        CheckpointError, OSError, SafetensorError: here and in all methods; the file is damaged or
            cannot be read.
    """
    if isinstance(path, ObjectUrl):
        yield RemoteWeights(path)
        return
    with safe_open(path, framework="pt") as opened:
        yield opened


@dataclass(frozen=True)
class RemoteSlice:
    """A tensor of a file in an object store."""

    file: ObjectFile
    offset: int
    code: str
    shape: tuple[int, ...]

    def get_dtype(self) -> str:
        """Return the dtype as safetensors files call it."""
        return self.code

    def get_shape(self) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        return self.shape

    def __getitem__(self, box: Sequence[slice]) -> Tensor:
        """Return a box, which has a slice for each dim; at most 32 MiB or a row are read at once.

        A box of some columns is cut out of its rows.
        """
        dtype = datafile.dtype_in_file(self.code)
        if dtype is None:
            raise CheckpointError(f"{self.file.name}: has tensors of an unknown dtype {self.code}")
        shape, own = self.shape or (1,), tuple(box) or (slice(0, 1),)
        bounds = [one.indices(size)[:2] for one, size in zip(own, shape, strict=True)]
        found = torch.empty(
            [max(stop - start, 0) for start, stop in bounds], dtype=dtype, device="cpu"
        )
        if not found.numel():
            return found
        row = math.prod(shape[1:])
        step = max(1, _LARGEST_READ_NBYTES // (row * dtype.itemsize))
        (first, last), inner = bounds[0], tuple(slice(*one) for one in bounds[1:])
        for start in range(first, last, step):
            count = min(step, last - start)
            data = bytearray(count * row * dtype.itemsize)
            self.file.read(self.offset + start * row * dtype.itemsize, memoryview(data))
            rows = torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(count, *shape[1:])
            found[start - first : start - first + count] = rows[(slice(None), *inner)]
        return found if self.shape else found.view([])


class RemoteWeights:
    """A safetensors file in an object store, read by ranges; see ``opened_weights``."""

    def __init__(self, url: ObjectUrl) -> None:
        self._file = ObjectFile(url)
        self._tensors: dict[str, RemoteSlice] = {}
        try:
            self._read_header()
        except CheckpointError:
            raise
        except Exception as error:  # it may hold anything
            raise CheckpointError(f"{url}: is no safetensors file ({error!r})") from error

    def _read_header(self) -> None:
        header = datafile.header_in(self._file)
        end, stored = len(header), json.loads(header[8:])
        stored.pop("__metadata__", None)
        for name, own in stored.items():
            start, stop = own["data_offsets"]
            shape = tuple(map(int, own["shape"]))
            dtype = datafile.dtype_in_file(own["dtype"])
            is_right = 0 <= start <= stop <= self._file.nbytes - end
            if dtype is not None:
                is_right = is_right and stop - start == math.prod(shape) * dtype.itemsize
            if not is_right:
                raise CheckpointError(f"{self._file.name}: has a damaged header, or was cut off")
            self._tensors[name] = RemoteSlice(self._file, end + start, own["dtype"], shape)

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> RemoteSlice:
        """Return a tensor, of which boxes can be read."""
        return self._tensors[name]

    def get_tensor(self, name: str) -> Tensor:
        """Return all of a tensor."""
        own = self._tensors[name]
        return own[[slice(0, size) for size in own.shape]]

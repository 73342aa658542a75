"""Read what PyTorch saves: files of ``torch.save``, folders of ``torch.distributed.checkpoint``.

Both hold dictionaries in dictionaries. Here they are trees: dictionaries and lists whose leaves are
values, or ``Leaf`` for tensors, which are read one at a time. Nothing in a file is ever run: what
unpickles knows tensors, plain values and the metadata of checkpoints, and nothing else.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullshard.checkpoint.format import dtype_of
from fullshard.errors import CheckpointError, UnsupportedError

METADATA = ".metadata"


class Leaf(NamedTuple):
    """A tensor in a file.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        memory: equal for tensors that share memory; None if that is not known.
        read: returns it, whole and on the CPU.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    memory: object
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def is_folder(path: Path) -> bool:
    """Return whether ``path`` is a checkpoint of ``torch.distributed.checkpoint``."""
    return (path / METADATA).is_file()


def tree_of(path: Path) -> dict[str, Any]:
    """Return what a file or a folder of PyTorch holds.

    Raises:
        CheckpointError: it cannot be read, or holds what would have to be run.
    """
    return _tree_of_folder(path) if is_folder(path) else _tree_of_file(path)


def _tree_of_file(path: Path) -> dict[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # it may hold anything
        raise CheckpointError(
            f"{path}: torch.load(weights_only=True) cannot read it: {error}"
        ) from error
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, expected a state dict")
    try:
        return {str(name): _leaves(value) for name, value in found.items()}
    except RecursionError as error:
        raise CheckpointError(f"{path}: holds something that contains itself") from error


def _leaves(value: Any) -> Any:
    """Return ``value`` with leaves for tensors."""
    if isinstance(value, Tensor):
        if type(value.detach()) is not Tensor or value.layout != torch.strided:
            raise UnsupportedError(
                f"it holds a {type(value).__name__} of {value.layout}; only plain dense tensors "
                "can be converted"
            )
        shape = tuple(value.shape)
        memory = (value.data_ptr(), shape, value.stride()) if value.numel() else None
        return Leaf(value.dtype, shape, memory, value.detach)
    if isinstance(value, Mapping):
        return {key: _leaves(one) for key, one in value.items()}
    return [*map(_leaves, value)] if type(value) is list else value


def _tree_of_folder(path: Path) -> dict[str, Any]:
    folder = _Folder(path)
    tree: dict[str, Any] = {}
    for name, stored in folder.stored.items():
        keys = folder.keys.get(name, (name,))
        _put(tree, keys, folder.value(name) if stored is None else folder.leaf(name, stored))
    return _with_lists(tree)  # type: ignore[no-any-return]


def _put(tree: dict[Any, Any], keys: tuple[Any, ...], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
    tree[keys[-1]] = value


def _with_lists(tree: Any) -> Any:
    """Return ``tree`` with a list for each dictionary whose keys are numbers from 0 on."""
    if not isinstance(tree, dict):
        return tree
    found = {key: _with_lists(value) for key, value in tree.items()}
    numbers = [key for key in found if isinstance(key, int)]
    is_list = bool(found) and sorted(numbers) == [*range(len(found))]
    return [found[number] for number in sorted(numbers)] if is_list else found


class _Chunk(NamedTuple):
    """A part of a tensor in a folder."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def overlaps(self, other: _Chunk) -> bool:
        """Return whether both have some element."""
        dims = zip(*self, *other, strict=True)
        return all(at < its + length and its < at + size for at, size, its, length in dims)


class _Stored(NamedTuple):
    """A tensor in a folder."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[_Chunk]


class _Place(NamedTuple):
    """Where something is in a folder: a file, and bytes of it."""

    file: str
    offset: int
    nbytes: int
    is_compressed: bool


class _Folder:
    """A folder of ``torch.distributed.checkpoint``.

    Attributes:
        stored: what is stored under a name; None: a value that is no tensor.
        keys: for names the keys of nested dictionaries.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.stored: dict[str, _Stored | None] = {}
        self.keys: dict[str, tuple[Any, ...]] = {}
        self._places: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
        file = path / METADATA
        try:
            with file.open("rb") as opened:
                self._take(_Unpickler(opened).load())
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error}") from error
        except Exception as error:  # it may hold anything
            raise CheckpointError(f"{file}: cannot be read ({error!r})") from error

    def _take(self, metadata: Any) -> None:
        """Take plain values out of the metadata; whatever is not as expected raises."""
        for name, stored in _fields(metadata, "Metadata")["state_dict_metadata"].items():
            self.stored[_checked(name, str)] = _stored(stored)
        for name, keys in (metadata.fields.get("planner_data") or {}).items():
            if not keys or any(type(key) not in (str, int) for key in _checked(keys, tuple)):
                raise CheckpointError(f"{name} is at {keys!r}")
            self.keys[_checked(name, str)] = keys
        for index, place in _checked(metadata.fields["storage_data"], dict).items():
            its, where = _fields(index, "MetadataIndex"), _fields(place, "_StorageInfo")
            offset = its.get("offset")
            key = (_checked(its["fqn"], str), None if offset is None else _numbers(offset))
            start, nbytes = _numbers((where["offset"], where["length"]))
            is_compressed = bool(where.get("transform_descriptors"))
            file = _checked(where["relative_path"], str)
            self._places[key] = _Place(file, start, nbytes, is_compressed)

    def leaf(self, name: str, stored: _Stored) -> Leaf:
        """Return a tensor.

        Raises:
            CheckpointError: its chunks are not all of it, once.
        """
        problem = _untiled(stored)
        if problem:
            raise CheckpointError(
                f"{self._path / METADATA}: {name} of shape {stored.shape} {problem}; save it again"
            )
        return Leaf(stored.dtype, stored.shape, None, lambda: self._read(name, stored))

    def value(self, name: str) -> Any:
        """Return what is no tensor."""
        return _leaves(self._load(name, None))

    def _read(self, name: str, stored: _Stored) -> Tensor:
        full = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        for offsets, sizes in stored.chunks:
            part = self._load(name, offsets)
            if not isinstance(part, Tensor) or (part.shape, part.dtype) != (sizes, stored.dtype):
                raise CheckpointError(f"{self._path}: {name} is not what {METADATA} says")
            place = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            full[place].copy_(part)
        return full

    def _load(self, name: str, offset: tuple[int, ...] | None) -> Any:
        place = self._places.get((name, offset)) or self._places.get((name, offset or ()))
        if place is None:
            raise CheckpointError(f"{self._path / METADATA}: says of no file that it has {name}")
        file = os.path.realpath(self._path / place.file)
        if place.is_compressed:
            raise UnsupportedError(f"{file}: {name} is compressed; save it without extensions")
        if os.path.dirname(file) != os.path.realpath(self._path):
            raise CheckpointError(f"{self._path / METADATA}: {name} is outside of the folder")
        try:
            with open(file, "rb") as opened:
                opened.seek(place.offset)
                data = opened.read(place.nbytes)
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # it may hold anything
            raise CheckpointError(f"{file}: {name} cannot be read ({error})") from error


def _stored(metadata: Any) -> _Stored | None:
    if type(metadata).__name__ == "BytesStorageMetadata":
        return None
    fields = _fields(metadata, "TensorStorageMetadata")
    properties = fields["properties"]
    # Its state is a tuple that begins with the dtype.
    dtype = dtype_of(_checked(_checked(properties.state, tuple)[0], str))
    chunks = [_fields(one, "ChunkStorageMetadata") for one in _checked(fields["chunks"], list)]
    parts = [_Chunk(_numbers(one["offsets"]), _numbers(one["sizes"])) for one in chunks]
    return _Stored(dtype, _numbers(fields["size"]), parts)


def _untiled(stored: _Stored) -> str:
    """Return why the chunks of a tensor do not make it up exactly once; or nothing."""
    shape = stored.shape
    for offsets, sizes in stored.chunks:
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=False)]
        if not len(offsets) == len(sizes) == len(shape) or any(map(int.__gt__, ends, shape)):
            return f"has a chunk at {offsets} of shape {sizes}, which is not inside"
    chunks = [one for one in stored.chunks if math.prod(one.sizes)]
    numel = sum(math.prod(one.sizes) for one in chunks)
    if numel != math.prod(shape):
        return f"has {numel} of {math.prod(shape)} elements in its chunks"
    if not shape:
        return ""
    # Along the dim with the most cuts few chunks are met at once.
    dim = max(range(len(shape)), key=lambda dim: len({one.offsets[dim] for one in chunks}))
    met: list[_Chunk] = []
    for one in sorted(chunks, key=lambda chunk: chunk.offsets[dim]):
        met = [its for its in met if its.offsets[dim] + its.sizes[dim] > one.offsets[dim]]
        other = next((its for its in met if its.overlaps(one)), None)
        if other is not None:
            return f"has chunks at {other.offsets} and {one.offsets} that overlap"
        met.append(one)
    return ""


def _fields(found: Any, kind: str) -> dict[str, Any]:
    if not isinstance(found, _StandIn) or type(found).__name__ != kind:
        raise CheckpointError(f"something is not what metadata have there, {kind}")
    return found.fields


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"something is a {type(value).__name__}, expected a {kind.__name__}")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if any(type(one) is not int or one < 0 for one in _checked(values, tuple)):
        raise CheckpointError("something is no number, or negative")
    return values  # type: ignore[no-any-return]


class _Unpickler(pickle.Unpickler):
    """Reads metadata of checkpoints.

    A pickle may call what ``find_class`` returns and set its attributes. So it returns nothing that
    anybody else has: a new class without meaning for each of the classes in such metadata, and
    functions that were made for this pickle alone.
    """

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._found: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a stand-in for a class in such metadata."""
        key = (module, name)
        if key not in self._found:
            self._found[key] = self._stand_in(module, name)
        return self._found[key]

    def _stand_in(self, module: str, name: str) -> Any:
        if module in _MODULES and name in _CLASSES:
            return type(name, (_StandIn,), {})
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        if (module, name) in (("torch", "Size"), ("collections", "OrderedDict")):
            kind = tuple if name == "Size" else dict
            return lambda *values: kind(*values)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda *_: None
        if module.split(".")[0] == "pathlib" and name in ("PosixPath", "PurePosixPath"):
            return lambda *parts: "/".join(parts)
        raise CheckpointError(
            f"it holds {module}.{name}, which metadata of checkpoints do not have: it was made to "
            "run something when it is read, or comes from another program"
        )


class _StandIn:
    """An object that only keeps what a pickle gives it; each pickle has subclasses of its own."""

    state: Any
    fields: dict[str, Any]

    def __new__(cls, *_: object) -> _StandIn:
        own = object.__new__(cls)
        own.state, own.fields = None, {}
        return own

    def __setstate__(self, state: Any) -> None:
        self.state = state
        self.fields = state if type(state) is dict else {}


_MODULES = {
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
}
_CLASSES = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
    "_StorageInfo",
}

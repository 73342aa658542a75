"""Read what PyTorch saves: files of ``torch.save``, folders of ``torch.distributed.checkpoint``.

Both hold dictionaries in dictionaries. Here they are trees: dictionaries and lists whose leaves are
values, or ``Leaf`` for tensors, which are read one at a time. Nothing in a file is ever run: what
unpickles knows tensors, plain values and the metadata of checkpoints, and nothing else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as its

from fullshard.errors import CheckpointError, UnsupportedError

METADATA = ".metadata"


class Leaf(NamedTuple):
    """A tensor in a file.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        memory: what it shares with others that are the same; None: nothing that is known.
        read: returns it, whole and on the CPU.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    memory: object
    read: Callable[[], Tensor]


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
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path}: torch.load(weights_only=True) cannot read it: {error}"
        ) from error
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, expected a state dict")
    return {str(name): _leaves(value) for name, value in found.items()}


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
    for name, stored in folder.metadata.state_dict_metadata.items():
        keys = (folder.metadata.planner_data or {}).get(name, (name,))
        if not isinstance(keys, tuple) or not keys:
            raise CheckpointError(f"{path / METADATA}: {name} is at {keys!r}")
        if isinstance(stored, its.TensorStorageMetadata):
            value: Any = folder.leaf(name, stored)
        else:
            value = folder.value(name)
        _put(tree, keys, value)
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


class _Folder:
    """A folder of ``torch.distributed.checkpoint``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        file = path / METADATA
        try:
            with file.open("rb") as opened:
                self.metadata: its.Metadata = _Unpickler(opened).load()
            stored = self.metadata.storage_data or {}
            self._places = {(index.fqn, _offset(index.offset)): at for index, at in stored.items()}
        except CheckpointError as error:
            raise CheckpointError(f"{file}: {error}") from error
        except Exception as error:  # it may hold anything
            raise CheckpointError(f"{file}: cannot be read ({error!r})") from error

    def leaf(self, name: str, stored: its.TensorStorageMetadata) -> Leaf:
        """Return a tensor."""
        dtype, shape = stored.properties.dtype, tuple(stored.size)
        return Leaf(dtype, shape, None, lambda: self._read(name, dtype, shape, stored.chunks))

    def value(self, name: str) -> Any:
        """Return what is no tensor."""
        found = self._load(name, None)
        return _leaves(found)

    def _read(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: Any) -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        numel = 0
        for chunk in chunks:
            part = self._load(name, _offset(chunk.offsets))
            target = whole
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            if not isinstance(part, Tensor) or part.shape != target.shape or part.dtype != dtype:
                raise CheckpointError(f"{self._path}: {name} is not what {METADATA} says")
            target.copy_(part)
            numel += part.numel()
        if numel != whole.numel():
            raise CheckpointError(
                f"{self._path}: {name} has {numel} of {whole.numel()} elements in its parts"
            )
        return whole

    def _load(self, name: str, offset: tuple[int, ...] | None) -> Any:
        place = self._places.get((name, offset))
        if place is None and offset is None:
            place = self._places.get((name, ()))
        if place is None:
            raise CheckpointError(f"{self._path / METADATA}: says of no file that it has {name}")
        file = self._path / place.relative_path
        if getattr(place, "transform_descriptors", None):
            raise UnsupportedError(f"{file}: {name} is compressed; save it without extensions")
        if not file.resolve().is_relative_to(self._path.resolve()):
            raise CheckpointError(f"{self._path / METADATA}: {name} is outside of the folder")
        try:
            with file.open("rb") as opened:
                opened.seek(place.offset)
                data = opened.read(place.length)
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # it may hold anything
            raise CheckpointError(f"{file}: {name} cannot be read ({error})") from error


def _offset(offset: Any) -> tuple[int, ...] | None:
    return None if offset is None else tuple(offset)


class _Unpickler(pickle.Unpickler):
    """Reads metadata of checkpoints, and refuses everything that is something else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the classes that such metadata have."""
        known: Any = None
        if module == "torch.distributed.checkpoint.metadata":
            known = getattr(its, name, None) if name in _CLASSES else None
        elif (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            known = _Place
        elif module == "torch" and (name == "Size" or isinstance(_of_torch(name), torch.dtype)):
            known = _of_torch(name)
        elif (module, name) == ("torch.serialization", "_get_layout"):
            known = _layout
        elif module.split(".")[0] == "pathlib" and name in ("PosixPath", "PurePosixPath"):
            known = Path
        elif (module, name) == ("collections", "OrderedDict"):
            known = dict
        if known is None:
            raise CheckpointError(
                f"it holds {module}.{name}, which metadata of checkpoints do not have: it "
                "was made to run something when it is read, or comes from another program"
            )
        return known


def _of_torch(name: str) -> Any:
    return getattr(torch, name, None)


def _layout(name: str) -> Any:
    return torch.strided


class _Place:
    """Where something is in a folder, as ``torch.distributed.checkpoint`` describes it."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Any = None


_CLASSES = {
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
}

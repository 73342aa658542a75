"""Where checkpoints are: folders, or URLs of object stores, which fsspec reaches.

An object store has no folders, only names with slashes. An object appears whole or not at all, and
cannot be renamed, appended to or written in the middle.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError, ConfigError, FullshardError, StorageError

_SYNC_NBYTES = 256 << 20  # so that no flush takes long
_PART_NBYTES = 32 << 20
_MAX_PARTS = 9_000  # S3 takes 10,000 in one upload
_PART_MULTIPLE = 1 << 18  # GCS takes multiples of this
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_DENIED = re.compile(r"permission|credential|denied|forbidden|unauthori[sz]ed|token|login", re.I)


@dataclass(frozen=True, order=True)
class ObjectUrl:
    """A URL in an object store, such as ``s3://bucket/run/step-000100``.

    ``str`` returns the URL. ``name``, ``parent``, ``with_name`` and ``/`` do what they do for a
    ``Path``. All methods raise ``CheckpointError`` if the store does not do what they ask for.
    """

    url: str

    @classmethod
    def of(cls, text: str) -> ObjectUrl:
        """Return the URL ``text``.

        Raises:
            ConfigError: it cannot be one of an object store.
        """
        scheme, mark, rest = text.partition("://")
        if not mark or not _SCHEME.fullmatch(scheme):
            raise ConfigError(f"{text}: expected a folder, or a URL such as s3://bucket/run")
        if scheme.lower() in ("file", "local"):
            raise ConfigError(f"{text}: give the path of the folder, without {scheme}://")
        if "::" in rest:
            raise ConfigError(f"{text}: '::' chains URLs in fsspec; give a URL without it")
        if not rest.strip("/"):
            raise ConfigError(
                f"{text}: the URL names no bucket; expected one such as s3://bucket/run"
            )
        return cls(f"{scheme}://{rest.rstrip('/')}")

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ObjectUrl:
        return ObjectUrl(f"{self.url.removesuffix('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectUrl:
        """The URL without its last part."""
        scheme, mark, rest = self.url.partition("://")
        return ObjectUrl(f"{scheme}{mark}{rest.rpartition('/')[0]}")

    def with_name(self, name: str) -> ObjectUrl:
        """Return the URL with another last part."""
        return self.parent / name

    def check(self) -> None:
        """Raise ``ConfigError`` if a package for this store is missing."""
        self._filesystem()

    def read_if_there(self) -> bytes | None:
        """Return the whole object; None if it does not exist."""
        with self._asked("read") as (filesystem, path), suppress(FileNotFoundError):
            return bytes(filesystem.cat_file(path))
        return None

    def read_range(self, start: int, stop: int) -> bytes:
        """Return bytes ``start`` to ``stop`` of the object."""
        with self._asked(f"read at byte {start}") as (filesystem, path):
            return bytes(filesystem.cat_file(path, start=start, end=stop))

    def nbytes(self) -> int:
        """Return the size of the object."""
        with self._asked("read") as (filesystem, path):
            return int(filesystem.info(path)["size"])

    def below(self) -> dict[str, int | None]:
        """Return the sizes of the objects right below this URL; None for a name with more below.

        Returns nothing if there is nothing.
        """
        found: dict[str, int | None] = {}
        with self._asked("listed") as (filesystem, path), suppress(FileNotFoundError):
            for one in filesystem.ls(path, detail=True):
                its = one["name"].rstrip("/")
                name = its.rpartition("/")[2]
                if name and its.strip("/") != path.strip("/"):  # some stores list the name itself
                    found[name] = None if one["type"] == "directory" else int(one["size"])
        return found

    def write(self, data: bytes) -> None:
        """Write a small object, at once."""
        with self._asked("written") as (filesystem, path):
            filesystem.pipe_file(path, data)

    def remove(self) -> None:
        """Remove the object, if it is there."""
        with self._asked("removed") as (filesystem, path), suppress(FileNotFoundError):
            filesystem.rm_file(path)

    def open_new(self, nbytes: int) -> Any:
        """Return fsspec's file for a new object of this size."""
        part = -(-nbytes // _MAX_PARTS)
        part = max(_PART_NBYTES, -(-part // _PART_MULTIPLE) * _PART_MULTIPLE)
        filesystem, path = self._filesystem()
        return filesystem.open(path, "wb", block_size=part)

    @contextmanager
    def _asked(self, to_be: str) -> Iterator[tuple[Any, str]]:
        """Yield the filesystem and the path in it, and explain what it raises."""
        with explained(self, to_be):
            filesystem, path = self._filesystem()
            filesystem.invalidate_cache()  # other processes write, too
            yield filesystem, path

    def _filesystem(self) -> tuple[Any, str]:
        scheme = self.url.partition("://")[0]
        try:
            from fsspec.core import url_to_fs

            filesystem, path = url_to_fs(self.url)
        except ImportError as error:
            raise ConfigError(
                f"{self}: {scheme}:// needs a package that is missing ({error}): "
                "pip install -e '.[object-stores]' in a clone of fullshard, and the package that "
                f"fsspec names for {scheme}, such as s3fs or gcsfs"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{self}: fsspec does not know this URL ({error})") from error
        return filesystem, path


class NewFile(ABC):
    """A new file, written front to back, and given up if bytes are missing when it is closed.

    Args:
        nbytes: the size of the file.

    Raises:
        OSError, CheckpointError: here and in all methods, if the file cannot be written.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._left_nbytes = nbytes
        self._is_open = True

    def write(self, data: bytes | memoryview) -> None:
        """Write the next bytes."""
        self._write(memoryview(data))
        self._left_nbytes -= len(data)

    def close(self) -> None:
        """End the file, or give it up if bytes are missing; do nothing the second time."""
        is_open, self._is_open = self._is_open, False
        if is_open:
            self._close(is_complete=self._left_nbytes == 0)

    @abstractmethod
    def _write(self, data: memoryview) -> None: ...

    @abstractmethod
    def _close(self, *, is_complete: bool) -> None: ...


class _LocalFile(NewFile):
    """A new file in a folder; ``close`` flushes a complete one, and leaves others as they are."""

    def __init__(self, path: Path, nbytes: int) -> None:
        super().__init__(nbytes)
        self._file = path.open("xb", buffering=0)
        self._unsynced_nbytes = 0

    def _write(self, data: memoryview) -> None:
        self._unsynced_nbytes += len(data)
        while data:
            data = data[self._file.write(data) :]
        if self._unsynced_nbytes > _SYNC_NBYTES:
            os.fsync(self._file.fileno())
            self._unsynced_nbytes = 0

    def _close(self, *, is_complete: bool) -> None:
        with self._file:
            if is_complete:
                os.fsync(self._file.fileno())


class _NewObject(NewFile):
    """A new object, which appears when it is complete."""

    def __init__(self, url: ObjectUrl, nbytes: int) -> None:
        super().__init__(nbytes)
        self._url = url
        with explained(url, "written"):
            self._file = url.open_new(nbytes)

    def _write(self, data: memoryview) -> None:
        with explained(self._url, "written"):
            count = self._file.write(data)
            if count not in (None, len(data)):
                raise CheckpointError(f"{self._url}: {count} of {len(data)} bytes were written")

    def _close(self, *, is_complete: bool) -> None:
        if not is_complete:
            self._give_up()
            return
        try:
            with explained(self._url, "written"):
                self._file.close()
            found = self._url.nbytes()
            if found != self.nbytes:
                raise CheckpointError(
                    f"{self._url}: has {found} bytes in the store, {self.nbytes} were written; "
                    "save again"
                )
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Give up the upload, as far as the store can."""
        with suppress(Exception):
            self._file.discard()
        with suppress(Exception):
            self._file.closed = True  # else fsspec finishes the upload when the file is deleted


Place = Path | ObjectUrl
"""The place of a checkpoint, or of several."""

AnyPlace = str | os.PathLike[str] | ObjectUrl
"""A place as callers give it."""


def place_of(path: AnyPlace) -> Place:
    """Return the folder or the URL that a caller gave.

    Raises:
        ConfigError: it is a URL that cannot be one of an object store.
    """
    if isinstance(path, ObjectUrl):
        return path
    if not isinstance(path, str) or "://" not in path:
        folder = Path(path)
        first = folder.parts[0] if folder.parts else ""
        if not isinstance(path, str) and first.endswith(":") and _SCHEME.fullmatch(first[:-1]):
            raise ConfigError(f"{folder}: pathlib removed a slash of this URL; give it as a str")
        return folder
    return ObjectUrl.of(path)


def new_file(path: Place, nbytes: int, start: bytes = b"") -> NewFile:
    """Return a new file or object of ``nbytes`` bytes, which begins with ``start``."""
    file: NewFile
    if isinstance(path, ObjectUrl):
        file = _NewObject(path, nbytes)
    else:
        file = _LocalFile(path, nbytes)
    try:
        file.write(start)
    except BaseException:
        file.close()
        raise
    return file


def folder_of(path: AnyPlace) -> Path:
    """Return the folder or file that a caller gave to ``convert``, which accepts no URL.

    Raises:
        ConfigError: it is a URL.
    """
    place = place_of(path)
    if isinstance(place, ObjectUrl):
        raise ConfigError(f"convert reads and writes folders, not URLs of object stores: {place}")
    return place


@contextmanager
def noting_damage(*others: type[Exception]) -> Iterator[list[str]]:
    """Catch ``CheckpointError`` and ``others``; add their texts to the yielded list.

    ``StorageError`` is raised.
    """
    problems: list[str] = []
    kinds: tuple[type[Exception], ...] = (CheckpointError, *others)
    try:
        yield problems
    except StorageError:
        raise
    except kinds as error:
        problems.append(str(error))


@contextmanager
def explained(url: ObjectUrl, to_be: str) -> Iterator[None]:
    """Raise an error of ours, with a remedy, in place of errors of a filesystem of fsspec.

    Raises:
        CheckpointError: there is no such object.
        StorageError: any other error.
    """
    try:
        yield
    except FullshardError:
        raise
    except Exception as error:  # each store has its own
        text = f"{type(error).__name__}: {error}"
        kind: type[CheckpointError] = StorageError
        if isinstance(error, FileNotFoundError):
            kind = CheckpointError
            remedy = "check that the bucket exists, and that no other job removes objects there"
        elif isinstance(error, PermissionError) or _DENIED.search(text):
            remedy = (
                "check the credentials of this process, and that they permit to list, read, write "
                "and remove objects there"
            )
        else:
            remedy = "check the network and the store, then repeat the call"
        raise kind(f"{url}: cannot be {to_be} ({text}); {remedy}") from error

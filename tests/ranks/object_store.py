"""An emulated object store: a filesystem of fsspec over a local folder that all ranks share.

The URL ``emulated:///folder/run`` names the objects in ``/folder/run``. An object appears as a
whole when its upload ends, or never. No object can be renamed, appended to or written in the
middle. Each process caches listings, as other filesystems of fsspec do. ``trouble`` lets tests fail
requests.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

__all__ = ["EmulatedStore", "objects", "trouble"]

_UPLOADS = ".uploads"
_troubles: list[Callable[[str, str], object]] = []


@contextmanager
def trouble(raises: Callable[[str, str], object]) -> Iterator[None]:
    """Call ``raises(kind, name)`` before each request that this process makes in the block.

    Kinds are "list", "get", "put", "put answered" (after the object is stored), "part" and
    "delete".
    """
    _troubles.append(raises)
    try:
        yield
    finally:
        _troubles.remove(raises)


def _request(kind: str, path: str) -> None:
    for one in list(_troubles):
        one(kind, path)


def objects(folder: Path) -> dict[str, bytes]:
    """Return the contents of all objects below a folder, by name relative to the folder."""
    found = sorted(one for one in folder.rglob("*") if one.is_file() and _UPLOADS not in one.parts)
    return {str(one.relative_to(folder)): one.read_bytes() for one in found}


class EmulatedStore(AbstractFileSystem):
    """The emulated store; the module describes it."""

    protocol = "emulated"
    cachable = True

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return "/" + str(path).removeprefix("emulated://").strip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            _request("list", path)
            self.dircache[path] = self._listed(path)
        found = self.dircache[path]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [one["name"] for one in found]

    def _listed(self, path: str) -> list[dict[str, Any]]:
        own = Path(path)
        if own.is_file():
            return [{"name": path, "size": own.stat().st_size, "type": "file"}]
        found = []
        for one in sorted(own.iterdir()) if own.is_dir() else []:
            if one.name == _UPLOADS:
                continue
            if one.is_file():
                found.append({"name": str(one), "size": one.stat().st_size, "type": "file"})
            elif objects(one):  # a prefix without objects does not exist
                found.append({"name": str(one), "size": 0, "type": "directory"})
        return found

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        _request("get", path)
        for one in self._listed(path):
            if one["name"] == path:
                return one
        raise FileNotFoundError(path)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        _request("get", path)
        return Path(path).read_bytes()[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        path = self._strip_protocol(path)
        _request("put", path)
        upload = _upload(path)
        upload.write_bytes(value)
        _appear(upload, path)
        _request("put answered", path)

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        _request("delete", path)
        os.unlink(path)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> EmulatedFile:
        if mode != "wb":
            raise NotImplementedError(mode)
        return EmulatedFile(self, path, mode, block_size=options.get("block_size") or 1 << 20)

    def cp_file(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    mv = created = modified = cp_file


class EmulatedFile(AbstractBufferedFile):
    """An upload in parts."""

    def _initiate_upload(self) -> None:
        _request("put", self.path)
        self._upload = _upload(self.path)
        self._upload.touch()

    def _upload_chunk(self, final: bool = False) -> bool:
        _request("part", self.path)
        with self._upload.open("ab") as file:
            file.write(self.buffer.getvalue())
        if final:
            _appear(self._upload, self.path)
            _request("put answered", self.path)
        return True

    def discard(self) -> None:
        self._upload.unlink(missing_ok=True)


def _upload(path: str) -> Path:
    folder = Path(path).parent / _UPLOADS
    folder.mkdir(parents=True, exist_ok=True)
    return folder / uuid.uuid4().hex


def _appear(upload: Path, path: str) -> None:
    os.replace(upload, path)


fsspec.register_implementation("emulated", EmulatedStore, clobber=True)

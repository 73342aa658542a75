"""The manifest of a checkpoint: which tensors there are, and which file holds what of them.

A rank's ``Contents`` name the tensors that it holds a part of, each with the mesh and the
placements that say which part. Ranks with equal contents share one copy of them, so the manifest of
a thousand ranks is as small as that of one, but for a line per file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePath
from typing import Any, NamedTuple

import xxhash

from fullshard.checkpoint.format.placement import (
    Grid,
    TensorEntry,
    placement_from_json,
    placement_to_json,
    problem_of,
)
from fullshard.checkpoint.format.values import decode, encode
from fullshard.comm.text import listed
from fullshard.errors import CheckpointError
from fullshard.layout.region import Region

FORMAT = "fullshard checkpoint"
VERSION = 2
"""The version of the format that is written; version 1 can be read, too."""
MANIFEST = "manifest.json"


class FileInfo(NamedTuple):
    """A data file.

    Attributes:
        name: in the checkpoint's folder.
        rank: the rank that wrote it.
        nbytes: its size.
        digest: the digest of its header and that of its tensor "digests"; in version 1 the digest
            of its header, which has the digests of all data.
        contents: the number of the rank's contents.
    """

    name: str
    rank: int
    nbytes: int
    digest: str
    contents: int


class FilePart(NamedTuple):
    """The part of a tensor that is in one file.

    Attributes:
        file: the file.
        region: the elements.
        dtype: such as "float32".
        shape: of the tensor in the file.
    """

    file: FileInfo
    region: Region
    dtype: str
    shape: tuple[int, ...]


class Contents(NamedTuple):
    """A rank's share in a checkpoint.

    Attributes:
        tensors: the tensors of which the rank holds a part, by name.
        values: values of its model and optimizer that are no tensors, in JSON's types.
    """

    tensors: Mapping[str, TensorEntry]
    values: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return the contents in JSON's types; meshes and placements are listed once."""
        grids: dict[Grid, int] = {}
        placed: dict[Any, int] = {}
        tensors = {
            name: [
                entry.dtype,
                entry.shape,
                grids.setdefault(entry.grid, len(grids)),
                placed.setdefault(entry.placements, len(placed)),
                entry.writer,
            ]
            for name, entry in self.tensors.items()
        }
        return {
            "meshes": [grid.to_json() for grid in grids],
            "placements": [
                None if those is None else [*map(placement_to_json, those)] for those in placed
            ],
            "tensors": tensors,
            "values": self.values,
        }

    @classmethod
    def from_json(cls, stored: Any, world: int) -> Contents:
        """Return the contents from the result of ``to_json``, of a save of ``world`` ranks.

        Raises:
            CheckpointError, ValueError, KeyError, TypeError, IndexError: ``stored`` is damaged.
        """
        grids = [Grid.from_json(one, world) for one in stored["meshes"]]
        placed = [
            None if those is None else tuple(map(placement_from_json, those))
            for those in stored["placements"]
        ]
        tensors = {
            name: TensorEntry(dtype, tuple(shape), grids[grid], placed[placements], writer)
            for name, (dtype, shape, grid, placements, writer) in stored["tensors"].items()
        }
        for name, entry in tensors.items():
            if not entry.makes_sense():
                raise CheckpointError(f"{name} cannot be placed as it says")
        return cls(tensors, stored["values"])


@dataclass(frozen=True)
class Manifest:
    """The manifest of a checkpoint.

    Attributes:
        step: the step of the training, given by the caller.
        time: seconds since 1970.
        versions: of fullshard and PyTorch.
        contents: the contents of all ranks, each once.
        files: one for each rank, in their order.
        extra: what the caller added.
        digest: of all that is before it in the file that was read; empty if none was.
    """

    step: int
    time: float
    versions: Mapping[str, str]
    contents: Sequence[Contents]
    files: Sequence[FileInfo]
    extra: Any
    digest: str = field(default="", compare=False)

    @cached_property
    def _held(self) -> dict[str, list[tuple[TensorEntry, set[int]]]]:
        """The different entries of each tensor, and the ranks that have them.

        Tensors of the same ranks share one set: a set for each would be tensors times ranks.
        """
        ranks: list[set[int]] = [set() for _ in self.contents]
        for file in self.files:
            ranks[file.contents].add(file.rank)
        own: set[int] = set()  # identities of sets that belong to one tensor
        found: dict[str, list[tuple[TensorEntry, set[int]]]] = {}
        for contents, those in zip(self.contents, ranks, strict=True):
            for name, entry in contents.tensors.items():
                held = found.setdefault(name, [])
                at = next((n for n, (other, _) in enumerate(held) if other == entry), None)
                if at is None:
                    held.append((entry, those))
                    continue
                if id(held[at][1]) not in own:
                    held[at] = (entry, set(held[at][1]))
                    own.add(id(held[at][1]))
                held[at][1].update(those)
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def values(self, kind: str) -> dict[str, Any]:
        """Return values of one kind, "ties" or "states", of all ranks."""
        return {name: one for own in self.contents for name, one in own.values[kind].items()}

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._held)

    def entry(self, name: str) -> TensorEntry:
        """Return the entry of a tensor as its first rank has it."""
        return self._held[name][0][0]

    def parts(self, name: str, near: Region | None = None) -> Iterator[FilePart]:
        """Yield the parts of a tensor; together they are all of it, once.

        If ``near`` is given, parts that have nothing in common with it may be left out.
        """
        for entry, ranks in self._held[name]:
            for rank in entry.writers(near):
                if rank in ranks:
                    yield from self._part(entry, rank)

    def parts_in(self, file: FileInfo) -> dict[str, FilePart]:
        """Return the parts of tensors that a data file has, by name.

        The work grows with the number of tensors, not of ranks.
        """
        return {
            name: part
            for name, held in self._held.items()
            for entry, ranks in held
            if file.rank in ranks and entry.is_written_by(file.rank)
            for part in self._part(entry, file.rank)
        }

    def _part(self, entry: TensorEntry, rank: int) -> Iterator[FilePart]:
        """Yield the part that ``rank`` writes, unless it is empty."""
        region = entry.region(rank)
        if region.numel:
            shape = (region.numel,) if entry.is_ragged else region.grid
            yield FilePart(self.files[rank], region, entry.dtype, shape)

    def check(self) -> None:
        """Check that the parts of each tensor make it up exactly once.

        Raises:
            CheckpointError: which tensors are incomplete, and why.
        """
        problems = []
        for name, held in self._held.items():
            problem = problem_of(held)
            if problem:
                problems.append(f"{name}: {problem}")
        if problems:
            found = listed(problems, between="; ")
            raise CheckpointError(f"the ranks' tensors do not fit: {found}")

    def to_json(self) -> bytes:
        """Return the manifest as a file, which ends with the digest of all that is before."""
        stored = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "time": self.time,
            "versions": self.versions,
            "files": [file._asdict() for file in self.files],
            "contents": [one.to_json() for one in self.contents],
            "extra": encode(self.extra, "extra"),
        }
        text = json.dumps(stored, separators=(",", ":"), allow_nan=False)
        return f'{text[:-1]},"digest":"{digest_of(text.encode())}"}}\n'.encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read the file that ``to_json`` made.

        Raises:
            CheckpointError: it is damaged, or of another format or version.
        """
        try:
            decoded = data.decode()  # json would take bytes in UTF-16, too
            stored = json.loads(decoded)
            kind, version = stored["format"], stored["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"no manifest of a checkpoint of fullshard ({error})") from None
        if kind != FORMAT or version not in (1, VERSION):
            raise CheckpointError(
                f"it is a {kind!r} of version {version!r}; this version of fullshard reads a "
                f"{FORMAT!r} of version 1 or {VERSION}"
            )
        text, mark, end = decoded.rpartition(',"digest":"')
        digest = digest_of((text + "}").encode())
        if not mark or end != f'{digest}"}}\n':
            raise CheckpointError("it was changed or cut off after it was written")
        try:
            files = stored["files"]
            manifest = cls(
                step=int(stored["step"]),
                time=float(stored["time"]),
                versions=stored["versions"],
                contents=[Contents.from_json(one, len(files)) for one in stored["contents"]],
                files=[_file(rank, file, stored) for rank, file in enumerate(files)],
                extra=decode(stored["extra"]),
                digest=digest,
            )
            if not math.isfinite(manifest.time) or not isinstance(manifest.versions, dict):
                raise CheckpointError("its time or its versions do not follow its format")
            for one in manifest.contents:
                values = one.values["ties"], one.values["states"], one.values.get("optimizer", {})
                left_out = one.values.get("left_out", [])
                is_list = isinstance(left_out, list) and all(type(n) is str for n in left_out)
                if not all(isinstance(its, dict) for its in values) or not is_list:
                    raise CheckpointError("its values do not follow its format")
            manifest.check()
        except CheckpointError:
            raise
        except Exception as error:  # it may hold anything
            raise CheckpointError(f"it does not follow its format ({error!r})") from error
        return manifest


def _file(rank: int, stored: Any, manifest: Any) -> FileInfo:
    file = FileInfo(**stored)
    is_plain = PurePath(file.name).name == file.name and file.name not in ("", "..")
    is_plain = is_plain and file.name.isprintable()  # no NUL, no half of a surrogate pair
    if not is_plain or file.rank != rank or not 0 <= file.contents < len(manifest["contents"]):
        raise CheckpointError(f"file {file.name!r} of rank {file.rank}")
    return file


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of a manifest, a header or contents: 128 bits, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)

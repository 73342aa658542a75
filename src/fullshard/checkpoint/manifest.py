"""The manifest of a checkpoint: which tensors there are, and which file holds what of them.

A rank's ``Contents`` name the tensors that it holds a part of, each with the mesh and the
placements that say which part. Ranks with equal contents share one copy of them, so the manifest of
a thousand ranks is as small as that of one, but for a line per file.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import PurePath
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed.tensor import Placement, Replicate, Shard

from fullshard import _torch
from fullshard.checkpoint.values import decode, encode
from fullshard.errors import CheckpointError
from fullshard.layout.region import Region, whole
from fullshard.tensors import RaggedShard, coordinates_near, region_of

FORMAT, VERSION = "fullshard checkpoint", 1
MANIFEST = "manifest.json"


class Grid(NamedTuple):
    """A mesh without its process groups: its shape, and its ranks in row-major order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


@cache
def _coordinates(grid: Grid) -> dict[int, tuple[int, ...]]:
    return dict(zip(grid.ranks, itertools.product(*map(range, grid.shape)), strict=True))


class Entry(NamedTuple):
    """A tensor of a checkpoint, as the ranks of one mesh hold it.

    Attributes:
        dtype: such as "float32".
        shape: of the whole tensor.
        grid: the ranks that hold it.
        placements: one for each dim of the grid; None: a plain tensor, whole on every rank.
        writer: which of the ranks that hold the same elements writes them.
    """

    dtype: str
    shape: tuple[int, ...]
    grid: Grid
    placements: tuple[Placement, ...] | None
    writer: int

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    def region(self, rank: int) -> Region:
        """Return the elements that ``rank`` holds."""
        coordinate = _coordinates(self.grid)[rank]
        return _region(self.shape, self._placements(), self.grid.shape, coordinate)

    @property
    def num_copies(self) -> int:
        """Number of ranks that hold the same elements."""
        pairs = zip(self._placements(), self.grid.shape, strict=True)
        return math.prod(size for placement, size in pairs if isinstance(placement, Replicate))

    @property
    def is_ragged(self) -> bool:
        """Return whether ranks hold intervals, as 1-D tensors."""
        return any(isinstance(one, RaggedShard) for one in self._placements())

    def makes_sense(self) -> bool:
        """Return whether dtype, mesh, placements and writer can be those of a tensor."""
        placements, ndim = self._placements(), len(self.shape)
        cuts = [one for one in placements if not isinstance(one, (Replicate, RaggedShard))]
        return (
            isinstance(getattr(torch, self.dtype, None), torch.dtype)
            and all(size >= 0 for size in self.shape)
            and math.prod(self.grid.shape) == len(set(self.grid.ranks)) == len(self.grid.ranks)
            and len(placements) == len(self.grid.shape)
            and all(0 <= one.dim < ndim for one in cuts)  # type: ignore[attr-defined]
            and 0 <= self.writer < self.num_copies
        )

    def writers(self, near: Region | None) -> Iterator[int]:
        """Yield the ranks that write their part, if ``near`` is given those that have some of it.

        There may be others among them.
        """
        shape, sizes, copy = self.grid.shape, [], self.writer
        for one, size in zip(self._placements()[::-1], shape[::-1], strict=True):
            own = 0
            if isinstance(one, Replicate):
                copy, own = divmod(copy, size)
            sizes.append(own)
        fixed = sizes[::-1]
        boxes = whole(self.shape).boxes() if near is None else near.boxes()
        found = {
            coordinate: None
            for box in boxes
            for coordinate in coordinates_near(box, self.shape, self._placements(), shape, fixed)
        }
        for coordinate in found:
            index = 0
            for own, size in zip(coordinate, shape, strict=True):
                index = index * size + own
            yield self.grid.ranks[index]

    def is_written_by(self, rank: int) -> bool:
        """Return whether ``rank`` writes its part, rather than a rank with the same elements."""
        coordinate, index = _coordinates(self.grid).get(rank), 0
        if coordinate is None:
            return False
        for one, own, size in zip(self._placements(), coordinate, self.grid.shape, strict=True):
            index = index * size + own if isinstance(one, Replicate) else index
        return index == self.writer

    def _placements(self) -> tuple[Placement, ...]:
        return self.placements or (Replicate(),) * len(self.grid.shape)


@cache
def _region(
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> Region:
    return region_of(shape, placements, mesh_shape, coordinate)


class FileInfo(NamedTuple):
    """A data file.

    Attributes:
        name: in the checkpoint's folder.
        rank: the rank that wrote it.
        nbytes: its size.
        digest: the digest of its header, which has the digests of all data.
        contents: the number of the rank's contents.
    """

    name: str
    rank: int
    nbytes: int
    digest: str
    contents: int


class Part(NamedTuple):
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
        values: what its model and optimizer have besides, in JSON's types.
    """

    tensors: Mapping[str, Entry]
    values: Mapping[str, Any]


def contents_to_json(contents: Contents) -> dict[str, Any]:
    """Return ``contents`` in JSON's types; meshes and placements are listed once."""
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
        for name, entry in contents.tensors.items()
    }
    return {
        "meshes": [{"shape": grid.shape, "ranks": _ranks_to_json(grid.ranks)} for grid in grids],
        "placements": [
            None if those is None else [_placement_to_json(one) for one in those]
            for those in placed
        ],
        "tensors": tensors,
        "values": contents.values,
    }


def contents_from_json(stored: Any) -> Contents:
    """Return the contents that ``contents_to_json`` was given.

    Raises:
        CheckpointError, ValueError, KeyError, TypeError, IndexError: it cannot have written this.
    """
    grids = [Grid(tuple(one["shape"]), _ranks_from_json(one["ranks"])) for one in stored["meshes"]]
    placed = [
        None if those is None else tuple(map(_placement_from_json, those))
        for those in stored["placements"]
    ]
    tensors = {
        name: Entry(dtype, tuple(shape), grids[grid], placed[placements], writer)
        for name, (dtype, shape, grid, placements, writer) in stored["tensors"].items()
    }
    for name, entry in tensors.items():
        if not entry.makes_sense():
            raise CheckpointError(f"{name} cannot be placed as it says")
    return Contents(tensors, stored["values"])


def _ranks_to_json(ranks: tuple[int, ...]) -> Any:
    first = ranks[0]
    in_order = ranks == tuple(range(first, first + len(ranks)))
    return {"first": first, "count": len(ranks)} if in_order else ranks


def _ranks_from_json(stored: Any) -> tuple[int, ...]:
    if isinstance(stored, dict):
        return tuple(range(stored["first"], stored["first"] + stored["count"]))
    return tuple(stored)


def _placement_to_json(placement: Placement) -> list[Any]:
    if isinstance(placement, RaggedShard):
        return ["ragged", placement.lengths]
    if isinstance(placement, _torch.StridedShard):
        return ["strided", placement.dim, placement.split_factor]
    if isinstance(placement, Shard):
        return ["shard", placement.dim]
    assert isinstance(placement, Replicate)
    return ["replicate"]


def _placement_from_json(stored: Any) -> Placement:
    kind, *rest = stored
    if kind == "ragged":
        return RaggedShard([(num_ranks, length) for num_ranks, length in rest[0]])
    if kind == "strided":
        strided: Placement = _torch.StridedShard(rest[0], split_factor=rest[1])
        return strided
    return Shard(rest[0]) if kind == "shard" else Replicate()


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
    """

    step: int
    time: float
    versions: Mapping[str, str]
    contents: Sequence[Contents]
    files: Sequence[FileInfo]
    extra: Any

    @cached_property
    def _ranks(self) -> list[frozenset[int]]:
        """The ranks that have each of the contents."""
        return [
            frozenset(file.rank for file in self.files if file.contents == number)
            for number in range(len(self.contents))
        ]

    @cached_property
    def _held(self) -> dict[str, dict[int, Entry]]:
        """The entries of each tensor, by the number of the contents that they are in.

        If several meshes hold all of a tensor, only the first one's entries.
        """
        found: dict[str, dict[int, Entry]] = {}
        for number, contents in enumerate(self.contents):
            for name, entry in contents.tensors.items():
                held = found.setdefault(name, {})
                if not held or entry.grid == next(iter(held.values())).grid:
                    held[number] = entry
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._held

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._held)

    def entry(self, name: str) -> Entry:
        """Return the entry of a tensor as its first rank has it."""
        return next(iter(self._held[name].values()))

    def parts(self, name: str, near: Region | None = None) -> Iterator[Part]:
        """Yield the parts of a tensor; together they are all of it, once.

        If ``near`` is given, parts that have nothing in common with it may be left out.
        """
        for number, entry in self._held[name].items():
            for rank in entry.writers(near):
                if rank in self._ranks[number]:
                    region = entry.region(rank)
                    if region.numel:
                        shape = (region.numel,) if entry.is_ragged else region.grid
                        yield Part(self.files[rank], region, entry.dtype, shape)

    def check(self) -> None:
        """Check that the parts of each tensor make it up exactly once.

        Raises:
            CheckpointError: which tensors are incomplete, and why.
        """
        problems = []
        for name, held in self._held.items():
            entry = self.entry(name)
            ranks = frozenset().union(*(self._ranks[number] for number in held))
            lost = [rank for rank in entry.grid.ranks if rank not in ranks]
            if lost:
                problems.append(f"{name}: ranks {lost[:8]} of its mesh do not hold it")
            elif any((e.shape, e.dtype) != (entry.shape, entry.dtype) for e in held.values()):
                problems.append(f"{name}: ranks have it in different shapes or dtypes")
            elif any(e != entry for e in held.values()):
                numel = sum(part.region.numel for part in self.parts(name))
                if numel != entry.numel:
                    problems.append(f"{name}: the ranks hold {numel} of {entry.numel} elements")
        if problems:
            more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise CheckpointError(f"the ranks' tensors do not fit: {'; '.join(problems[:8])}{more}")

    def to_json(self) -> bytes:
        """Return the manifest as a file, which ends with the digest of all that is before."""
        stored = {
            "format": FORMAT,
            "version": VERSION,
            "step": self.step,
            "time": self.time,
            "versions": self.versions,
            "files": [file._asdict() for file in self.files],
            "contents": [contents_to_json(one) for one in self.contents],
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
            stored = json.loads(data)
            kind, version = stored["format"], stored["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"no manifest of a checkpoint of fullshard ({error})") from None
        if (kind, version) != (FORMAT, VERSION):
            raise CheckpointError(
                f"it is a {kind!r} of version {version!r}; this version of fullshard reads a "
                f"{FORMAT!r} of version {VERSION}"
            )
        text, mark, end = data.decode().rpartition(',"digest":"')
        if not mark or end != f'{digest_of((text + "}").encode())}"}}\n':
            raise CheckpointError("it was changed or cut off after it was written")
        try:
            return cls(
                step=stored["step"],
                time=stored["time"],
                versions=stored["versions"],
                contents=[contents_from_json(one) for one in stored["contents"]],
                files=[_file(rank, file, stored) for rank, file in enumerate(stored["files"])],
                extra=decode(stored["extra"]),
            )
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointError(f"it does not follow its format ({error!r})") from error


def _file(rank: int, stored: Any, manifest: Any) -> FileInfo:
    file = FileInfo(**stored)
    is_plain = PurePath(file.name).name == file.name
    if not is_plain or file.rank != rank or not 0 <= file.contents < len(manifest["contents"]):
        raise CheckpointError(f"file {file.name!r} of rank {file.rank}")
    return file


def digest_of(data: bytes) -> str:
    """Return the digest of a manifest, a header or contents: 128 bits, in hexadecimal."""
    return xxhash.xxh3_128_hexdigest(data)

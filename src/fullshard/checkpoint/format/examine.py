"""Examine checkpoints in a folder or a store: list them, find the newest, verify them.

root/
  latest                  name of the checkpoint that was saved last, for other programs
  step-000100/            a checkpoint; a folder has this name only once it is complete
    manifest.json
    rank-00000.safetensors, ...
  .unfinished-step-000200-1f0e66a2/     left by a job that was killed
  step-000100.damaged-1f0e66a2/         incomplete, and in the way of a checkpoint of this step
  step-000100.replaced-1f0e66a2/        complete, of a branch of the training that was left

In an object store a checkpoint is complete once it has a manifest, which is written last. There is
no ``latest``, and ``stores.objects`` describes unfinished and replaced ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, overload

from torch.distributed.tensor import Placement

from fullshard.checkpoint.format.datafile import Bytes, DataFile, LocalFile, ObjectFile, unreadable
from fullshard.checkpoint.format.manifest import MANIFEST, FileInfo, Manifest
from fullshard.checkpoint.format.places import AnyPlace, ObjectUrl, Place, noting_damage, place_of
from fullshard.errors import CheckpointError, StorageError
from fullshard.progress import Operation

LATEST = "latest"
UNFINISHED = ".unfinished-"
DAMAGED = ".damaged-"
REPLACED = ".replaced-"
DATA_OBJECT = re.compile(r"rank-[0-9]{5,}-([0-9a-f]{12})\.safetensors")
"""Names of data files in object stores; the group is the name of the save that wrote them."""
ASIDE_OBJECT = re.compile(r"(replaced|damaged)-[0-9a-f]{8}\.json")
"""Names of manifests in object stores that were put aside."""
_NUMBERED = re.compile(r"step-([0-9]+)")
_HEAD = re.compile(rb'\{"format":"[^"]*","version":[0-9]+,"step":(-?[0-9]+),"time":([-+0-9.e]+),')
_TAIL = re.compile(rb',"digest":"([0-9a-f]{32})"\}\n\Z')
_HEAD_NBYTES, _TAIL_NBYTES = 256, 64


class TensorInfo(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        dtype: such as "float32".
        shape: of the full tensor.
        mesh: shape of the mesh that held it.
        placements: one for each dim of the mesh; None: whole on every rank.
    """

    dtype: str
    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Placement, ...] | None


class CheckpointInfo(NamedTuple):
    """A complete checkpoint, as its manifest describes it.

    Attributes:
        path: its folder or URL.
        step: the step of the training.
        time: when it was written, in seconds since 1970.
        world: number of ranks that wrote it.
        nbytes: size of its data files.
        extra: what the caller of ``save`` added.
        versions: of fullshard and PyTorch.
        tensors: by name, such as "model/head.weight" or "optimizer/head.weight/exp_avg".
    """

    path: Path | ObjectUrl
    step: int
    time: float
    world: int
    nbytes: int
    extra: Any
    versions: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]


def read_manifest(path: Place) -> Manifest:
    """Read the manifest of the checkpoint at ``path``.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if isinstance(path, ObjectUrl):
        data = (path / MANIFEST).read_if_there()
        if data is None:
            raise CheckpointError(
                f"{path}: no manifest: no checkpoint is at this URL, or its save did not finish"
            )
    else:
        try:
            data = (path / MANIFEST).read_bytes()
        except OSError as error:
            why = "there is no such folder" if not path.is_dir() else "no manifest"
            raise unreadable(error, f"{path}: {why}") from error
    try:
        return Manifest.from_json(data)
    except CheckpointError as error:
        raise CheckpointError(f"{path / MANIFEST}: {error}") from error


def list_checkpoints(root: AnyPlace) -> list[CheckpointInfo]:
    """Return the checkpoints in ``root``, a folder or a URL, in the order of their steps.

    Those of one step are in the order of their times. Folders without a readable manifest, or with
    a data file that is missing or has another size than it was written with, are left out;
    ``verify`` says what is wrong with them.

    Raises:
        CheckpointError: the folder cannot be listed, or the object store cannot be reached.
    """
    found = map(complete, _folders(place_of(root)))
    return sorted((one for one in found if one is not None), key=lambda one: (one.step, one.time))


@overload
def latest(root: os.PathLike[str]) -> Path | None: ...


@overload
def latest(root: str | ObjectUrl) -> Path | ObjectUrl | None: ...


def latest(root: AnyPlace) -> Path | ObjectUrl | None:
    """Return the complete checkpoint in ``root`` of the highest step; None if there is none.

    Of checkpoints of one step it is the one with the latest time. The file ``latest`` is for other
    programs: it is written later, and a job may be killed before.
    """
    found = [
        (heading.step, heading.time, path)
        for path in _folders(place_of(root))
        if (heading := _heading(path)) is not None
    ]
    found.sort(key=lambda one: one[:2])
    return next((path for *_, path in reversed(found) if complete(path) is not None), None)


def inspect(path: AnyPlace) -> CheckpointInfo:
    """Return the description of the checkpoint at ``path``; reads no tensors.

    Raises:
        CheckpointError: the manifest is damaged, or data files are missing or have other sizes.
    """
    path = place_of(path)
    manifest = read_manifest(path)
    for problem in _lacking(path, manifest).values():
        raise CheckpointError(problem)
    return described(path, manifest)


def _lacking(path: Place, manifest: Manifest) -> dict[int, str]:
    """Return the ranks whose data file is missing or has another size, each with the reason."""
    below = path.below() if isinstance(path, ObjectUrl) else {}
    found = {}
    for file in manifest.files:
        size, why = below.get(file.name), ""
        if isinstance(path, Path):
            try:
                size = (path / file.name).stat().st_size
            except OSError as error:
                why = f" ({error})"
        if size is None:
            found[file.rank] = f"{path / file.name}: is missing{why}"
        elif size != file.nbytes:
            what = f"has {size} bytes, {file.nbytes} were written"
            found[file.rank] = f"{path / file.name}: {what}"
    return found


def described(path: Place, manifest: Manifest) -> CheckpointInfo:
    """Return the description of the checkpoint at ``path`` that has this manifest."""
    entries = ((name, manifest.entry(name)) for name in manifest.names())
    return CheckpointInfo(
        path=path,
        step=manifest.step,
        time=manifest.time,
        world=len(manifest.files),
        nbytes=sum(file.nbytes for file in manifest.files),
        extra=manifest.extra,
        versions=manifest.versions,
        tensors={
            name: TensorInfo(one.dtype, one.shape, one.grid.shape, one.placements)
            for name, one in entries
        },
    )


def verify(path: AnyPlace) -> CheckpointInfo:
    """Read all of the checkpoint at ``path``, and compare it with its digests.

    Raises:
        CheckpointError: with all that is missing, damaged or does not belong there.
    """
    path = place_of(path)
    problems = list(faults(path))
    if problems:
        more = f"\n... and {len(problems) - 16} more" if len(problems) > 16 else ""
        raise CheckpointError("\n".join(problems[:16]) + more)
    return inspect(path)


def faults(path: AnyPlace) -> Iterator[str]:
    """Yield what is wrong with a checkpoint, and files that do not belong there.

    Args:
        path: its folder or URL.
    """
    path = place_of(path)
    with noting_damage() as problems:
        manifest = read_manifest(path)
    yield from problems
    if problems:
        return
    work = Operation(f"verifying {path.name}", sum(file.nbytes for file in manifest.files))
    for info in manifest.files:
        yield from _wrong(path, info, manifest, work.add)
    known = {MANIFEST, *(file.name for file in manifest.files)}
    if isinstance(path, ObjectUrl):  # those of other saves of this step do no harm
        pattern = re.compile(f"{DATA_OBJECT.pattern}|{ASIDE_OBJECT.pattern}")
        names = {name for name in path.below() if not pattern.fullmatch(name)}
    else:
        names = {one.name for one in path.iterdir()}
    for name in sorted(names):
        if name not in known:
            yield f"{path / name}: no file of this checkpoint"


class Looked(NamedTuple):
    """The result of reading some data files of a checkpoint.

    Attributes:
        digest: of the manifest; empty if it cannot be read.
        total: number of the data files.
        intact: the ranks of those that were read and are intact.
        damaged: the names of existing files that are not intact.
        problem: what was wrong first; empty if nothing was.
    """

    digest: str
    total: int
    intact: list[int]
    damaged: list[str]
    problem: str


def look(path: Place, *, first: int, every: int) -> Looked:
    """Read data files of a checkpoint, and compare them with their digests.

    Args:
        path: its folder or URL.
        first: the number of the first data file to read.
        every: read this one, and each so many after it.
    """
    try:
        manifest = read_manifest(path)
    except (CheckpointError, OSError) as error:
        return Looked("", 0, [], [], str(error))
    intact, damaged, problem = [], [], ""
    for info in manifest.files[first::every]:
        try:
            wrong = next(_wrong(path, info, manifest), "")
        except StorageError as error:
            problem = problem or str(error)
            continue  # perhaps intact, so nobody may remove it
        problem = problem or wrong
        if not wrong:
            intact.append(info.rank)
        elif isinstance(path, Path) and os.path.exists(path / info.name):
            damaged.append(info.name)
    return Looked(manifest.digest, len(manifest.files), intact, damaged, problem)


def _wrong(
    path: Place, info: FileInfo, manifest: Manifest, read: Callable[[int], None] | None = None
) -> Iterator[str]:
    """Yield what is wrong with a data file; call ``read`` with the bytes of each piece."""
    with noting_damage() as problems:
        file = DataFile(in_folder(path)(info), info)
    yield from problems
    if problems:
        return
    with file:
        yield from file.verify(manifest.parts_in(info), read)


def in_folder(path: Place) -> Callable[[FileInfo], Bytes]:
    """Return what opens the data files of the checkpoint at ``path``."""
    if isinstance(path, ObjectUrl):
        return lambda info: ObjectFile(path / info.name)
    return lambda info: LocalFile(path / info.name)


def present(path: Place, manifest: Manifest) -> list[int]:
    """Return the ranks whose data files are at ``path``, in the size that was written."""
    lacking = _lacking(path, manifest)
    return [info.rank for info in manifest.files if info.rank not in lacking]


class Numbered(NamedTuple):
    """A folder ``step-...``, complete or not; sorted by step, because clocks may be wrong.

    Attributes:
        step: the number in its name.
        time: when its checkpoint was written; 0 if it has no manifest.
        name: of the folder.
        digest: that the manifest ends with; empty if there is none.
    """

    step: int
    time: float
    name: str
    digest: str


def numbered_names(root: Place) -> dict[str, int]:
    """Return the names of the folders ``step-...`` in ``root``, and the numbers in them.

    Links to folders count, because a checkpoint may have been moved to another disk.
    """
    found: dict[str, int] = {}
    for one in _folders(root):
        match = _NUMBERED.fullmatch(one.name)
        if match and (isinstance(one, ObjectUrl) or os.path.isdir(one)):  # which never raises
            found[one.name] = int(match[1])
    return found


def numbered(root: Place) -> list[Numbered]:
    """Return the checkpoints ``step-...`` in ``root``, the newest last.

    In a folder they may be incomplete; in an object store all have a manifest.
    """
    found = (_numbered(root / name, step) for name, step in numbered_names(root).items())
    return sorted(one for one in found if one is not None)


def contained(root: Place) -> list[tuple[int, float, str, int, list[int]]]:
    """Return what is in ``root`` of which checkpoints.

    Returns:
        For each step, time, digest of the manifest, number of files, and the ranks of those here.
    """
    found = []
    for one in numbered(root):
        with noting_damage(OSError):
            manifest = read_manifest(root / one.name)
            files = len(manifest.files), present(root / one.name, manifest)
            found.append((manifest.step, one.time, one.digest, *files))
    return found


def _heading(path: Place) -> Numbered | None:
    """Return the ends of the manifest at ``path``; None if it cannot have been written so.

    In a folder the time does not grow with the size of the manifest. The rest of it may be damaged.
    """
    try:
        if isinstance(path, ObjectUrl):
            data = (path / MANIFEST).read_if_there() or b""
            first, last = data[:_HEAD_NBYTES], data[-_TAIL_NBYTES:]
        else:
            with (path / MANIFEST).open("rb") as file:
                first = file.read(_HEAD_NBYTES)
                file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_NBYTES, 0))
                last = file.read()
        head, tail = _HEAD.match(first), _TAIL.search(last)
        if head is not None and tail is not None:
            return Numbered(int(head[1]), float(head[2]), path.name, tail[1].decode())
    except (OSError, ValueError):
        pass
    return None


def _numbered(path: Place, step: int) -> Numbered | None:
    heading = _heading(path)
    if heading is not None:
        return heading._replace(step=step)
    is_there = isinstance(path, Path) or MANIFEST in path.below()  # else its save did not finish
    return Numbered(step, 0.0, path.name, "") if is_there else None


def complete(path: Place) -> CheckpointInfo | None:
    """Return the description of the checkpoint at ``path``; None if it is not complete."""
    with noting_damage(OSError):
        return inspect(path)
    return None


def _folders(root: Place) -> Iterator[Place]:
    """Yield what is in ``root`` and was neither left by a job nor put aside."""
    if isinstance(root, ObjectUrl):
        names = sorted(name for name, size in root.below().items() if size is None)
        yield from (root / name for name in names if not is_reserved(name))
        return
    try:
        found = sorted(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be listed ({error})") from error
    yield from (one for one in found if not is_reserved(one.name))


def is_reserved(name: str) -> bool:
    """Return whether a folder of this name is unfinished or was put aside, and is not looked at."""
    return name.startswith(".") or DAMAGED in name or REPLACED in name

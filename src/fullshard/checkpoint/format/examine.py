"""Folders of checkpoints: which are complete, which is the newest, and what is wrong with one.

root/
  latest                  name of the checkpoint that was saved last, for other programs
  step-000100/            a checkpoint; a folder has this name only once it is complete
    manifest.json
    rank-00000.safetensors, ...
  .unfinished-step-000200-1f0e66a2/     left by a job that was killed
  step-000100.damaged-1f0e66a2/         incomplete, and in the way of a checkpoint of this step
  step-000100.replaced-1f0e66a2/        complete, of a branch of the training that was left
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.tensor import Placement

from fullshard.checkpoint.format.datafile import DataFile, LocalFile
from fullshard.checkpoint.format.manifest import MANIFEST, FileInfo, Manifest, digest_in
from fullshard.errors import CheckpointError

LATEST = "latest"
UNFINISHED = ".unfinished-"
DAMAGED = ".damaged-"
REPLACED = ".replaced-"
_NUMBERED = re.compile(r"step-([0-9]+)")
_HEAD = re.compile(rb'\{"format":"[^"]*","version":[0-9]+,"step":(-?[0-9]+),"time":([-+0-9.e]+),')
_TAIL = re.compile(rb',"digest":"([0-9a-f]{32})"\}\n\Z')
_HEAD_NBYTES, _TAIL_NBYTES = 256, 64


class TensorInfo(NamedTuple):
    """A tensor of a checkpoint.

    Attributes:
        dtype: such as "float32".
        shape: of the whole tensor.
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
        path: its folder.
        step: the step of the training.
        time: when it was written, in seconds since 1970.
        world: number of ranks that wrote it.
        nbytes: size of its data files.
        extra: what the caller of ``save`` added.
        versions: of fullshard and PyTorch.
        tensors: by name, such as "model/head.weight" or "optimizer/head.weight/exp_avg".
    """

    path: Path
    step: int
    time: float
    world: int
    nbytes: int
    extra: Any
    versions: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint in folder ``path``.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    file = path / MANIFEST
    try:
        data = file.read_bytes()
    except OSError as error:
        why = "there is no such folder" if not path.is_dir() else f"no manifest ({error})"
        raise CheckpointError(f"{path}: {why}") from error
    try:
        return Manifest.from_json(data)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error


def list_checkpoints(root: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """Return the checkpoints in folder ``root`` in the order of their steps.

    Those of one step are in the order of their times. Folders without a readable manifest, or with
    a data file that is missing or has another size than it was written with, are left out;
    ``verify`` says what is wrong with them.
    """
    found = map(complete, _folders(Path(root)))
    return sorted((one for one in found if one is not None), key=lambda one: (one.step, one.time))


def latest(root: str | os.PathLike[str]) -> Path | None:
    """Return the complete checkpoint in folder ``root`` of the highest step; None if there is none.

    Of checkpoints of one step it is the one with the latest time. The file ``latest`` is for other
    programs: it is written later, and a job may be killed before.
    """
    found = []
    for path in _folders(Path(root)):
        heading = _heading(path)
        if heading is not None:
            found.append((heading.step, heading.time, path))
    found.sort(key=lambda one: one[:2])
    return next((path for *_, path in reversed(found) if complete(path) is not None), None)


def inspect(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Return the description of the checkpoint in folder ``path``; reads no tensors.

    Raises:
        CheckpointError: the manifest is damaged, or data files are missing or have other sizes.
    """
    path = Path(path)
    manifest = read_manifest(path)
    for file in manifest.files:
        try:
            size = (path / file.name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path / file.name}: is missing ({error})") from error
        if size != file.nbytes:
            what = f"has {size} bytes, {file.nbytes} were written"
            raise CheckpointError(f"{path / file.name}: {what}")
    return described(path, manifest)


def described(path: Path, manifest: Manifest) -> CheckpointInfo:
    """Return the description of the checkpoint in folder ``path`` that has this manifest."""
    entries = {name: manifest.entry(name) for name in manifest.names()}
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
            for name, one in entries.items()
        },
    )


def verify(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Read all of the checkpoint in folder ``path`` and compare it with what was written.

    Raises:
        CheckpointError: with all that is missing, damaged or does not belong there.
    """
    path = Path(path)
    problems = list(faults(path))
    if problems:
        more = f"\n... and {len(problems) - 16} more" if len(problems) > 16 else ""
        raise CheckpointError("\n".join(problems[:16]) + more)
    return inspect(path)


def faults(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield what is wrong with a checkpoint, and files that do not belong there.

    Args:
        path: its folder.
    """
    path = Path(path)
    yield from damage(path)
    try:
        known = {MANIFEST, *(file.name for file in read_manifest(path).files)}
    except CheckpointError:
        return
    for one in sorted(path.iterdir()):
        if one.name not in known:
            yield f"{one}: no file of this checkpoint"


def damage(path: Path) -> Iterator[str]:
    """Yield why the checkpoint in folder ``path`` cannot be loaded; reads all of it."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        yield str(error)
        return
    for info in manifest.files:
        yield from _wrong(path, info, manifest)


class Looked(NamedTuple):
    """The result of reading some data files of a checkpoint.

    Attributes:
        digest: of the manifest; empty if it cannot be read.
        total: number of the data files.
        intact: the ranks of those that were read and are intact.
        damaged: the names of those that are there and are not.
        problem: what was wrong first; empty if nothing was.
    """

    digest: str
    total: int
    intact: list[int]
    damaged: list[str]
    problem: str


def look(path: Path, *, first: int, every: int) -> Looked:
    """Read data files of a checkpoint, and compare them with what was written.

    Args:
        path: its folder.
        first: the number of the first data file to read.
        every: read this one, and each so many after it.
    """
    try:
        manifest = read_manifest(path)
        digest = digest_in((path / MANIFEST).read_bytes())
    except (CheckpointError, OSError) as error:
        return Looked("", 0, [], [], str(error))
    intact, damaged, problem = [], [], ""
    for info in manifest.files[first::every]:
        wrong = next(_wrong(path, info, manifest), "")
        problem = problem or wrong
        if not wrong:
            intact.append(info.rank)
        elif os.path.exists(path / info.name):
            damaged.append(info.name)
    return Looked(digest, len(manifest.files), intact, damaged, problem)


def _wrong(path: Path, info: FileInfo, manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong with a data file."""
    try:
        file = DataFile(LocalFile(path / info.name), info)
    except CheckpointError as error:
        yield str(error)
        return
    with file:
        yield from file.verify(manifest.parts_in(info))


def in_folder(path: Path) -> Callable[[FileInfo], LocalFile]:
    """Return what opens the data files in folder ``path``."""
    return lambda info: LocalFile(path / info.name)


def present(path: Path, manifest: Manifest) -> list[int]:
    """Return the ranks whose data files are in folder ``path``, in the size that was written."""
    found = []
    for info in manifest.files:
        with suppress(OSError):
            if (path / info.name).stat().st_size == info.nbytes:
                found.append(info.rank)
    return found


class Numbered(NamedTuple):
    """A folder ``step-...``, complete or not; sorted by step, because clocks may be wrong.

    Attributes:
        step: the number in its name.
        time: when its checkpoint was written, or the folder if it has no manifest.
        name: of the folder.
        digest: that the manifest ends with; empty if there is none.
    """

    step: int
    time: float
    name: str
    digest: str


def numbered_names(root: Path) -> dict[str, int]:
    """Return the names of the folders ``step-...`` in ``root``, and the numbers in them."""
    found: dict[str, int] = {}
    for one in _folders(root):
        match = _NUMBERED.fullmatch(one.name)
        if match and os.path.isdir(one) and not os.path.islink(one):  # which never raise
            found[one.name] = int(match[1])
    return found


def numbered(root: Path) -> list[Numbered]:
    """Return the folders ``step-...`` in ``root``, complete or not, the newest last."""
    return sorted(_numbered(root / name, step) for name, step in numbered_names(root).items())


def contained(root: Path) -> list[tuple[int, float, str, int, list[int]]]:
    """Return what is in ``root`` of which checkpoints.

    Returns:
        For each step, time, digest of the manifest, number of files, and the ranks of those here.
    """
    found = []
    for one in numbered(root):
        with suppress(CheckpointError, OSError):
            manifest = read_manifest(root / one.name)
            files = len(manifest.files), present(root / one.name, manifest)
            found.append((manifest.step, one.time, one.digest, *files))
    return found


class _Heading(NamedTuple):
    step: int
    time: float
    digest: str


def _heading(path: Path) -> _Heading | None:
    """Return the ends of the manifest in folder ``path``; None if it cannot have been written so.

    The time does not grow with the size of the manifest. The rest of it may be damaged.
    """
    try:
        with (path / MANIFEST).open("rb") as file:
            head = _HEAD.match(file.read(_HEAD_NBYTES))
            file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_NBYTES, 0))
            tail = _TAIL.search(file.read())
        if head is None or tail is None:
            return None
        return _Heading(int(head[1]), float(head[2]), tail[1].decode())
    except (OSError, ValueError):
        return None


def _numbered(path: Path, step: int) -> Numbered:
    heading = _heading(path)
    if heading is not None:
        return Numbered(step, heading.time, path.name, heading.digest)
    try:
        return Numbered(step, path.stat().st_mtime, path.name, "")
    except OSError:  # it is gone, say
        return Numbered(step, 0.0, path.name, "")


def complete(path: Path) -> CheckpointInfo | None:
    """Return the description of the checkpoint in folder ``path``; None if it is not complete."""
    try:
        return inspect(path)
    except (CheckpointError, OSError):
        return None


def _folders(root: Path) -> Iterator[Path]:
    """Yield what is in ``root`` and was neither left by a job nor put aside."""
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

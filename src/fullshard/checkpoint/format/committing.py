"""Folders of checkpoints appear at once or not at all, and make way for others.

``examine`` reports what a root contains.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from fullshard.checkpoint.format.examine import (
    DAMAGED,
    LATEST,
    REPLACED,
    UNFINISHED,
    complete,
    is_reserved,
    numbered_names,
)
from fullshard.checkpoint.format.manifest import MANIFEST
from fullshard.checkpoint.format.places import Place
from fullshard.errors import ConfigError

log = logging.getLogger(__name__)


def make_folder(path: Path) -> None:
    """Make a new folder, and those above it that are missing, and flush their names."""
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir()
    flush_folder(path.parent)


def unfinished_at(path: Path) -> Path:
    """Return a new name beside ``path``, until a file or folder is complete and gets ``path``."""
    return path.with_name(f"{UNFINISHED}{path.name}-{uuid.uuid4().hex[:8]}")


def write_flushed(path: Path, data: bytes) -> None:
    """Write a small file by another name, flush it, and give it its name."""
    unfinished = unfinished_at(path)
    try:
        with unfinished.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def flush_folder(path: Path) -> None:
    """Flush the names of the files in a folder."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def refuse_name(path: Place) -> None:
    """Raise ``ConfigError`` if ``path`` has a name that checkpoints cannot have."""
    if path.name == LATEST or is_reserved(path.name):
        raise ConfigError(
            f"{path.name} is a name with a meaning of its own among checkpoints; choose another"
        )


def seal(unfinished: Path, manifest: bytes) -> None:
    """Write the manifest next to the flushed data files; ``publish`` then gives the name."""
    write_flushed(unfinished / MANIFEST, manifest)
    flush_folder(unfinished)


def publish(unfinished: Path, path: Path) -> None:
    """Rename ``unfinished`` to ``path``, so that the checkpoint appears at once or not at all."""
    unfinished.rename(path)
    flush_folder(path.parent)
    pointer = path.parent / LATEST
    try:
        write_flushed(pointer, f"{path.name}\n".encode())
        flush_folder(path.parent)
    except OSError as error:  # the checkpoint is there; without the file, its step says so
        log.warning("%s cannot be written (%s)", pointer, error)
        with suppress(OSError):
            pointer.unlink()


def supersede(unfinished: Path, path: Path, step: int, *, removes: bool) -> None:
    """Publish the checkpoint in ``unfinished`` at ``path``, in place of those from ``step`` on.

    A folder at ``path``, and folders of later steps in its parent, belong to an abandoned branch of
    the training. Loading would take them for newer checkpoints, so they are renamed and logged.

    Args:
        unfinished, path: as for ``publish``.
        step: the step of the checkpoint.
        removes: remove the other folders once the checkpoint is published, as in memory.
    """
    moved = {}
    for name, its in numbered_names(path.parent).items():
        if its > step:
            try:
                moved[name] = _put_aside(path.with_name(name), removes=removes)
            except OSError as error:
                log.warning(
                    "%s cannot be renamed (%s); move it away, or loads will take it for newer than "
                    "step %d",
                    path.with_name(name),
                    error,
                    step,
                )
    if os.path.lexists(path):
        moved[path.name] = _put_aside(path, removes=removes)
    publish(unfinished, path)
    if moved:
        names = (
            "removed" if removes else "renamed to " + ", ".join(one.name for one in moved.values())
        )
        log.warning(
            "%s was saved; the folders it replaces, of step %d and later, were %s",
            path,
            step,
            names,
        )
    if removes:
        for one in moved.values():
            if one.is_symlink():
                one.unlink(missing_ok=True)
            else:
                shutil.rmtree(one, ignore_errors=True)


def _put_aside(path: Path, *, removes: bool) -> Path:
    """Rename what is at ``path``, and return its new name."""
    if removes:
        aside = unfinished_at(path)
    else:
        kind = REPLACED if complete(path) else DAMAGED
        aside = path.with_name(f"{path.name}{kind}{uuid.uuid4().hex[:8]}")
    path.rename(aside)
    return aside


def remove(path: Path) -> None:
    """Remove a checkpoint if it is there, or log why not; a link to one stays.

    If this is interrupted, the files that remain count as an unfinished checkpoint.
    """
    if not os.path.lexists(path) or os.path.islink(path):
        return
    try:
        # A name of its own: NFS may keep files of an earlier one that somebody still reads.
        aside = _put_aside(path, removes=True)
    except OSError as error:
        log.warning("%s cannot be removed (%s)", path, error)
    else:
        shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(root: Path) -> None:
    """Remove what jobs that were killed left in ``root``; no job may be saving there."""
    for one in root.glob(f"{UNFINISHED}*"):
        if os.path.isdir(one) and not os.path.islink(one):
            shutil.rmtree(one, ignore_errors=True)
        else:
            with suppress(OSError):
                one.unlink()

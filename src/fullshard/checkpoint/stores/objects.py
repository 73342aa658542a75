"""Checkpoints in object stores appear with their manifests, and make way for others.

s3://bucket/run/
  step-000100/            a checkpoint, if it has a manifest
    manifest.json                         written last
    rank-00000-1f0e66a2b3c4.safetensors   named after the save that wrote it
    rank-00000-0a1b2c3d4e5f.safetensors   in no manifest: of a save that was killed
    replaced-5e6f7a8b.json                the manifest of a checkpoint that made way for another

Objects cannot be renamed, so the names of data files are final. Two saves of one step write files
of different names, and a manifest names files of one save only.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection
from contextlib import suppress

from fullshard.checkpoint.format import (
    ASIDE_OBJECT,
    DATA_OBJECT,
    MANIFEST,
    Manifest,
    ObjectUrl,
    complete,
    numbered_names,
)
from fullshard.errors import CheckpointError

log = logging.getLogger(__name__)


def exists(url: ObjectUrl) -> bool:
    """Return whether there is a checkpoint at ``url``, intact or not."""
    return MANIFEST in url.below()


def check_written(url: ObjectUrl, manifest: bytes) -> None:
    """Check that all files of ``manifest`` are at ``url``, in their sizes.

    Raises:
        CheckpointError: which file is missing or has another size.
    """
    there = url.below()
    for file in Manifest.from_json(manifest).files:
        found = there.get(file.name)
        if found != file.nbytes:
            what = "is not in the store" if found is None else f"has {found} bytes in the store"
            raise CheckpointError(
                f"{url / file.name}: {what}, rank {file.rank} wrote {file.nbytes} bytes; check "
                "that all ranks reach the same store, and that no other job removes objects there"
            )


def supersede(url: ObjectUrl, step: int) -> list[str]:
    """Put aside the checkpoint at ``url``, and those of later steps in the same run.

    They belong to an abandoned branch of the training. The checkpoint at ``url`` stays until its
    manifest is overwritten. Returns the names of the manifests that were put aside.
    """
    moved = []
    for name, its in numbered_names(url.parent).items():
        if its > step:
            try:
                moved += _put_aside(url.parent / name)
            except CheckpointError as error:
                log.warning(
                    "%s cannot be put aside (%s); remove its %s, or loads will take it for newer "
                    "than step %d",
                    url.parent / name,
                    error,
                    MANIFEST,
                    step,
                )
    return moved + _put_aside(url, stays=True)


def _put_aside(url: ObjectUrl, *, stays: bool = False) -> list[str]:
    """Give the manifest at ``url`` another name, if there is one; return it."""
    data = (url / MANIFEST).read_if_there()
    if data is None:
        return []
    kind = "replaced" if complete(url) else "damaged"
    aside = url / f"{kind}-{uuid.uuid4().hex[:8]}.json"
    aside.write(data)
    if not stays:
        (url / MANIFEST).remove()
    return [str(aside)]


def remove(url: ObjectUrl) -> None:
    """Remove a checkpoint, or log why not; checkpoints that were put aside there stay."""
    try:
        data = (url / MANIFEST).read_if_there()
        own: set[str] = set()
        if data is not None:
            with suppress(CheckpointError):
                own = {file.name for file in Manifest.from_json(data).files}
            (url / MANIFEST).remove()
        remove_unfinished_at(url, own)
    except CheckpointError as error:
        log.warning("%s cannot be removed (%s)", url, error)


def remove_unfinished(root: ObjectUrl) -> None:
    """Remove what saves that were killed left in ``root``; no job may be saving there."""
    for name in numbered_names(root):
        try:
            remove_unfinished_at(root / name)
        except CheckpointError as error:
            log.warning("files of unfinished saves cannot be removed (%s)", error)


def remove_unfinished_at(url: ObjectUrl, others: Collection[str] = ()) -> None:
    """Remove data files and ``others`` at ``url``, unless a manifest there names them.

    Raises:
        CheckpointError: the store cannot be reached.
    """
    there = url.below()
    data = {name for name in there if name in others or DATA_OBJECT.fullmatch(name)}
    known = _named_at(url, there) if data else set()
    for name in [] if known is None else data - known:
        (url / name).remove()


def _named_at(url: ObjectUrl, there: Collection[str]) -> set[str] | None:
    """Return the files that manifests at ``url`` name; None if one of these is damaged."""
    named: set[str] = set()
    for name in there:
        if name == MANIFEST or ASIDE_OBJECT.fullmatch(name):
            data = (url / name).read_if_there()
            try:
                named.update(file.name for file in Manifest.from_json(data or b"").files)
            except CheckpointError:
                return None
    return named


def remove_save(url: ObjectUrl, save: str) -> None:
    """Remove the data files that one save wrote to ``url``, as far as the store lets us."""
    with suppress(CheckpointError):
        for name in url.below():
            match = DATA_OBJECT.fullmatch(name)
            if match and match[1] == save:
                with suppress(CheckpointError):
                    (url / name).remove()

"""New checkpoints while they are written: in a folder, in machines' folders, in an object store.

All ranks of a save have a ``SaveTarget``. The first rank begins, and tells the others the name of
the save. Each rank writes its data file. The first rank of each machine seals the files with the
manifest, and then lets the checkpoint appear.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fullshard.checkpoint.format import (
    MANIFEST,
    DataWriter,
    FileInfo,
    ObjectUrl,
    Parts,
    Place,
    committing,
    make_folder,
    publish,
    refuse_name,
    seal,
    supersede,
    unfinished_at,
)
from fullshard.checkpoint.stores import objects
from fullshard.checkpoint.stores.machines import Machines, copy_files
from fullshard.comm.consensus import Consensus
from fullshard.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


class FolderTarget:
    """A new checkpoint folder, of all ranks or of each machine, published by a renaming.

    Args:
        path: the folder, on each of the ``machines``.
        machines: the machine of each rank.
        copies: how many machines have each file; None: one folder is all ranks'.
        replaces: as for ``target_at``.
    """

    def __init__(
        self, path: Path, machines: Machines, copies: int | None, replaces: int | None
    ) -> None:
        self.path = path
        self.machines = machines
        self._copies = copies
        self._replaces = replaces

    def check(self) -> None:
        """Return at once: folders need no package."""

    def begin(self) -> str:
        """Make an unfinished folder; on the first rank. Return the name of the save.

        Raises:
            ConfigError: something is at ``path``.
        """
        refuse_name(self.path)
        if self._replaces is None and self.path.exists():
            raise ConfigError("there is something at this path; a checkpoint needs a new one")
        unfinished = unfinished_at(self.path)
        make_folder(unfinished)
        return unfinished.name

    def file_name(self, save: str, rank: int) -> str:
        """Return the name of the data file of ``rank``."""
        return f"rank-{rank:05d}.safetensors"

    def writer(self, save: str, name: str, parts: Parts) -> DataWriter:
        """Return the new data file of this rank."""
        unfinished = self.path.with_name(save)
        if self.machines.own:
            unfinished.mkdir(exist_ok=True)  # the first rank has made that of its machine
        return DataWriter(unfinished / name, parts)

    def copy(self, consensus: Consensus, save: str, files: Sequence[FileInfo]) -> None:
        """Copy data files to the next machines."""
        copy_files(consensus, self.machines, self._copies or 1, self.path.with_name(save), files)

    def seal(self, save: str, manifest: bytes) -> None:
        """Write the manifest, and flush the folder."""
        seal(self.path.with_name(save), manifest)

    def appear(self, save: str, manifest: bytes) -> None:
        """Let the sealed checkpoint appear, at once or not at all: rename its folder."""
        unfinished, removes = self.path.with_name(save), self._copies is not None
        if self._replaces is None:
            publish(unfinished, self.path)
        else:
            supersede(unfinished, self.path, self._replaces, removes=removes)

    def undo(self, save: str) -> None:
        """Remove the unfinished folder."""
        shutil.rmtree(self.path.with_name(save), ignore_errors=True)


@contextmanager
def _on_first_rank() -> Iterator[None]:
    """Name the rank in the errors of an object store, as a decision does not."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"rank 0: {error}") from error


class ObjectTarget:
    """New objects at a URL, which are a checkpoint once the manifest is there.

    Args:
        path: the URL.
        consensus: of all ranks.
        replaces: as for ``target_at``.
    """

    def __init__(self, path: ObjectUrl, consensus: Consensus, replaces: int | None) -> None:
        self.path = path
        self.machines = Machines.sharing(consensus)
        self._replaces = replaces
        self._may_be_there = False

    def check(self) -> None:
        """Raise ``ConfigError`` if a package for this store is missing."""
        self.path.check()

    def begin(self) -> str:
        """Choose a name for the save, and remove files of killed saves; on the first rank.

        Raises:
            ConfigError: a checkpoint is at the URL.
        """
        refuse_name(self.path)
        with _on_first_rank():
            if self._replaces is None and objects.exists(self.path):
                raise ConfigError("there is a checkpoint at this URL; give a new one")
            objects.remove_unfinished_at(self.path)
        return uuid.uuid4().hex[:12]

    def file_name(self, save: str, rank: int) -> str:
        """Return the name of the data file of ``rank``."""
        return f"rank-{rank:05d}-{save}.safetensors"

    def writer(self, save: str, name: str, parts: Parts) -> DataWriter:
        """Return the new data file of this rank."""
        return DataWriter(self.path / name, parts)

    def copy(self, consensus: Consensus, save: str, files: Sequence[FileInfo]) -> None:
        """Return at once: the store keeps copies of its own."""

    @_on_first_rank()
    def seal(self, save: str, manifest: bytes) -> None:
        """Check that all data files are in the store."""
        objects.check_written(self.path, manifest)

    @_on_first_rank()
    def appear(self, save: str, manifest: bytes) -> None:
        """Write the manifest.

        Raises:
            CheckpointError: the manifest could not be written, or the store does not say whether
                it was; then the data files are left there.
        """
        moved = []
        if self._replaces is not None:
            moved = objects.supersede(self.path, self._replaces)
        elif objects.exists(self.path):
            raise ConfigError("a checkpoint appeared at this URL meanwhile; give a new one")
        own = self.path / MANIFEST
        self._may_be_there = True  # also after an error, which may have lost the answer alone
        try:
            own.write(manifest)
        except CheckpointError as error:
            if own.read_if_there() != manifest:
                raise type(error)(
                    f"{error}. The data files are left in the store, where the next save removes "
                    "them, as the manifest may still appear"
                ) from error
        if moved:
            log.warning(
                "%s was saved; the checkpoints it replaces, of step %d and later, have their "
                "manifests at %s",
                self.path,
                self._replaces,
                ", ".join(moved),
            )

    def undo(self, save: str) -> None:
        """Remove the data files, unless the manifest may be there."""
        if not self._may_be_there:
            objects.remove_save(self.path, save)


SaveTarget = FolderTarget | ObjectTarget
"""The place of a new checkpoint."""


def target_at(
    path: Place,
    consensus: Consensus,
    machines: Machines | None = None,
    *,
    copies: int | None = None,
    replaces: int | None = None,
) -> SaveTarget:
    """Return a new checkpoint at ``path``.

    Args:
        path: its folder or URL.
        consensus: of all ranks.
        machines: of the ranks; None: all see the same folder.
        copies: as for ``Checkpointer``.
        replaces: the step of the checkpoint, which takes the place of those from this step on.
            None: nothing may be at ``path``.
    """
    if isinstance(path, ObjectUrl):
        return ObjectTarget(path, consensus, replaces)
    return FolderTarget(path, machines or Machines.sharing(consensus), copies, replaces)


def exists(path: Place) -> bool:
    """Return whether there is something at ``path``."""
    return objects.exists(path) if isinstance(path, ObjectUrl) else path.exists()


def remove(path: Place) -> None:
    """Remove the checkpoint at ``path``, or log why not."""
    if isinstance(path, ObjectUrl):
        objects.remove(path)
    else:
        committing.remove(path)


def remove_unfinished(root: Place) -> None:
    """Remove what saves that were killed left in ``root``; no job may be saving there."""
    if isinstance(root, ObjectUrl):
        objects.remove_unfinished(root)
    else:
        committing.remove_unfinished(root)

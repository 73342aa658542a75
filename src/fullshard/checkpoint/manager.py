"""The checkpoints of a training loop: when to save, which to keep, from which to go on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fullshard.checkpoint import stores
from fullshard.checkpoint.format import (
    AnyPlace,
    CheckpointInfo,
    Looked,
    Numbered,
    ObjectUrl,
    Place,
    contained,
    in_folder,
    look,
    numbered,
    place_of,
)
from fullshard.checkpoint.loading import load_from
from fullshard.checkpoint.saving import CopyMemory, How, PendingSave, await_save, begin
from fullshard.checkpoint.stores import Machines, lent, target_at
from fullshard.comm.consensus import Consensus
from fullshard.errors import CheckpointError, ConfigError, StorageError

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves every so many steps, keeps the newest checkpoints, and loads the newest intact one.

    All ranks must make the same calls. No other job may save to the folder.

    Args:
        root: the folder of the checkpoints, or a URL of an object store; those of step 100 are in
            ``step-000100``. Other folders there are left alone. All ranks share it, unless
            ``copies`` is given.
        every: save when this divides the step.
        keep: keep this many checkpoints. Only those count that were read back and found intact,
            which happens once before any other is removed. None: remove none.
        copies: each machine has a folder ``root`` of its own, such as one in its memory, in
            ``/dev/shm``. That folder has the files of the machine's ranks. Each file is on so many
            machines, if there are that many. A checkpoint can be loaded while each of its files
            is left on one machine.
        mode, budget_nbytes: as for ``save``. With "async", old checkpoints are also read back and
            removed in the background, and the memory of copies is kept for the next save.
        frozen: whether to save parameters that require no gradient. False leaves them out, for a
            program that reads them elsewhere; loading such a checkpoint does not change them.

    Raises:
        ConfigError: an argument has no meaning.
    """

    def __init__(
        self,
        root: AnyPlace,
        *,
        every: int = 1,
        keep: int | None = None,
        copies: int | None = None,
        mode: str = "sync",
        budget_nbytes: int | None = None,
        frozen: bool = True,
    ) -> None:
        for name, value in {"every": every, "keep": keep, "copies": copies}.items():
            is_default = value is None and name != "every"
            is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if not is_default and not is_count:
                raise ConfigError(f"Checkpointer({name}={value!r}): expected a positive int")
        self.root = place_of(root)
        if copies is not None and not isinstance(self.root, Path):
            raise ConfigError(
                f"Checkpointer({str(self.root)!r}, copies={copies}): copies are for folders in the "
                "memory of machines; leave copies out, as an object store keeps its own"
            )
        memory = CopyMemory(0 if mode == "sync" else budget_nbytes, is_kept=True)
        self._how = How(mode, budget_nbytes, memory, frozen)
        self._how.check()
        self._every = every
        self._keep = keep
        self._copies = copies
        self._is_intact: dict[Place, bool] = {}
        self._is_clean = False
        self._saved: set[Place] = set()  # since the last load

    def path(self, step: int) -> Path | ObjectUrl:
        """Return the folder or URL of the checkpoint of ``step``."""
        return self.root / f"step-{step:06d}"

    def is_due(self, step: int) -> bool:
        """Return whether to save after ``step``."""
        return step % self._every == 0

    def save(
        self, model: nn.Module, optimizer: Optimizer | None = None, extra: Any = None, *, step: int
    ) -> PendingSave:
        """Save as the function ``save`` does, and remove checkpoints that need not be kept.

        Unfinished folders of killed jobs are removed first. Once the new checkpoint is published, a
        checkpoint that had its name, and those of later steps, are renamed; folders of machines are
        removed. An intact checkpoint of this step, saved here since the last ``load``, is a
        ``ConfigError``.
        """
        if step < 0:
            raise ConfigError(f"Checkpointer.save(step={step}): expected 0 or more")
        await_save()
        path = self.path(step)
        consensus = Consensus(f"save to {path}", "save", "a checkpoint")
        _check_alike(consensus, [self])
        folders = self._folders(consensus)
        if not self._is_clean:
            folders.remove_unfinished()
        self._is_clean = False  # a save that fails may leave files in an object store
        is_shared = self._copies is None
        is_there = (path in self._saved or not is_shared) and folders.has(path)
        is_intact = is_there and self._verify(folders, path)
        if is_there and not is_intact and not is_shared:
            folders.remove(path)  # memory may have no room for both
        is_own = is_intact and path in self._saved
        self._is_intact.pop(path, None)
        replaces = None if is_own else step
        target = target_at(
            path, consensus, folders.machines, copies=self._copies, replaces=replaces
        )
        after = partial(self._remove_old, folders, path)
        return begin(
            consensus, target, model, optimizer, extra, step=step, how=self._how, after=after
        )

    def wait(self) -> None:
        """Wait for the last save, which runs in the background if ``mode`` is "async".

        Raises:
            FullshardError: it failed.
        """
        await_save()

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, the newest last.

        A checkpoint is complete if its manifest and all files, in their sizes, are there.
        """
        consensus = Consensus(f"look at {self.root}", "list", "checkpoints")
        _check_alike(consensus, [self])
        return self._folders(consensus).steps()

    def load(
        self, model: nn.Module, optimizer: Optimizer | None = None, *, strict: bool = True
    ) -> CheckpointInfo | None:
        """Load the newest checkpoint that is intact, and return its description.

        The newest is that of the highest step. Damaged ones are passed over, with a warning.

        Returns:
            None if there is no checkpoint, damaged ones included.

        Raises:
            CheckpointError: no checkpoint is intact.
            StorageError: an object store did not answer; no older checkpoint was loaded.
            ConfigError, FailedRankError, LostRankError, ProtocolError: as ``load`` does.
        """
        return load_newest([self], model, optimizer, strict=strict)

    def _folders(self, consensus: Consensus) -> _Folders:
        machines = Machines.sharing(consensus)
        if self._copies is not None and isinstance(self.root, Path):
            machines = Machines.seen(consensus, self.root)
        return _Folders(consensus, machines, self.root)

    def _remove_old(self, folders: _Folders, newest: Place) -> None:
        self._saved.add(newest)
        self._is_clean = True
        if self._keep is None:
            return
        num_intact = 0
        names = dict.fromkeys(one.name for one in reversed(folders.numbered()))
        for path in dict.fromkeys([newest, *(self.root / name for name in names)]):
            if num_intact >= self._keep:
                folders.remove(path)
                self._is_intact.pop(path, None)
            elif self._verify(folders, path):
                num_intact += 1

    def _verify(self, folders: _Folders, path: Place) -> bool:
        """Return whether a checkpoint can be loaded; each rank reads some of its files."""
        if path not in self._is_intact:
            problem = folders.mend(path)
            if problem:
                log.warning("%s is damaged: %s", path, problem)
            self._is_intact[path] = not problem
        return self._is_intact[path]


def load_newest(
    checkpointers: Sequence[Checkpointer],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
) -> CheckpointInfo | None:
    """Load the newest intact checkpoint of several ``checkpointers``.

    For a loop that saves to memory often and to a disk seldom. Returns and raises what
    ``Checkpointer.load`` does. If an object store does not answer, no older checkpoint is loaded.
    """
    await_save()
    consensus = Consensus(
        "load from " + ", ".join(str(one.root) for one in checkpointers), "list", "checkpoints"
    )
    _check_alike(consensus, checkpointers)
    found: list[tuple[Numbered, Place, Machines, bool]] = []
    for one in checkpointers:
        one._saved.clear()  # what is saved again from now on is no mistake
        folders = one._folders(consensus)
        found += [
            (its, one.root / its.name, folders.machines, one._copies is None)
            for its in folders.numbered()
        ]
    failure: CheckpointError | None = None
    for its, path, machines, is_shared in sorted(found, key=lambda one: one[0], reverse=True):
        consensus = Consensus(f"load {path}", "load", "a checkpoint")
        load = partial(load_from, consensus, path=path, model=model, strict=strict)
        try:
            if is_shared or not isinstance(path, Path):
                return load(in_folder(path), optimizer=optimizer)
            load_there = partial(load, optimizer=optimizer)
            return _load_lent(consensus, machines, path, its.digest, load_there)
        except StorageError:
            raise  # the checkpoint may be intact; an older one would lose steps
        except CheckpointError as error:
            log.warning("%s", error)
            failure = error
    if failure is not None:
        raise failure
    return None


def _check_alike(consensus: Consensus, checkpointers: Sequence[Checkpointer]) -> None:
    """Compare what decides which decisions ranks make together.

    Raises:
        ConfigError: on all ranks, if any rank has other options or more checkpointers than rank 0.
    """

    def compare(said: list[str]) -> None:
        for rank, own in enumerate(said):
            if own != said[0]:
                raise ConfigError(
                    f"rank {rank} has {own or 'no Checkpointer'}, rank 0 {said[0] or 'none'}; give "
                    "all ranks the same"
                )

    shown = [f"Checkpointer(keep={one._keep}, copies={one._copies})" for one in checkpointers]
    consensus.agree(lambda: ", ".join(shown), compare)


def _load_lent(
    consensus: Consensus,
    machines: Machines,
    path: Path,
    digest: str,
    load: Callable[..., CheckpointInfo],
) -> CheckpointInfo:
    """Load what machines have; if that fails, once more without the files that are damaged."""
    is_mended = False
    while True:
        try:
            with lent(consensus, machines, path, digest) as (manifest, opened):
                return load(opened, manifest=manifest)
        except CheckpointError:
            if is_mended or _Folders(consensus, machines, path.parent).mend(path):
                raise
            is_mended = True


class _Folders:
    """The place ``root``, or that of each machine, with the decisions of all ranks about it."""

    def __init__(self, consensus: Consensus, machines: Machines, root: Place) -> None:
        self._consensus = consensus
        self.machines = machines
        self._root = root

    def _by_each(self, act: Callable[[], Any]) -> list[Any]:
        """Return what the first ranks of machines got by ``act``, which is in JSON's types."""
        is_first = self.machines.is_first
        said = self._consensus.agree(lambda: [act()] if is_first else [], list)
        return [one for its in said for one in its]

    def remove_unfinished(self) -> None:
        """Remove what jobs that were killed left."""
        self._by_each(lambda: stores.remove_unfinished(self._root))

    def has(self, path: Place) -> bool:
        """Return whether any machine has something at ``path``."""
        return any(self._by_each(lambda: stores.exists(path)))

    def remove(self, path: Place) -> None:
        """Remove a checkpoint."""
        self._by_each(lambda: stores.remove(path))

    def numbered(self) -> list[Numbered]:
        """Return the checkpoints that machines have, complete or not, the newest last."""
        said = self._by_each(lambda: numbered(self._root))
        return sorted({Numbered(*one) for those in said for one in those})

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, the newest last."""
        found: dict[tuple[int, float, str, int], set[int]] = {}
        for those in self._by_each(lambda: contained(self._root)):
            for *its, ranks in those:
                found.setdefault(tuple(its), set()).update(ranks)
        return [its[0] for its, ranks in sorted(found.items()) if len(ranks) == its[3]]

    def mend(self, path: Place) -> str:
        """Return why a checkpoint cannot be loaded, or ""; each rank reads some of its files.

        If it can be, damaged files are removed: machines would read their own ones before others'.
        """

        def decide(said: list[Any]) -> list[Any]:
            looked = [Looked(*one) for one in said]
            intact: dict[tuple[str, int], set[int]] = {}
            for one in looked:
                intact.setdefault((one.digest, one.total), set()).update(one.intact)
            for (digest, total), those in intact.items():
                if digest and len(those) == total:
                    return ["", [one.damaged if one.digest == digest else [] for one in looked]]
            return [next((one.problem for one in looked if one.problem), "it is incomplete"), []]

        first, every = self.machines.share
        look_here = partial(look, path, first=first, every=every)
        problem, damaged = self._consensus.agree(look_here, decide)

        def remove_damaged() -> None:
            for name in damaged[self._consensus.rank]:
                log.warning("%s is damaged; it is read from another machine", path / name)
                if isinstance(path, Path):
                    with suppress(OSError):
                        (path / name).unlink()

        if any(damaged):
            self._consensus.agree(remove_damaged)
        return str(problem)

"""Folders of checkpoints that each machine has for itself, such as one in its memory.

The ranks that see one folder count as one machine; where all ranks share a folder, all are. Each
rank writes its file to the folder of its machine, and the next machines get copies of it, over TCP
(``peers``). To load a checkpoint, ranks open the files on their machine, and read the missing ones
from other machines. So a machine may be lost or be new, as long as each file is left somewhere.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.checkpoint.format import (
    MANIFEST,
    Bytes,
    FileInfo,
    Manifest,
    in_folder,
    present,
)
from fullshard.checkpoint.stores.peers import PeerFile, Server, copy
from fullshard.comm.consensus import Consensus
from fullshard.errors import CheckpointError, ConfigError

_MARK = ".machine"


class Machines(NamedTuple):
    """The machines of a job, numbered in the order of their first ranks.

    Attributes:
        rank: this rank.
        of_ranks: for each rank the number of its machine.
    """

    rank: int
    of_ranks: tuple[int, ...]

    @classmethod
    def sharing(cls, consensus: Consensus) -> Machines:
        """Return one machine: all ranks see the same folder."""
        return cls(consensus.rank, (0,) * consensus.world)

    @classmethod
    def seen(cls, consensus: Consensus, root: Path) -> Machines:
        """Find out which ranks see the same ``root``, which is made if need be; a decision."""
        marks = consensus.agree(lambda: _mark(root), list)
        numbers: dict[str, int] = {}
        return cls(consensus.rank, tuple(numbers.setdefault(one, len(numbers)) for one in marks))

    @property
    def total(self) -> int:
        """The number of machines."""
        return max(self.of_ranks) + 1

    @property
    def own(self) -> int:
        """The number of this rank's machine."""
        return self.of_ranks[self.rank]

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the first one of its machine, which acts on its folder."""
        return self.of_ranks.index(self.own) == self.rank

    def ranks(self, machine: int) -> list[int]:
        """Return the ranks of a machine."""
        return [rank for rank, one in enumerate(self.of_ranks) if one == machine]

    @property
    def share(self) -> tuple[int, int]:
        """This rank's place among those of its machine, and their number."""
        ranks = self.ranks(self.own)
        return ranks.index(self.rank), len(ranks)


def _mark(root: Path) -> str:
    """Return a name that only those who see this folder know; make the folder if need be.

    Raises:
        ConfigError: another user can change the folder.
    """
    root.parent.mkdir(parents=True, exist_ok=True)  # several ranks may do so at once
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)  # others may look into /dev/shm
    # Another user may replace the folder at any time, so the opened folder is checked.
    try:
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        raise _not_own(root, "is a link or a file") from error
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            raise _not_own(root, f"belongs to another user, of uid {status.st_uid}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _not_own(root, f"has mode {stat.S_IMODE(status.st_mode):o}")
        return _mark_in(folder)
    finally:
        os.close(folder)


def _not_own(root: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{root} {why}; expected a folder that only this user can change: remove it, choose "
        "another one, or if it is yours chmod 700 it"
    )


def _mark_in(folder: int) -> str:
    """Return the name that is in the open folder, or put one there."""
    new = f"{_MARK}-{uuid.uuid4().hex}"
    with suppress(FileNotFoundError):
        return _read(_MARK, folder)
    number = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600, dir_fd=folder)
    with os.fdopen(number, "w") as file:
        file.write(uuid.uuid4().hex)
    with suppress(FileExistsError):
        os.link(new, _MARK, src_dir_fd=folder, dst_dir_fd=folder)
    os.unlink(new, dir_fd=folder)
    return _read(_MARK, folder)


def _read(name: str, folder: int) -> str:
    number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    with os.fdopen(number) as file:
        return file.read()


def copy_files(
    consensus: Consensus, machines: Machines, copies: int, folder: Path, files: Sequence[FileInfo]
) -> None:
    """Give copies of the ``files`` in ``folder`` of each machine to the next ones.

    Args:
        consensus: of all ranks; two decisions, or none if there is nothing to copy.
        machines: of the ranks.
        copies: how many machines are to have each file, its own included.
        folder: of the files of this machine's ranks, and of the copies.
        files: of all ranks, in their order.
    """
    if min(copies, machines.total) < 2:
        return
    names = [files[rank].name for rank in machines.ranks(machines.own)]
    with _serving(consensus, machines, folder, names if machines.is_first else []) as addresses:
        first, every = machines.share
        wanted = [
            (machine, number, files[rank])
            for back in range(1, min(copies, machines.total))
            for machine in [(machines.own - back) % machines.total]
            for number, rank in enumerate(machines.ranks(machine))
        ]

        def fetch() -> None:
            for machine, number, info in wanted[first::every]:
                name = f"{info.name} of machine {machine}"
                with closing(PeerFile(addresses[machine], number, name, info.nbytes)) as source:
                    copy(source, folder / info.name)

        consensus.agree(fetch)


@contextmanager
def _serving(
    consensus: Consensus, machines: Machines, folder: Path, names: Sequence[str]
) -> Iterator[dict[int, str]]:
    """Serve files of ``names`` to the others; yields the addresses of the machines that serve."""
    with ExitStack() as opened:

        def serve() -> str | None:
            return opened.enter_context(Server(folder, names)).address if names else None

        said = consensus.agree(serve, list)
        numbers = machines.of_ranks
        yield {numbers[rank]: one for rank, one in enumerate(said) if one is not None}


@contextmanager
def lent(
    consensus: Consensus, machines: Machines, path: Path, digest: str
) -> Iterator[tuple[Manifest, Callable[[FileInfo], Bytes]]]:
    """Yield a checkpoint's manifest, and a function that opens its files on any machine.

    Args:
        consensus: of all ranks; two decisions, and one at the end of the block.
        machines: of the ranks.
        path: the checkpoint's folder on this machine, which may lack it.
        digest: of its manifest; folders with another one are not looked at.

    Raises:
        CheckpointError: some of its files are on no machine.
    """

    def look() -> dict[str, Any] | None:
        with suppress(CheckpointError, OSError):  # another machine may have it intact
            text = (path / MANIFEST).read_bytes() if machines.is_first else b""
            manifest = Manifest.from_json(text)
            if manifest.digest == digest:
                return {
                    "manifest": consensus.share(text.decode()),
                    "files": present(path, manifest),
                }
        return None

    def choose(said: list[dict[str, Any] | None]) -> list[Any]:
        there = {rank: one for rank, one in enumerate(said) if one is not None}
        keys = {one["manifest"] for one in there.values()}
        if not keys:
            raise CheckpointError("its manifest is on no machine any more")
        (key,) = keys
        return [consensus.take(key), {rank: one["files"] for rank, one in there.items()}]

    text, held = consensus.agree(look, choose)
    manifest = Manifest.from_json(text.encode())
    on = {machines.of_ranks[int(rank)]: numbers for rank, numbers in held.items()}
    for info in manifest.files:
        if not any(info.rank in numbers for numbers in on.values()):
            raise CheckpointError(f"{path.name}: {info.name} is on none of the remaining machines")
    own = on.get(machines.own, [])
    is_asked = any(len(on.get(one, ())) < len(manifest.files) for one in range(machines.total))
    names = [manifest.files[one].name for one in own if machines.is_first and is_asked]
    with _serving(consensus, machines, path, names) as addresses:
        here = in_folder(path)

        def opened(info: FileInfo) -> Bytes:
            if info.rank in own:
                return here(info)
            having = [one for one, numbers in on.items() if info.rank in numbers]
            machine = having[machines.rank % len(having)]
            name = f"{info.name} of machine {machine}"
            return PeerFile(addresses[machine], on[machine].index(info.rank), name, info.nbytes)

        yield manifest, opened
        consensus.agree(lambda: None)  # nobody reads any longer

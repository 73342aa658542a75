"""Who trains in the folder of a run: one job at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from fullshard.errors import ConfigError

_UNKNOWN_THERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """Holds a lock on a file until it is closed, or this process ends, however it does.

    The operating system keeps the lock, so that a file which a killed process left behind locks
    nothing. On folders that machines share it holds among them, where the file system has locks.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock of ``path``, and write into the file who has it.

        Raises:
            ConfigError: another process has it, which is named; nothing was changed.
        """
        self._file: TextIO | None = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNKNOWN_THERE:
                print(f"fullshard: note: {path} cannot be locked ({error})", file=sys.stderr)
                return
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self.close()
            raise ConfigError(
                f"{path.parent}: a run is being trained in this folder, by {holder}; wait for its "
                "end, or give another --name or --out"
            ) from error
        self._file.truncate(0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        self._file.write(f"process {os.getpid()} on {socket.gethostname()} since {since}\n")
        self._file.flush()

    def close(self) -> None:
        """Let others have it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

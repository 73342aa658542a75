"""A lock that lets only one job at a time train in the folder of a run."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
import time
from pathlib import Path
from typing import Self, TextIO

from fullshard.errors import ConfigError

_UNKNOWN_THERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """A file lock that is held until it is closed or this process ends, in whatever way.

    The operating system keeps the lock, so a file left behind by a killed process locks nothing. In
    a folder that machines share, the lock holds across machines if the file system supports locks.
    """

    def __init__(self, path: Path) -> None:
        """Lock ``path`` and write into the file which process holds the lock.

        Raises:
            ConfigError: another process, named in the message, holds it; nothing was changed.
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
        """Release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

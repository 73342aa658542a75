"""The command as users start it, on a little text."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fullshard.train.run.folder import RunDir
from fullshard.train.run.metrics import read_metrics

TIMEOUT_S = 300.0  # a start takes ten seconds
COMMAND = ("-m", "fullshard.cli", "train")
FROM_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

Job = subprocess.Popen[str]


def torchrun(nproc: int) -> tuple[str, ...]:
    """Return the arguments that start ``nproc`` workers under torchrun."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}")
    return (*launcher, "-m", "fullshard.train")


@dataclass(frozen=True)
class Outcome:
    """The exit code and output of a command."""

    exitcode: int
    out: str
    err: str


@dataclass(frozen=True)
class Shell:
    """A folder in which the command runs."""

    folder: Path

    @classmethod
    def with_a_little_text(cls, folder: Path) -> Shell:
        """Write 20 files into ``folder/text``."""
        for number in range(20):
            lines = [f"def square_{n}(x):\n    return x * {n * number}\n" for n in range(100)]
            path = folder / "text" / f"file{number}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join(lines))
        return cls(folder)

    @contextmanager
    def started(self, *options: str, program: tuple[str, ...] = COMMAND) -> Iterator[Job]:
        """Start the command and yield it; at the end, terminate it with its workers."""
        fonts = Path.home() / ".cache" / "matplotlib"  # a new index of fonts takes ten seconds
        environment = {key: v for key, v in os.environ.items() if key not in FROM_A_LAUNCHER}
        environment |= {
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", str(fonts)),
            "OMP_NUM_THREADS": "1",
        }
        job = subprocess.Popen(
            [sys.executable, *program, *options],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield job
        finally:
            job.terminate()  # the launcher ends its workers
            job.communicate(timeout=TIMEOUT_S)

    def end_of(self, job: Job) -> Outcome:
        """Wait for the end; fail the test after ``TIMEOUT_S``."""
        try:
            out, err = job.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            job.terminate()
            out, err = job.communicate(timeout=TIMEOUT_S)
            pytest.fail(f"no end after {TIMEOUT_S} s\n{out}\n{err}")
        return Outcome(job.returncode, out, err)

    def train(self, *options: str, program: tuple[str, ...] = COMMAND) -> Outcome:
        """Run the command to its end."""
        with self.started(*options, program=program) as job:
            return self.end_of(job)

    def wait_for(self, path: Path) -> None:
        """Wait until a running command has made ``path``."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not path.exists():
            if time.monotonic() > deadline_s:
                pytest.fail(f"{path} was not made in {TIMEOUT_S} s")
            time.sleep(0.01)

    def metrics(self, run: str) -> list[dict[str, Any]]:
        return read_metrics(RunDir(self.folder / run).metrics)


def children_of(pid: int) -> list[int]:
    """Return the Python processes that ``pid`` started, according to ``ps``."""
    table = _ps("-A", "-o", "pid=,ppid=,comm=")
    rows = [line.split(maxsplit=2) for line in table.splitlines()]
    return [int(own) for own, parent, name in rows if int(parent) == pid and "ython" in name]


def is_alive(pid: int) -> bool:
    """Return True if the process runs; False for a zombie."""
    state = _ps("-o", "stat=", "-p", str(pid)).strip()
    return bool(state) and not state.startswith("Z")


def _ps(*options: str) -> str:
    return subprocess.run(["ps", *options], capture_output=True, text=True).stdout


LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF0000" + "0100007F"}
"""Loopback addresses in the form of ``listening``."""


def listening(pids: Iterable[int]) -> set[str]:
    """Return the addresses, as Linux writes them, on which these processes listen over TCP."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                sockets.add(os.readlink(link))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in sockets:
                found.add(address.partition(":")[0])
    return found

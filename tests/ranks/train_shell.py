"""The command, started as users start it, on one little text."""

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

TIMEOUT_S = 300.0  # a start takes about ten seconds
COMMAND = ("-m", "fullshard.cli", "train")
FROM_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")

Job = subprocess.Popen[str]


def torchrun(nproc: int) -> tuple[str, ...]:
    """The program that starts ``nproc`` workers under torchrun."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}")
    return (*launcher, "-m", "fullshard.train")


@dataclass(frozen=True)
class Outcome:
    """What a command said."""

    exitcode: int
    out: str
    err: str


@dataclass(frozen=True)
class Shell:
    """Runs the command in ``folder``."""

    folder: Path

    @classmethod
    def with_a_little_text(cls, folder: Path) -> Shell:
        """Writes 20 files into ``folder/text``."""
        for number in range(20):
            lines = [f"def square_{n}(x):\n    return x * {n * number}\n" for n in range(100)]
            path = folder / "text" / f"file{number}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text("\n".join(lines))
        return cls(folder)

    @contextmanager
    def started(self, *options: str, program: tuple[str, ...] = COMMAND) -> Iterator[Job]:
        """The running command; what is left of it at the end is ended with its workers."""
        fonts = Path.home() / ".cache" / "matplotlib"  # a new index of fonts costs ten seconds
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
            job.terminate()  # the launcher takes its workers with it
            job.communicate(timeout=TIMEOUT_S)

    def end_of(self, job: Job) -> Outcome:
        """Waits for the end; fails the test after ``TIMEOUT_S``."""
        try:
            out, err = job.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            job.terminate()
            out, err = job.communicate(timeout=TIMEOUT_S)
            pytest.fail(f"no end after {TIMEOUT_S} s\n{out}\n{err}")
        return Outcome(job.returncode, out, err)

    def train(self, *options: str, program: tuple[str, ...] = COMMAND) -> Outcome:
        """Runs the command to its end."""
        with self.started(*options, program=program) as job:
            return self.end_of(job)

    def wait_for(self, path: Path) -> None:
        """Waits until a running command has made ``path``."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not path.exists():
            if time.monotonic() > deadline_s:
                pytest.fail(f"{path} was not made in {TIMEOUT_S} s")
            time.sleep(0.01)

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """The records of a run."""
        return read_metrics(RunDir(self.folder / run).metrics)


def children_of(pid: int) -> list[int]:
    """The processes that ``pid`` started, as ``ps`` knows them."""
    table = _ps("-A", "-o", "pid=,ppid=,comm=")
    rows = [line.split(maxsplit=2) for line in table.splitlines()]
    return [int(own) for own, parent, name in rows if int(parent) == pid and "ython" in name]


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended and waits for its parent does not."""
    state = _ps("-o", "stat=", "-p", str(pid)).strip()
    return bool(state) and not state.startswith("Z")


def _ps(*options: str) -> str:
    return subprocess.run(["ps", *options], capture_output=True, text=True).stdout


LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF0000" + "0100007F"}
"""As ``listening`` returns it."""


def listening(pids: Iterable[int]) -> set[str]:
    """The addresses, as Linux writes them, on which these processes wait for TCP connections."""
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

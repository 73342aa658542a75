"""Kills jobs at random moments, and checks what they left behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fullshard import checkpoint
from tests.faults.jobs import context
from tests.faults.worker import KEEP, LAYOUTS, work

WORLD = 2
STEPS = 12
_END_S = 60.0  # a job must end by itself so soon after one of its ranks was killed
_DISK_S = 600.0


class Failed(AssertionError):
    """A job lost something, or did not end."""


@dataclass
class Killer:
    """Starts jobs and kills them.

    Attributes:
        seed: what is killed, and when.
        kills: how many were killed, by what was killed and what the job was doing.
    """

    seed: int
    kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._expected = ""

    def run(self, kills: int, tell: Any = None) -> None:
        """Kill ``kills`` times, in as many trainings as that takes.

        Raises:
            Failed: what was wrong; the folder is kept.
        """
        self._expected = self._train(0)
        while self.kills.total() < kills:
            found = self._train(kills)
            if found != self._expected:
                raise Failed(f"final weights {found}, expected {self._expected}")
            if tell is not None:
                tell(self)

    def _train(self, kills: int) -> str:
        """Train in a new folder, killed until ``kills`` are reached; return the final digest."""
        root = Path(tempfile.mkdtemp(prefix="faults-"))
        for attempt in range(10_000):
            may_kill = self.kills.total() < kills
            done = self._attempt(root, attempt, may_kill=may_kill)
            if done:
                shutil.rmtree(root)
                return done
        raise Failed(f"{root}: no end")

    def _attempt(self, root: Path, attempt: int, *, may_kill: bool) -> str:
        """Start a job and let it end or kill it; return the digest if it was done."""
        newest = _newest(root)
        before = _lines(root)
        for mark in root.glob("joined-*"):
            mark.unlink()
        layout = self._random.choice([*LAYOUTS])
        # Not a FileStore: one who is killed while writing to it leaves half a record, on which all
        # others hang. As with torchrun, the store is kept by a process that lives.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        jobs = [
            context.Process(target=work, args=(rank, WORLD, str(root), store.port, layout, STEPS))
            for rank in range(WORLD)
        ]
        for job in jobs:
            job.start()
        killed = self._kill(root, jobs, before) if may_kill else ""
        self._wait(root, jobs, killed)
        new = _lines(root)[len(before) :]
        loaded = [int(line.split()[1]) for line in new if line.startswith("loaded")]
        if loaded and loaded[0] != newest:
            raise Failed(f"{root}: started from step {loaded[0]}, step {newest} was committed")
        done = [line.split()[1] for line in new if line.startswith("done")]
        if not killed and not done:
            raise Failed(f"{root}: attempt {attempt} ended by itself: {new[-1:]}")
        if killed:
            doing = new[-1].split()[0] if new else "starting"
            self.kills[f"{killed} while {doing}"] += 1
        self._check(root, new)
        return done[0] if done else ""

    def _kill(self, root: Path, jobs: list[Any], before: list[str]) -> str:
        """Kill one rank or all; return which, or nothing if the job was faster."""
        one = self._random.random() < 0.5
        victims = [self._random.choice(jobs)] if one else jobs
        if self._random.random() < 0.8:  # during a save, at any of its moments
            number = self._random.randint(1, STEPS)
            wanted = len(before) + 2 * number
            delay_s = self._random.uniform(0, 0.08)
        else:
            wanted = len(before)
            delay_s = self._random.uniform(0, 2)
        while len(_lines(root)) < wanted and all(job.is_alive() for job in jobs):
            time.sleep(0.001)
        time.sleep(delay_s)
        if not any(victim.is_alive() for victim in victims):
            return ""
        for victim in victims:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(victim.pid, signal.SIGKILL)
        for victim in victims:
            victim.join(_DISK_S)
        return "one" if one else "all"

    def _wait(self, root: Path, jobs: list[Any], killed: str) -> None:
        """Wait for the end of a job.

        PyTorch's ``init_process_group`` may wait for a rank that was killed, for minutes; who hangs
        there is ended. So is who was killed, by a kernel that may have to wait for the disk.
        """
        deadline_s = time.monotonic() + _END_S
        for job in jobs:
            job.join(max(deadline_s - time.monotonic(), 0))
        hanging = {rank: job for rank, job in enumerate(jobs) if job.is_alive()}
        does = {rank: _does(job.pid) for rank, job in hanging.items()}
        joined = [rank for rank in hanging if (root / f"joined-{rank}").exists()]
        for job in hanging.values():
            with suppress(ProcessLookupError):
                os.kill(job.pid, signal.SIGABRT)  # they write their stacks to errors-RANK
            job.join(5)
            job.kill()
            job.join()
        if joined:
            raise Failed(f"{root}: {killed or 'none'} killed, did not end in {_END_S} s: {does}")

    def _check(self, root: Path, new: list[str]) -> None:
        """Check that everything that was saved, or its successors, can be read."""
        newest = _newest(root)
        saved = [int(line.split()[1]) for line in new if line.startswith("saved")]
        if saved and newest < saved[-1]:
            raise Failed(f"{root}: step {saved[-1]} was saved, {newest} is the newest")
        complete = checkpoint.list_checkpoints(root / "checkpoints")
        for info in complete:
            checkpoint.verify(info.path)
        if newest >= KEEP and len(complete) < KEEP:
            raise Failed(f"{root}: {len(complete)} checkpoints are left of {KEEP}")


def _does(pid: int) -> str:
    """Return what the threads of a process do, as the kernel says."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            state = next(
                line for line in (task / "status").read_text().splitlines() if "State" in line
            )
            found.append(f"{state.split()[1]} {(task / 'wchan').read_text()}")
    return ", ".join(found)


def _newest(root: Path) -> int:
    path = checkpoint.latest(root / "checkpoints")
    return checkpoint.inspect(path).step if path is not None else 0


def _lines(root: Path) -> list[str]:
    """Return what the first rank has told, in all attempts."""
    try:
        return (root / "log-0").read_text().splitlines()
    except FileNotFoundError:
        return []

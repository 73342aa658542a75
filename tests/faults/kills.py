"""Kills jobs at random moments, and checks the checkpoints that they leave."""

from __future__ import annotations

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

from fullshard import checkpoint
from tests.faults.jobs import Ranks
from tests.faults.strike import notes_of
from tests.faults.worker import KEEP, LAYOUTS, Training, work

_END_S = 60.0  # time limit for the other ranks of a job after one was killed
_DISK_S = 600.0


class Failed(AssertionError):
    """A job lost a saved step, or did not end."""


@dataclass
class Killer:
    """Starts jobs and kills them.

    Attributes:
        seed: determines the ranks that are killed, and the moments.
        kills: number of kills, by victims ("one" or "all") and by the job's last note.
    """

    seed: int
    kills: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._expected = ""

    def run(self, kills: int, tell: Any = None) -> None:
        """Kill ``kills`` times, in as many trainings as that takes.

        Raises:
            Failed: describes the problem; the folder of the job is kept.
        """
        self._expected = self._train(0)
        while self.kills.total() < kills:
            found = self._train(kills)
            if found != self._expected:
                raise Failed(f"final weights {found}, expected {self._expected}")
            if tell is not None:
                tell(self)

    def _train(self, kills: int) -> str:
        """Train in a new folder until ``kills`` are reached; return the digest of the weights."""
        root = Path(tempfile.mkdtemp(prefix="faults-"))
        for attempt in range(10_000):
            may_kill = self.kills.total() < kills
            done = self._attempt(root, attempt, may_kill=may_kill)
            if done:
                shutil.rmtree(root)
                return done
        raise Failed(f"{root}: no end")

    def _attempt(self, root: Path, attempt: int, *, may_kill: bool) -> str:
        """Start a job, kill it or let it end; return the digest of the weights if it finished."""
        newest = _newest(root)
        folder = root / f"attempt-{attempt}"
        folder.mkdir()
        job = Training(self._random.choice([*LAYOUTS]))
        ranks = Ranks(work, job, folder)
        killed = self._kill(folder, job, ranks) if may_kill else ""
        self._wait(folder, ranks, killed)
        told = _told(folder)
        for note in told:
            if note["what"] == "loaded" and note["step"] != newest:
                raise Failed(f"{root}: started from step {note['step']}, {newest} was committed")
        done: str = next((note["digest"] for note in told if note["what"] == "done"), "")
        if not killed and not done:
            raise Failed(f"{root}: attempt {attempt} ended by itself: {told[-1:]}")
        if killed:
            doing = told[-1]["what"] if told else "starting"
            self.kills[f"{killed} while {doing}"] += 1
        self._check(root, told)
        return done

    def _kill(self, folder: Path, job: Training, ranks: Ranks) -> str:
        """Kill one rank or all; return "one" or "all", or "" if the job ended first."""
        one = self._random.random() < 0.5
        victims = {self._random.randrange(job.world)} if one else set(range(job.world))
        if self._random.random() < 0.8:  # at any moment of a save
            wanted = 2 * self._random.randint(1, job.steps)  # two notes a step follow "loaded"
            delay_s = self._random.uniform(0, 0.08)
        else:
            wanted = 0
            delay_s = self._random.uniform(0, 2)
        while len(_told(folder)) < wanted and len(ranks.alive()) == job.world:
            time.sleep(0.001)
        time.sleep(delay_s)
        if not victims & ranks.alive():
            return ""
        for victim in victims:
            ranks.send(victim, signal.SIGKILL)
        for victim in victims:
            ranks.processes[victim].join(_DISK_S)
        return "one" if one else "all"

    def _wait(self, folder: Path, ranks: Ranks, killed: str) -> None:
        """Wait for the end of a job.

        PyTorch's ``init_process_group`` may wait for minutes for a killed rank; a rank that hangs
        there is aborted. A killed rank may itself end late, while the kernel waits for the disk.
        """
        deadline_s = time.monotonic() + _END_S
        for one in ranks.processes:
            one.join(max(deadline_s - time.monotonic(), 0))
        hanging = ranks.alive()
        does = {rank: _does(ranks.processes[rank].pid) for rank in hanging}
        for rank in hanging:
            ranks.abort(rank)  # the rank writes its stacks to printed-RANK
        notes = [note for rank in hanging for note in notes_of(folder, rank)]
        if any(note["what"] == "joined" for note in notes):
            raise Failed(f"{folder}: {killed or 'none'} killed, did not end in {_END_S} s: {does}")

    def _check(self, root: Path, told: list[dict[str, Any]]) -> None:
        """Check that every saved checkpoint, or a newer one, can be read."""
        newest = _newest(root)
        saved = [note["step"] for note in told if note["what"] == "saved"]
        if saved and newest < saved[-1]:
            raise Failed(f"{root}: step {saved[-1]} was saved, {newest} is the newest")
        complete = checkpoint.list_checkpoints(root / "checkpoints")
        for info in complete:
            checkpoint.verify(info.path)
        if newest >= KEEP and len(complete) < KEEP:
            raise Failed(f"{root}: {len(complete)} checkpoints are left of {KEEP}")


def _does(pid: int) -> str:
    """Return the state of each thread of a process, as the kernel reports it."""
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


def _told(folder: Path) -> list[dict[str, Any]]:
    """Return the first rank's diary of an attempt, without logs and joining."""
    return [note for note in notes_of(folder, 0) if note["what"] not in ("log", "joined")]

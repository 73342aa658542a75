"""Runs jobs to which a fault happens, and takes down how each rank ended."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.faults.rank import GLOO_TIMEOUT_S, Job, work
from tests.faults.rows import What
from tests.faults.strike import fault_s, notes_of

START_S = 60.0
"""So long a job may take until its fault, on a loaded machine."""
LIMIT_S = GLOO_TIMEOUT_S + 15.0
"""So long after the fault all ranks must have ended, some of them by gloo's time-out."""
_POLL_S = 0.01

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.faults.rank", "tests.faults.worker"])


class Ranks:
    """The processes of a job; as with torchrun, their store is kept by a process that lives."""

    def __init__(self, work: Callable[..., None], job: Any, folder: Path) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        self.processes: list[Any] = [
            context.Process(target=work, args=(job, rank, str(folder), port))
            for rank in range(job.world)
        ]
        for one in self.processes:
            one.start()

    def alive(self) -> set[int]:
        return {rank for rank, one in enumerate(self.processes) if one.is_alive()}

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to a rank, which may just have ended."""
        with suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid, number)

    def abort(self, rank: int) -> None:
        """End a rank, which prints its stacks."""
        self.send(rank, signal.SIGABRT)
        self.processes[rank].join(2)
        self.kill(rank)

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join()


@dataclass(frozen=True)
class Ending:
    """How a rank ended.

    Attributes:
        kind: the class of its exception; a signal, one that stopped it too; "exit N"; "hang"; empty
            for a normal end.
        text: its exception's, or all that it printed where a signal ended it.
        logs: what fullshard told it since the fault, each a level and a text. On a loaded machine
            a rank may be late before.
        after_s: seconds from the fault to its end, or None.
        told_s: seconds from the fault to the first log, or exception that its loop caught, or None.
        caught: the exceptions that its loop caught.
    """

    kind: str
    text: str
    logs: tuple[tuple[str, str], ...] = ()
    after_s: float | None = None
    told_s: float | None = None
    caught: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Result:
    """What came of a job: the ending of each rank, and its weights where it was asked for them."""

    job: Job
    endings: tuple[Ending, ...]
    weights: tuple[Tensor, ...] = ()
    complaint: str = ""
    """What ``look`` of ``run`` found wrong with what the job has left."""


def run(job: Job, look: Callable[[Path], str] = lambda _: "") -> Result:
    """Run a job to its end, or end it; nothing of it is left.

    Args:
        look: looks at the folder of the job, returns what is wrong.
    """
    folder = Path(tempfile.mkdtemp(prefix="fault-"))
    ranks = Ranks(work, job, folder)
    gone_s = _wait(job, ranks, folder)
    endings = tuple(
        _ending(job, folder, rank, one.exitcode, gone_s.get(rank))
        for rank, one in enumerate(ranks.processes)
    )
    weights = tuple(
        torch.load(path)
        for path in (folder / f"weights-{rank}.pt" for rank in range(job.world))
        if path.exists()
    )
    complaint = look(folder)
    shutil.rmtree(folder)
    return Result(job, endings, weights, complaint)


def _wait(job: Job, ranks: Ranks, folder: Path) -> dict[int, float]:
    """Wait until all ranks ended that can, end the others; return when each was seen to be gone."""
    start_s, gone_s = time.monotonic(), dict[int, float]()
    everyone = set(range(job.world))
    stopped = {job.victim} if job.fault.what is What.STOP else set()
    limit_s = LIMIT_S + (job.fault.stall_s if job.fault.what is What.STALL else 0)
    deadline_s = start_s + START_S
    is_struck = False
    while time.monotonic() < deadline_s and everyone - gone_s.keys() - stopped:
        time.sleep(_POLL_S)
        for rank in everyone - ranks.alive():
            gone_s.setdefault(rank, time.monotonic())
        if not is_struck and (struck_s := fault_s(folder, job.world)) is not None:
            is_struck, deadline_s = True, struck_s + limit_s
    for rank in everyone:
        if rank in gone_s or rank in stopped:
            ranks.kill(rank)
        else:
            ranks.abort(rank)
    return gone_s


def _ending(job: Job, folder: Path, rank: int, code: int, gone_s: float | None) -> Ending:
    """Return how a rank ended, from its diary, its exit code, and when it was seen to be gone."""
    notes = notes_of(folder, rank)
    last = next((note for note in notes if note["what"] == "ended"), None)
    printed = (folder / f"printed-{rank}").read_text(errors="replace")
    if gone_s is None and rank == job.victim and job.fault.what is What.STOP:
        kind, text = "SIGSTOP", printed
    elif gone_s is None:
        raised = f"after {last['kind'] or 'its end'}: {last['text']}\n" if last else ""
        kind, text = "hang", raised + printed
    elif code < 0:
        kind, text = signal.Signals(-code).name, printed
    elif last is None:
        kind, text = f"exit {code}", printed
    else:
        kind, text = last["kind"], last["text"]
    struck_s = fault_s(folder, job.world)
    logs = [
        note
        for note in notes
        if note["what"] == "log" and (struck_s is None or note["at_s"] >= struck_s)
    ]
    caught = [note for note in notes if note["what"] == "caught"]
    told_s = min((note["at_s"] for note in (*logs, *caught)), default=None)
    end_s = last["at_s"] if last else gone_s

    def since(at_s: float | None) -> float | None:
        return None if at_s is None or struck_s is None else at_s - struck_s

    return Ending(
        kind,
        text,
        tuple((note["level"], note["text"]) for note in logs),
        since(end_s),
        since(told_s),
        tuple((note["kind"], note["text"]) for note in caught),
    )

"""Runs a job with a fault, and records how each rank ended."""

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
"""Time limit from the start of a job to its fault, on a loaded machine."""
LIMIT_S = GLOO_TIMEOUT_S + 15.0
"""Time limit from the fault to the end of all ranks, some of which end by gloo's time-out."""
_POLL_S = 0.01

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.faults.rank", "tests.faults.worker"])


class Ranks:
    """The processes of a job. As with torchrun, the parent keeps their store and survives them."""

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
        """Send a signal to a rank, which may have ended already."""
        with suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid, number)

    def abort(self, rank: int) -> None:
        """End a rank with SIGABRT, so that it prints its stacks; kill it if that takes too long."""
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
        kind: the class of its exception; the name of the signal that ended or stopped it; "exit N";
            "hang"; empty for a normal end.
        text: the text of its exception, or its complete output if a signal ended it.
        logs: level and text of fullshard's log records since the fault. Before the fault a rank may
            be reported as late, on a loaded machine.
        after_s: seconds from the fault to its end, or None.
        told_s: seconds from the fault to the first log record, or to the first exception that its
            loop caught, or None.
        caught: class and text of the exceptions that its loop caught.
    """

    kind: str
    text: str
    logs: tuple[tuple[str, str], ...] = ()
    after_s: float | None = None
    told_s: float | None = None
    caught: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Result:
    """How each rank of a job ended, and its final weights if the job writes them."""

    job: Job
    endings: tuple[Ending, ...]
    weights: tuple[Tensor, ...] = ()
    complaint: str = ""
    """The problem that ``look`` found in the files of the job; empty if none."""


def run(job: Job, look: Callable[[Path], str] = lambda _: "") -> Result:
    """Run a job to its end, or kill it after the time limit; delete its files.

    Args:
        look: gets the folder of the job, and returns the problem that it finds there, or "".
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
    """Wait for the ranks, then abort those that hang; return the time at which each rank ended."""
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
    """Return how a rank ended, from its diary, its exit code, and the time of its end."""
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

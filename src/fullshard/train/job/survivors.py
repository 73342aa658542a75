"""A launcher that keeps the remaining workers running after it loses others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

_POLL_S = 0.1
_Worker = subprocess.Popen[bytes]


def run_survivors(nproc: int, folder: Path, *arguments: str) -> None:
    """Run ``nproc`` times ``python ARGUMENTS``, and wait until all have ended.

    The store must outlive each worker. Workers write their errors into ``folder``. A lost worker
    is reported, and the other workers keep running.

    Raises:
        ChildFailedError: all workers failed.
        SignalException: SIGTERM or SIGINT came; the workers get the signal too.
    """
    workers: list[_Worker] = []
    with _handing_on(workers) as got:
        for rank in range(nproc):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(nproc),
                "LOCAL_WORLD_SIZE": str(nproc),
                "TORCHELASTIC_ERROR_FILE": str(_error_file(folder, rank)),
            }
            workers.append(subprocess.Popen([sys.executable, *arguments], env=environment))
        _wait(workers)
    if got:
        raise SignalException("interrupted", signal.Signals(got[0]))
    failures = {
        rank: ProcessFailure(rank, one.pid, one.returncode, str(_error_file(folder, rank)))
        for rank, one in enumerate(workers)
        if one.returncode
    }
    if len(failures) == nproc:
        # A killed worker wrote no record; the records of the others say why they could not go on.
        recorded = {rank: one for rank, one in failures.items() if Path(one.error_file).exists()}
        raise ChildFailedError("fullshard train", recorded or failures)


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"error-{rank}.json"


def _wait(workers: Sequence[_Worker]) -> None:
    running = dict(enumerate(workers))
    while running:
        time.sleep(_POLL_S)
        for rank in [rank for rank, one in running.items() if one.poll() is not None]:
            code = running.pop(rank).returncode
            if code < 0 and running:
                name = signal.Signals(-code).name
                print(f"fullshard: worker {rank} was ended by {name}", file=sys.stderr)


@contextmanager
def _handing_on(workers: Sequence[_Worker]) -> Iterator[list[int]]:
    """Forward SIGTERM and SIGINT to ``workers``; yield the list of received signals."""
    got: list[int] = []

    def hand_on(number: int, _: FrameType | None) -> None:
        got.append(number)
        for one in workers:
            one.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

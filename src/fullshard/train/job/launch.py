"""The launcher: starts the workers of a job on this machine and explains a failure once."""

from __future__ import annotations

import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fullshard.train.config import TrainConfig
from fullshard.train.job.prepare import prepare
from fullshard.train.run import RunDir, handling, say
from fullshard.train.world import JOINED, LAUNCHER, LOOPBACK, STORE, TCP, check_gpus

_POLL_S = 0.1
_GRACE_S = 30.0  # time that workers of a failed or interrupted job have to end by themselves
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_Worker = subprocess.Popen[bytes]


def default_nproc() -> int:
    """Return the number of GPUs, or 2 on CPU."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def launch(config: TrainConfig) -> int:
    """Train with ``config.nproc`` local workers, report a failure and return the exit code.

    Raises:
        ConfigError: an option cannot work; raised before any worker starts.
    """
    check_gpus(config.nproc)
    run = RunDir(Path(config.out))
    job = "-m", "fullshard.train.job", str(run.config)
    with prepare(config, num_workers=config.nproc):
        try:
            start_workers(config.nproc, *job, keeps_going=config.min_workers is not None)
        except ChildFailedError as error:
            return _explain(error.failures, config, run)
        except (SignalException, KeyboardInterrupt) as error:
            say(f"\nfullshard: interrupted; {_how_to_go_on(config, run)}", sys.stderr)
            return 128 + getattr(error, "sigval", signal.SIGINT)
        finally:
            Console().show_cursor()  # a worker that died may have left the cursor hidden
    return 0


def start_workers(nproc: int, *arguments: str, keeps_going: bool = False) -> None:
    """Run ``nproc`` times ``python ARGUMENTS`` on this machine, and wait until all have ended.

    If a worker fails, the other workers are ended. If the job ``keeps_going``, and all workers have
    met, the lost worker is reported, and the other workers keep running. Stores unpickle what they
    receive, so workers meet in a private file, or at a store on loopback.

    Raises:
        ChildFailedError: a worker failed; all workers failed if the job ``keeps_going``.
        SignalException: a signal that ends the job came; the workers got it too.
    """
    workers: list[_Worker] = []
    store = _kept_store() if keeps_going else None
    with tempfile.TemporaryDirectory(prefix="fullshard-") as folder, _handing_on(workers) as got:
        place = f"{folder}/store" if store is None else f"{TCP}{store.port}"
        common = _environment(nproc) | {STORE: place}
        errors = [f"{folder}/error-{rank}.json" for rank in range(nproc)]
        for rank, error_file in enumerate(errors):
            own = {
                "RANK": f"{rank}",
                "LOCAL_RANK": f"{rank}",
                "TORCHELASTIC_ERROR_FILE": error_file,
            }
            workers.append(subprocess.Popen([sys.executable, *arguments], env=common | own))
        ended = _wait(workers, got, keeps_going=lambda: store is not None and store.check([JOINED]))
        if got:
            raise SignalException("interrupted", signal.Signals(got[0]))
        failures = {
            rank: ProcessFailure(rank, one.pid, one.returncode, errors[rank])
            for rank, one in enumerate(workers)
            if one.returncode
        }
        if not failures or (keeps_going and len(failures) < nproc):
            return
        for rank in ended:  # by a signal of this process; one that failed before has a record
            if rank in failures and failures[rank].exitcode < 0:
                del failures[rank]
        if keeps_going:
            # A killed worker wrote no record; those of the others say why they could not go on.
            recorded = {rank: one for rank, one in failures.items() if Path(errors[rank]).exists()}
            failures = recorded or failures
        raise ChildFailedError("fullshard train", failures)


def _environment(nproc: int) -> dict[str, str]:
    """Return the environment of ``nproc`` workers of this machine, which divide its cores.

    All workers are on this machine, so gloo and NCCL use loopback only.
    """
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    affinity = getattr(os, "sched_getaffinity", None)
    num_cores = (os.cpu_count() or 1) if affinity is None else len(affinity(0))
    return {
        "OMP_NUM_THREADS": str(max(1, num_cores // nproc)),
        **(loopback if sys.platform == "linux" else {}),
        **os.environ,
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        LAUNCHER: str(os.getpid()),
    }


def _kept_store() -> dist.TCPStore:
    """Return a TCP store on loopback that this process runs, for workers that may be killed.

    In a file store, a worker killed during a write leaves half a record, which hangs all others.
    """
    with socket.socket() as listening:
        listening.bind((LOOPBACK, 0))
        listening.listen()
        port = listening.getsockname()[1]
        return dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False,
            master_listen_fd=listening.detach(),  # else it would listen to the network
        )  # fmt: skip


@contextmanager
def _handing_on(workers: Sequence[_Worker]) -> Iterator[list[int]]:
    """Forward signals that end a job to ``workers``; yield the list of received signals.

    No worker outlives the block.
    """
    got: list[int] = []

    def hand_on(number: int, _: FrameType | None) -> None:
        got.append(number)
        for one in workers:
            one.send_signal(number)

    try:
        with handling(_SIGNALS, hand_on):
            yield got
    finally:
        for one in workers:
            if one.poll() is None:  # only after an error here
                one.kill()


def _wait(
    workers: Sequence[_Worker], got: Sequence[int], *, keeps_going: Callable[[], bool]
) -> set[int]:
    """Wait for all workers, and return the ranks of those that this function ended.

    It ends all that run some time after a signal, and, unless ``keeps_going()``, after a failure.

    ``got`` are the signals that workers got from this process.
    """
    running = dict(enumerate(workers))
    ended_here: set[int] = set()
    kill_s = math.inf
    while running:
        time.sleep(_POLL_S)
        ended = {rank: one.poll() for rank, one in running.items()}
        for rank, code in ended.items():
            if code is None:
                continue
            del running[rank]
            if code < 0 and running and keeps_going():
                name = signal.Signals(-code).name
                print(f"fullshard: worker {rank} was ended by {name}", file=sys.stderr)
        if kill_s == math.inf and (got or (any(ended.values()) and not keeps_going())):
            kill_s = time.monotonic() + _GRACE_S
            for one in () if got else running.values():
                one.terminate()
            ended_here.update(running)
        if time.monotonic() > kill_s:
            for one in running.values():
                one.kill()
    return ended_here


def _explain(failures: dict[int, ProcessFailure], config: TrainConfig, run: RunDir) -> int:
    """Print the error of the worker that failed first and return the exit code."""
    rank = min(failures, key=lambda rank: _failed_at(failures[rank]))
    failure = failures[rank]
    details = _details(failure)
    what = details.get("text", failure.message)
    if details.get("is_refusal"):
        say(f"fullshard: error: {what}", sys.stderr)
        return 2
    say(f"fullshard: error: worker {rank} of {config.nproc} failed: {what}", sys.stderr)
    if "py_callstack" in details:
        print(details["py_callstack"].rstrip(), file=sys.stderr)
    say(f"fullshard: {_how_to_go_on(config, run)}", sys.stderr)
    return 1


def _failed_at(failure: ProcessFailure) -> int:
    """Return the time of ``failure`` in ns, as a sort key.

    A worker killed by a signal sorts first: it recorded no time, and other workers only report
    that they lost the connection.
    """
    return int(_details(failure).get("time_ns", 0))


def _details(failure: ProcessFailure) -> dict[str, Any]:
    """Return the error record of the failed worker; empty if the worker wrote none."""
    message: Any = failure.message  # declared str, but a dict if the worker recorded one
    return message["extraInfo"] if isinstance(message, dict) else {}


def _how_to_go_on(config: TrainConfig, run: RunDir) -> str:
    newest = run.newest_checkpoint()
    if newest is None:
        return "no checkpoint was written yet"
    return f"fullshard train --out {shlex.quote(config.out)} --resume  goes on from {newest.name}"

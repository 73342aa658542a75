"""``fullshard doctor``: examine environment, wires and speed of a job, and name common mistakes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from fullshard import doctor
from fullshard.cli.doctor_tables import print_report
from fullshard.cli.printing import AsJson, print_json
from fullshard.errors import ConfigError, FullshardError
from fullshard.plan import hardware_from, time_host
from fullshard.progress import on_progress
from fullshard.train.job import default_nproc, start_workers
from fullshard.train.showing import Operations
from fullshard.train.world import is_worker, launcher_rendezvous, num_local_workers

Show = Callable[[doctor.Report], None]

_MOST_LOAD = 0.5  # load average per core, before the command, of a machine that is not busy


def doctor_command(
    *,
    nproc: Annotated[
        int | None, typer.Option(help="Local ranks; default: one per GPU, 2 on CPU.", min=1)
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(help="Dims to measure, such as replicate=2,shard=4.", metavar="NAME=SIZE,..."),
    ] = None,
    as_json: AsJson = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Write the measured hardware to a file for plans.", metavar="FILE"),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that ranks wait for each other.", min=1)
    ] = 60.0,
) -> int:
    """Examine environment, wires and speed of a job, and name common mistakes.

    Under torchrun the same command is one rank of its job:
    torchrun --nproc-per-node 2 -m fullshard.cli doctor
    """
    if calibrate is not None and not calibrate.absolute().parent.is_dir():
        raise ConfigError(f"--calibrate {calibrate}: there is no such folder")
    show = partial(_show, as_json=as_json, calibrate=calibrate, load=os.getloadavg()[0])
    alone = doctor.facts_here()
    if doctor.half_launched([alone]) is not None:
        show(doctor.Report([alone], failures=["half of a launcher's environment: nothing started"]))
        return 1
    if is_worker():
        started = num_local_workers()
        if nproc not in (None, started):
            raise ConfigError(
                f"--nproc is {nproc}, but the launcher started {started} ranks on this machine: "
                "leave --nproc out"
            )
        _work(show, mesh, timeout)
    options = ["--timeout", str(timeout), *(["--json"] if as_json else [])]
    options += [] if mesh is None else ["--mesh", mesh]
    options += [] if calibrate is None else ["--calibrate", str(calibrate)]
    count = nproc or default_nproc()
    doctor.mesh_shape(mesh, count)
    return _launch(count, options)


def _work(show: Show, mesh: str | None, timeout_s: float) -> NoReturn:
    """Run one rank, and exit without finalizing the interpreter, as the trainer's workers do."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shape = doctor.mesh_shape(mesh, world)
    try:
        # Lines, not a bar: a rank that exceeds a time limit exits at once and would leave the
        # cursor hidden.
        with on_progress(Operations(prints=rank == 0).update):
            code = doctor.examine(
                lambda: launcher_rendezvous()[0]["store"],
                show,
                rank=rank,
                world=world,
                shape=shape,
                timeout_s=timeout_s,
                calibrate=time_host,
            )
    except FullshardError as error:
        print(f"fullshard: error: rank {rank}: {error}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _launch(nproc: int, options: list[str]) -> int:
    """Start the ranks on this machine, and print an error for each rank that a signal killed."""
    try:
        start_workers(nproc, "-m", "fullshard.cli", "doctor", *options)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for rank, code in codes.items():
            if code < 0 and code != -signal.SIGTERM:  # the launcher ends the other ranks with it
                name = signal.Signals(-code).name
                print(f"fullshard: error: rank {rank} was ended by {name}", file=sys.stderr)
        return 1
    except (SignalException, KeyboardInterrupt) as error:
        return 128 + int(getattr(error, "sigval", signal.SIGINT))
    return 0


def _show(report: doctor.Report, *, as_json: bool, calibrate: Path | None, load: float) -> None:
    """Print the report, and write the file of ``--calibrate``; ``load`` is that at the start."""
    if as_json:
        print_json(report.as_dict())
    else:
        print_report(report)
    sys.stdout.flush()
    if calibrate is None:
        return
    if report.failures:
        print(f"fullshard: {calibrate} is not written: no full measurement", file=sys.stderr)
        return
    try:
        hardware_from(report, time.strftime("%Y-%m-%d")).save(calibrate)
    except OSError as error:
        raise ConfigError(f"--calibrate {calibrate}: {error}") from error
    print(f"fullshard: {calibrate} is written", file=sys.stderr)
    cores = os.cpu_count() or 1
    if load > _MOST_LOAD * cores:
        print(
            f"fullshard: other programs used this machine (load {load:.1f} on {cores} cores), so "
            "the measured speeds may be too low: calibrate again when the machine is idle",
            file=sys.stderr,
        )

"""The launcher: starts the workers of a job on this machine and explains a failure once."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fullshard.train.config import TrainConfig
from fullshard.train.job.prepare import prepare
from fullshard.train.job.survivors import run_survivors
from fullshard.train.run import RunDir, say
from fullshard.train.world import LOOPBACK, STORE, TCP, check_gpus


def default_nproc() -> int:
    """Return the number of GPUs, or 2 on CPU."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def launch(config: TrainConfig) -> int:
    """Train with ``config.nproc`` local workers and return the exit code.

    Raises:
        ConfigError: an option cannot work; raised before any worker starts.
    """
    check_gpus(config.nproc)
    with prepare(config, num_workers=config.nproc):
        return _run(config)


def _run(config: TrainConfig) -> int:
    """Start the workers, wait for them, report a failure and return the exit code."""
    run = RunDir(Path(config.out))
    try:
        _start_workers(config, run.config)
    except ChildFailedError as error:
        return _explain(error.failures, config, run)
    except (SignalException, KeyboardInterrupt) as error:
        say(f"\nfullshard: interrupted; {_how_to_go_on(config, run)}", sys.stderr)
        return 128 + getattr(error, "sigval", signal.SIGINT)
    finally:
        Console().show_cursor()  # a worker that died may have left the cursor hidden
    return 0


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start_workers(config: TrainConfig, path: Path) -> None:
    """Run the workers of a training job, whose configuration is at ``path``, and wait for them."""
    arguments = ("-m", "fullshard.train.job", str(path))
    if config.min_workers is None:
        start_workers(config.nproc, *arguments)
        return
    with _shared_folder(config.nproc) as folder, _kept_store():
        run_survivors(config.nproc, Path(folder), *arguments)


@contextmanager
def _shared_folder(nproc: int) -> Iterator[str]:
    """Yield a folder that ``nproc`` workers of this machine share, and divide the cores.

    Stores unpickle their content, and PyTorch's TCP stores listen to the network. All workers are
    on this machine, so rendezvous uses files of this user, and gloo and NCCL use loopback only.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // nproc)))
    with tempfile.TemporaryDirectory(prefix="fullshard-") as folder:
        os.environ[STORE] = f"{folder}/store"
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        yield folder


@contextmanager
def _kept_store() -> Iterator[None]:
    """Run a TCP store on loopback in this process, for workers that may be killed.

    In a file store, a worker killed during a write leaves half a record, which hangs all others.
    """
    with socket.socket() as listening:
        listening.bind((LOOPBACK, 0))
        listening.listen()
        port = listening.getsockname()[1]
        store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False,
            master_listen_fd=listening.detach(),  # else it would listen to the network
        )  # fmt: skip
    os.environ[STORE] = f"{TCP}{store.port}"
    yield


def start_workers(nproc: int, *arguments: str) -> None:
    """Run ``nproc`` times ``python ARGUMENTS`` by torchrun's launcher, and wait."""
    with _shared_folder(nproc) as folder, _silent_logs():
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # no TCP store in the launcher
        launcher = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{folder}/rendezvous",
            rdzv_configs={"store_type": "file"},
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        elastic_launch(launcher, sys.executable)(*arguments)


@contextmanager
def _silent_logs() -> Iterator[None]:
    """Keep torch's launcher from logging above the one error that matters."""
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


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
    that they lost the connection. SIGTERM sorts last: the launcher ends remaining workers with it.
    """
    if failure.exitcode == -signal.SIGTERM:
        return sys.maxsize
    return int(_details(failure).get("time_ns", 0))


def _details(failure: ProcessFailure) -> dict[str, Any]:
    """Return the error record of the failed worker; empty if the worker wrote none."""
    message: Any = failure.message  # declared str, but a dict if the worker recorded one
    return message["extraInfo"] if isinstance(message, dict) else {}


def _how_to_go_on(config: TrainConfig, run: RunDir) -> str:
    newest = run.newest_checkpoint()
    if newest is None:
        return "no checkpoint was written yet"
    return f"fullshard train --out {config.out} --resume  goes on from {newest.name}"

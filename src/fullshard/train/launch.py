"""Starts the workers of a job on this machine, and says in one place why it failed."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .config import TrainConfig
from .prepare import prepare
from .rundir import RunDir
from .world import STORE, check_gpus


def default_nproc() -> int:
    """As many workers as there are GPUs, or two on CPU."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def launch(config: TrainConfig) -> int:
    """Trains with ``config.nproc`` local workers; returns the exit code.

    Raises:
        ConfigError: if something cannot work, before any worker starts.
    """
    check_gpus(config.nproc)
    with prepare(config, num_workers=config.nproc):
        return _run(config)


def _run(config: TrainConfig) -> int:
    """Starts the workers, waits for their end, and says what came of it."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // config.nproc)))
    run = RunDir(Path(config.out))
    # The launcher's log would stand above the one error that matters.
    logging.disable(logging.ERROR)
    try:
        _start_workers(config.nproc, run.config)
    except ChildFailedError as error:
        return _explain(error.failures, config, run)
    except (SignalException, KeyboardInterrupt) as error:
        print(f"\nfullshard: interrupted; {_how_to_go_on(config, run)}", file=sys.stderr)
        return 128 + getattr(error, "sigval", signal.SIGINT)
    finally:
        logging.disable(logging.NOTSET)
        Console().show_cursor()  # a worker that died in mid-line left it hidden
    return 0


def num_cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _start_workers(nproc: int, config: Path) -> None:
    """Runs the workers through torchrun's launcher and waits for their end.

    Stores unpickle what is put in them, and PyTorch's listen to the network. All workers are here,
    so they meet by files of this user's instead, and gloo and NCCL listen on loopback only.
    """
    with tempfile.TemporaryDirectory(prefix="fullshard-") as folder:
        os.environ[STORE] = f"{folder}/store"
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # another one, of the launcher's
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
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
        elastic_launch(launcher, sys.executable)("-m", "fullshard.train.worker", str(config))


def _explain(failures: dict[int, ProcessFailure], config: TrainConfig, run: RunDir) -> int:
    """Prints the error of the worker that failed first; returns the exit code."""
    rank = min(failures, key=lambda rank: _failed_at(failures[rank]))
    failure = failures[rank]
    details = _details(failure)
    what = details.get("text", failure.message)
    if details.get("is_refusal"):
        print(f"fullshard: error: {what}", file=sys.stderr)
        return 2
    print(f"fullshard: error: worker {rank} of {config.nproc} failed: {what}", file=sys.stderr)
    if "py_callstack" in details:
        print(details["py_callstack"].rstrip(), file=sys.stderr)
    print(f"fullshard: {_how_to_go_on(config, run)}", file=sys.stderr)
    return 1


def _failed_at(failure: ProcessFailure) -> int:
    """When it failed, in ns.

    A worker that a signal killed comes first: it left no time, and what the others report is the
    connection they lost. SIGTERM alone is how the launcher ends the rest.
    """
    if failure.exitcode == -signal.SIGTERM:
        return sys.maxsize
    return int(_details(failure).get("time_ns", 0))


def _details(failure: ProcessFailure) -> dict[str, Any]:
    """What ``worker`` recorded of its error; nothing if it died without a word."""
    message: Any = failure.message  # declared str, but what the record holds
    return message["extraInfo"] if isinstance(message, dict) else {}


def _how_to_go_on(config: TrainConfig, run: RunDir) -> str:
    newest = run.newest_checkpoint()
    if newest is None:
        return "no checkpoint was written yet"
    return f"fullshard train --out {config.out} --resume  goes on from {newest.name}"

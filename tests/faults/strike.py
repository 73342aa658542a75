"""Injects a fault into one rank of a job, and keeps the rank's diary."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from fullshard.checkpoint.format import datafile
from fullshard.comm import c10d
from tests.faults.rows import Fault, Phase, What

MESSAGE = "an injected fault"


class Diary:
    """Notes of a rank in a file, a line of JSON each with its time; the file survives the rank.

    Times are ``time.monotonic()``, which all processes of a machine share.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(diary_of(folder, rank), flags)

    def note(self, what: str, **details: Any) -> None:
        line = json.dumps({"what": what, "at_s": time.monotonic(), **details})
        os.write(self._file, f"{line}\n".encode())


def diary_of(folder: Path, rank: int) -> Path:
    return folder / f"diary-{rank}"


def notes_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the notes of a rank, without an unfinished last line."""
    diary = diary_of(folder, rank)
    lines = diary.read_text().splitlines(keepends=True) if diary.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def fault_s(folder: Path, world: int) -> float | None:
    """Return the time of the fault, or None if it has not happened."""
    notes = (note for rank in range(world) for note in notes_of(folder, rank))
    return next((note["at_s"] for note in notes if note["what"] == "fault"), None)


class Strike:
    """Makes a fault happen on this rank, once; ranks other than the victim have no fault."""

    def __init__(
        self, fault: Fault | None = None, at_step: int = 0, diary: Diary | None = None
    ) -> None:
        self.fault = fault or Fault(What.NOTHING, Phase.END)
        self.step = 0
        """The current step, set by the training loop."""
        self._at_step = at_step
        self._diary = diary
        self._has_happened = False

    def is_due(self, what: What, phase: Phase) -> bool:
        """Return whether the fault is ``what`` and due now; if so, note its time."""
        due = self.fault.what is what and self.fault.phase is phase and self.step == self._at_step
        if due:
            self.note()
        return due

    def note(self) -> None:
        """Note the time of the fault, once."""
        if not self._has_happened:
            self._has_happened = True
            if self._diary is not None:
                self._diary.note("fault")

    def meet(self, phase: Phase, block: int | None = None) -> None:
        """Make the fault happen if it is due now."""
        fault = self.fault
        if (phase, self.step) != (fault.phase, self._at_step) or self._has_happened:
            return
        if block not in (None, fault.block) or fault.what not in _ACTS:
            return
        self.note()
        _ACTS[fault.what](fault)

    def in_backward(self, x: Tensor, block: int) -> Tensor:
        """Return ``x``; the fault may happen in its backward."""
        return _Met.apply(x, self, block)


class _Met(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strike: Strike, block: int) -> Tensor:
        ctx.met = strike, block
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        strike, block = ctx.met
        strike.meet(Phase.BACKWARD, block)
        return grad, None, None


def _raise(_: Fault) -> None:
    raise RuntimeError(MESSAGE)


def _out_of_memory(_: Fault) -> None:
    raise torch.OutOfMemoryError("tried to allocate more than there is")


def _disk_full(_: Fault) -> None:
    """Make all later writes of checkpoints fail."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    datafile.DataWriter.put = full  # type: ignore[method-assign]
    dcp.FileSystemWriter.write_data = full


_ACTS: dict[What, Callable[[Fault], object]] = {
    What.RAISE: _raise,
    What.LINGER: _raise,
    What.CAUGHT: _raise,
    What.CAUGHT_ALONE: _raise,
    What.OUT_OF_MEMORY: _out_of_memory,
    What.SYS_EXIT: lambda _: sys.exit(3),
    What.OS_EXIT: lambda _: os._exit(3),
    What.KILL: lambda _: os.kill(os.getpid(), signal.SIGKILL),
    What.STOP: lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    What.DISK_FULL: _disk_full,
    What.STALL: lambda fault: time.sleep(fault.stall_s),
}


def watch_gathers(strike: Strike) -> None:
    """Make a fault happen right after the start of a unit's all-gather, on either engine."""
    ours, theirs = c10d.C10d.all_gather, _fsdp_param_group.foreach_all_gather

    def all_gather(self: Any, outputs: Any, sources: Any) -> Any:
        started = ours(self, outputs, sources)
        _met_in(self._label.text)
        return started

    def foreach_all_gather(params: Any, *args: Any, **kwargs: Any) -> Any:
        started = theirs(params, *args, **kwargs)
        _met_in(str(params[0]._param_fqn))
        return started

    def _met_in(name: str) -> None:
        if f"blocks.{strike.fault.block}" in name:
            strike.meet(Phase.GATHER)

    c10d.C10d.all_gather = all_gather  # type: ignore[method-assign]
    _fsdp_param_group.foreach_all_gather = foreach_all_gather

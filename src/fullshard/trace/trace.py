"""``fullshard.trace``: record the actions of a model's engines during training."""

from __future__ import annotations

import logging
import re
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard._version import __version__
from fullshard.device import Lane
from fullshard.engine import Engine
from fullshard.errors import ArgumentTypeError, ConfigError, ProtocolError
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.ownership import units_below
from fullshard.frontend.sharded import ShardedModule
from fullshard.trace import rankfile, report
from fullshard.trace.describe import history_as_json, resting, step_as_json, unit_as_json
from fullshard.trace.reading import held_when_it_failed
from fullshard.trace.steps import HELD, Clock, History, TapeSegment
from fullshard.trace.tape import Tap, Tape, stamp_of

log = logging.getLogger("fullshard")


def trace(model: nn.Module, folder: str | Path, *, keep: int = 20, plan: Any = None) -> Trace:
    """Return a trace of all units in ``model``, for ``with`` or for ``start`` and ``stop``.

        with fullshard.trace(model, "runs/7b/trace"):
            train(model)

    Each rank writes one file into ``folder`` when the trace stops. ``fullshard trace FOLDER`` makes
    a report of these files. No rank waits for another rank.

    Args:
        model: a sharded module; units made after the start are not recorded.
        folder: created if missing.
        keep: number of the last steps to keep in full, in addition to the slowest steps. Other
            steps count in sums only.
        plan: a plan to compare with: a dict, or an object with ``as_json()``.

    Raises:
        ConfigError: ``model`` has no unit, or an argument cannot work.
    """
    return Trace(model, folder, keep=keep, plan=plan)


class Trace:
    """A trace of a model; see ``trace``. A second start replaces this rank's file."""

    def __init__(self, model: nn.Module, folder: str | Path, *, keep: int, plan: Any) -> None:
        self.folder = Path(folder)
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"trace: keep={keep!r}; expected a number of steps, 1 or more")
        self._model = model
        self._keep = keep
        self._plan = _plan_as_json(plan)
        self._run: _Run | None = None

    def start(self) -> None:
        """Start the recording.

        Raises:
            ConfigError: the model has no unit.
            ProtocolError: this trace runs, or another trace records some of the model's units.
        """
        if self._run is not None:
            raise ProtocolError("trace: start() of a trace that runs; call stop() first")
        engines = list(dict.fromkeys(map(engine_of, units_below([self._model]))))
        if not engines:
            raise ConfigError(
                f"trace: {type(self._model).__name__} has no unit; expected a model that was given "
                "to fully_shard, shard_blocks or FullyShardedDataParallel before"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        self._run = _Run(engines, self._keep)
        rankfile.path_of(self.folder, _place()[0]).unlink(missing_ok=True)  # an earlier recording

    def stop(self) -> Path:
        """End the recording, write this rank's file, and return its path.

        Raises:
            ProtocolError: the trace does not run.
        """
        return self._stop(None)

    def _stop(self, error: BaseException | None) -> Path:
        run, self._run = self._run, None
        if run is None:
            raise ProtocolError("trace: stop() of a trace that does not run; call start() first")
        found = run.end(error)
        found |= {"about": self._about(run), "plan": self._plan}
        return rankfile.write(self.folder, found["rank"], found)

    def _about(self, run: _Run) -> dict[str, Any]:
        """Return the facts that identify this run."""
        buckets = [bucket for unit in run.units for bucket in unit.buckets]
        inner = getattr(self._model, "module", self._model)  # of FullyShardedDataParallel
        classes = (base for base in type(inner).__mro__ if not issubclass(base, ShardedModule))
        dtypes = (one.spec.param_dtype or one.sharded_params[0].dtype for one in buckets)
        return {
            "folder": str(self.folder.resolve()),
            "model": next(classes).__name__,
            "num_parameters": sum(param.numel() for param in self._model.parameters()),
            "dtypes": list(dict.fromkeys(str(one).removeprefix("torch.") for one in dtypes)),
            "command": shlex.join(sys.argv),
            "versions": {"fullshard": __version__, "torch": torch.__version__},
        }

    def __enter__(self) -> Trace:
        """Start."""
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        """Stop; after an error in the block, log failures of the trace instead of raising them."""
        if error is None:
            self._stop(None)
            return
        try:
            self._stop(error)
            if isinstance(error, torch.OutOfMemoryError):
                log.error("out of memory: see %s", report.combine(self.folder).page)
        except Exception as failure:
            log.error("the trace in %s could not be written: %s", self.folder, failure)


class _Run:
    """One recording, from its start to its end."""

    def __init__(self, engines: list[Engine], keep: int) -> None:
        self.engines = engines
        self.device = engines[0].units[-1].device
        self._synchronize()
        stamps = stamp_of(engines[0])
        stamp = None if stamps is None else stamps(Lane.COMPUTE)
        self.start_s, self.wall_ns = time.perf_counter(), time.time_ns()
        self.tape = Tape(self._done, self.start_s)
        self.units = [unit for engine in engines for unit in engine.units]
        self.history = History(keep, len(self.units), Clock(self.start_s, stamp))
        bases = accumulate((len(engine.units) for engine in engines), initial=0)
        with ExitStack() as attached:  # if one cannot be attached, those before are detached
            for engine, base in zip(engines, bases, strict=False):
                tap = Tap(engine, base, self.tape)
                tap.attach()
                attached.callback(tap.detach)
            self._detach = attached.pop_all().close

    def end(self, error: BaseException | None) -> dict[str, Any]:
        """Stop listening, and return the contents of the rank's file."""
        self._detach()
        if error is None:  # waiting for a failed device may fail too
            self._synchronize()
        self.tape.end()
        self.history.end()
        last = None if error is None else self.history.last  # the step that it interrupted
        rank, world = _place()
        policies = [engine.scheduler.policy for engine in self.engines]
        return {
            "rank": rank,
            "world": world,
            "host": socket.gethostname(),
            "device": str(self.device),
            "started": {"wall_ns": self.wall_ns},
            "ended": {"wall_ns": time.time_ns(), "after_s": time.perf_counter() - self.start_s},
            "engines": [
                {"prefetch_budget": one.prefetch_budget, "reduction_budget": one.reduction_budget}
                for one in policies
            ],
            "units": [
                unit_as_json(unit, engine, number)
                for number, engine in enumerate(self.engines)
                for unit in engine.units
            ],
            **history_as_json(self.history, self.start_s),
            "unfinished": None if last is None else step_as_json(last, self.start_s),
            "shortage": self._shortage(error),
        }

    def _done(self, segment: TapeSegment) -> None:
        held: Counter[str] = Counter()
        for engine in self.engines:
            held.update({kind.value: n for kind, n in engine.meter.held_nbytes.items()})
        for _, _, kind, nbytes, _ in (e for e in self.tape.entries if e[0] == HELD):
            held[kind.value] -= nbytes  # these bytes belong to the next segment
        allocated = None
        if self.device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self.device)
        self.history.add(segment._replace(held=dict(held), allocated_nbytes=allocated))

    def _synchronize(self) -> None:
        if self.device.type not in ("cpu", "meta"):
            torch.get_device_module(self.device).synchronize(self.device)

    def _shortage(self, error: BaseException | None) -> dict[str, Any] | None:
        if not isinstance(error, torch.OutOfMemoryError):
            return None
        last = self.history.last
        assert last is not None  # the end of the tape adds a segment
        where, held = held_when_it_failed(self.history.kept, last)
        found = [[unit, kind, nbytes] for (unit, kind), nbytes in held.items()]
        for number, unit in enumerate(self.units):
            found += [[number, kind, nbytes] for kind, nbytes in resting(unit).items() if nbytes]
        text = str(error)
        return {
            "message": text.strip().partition("\n")[0],
            "where": where,
            "tried_nbytes": _size_in(text, r"Tried to allocate ([\d.]+) (\w+)"),
            "allocated_nbytes": _size_in(text, r"([\d.]+) (\w+) is allocated by PyTorch"),
            "held": found,
        }


def _place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _size_in(text: str, pattern: str) -> int | None:
    """Return the bytes in an error of PyTorch's allocator; None if they are not found."""
    found = re.search(pattern, text)
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    if found is None or found[2] not in units:
        return None
    return int(float(found[1]) * 1024 ** units.index(found[2]))


def _plan_as_json(plan: Any) -> dict[str, Any] | None:
    as_json = plan.as_json() if hasattr(plan, "as_json") else plan
    if as_json is not None and not isinstance(as_json, Mapping):
        raise ArgumentTypeError(
            f"trace: plan={plan!r}; expected a dict, or an object with as_json() that returns one"
        )
    return None if as_json is None else dict(as_json)

"""The machine of the checks: a GPU, or a CPU in its place, to try the checks out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.device.streams import Lanes, StreamLanes

WORLD = 8
"""Ranks of which one process plays the first."""
APART_LIMIT_S = 240


class Failed(Exception):
    """A check found what must not be."""


@dataclass
class Verdict:
    """The result of a part."""

    passed: bool | None
    """None: there was nothing to judge, see the notes."""
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Kernel(NamedTuple):
    """Something that ran on a device."""

    name: str
    stream: int
    start_us: float
    duration_us: float


@dataclass(frozen=True)
class Stream:
    """A stream on which nothing waits."""

    name: str = "compute"

    def wait_event(self, event: Any) -> None:
        """Do nothing: the event has passed."""

    def wait_stream(self, other: Any) -> None:
        """Do nothing: the work there is done."""

    def record_event(self, event: Any = None) -> Any:
        return NoStreams().Event()


class NoStreams:
    """An accelerator's module on a CPU: what is issued is done, so nothing waits."""

    def __init__(self) -> None:
        self._here = Stream()

    def Stream(self, **options: Any) -> Any:
        return Stream()

    def Event(self, **options: Any) -> Any:
        return SimpleNamespace(
            record=lambda stream=None: None,
            synchronize=lambda: None,
            query=lambda: True,
            elapsed_time=lambda later: 0.0,
        )

    def current_stream(self, device: Any = None) -> Any:
        return self._here

    def stream(self, stream: Any) -> Any:
        return nullcontext()


class _Reads(TorchDispatchMode):
    """Refuses what would make the host wait for a device."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("called a synchronizing operation")
        return op(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Machine:
    """A device, with the operations that PyTorch does not offer for all devices alike."""

    device: torch.device

    @classmethod
    def here(cls, *, stand_in: bool = False) -> Machine:
        """The first GPU, or a CPU in its place."""
        if stand_in:
            return cls(torch.device("cpu"))
        torch.cuda.set_device(0)
        return cls(torch.device("cuda", 0))

    @property
    def is_real(self) -> bool:
        """True on a GPU, where results count."""
        return self.device.type != "cpu"

    @property
    def accelerator(self) -> Any:
        """``torch.cuda``, or a stand-in that does nothing."""
        return torch.cuda if self.is_real else NoStreams()

    def lanes(self, device: torch.device) -> Lanes:
        """Lanes with streams, on the stand-in too."""
        return StreamLanes(self.accelerator, device)

    def describe(self) -> dict[str, str]:
        """Return the facts that figures depend on."""
        name = torch.cuda.get_device_name(self.device) if self.is_real else "CPU as a stand-in"
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if self.is_real else "none"
        return {
            "device": name,
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda),
            "nccl": nccl,
            "python": sys.version.split()[0],
        }

    def sleep(self, us: float) -> None:
        """Keep the current stream busy for about ``us`` microseconds; the host goes on."""
        if self.is_real and us > 0:
            torch.cuda._sleep(int(us * 1500))  # clock cycles

    def synchronize(self) -> None:
        """Wait for all that was issued."""
        if self.is_real:
            torch.cuda.synchronize()

    def reset_peaks(self) -> None:
        """Look for new peaks of memory from here on."""
        if self.is_real:
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, int]:
        """Bytes at the peaks and now, and how often the allocator had to start anew."""
        if not self.is_real:
            return dict.fromkeys(("peak allocated", "peak reserved", "held", "retries"), 0)
        stats = torch.cuda.memory_stats()
        return {
            "peak allocated": stats["allocated_bytes.all.peak"],
            "peak reserved": stats["reserved_bytes.all.peak"],
            "held": stats["allocated_bytes.all.current"],
            "retries": stats["num_alloc_retries"],
        }

    def reserved(self) -> dict[str, str]:
        """Megabytes that the allocator keeps for each stream, the most first."""
        kept: Counter[int] = Counter()
        for segment in torch.cuda.memory_snapshot() if self.is_real else ():
            kept[segment["stream"]] += segment["total_size"]
        return {"MB by stream": " + ".join(f"{n / 1e6:.0f}" for _, n in kept.most_common())}

    @contextmanager
    def without_syncs(self) -> Iterator[None]:
        """Raise where the host would wait for the device in the block."""
        if not self.is_real:
            with _Reads():
                yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def traced(self, run: Callable[[], object]) -> list[Kernel]:
        """Return the kernels of ``run`` in order; on the stand-in, all operations."""
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.is_real else [])]
        self.synchronize()
        with profile(activities=kinds, acc_events=True) as prof:
            run()
            self.synchronize()
        ours = torch.autograd.DeviceType.CUDA if self.is_real else torch.autograd.DeviceType.CPU
        events = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
        found = [
            Kernel(e.name(), e.device_resource_id(), e.start_ns() / 1e3, e.duration_ns() / 1e3)
            for e in events
            if e.device_type() == ours
        ]
        return sorted(found, key=lambda kernel: kernel.start_us)

    @contextmanager
    def first_of_many(self, world: int = WORLD) -> Iterator[None]:
        """Play rank 0 of ``world`` in the block, with made-up messages from the other ranks."""
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        try:
            yield
        finally:
            dist.destroy_process_group()

    @contextmanager
    def alone(self) -> Iterator[dist.ProcessGroup]:
        """A process group of one rank, by the device's own backend."""
        more: dict[str, Any] = {"device_id": self.device} if self.is_real else {}
        backend = "nccl" if self.is_real else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **more)
        group = dist.group.WORLD
        assert group is not None
        try:
            yield group
        finally:
            dist.destroy_process_group()

    def apart(self, function: Callable[..., Any], *args: Any, **env: str) -> Any:
        """``function(self, *args)`` in a process of its own, as it would be alone on a machine.

        On the stand-in here: where processes share an allocator there is nothing to compare.
        """
        if not self.is_real:
            return function(self, *args)
        call = json.dumps([function.__module__, function.__qualname__, args, False])
        command = [sys.executable, "-m", "bench.gpu.apart", call]
        done = subprocess.run(
            command, env=os.environ | env, capture_output=True, text=True, timeout=APART_LIMIT_S
        )
        if done.returncode:
            raise Failed(f"{function.__qualname__}{args}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])


def seconds(machine: Machine, run: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds until the host has issued ``run``, and until the device is done."""
    machine.synchronize()
    start = time.perf_counter()
    run()
    host = time.perf_counter() - start
    machine.synchronize()
    return host, time.perf_counter() - start


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether all pairs are equal bit for bit; NaN equals nothing."""
    return len(ones) == len(others) and all(map(torch.equal, ones, others))

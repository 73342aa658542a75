"""The memory that a GPU would reserve on each stream, without a GPU.

A process plays one rank of eight on the CPU. Streams there are names: FSDP2 and our lanes switch
them as on a GPU, and PyTorch's profiler notes each allocation, which goes to a model of the caching
allocator (``allocator``) on the stream that is current. The model has 12 blocks of 51 million
parameters, computed in bf16 and reduced in fp32 (``gpu.model.LARGE``). Its dims and its 1,024
tokens are divided by four, so bytes are a sixteenth; the replay multiplies them by 16.

Two ways to begin: with the whole model on the device, which is then sharded there, and with a model
on the meta device, of which only the shards get memory. On an H200 the first way reserved
4,622,123,008 bytes with FSDP2, 4,747,952,128 per parameter and 4,745,854,976 ragged, after three
steps; here it is 4,624, 4,750 and 4,748 million after the first.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.profiler import profile, record_function

from bench.allocator import CachingAllocator
from bench.compare import apart, verdict
from bench.contenders import FSDP2, PER_PARAMETER, RAGGED
from bench.gpu.costs import brief
from bench.gpu.machine import WORLD, Machine, NoStreams, Stream
from bench.gpu.model import LARGE, Llama, contenders, made_from_meta, tokens_of, train
from bench.machine import table
from fullshard.device.streams import StreamLanes
from fullshard.engine import executor

PART = 4
"""The divisor of dims and tokens."""
SIZES = replace(
    LARGE,
    dim=LARGE.dim // PART,
    hidden=LARGE.hidden // PART,
    heads=LARGE.heads // PART,
    vocab=LARGE.vocab // PART,
)
NAMES = (FSDP2, PER_PARAMETER, RAGGED)
STARTS = WHOLE, META = "the whole model first", "from meta"
STEPS = 3
_STREAM, _MARK = "stream::", "mark::"


class _NamedStreams(NoStreams):
    """An accelerator's module whose streams are spans in the profiler's trace."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = count(1)

    def Stream(self, **options: Any) -> Stream:
        return Stream(f"stream {next(self._numbers)}")

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make ``stream`` the current stream."""
        before, self._here = self._here, stream
        with record_function(_STREAM + stream.name):
            yield
        self._here = before

    def is_current_stream_capturing(self) -> bool:
        return False


@contextmanager
def _on_streams() -> Iterator[None]:
    """Make FSDP2 and fullshard use named streams on the CPU."""
    accelerator: Any = _NamedStreams()
    with ExitStack() as stack:
        for name in ("param_group", "collectives", "state", "param"):
            module = importlib.import_module(f"torch.distributed.fsdp._fully_shard._fsdp_{name}")
            if hasattr(module, "_get_device_handle"):
                stack.enter_context(
                    patch.object(module, "_get_device_handle", lambda kind: accelerator)
                )
        stack.enter_context(
            patch.object(executor, "make_lanes", lambda device: StreamLanes(accelerator, device))
        )
        yield


def reserved(name: str, start: str) -> dict[str, list[float]]:
    """Return the megabytes reserved on each stream after each of three steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    machine = Machine(torch.device("cpu"))
    with machine.first_of_many(WORLD), brief(), _on_streams():
        contender = contenders(machine)[name]
        tokens = tokens_of(machine, SIZES, 1024 // PART)
        plain = Llama(SIZES)
        with profile(profile_memory=True) as prof:
            if start == META:
                model, optimizer = made_from_meta(machine, name, SIZES)
            else:
                model, optimizer = contender.make(copy.deepcopy(plain))
            for _ in range(STEPS):
                train(model, optimizer, tokens)
                with record_function(_MARK):
                    pass
    return _by_stream(list(_events(prof.kineto_results.experimental_event_tree())))


def _events(tree: Any) -> Iterator[Any]:
    for event in tree:
        yield event
        yield from _events(event.children)


def _by_stream(events: list[Any]) -> dict[str, list[float]]:
    """Replay the allocations; each belongs to the innermost stream that it lies in."""
    found: dict[str, list[float]] = {}
    allocator = CachingAllocator()
    spans: list[tuple[int, str]] = []  # ends and names
    for event in sorted(events, key=lambda event: event.start_time_ns):
        spans = [span for span in spans if span[0] >= event.start_time_ns]
        if event.name.startswith(_STREAM):
            spans.append((event.end_time_ns, event.name.removeprefix(_STREAM)))
        elif event.name == _MARK:
            for stream, nbytes in allocator.reserved.items():
                found.setdefault(stream, []).append(nbytes / 1e6)
        elif event.name == "[memory]":
            address, nbytes = event.extra_fields.ptr, event.extra_fields.alloc_size
            if allocator.holds(address):
                allocator.free(address)
            if nbytes > 0:
                stream = spans[-1][1] if spans else Stream().name
                allocator.allocate(address, nbytes * PART**2, stream)
    return found


def figures() -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return the megabytes reserved on each stream after each step, by start and contender."""
    return {start: {name: apart(reserved, name, start) for name in NAMES} for start in STARTS}


def report(found: dict[str, dict[str, dict[str, list[float]]]]) -> int:
    """Print the table; return how many of ours reserve more than FSDP2 from the meta device."""
    print("MB that the allocator reserves: after each step, and by stream after the last\n")
    rows = []
    for start, row in found.items():
        for name, streams in row.items():
            last = sorted((megabytes[-1] for megabytes in streams.values()), reverse=True)
            rows.append([f"{name}, {start}", *map(_text, _totals(streams))])
            rows[-1].append(" + ".join(map(_text, last)))
    print(table(["", *(f"step {number + 1}" for number in range(STEPS)), "by stream"], rows))
    most = _totals(found[META][FSDP2])[-1]
    missed = [name for name in NAMES if _totals(found[META][name])[-1] > most]
    return verdict(missed, f"more than FSDP2, {META}")


def _totals(streams: dict[str, list[float]]) -> list[float]:
    """Return the sum over streams after each step; a stream counts from its first use."""
    return [
        sum(steps[number - STEPS] for steps in streams.values() if len(steps) >= STEPS - number)
        for number in range(STEPS)
    ]


def _text(megabytes: float) -> str:
    return f"{megabytes:.0f}"

"""Runs a program on real ``StreamLanes`` over a fake accelerator, and reports its races.

The checker replaces the lanes (``make_lanes``), the wire (``comm.wrapped``), the resizing of
storages (``torch.UntypedStorage``), reads by the host (``Tensor.tolist``), and offloading, which a
CPU does not do by itself. ``Booking`` sees everything else.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fullshard import comm
from fullshard.device import Lane, Lanes
from fullshard.device.streams import OnStream, StreamLanes
from fullshard.engine import executor, shard
from fullshard.engine import spec as bucket_spec
from fullshard.optim import host as host_state
from fullshard.optim.flat import stream as state_stream
from tests.lanes.booking import Booking, is_plain
from tests.lanes.clocks import RaceError, Timeline, Trace
from tests.lanes.fake import Accelerator
from tests.lanes.places import here
from tests.lanes.wire import TracedWire

_current: ContextVar[Checker] = ContextVar("checker")
_SHOWN = 5  # races in an error


def current_checker() -> Checker:
    """Return the checker of the running program, for its streams and events."""
    return _current.get()


class _Lanes(StreamLanes):
    """Lanes whose collectives run in the order of their stream, as our wire asks of NCCL."""

    def wire(self, lane: Lane, comm: comm.Collectives) -> comm.Collectives:
        """See ``StreamLanes.wire``."""
        if isinstance(comm, TracedWire):
            comm = replace(comm, in_order=True)
        wire = super().wire(lane, comm)
        if isinstance(wire, OnStream):
            wire.stream.timeline.name = f"wire of {lane.value}"
        return wire

    def _new_stream(self) -> Any:
        """Return a stream whose work does not call ``record_stream``."""
        stream = super()._new_stream()
        stream.timeline.computes = False
        return stream


class Checker:
    """A trace, and the stand-ins that fill it."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.accelerator = Accelerator(self.trace)
        self.booking = Booking(self.trace, self.accelerator)
        self._wires: weakref.WeakKeyDictionary[Any, Timeline] = weakref.WeakKeyDictionary()
        self._num_lanes = 0

    @property
    def figures(self) -> Counter[str]:
        """The numbers of programs, operations, accesses, storages and lanes."""
        return self.trace.counts + Counter(programs=1, lanes=len(self.trace.timelines))

    def check(self) -> None:
        """Raise ``RaceError`` if there are races."""
        races = self.trace.races
        if races:
            more = f"\n\n... and {len(races) - _SHOWN} more" if len(races) > _SHOWN else ""
            text = "\n\n".join(races[:_SHOWN])
            raise RaceError(f"races between lanes: {len(races)}\n\n{text}{more}")

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Check the work of the block."""
        checks = sys.modules["fullshard.frontend.checks"]
        flat = sys.modules["fullshard.flat.wrapper"]
        checked_offload, as_offload = checks.checked_offload, flat.as_offload
        away = torch.device("cuda")  # any that is no CPU
        with ExitStack() as stack:
            for target, name, stand_in in (
                (executor, "make_lanes", self._make_lanes),
                (bucket_spec, "host_tensor", self._host_tensor(bucket_spec.host_tensor)),
                (state_stream, "make_lanes", self._make_lanes),
                (host_state, "host_tensor", self._host_tensor(host_state.host_tensor)),
                (torch.UntypedStorage, "resize_", self._resize(torch.UntypedStorage.resize_)),
                (Tensor, "tolist", self._tolist(Tensor.tolist)),
                (shard.Shards, "__init__", self._shard(shard.Shards.__init__)),
                (shard.SeparateShards, "__init__", self._shard(shard.SeparateShards.__init__)),
                (checks, "checked_offload", lambda policy, _: checked_offload(policy, "cuda")),
                (flat, "as_offload", lambda choice, _: as_offload(choice, away)),
            ):
                stack.enter_context(patch.object(target, name, stand_in))
            stack.enter_context(comm.wrapped(self._wrap))
            token = _current.set(self)
            stack.callback(_current.reset, token)
            stack.enter_context(self.booking)
            yield

    def _make_lanes(self, device: torch.device) -> Lanes:
        lanes = _Lanes(self.accelerator, device)  # type: ignore[arg-type]
        self._num_lanes += 1
        suffix = "" if self._num_lanes == 1 else f" {self._num_lanes}"
        for lane in (Lane.GATHER, Lane.REDUCE):
            timeline = lanes._streams[lane].timeline
            timeline.name = lane.value + suffix
        return lanes

    def _wrap(self, inner: comm.Collectives) -> comm.Collectives:
        group = inner.group
        if group is None:  # alone: its copies run on the current lane
            return inner
        if group not in self._wires:
            self._wires[group] = Timeline(f"wire {len(self._wires) + 1}")
        return TracedWire(inner, self, self._wires[group])

    def on_host(self, tensor: Tensor) -> None:
        """Mark the memory of ``tensor``, or of the tensors inside it, as memory of the host."""
        self.trace.host.join(self.accelerator.current.clock)  # which waited if it was moved there
        if not is_plain(type(tensor)):
            for value in vars(tensor).values():
                if isinstance(value, Tensor):
                    self.on_host(value)
        elif tensor.numel() and not tensor.is_meta:
            self.booking.block_of(tensor).on_host = True

    def _host_tensor(self, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def host_tensor(numel: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
            tensor = plain(numel, dtype, pinned=False)  # pinning takes an accelerator
            self.on_host(tensor)
            return tensor

        return host_tensor

    def _shard(self, plain: Callable[..., None]) -> Callable[..., None]:
        def __init__(shards: Any, spec: Any, own: Any) -> None:
            if spec.offload is not None:
                for tensor in own if isinstance(own, list) else [own]:
                    self.on_host(tensor)
            plain(shards, spec, own)

        return __init__

    def _resize(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            trace = self.trace
            if storage.nbytes() and storage.device.type == "cpu":
                block = trace.block_at(storage.data_ptr())
                if block is not None:
                    trace.free(block, here())
            result = plain(storage, nbytes)
            if nbytes and storage.device.type == "cpu":
                trace.allocate(storage, self.accelerator.current, here(), on_host=False)
            return result

        return resize_

    def _tolist(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def tolist(tensor: Tensor) -> Any:
            if type(tensor) is Tensor and tensor.numel() and tensor.device.type == "cpu":
                lane = self.accelerator.current
                if self.booking.block_of(tensor, lane).on_host:
                    lane = self.trace.host
                tick = self.trace.issue(lane)
                self.booking.touch(tensor, lane, tick, here(), writes=False)
                self.trace.host.join(lane.clock)
            return plain(tensor)

        return tolist

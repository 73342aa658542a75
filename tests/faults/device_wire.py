"""Collectives of a fake device, for which the host does not wait (as with NCCL), over files.

A collective is work on the current stream. It ends once all ranks of the group have issued the
collective with the same number, kind and size. It never ends if ranks run different collectives, or
a rank is gone. An event after each collective tells the watch that it is done. A fault aborts all
collectives: streams continue with NaN as results, and later collectives raise.

Not modelled: errors and time-outs of NCCL; PyTorch's NCCL watchdog, which may end a process
(SIGABRT); and kernels that compete for the device. Objects and raw bytes travel over gloo; the host
waits for them, as it does over NCCL, and a fault ends these waits as on a CPU.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard._torch import collectives as _collectives
from fullshard._torch import device as _device
from fullshard.comm import Done, Pending, blocking, c10d
from fullshard.device import HostReader
from fullshard.device.streams import StreamLanes
from fullshard.engine import executor
from fullshard.optim.flat import stream
from tests.faults.device import Device, Event, put

_POLL_S = 0.001

Finish = Callable[[list[Tensor]], object]
"""Function that computes the outputs of a collective from the tensors of all ranks."""


class DeviceWire:
    """The collectives of this process, exchanged through files in ``folder``, the job's folder."""

    def __init__(self, device: Device, folder: Path) -> None:
        self._device = device
        self._folder = folder
        self._numbers: Counter[str] = Counter()
        self._is_aborted = threading.Event()

    def abort(self) -> None:
        """Abort the current collectives, and make later ones raise."""
        self._is_aborted.set()

    def mark(self, device_type: str) -> Event:
        """Record an event, as ``fullshard._torch.device.mark`` does."""
        return self._device.current_stream().record_event()

    def ledger_for(self, plain: Any, group: dist.ProcessGroup, device_type: str) -> Any:
        """Return ``c10d.ledger_for``'s ledger, with ``aborts`` replaced."""
        ledger = plain(group, device_type)
        ledger.aborts = self.abort
        return ledger

    def _issue(
        self, group: Any, kind: str, outputs: Sequence[Tensor], source: Tensor, finish: Finish
    ) -> None:
        if self._is_aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        name = f"{group.group_name}-{self._numbers[group.group_name]}-{kind}-{source.nbytes}"
        self._numbers[group.group_name] += 1
        paths = [self._folder / f"{name}-{rank}" for rank in range(group.size())]
        own, part = paths[group.rank()], self._folder / f"{name}-{group.rank()}.part"
        put(outputs)

        def work() -> None:
            torch.save(source.clone(), part)
            os.rename(part, own)
            while not all(path.exists() for path in paths) and not self._is_aborted.is_set():
                time.sleep(_POLL_S)
            if self._is_aborted.is_set():
                for one in outputs:
                    one.fill_(float("nan") if one.is_floating_point() else 255)
            else:
                finish([torch.load(path) for path in paths])

        self._device.current_stream().issue(work)

    # Replacements for functions of ``fullshard._torch.collectives``.

    def all_gather(self, group: Any, outputs: Any, sources: Any, *, in_order: bool = False) -> None:
        """Issue one collective for each source."""
        for output, source in zip(outputs, sources, strict=True):
            output, source = output.detach(), source.detach()
            finish = partial(torch.cat, out=output)
            self._issue(group, "gather", [output], source, finish)

    def reduce_scatter(
        self, group: Any, output: Tensor, source: Tensor, op: Any, *, in_order: bool = False
    ) -> None:
        output, source, rank = output.detach(), source.detach(), group.rank()

        def finish(rows: list[Tensor]) -> None:
            output.copy_(_reduced(rows, op).view(len(rows), -1)[rank])

        self._issue(group, "reduce", [output], source, finish)

    def all_reduce(self, group: Any, values: Tensor, op: Any, *, in_order: bool = False) -> None:
        values = values.detach()
        self._issue(group, "sum", [values], values, lambda rows: values.copy_(_reduced(rows, op)))

    def broadcast(self, group: Any, values: Tensor, root: int) -> Pending:
        values = values.detach()
        self._issue(group, "send", [values], values, lambda rows: values.copy_(rows[root]))
        return Done()


def _reduced(rows: list[Tensor], op: Any) -> Tensor:
    values = torch.stack(rows)
    return values.amax(0) if op == dist.ReduceOp.MAX else values.sum(0)


@contextmanager
def on_device(folder: Path) -> Iterator[Device]:
    """Train on a fake device in the block; ranks exchange files in ``folder``."""
    device = Device()
    wire = DeviceWire(device, folder)
    lanes = partial(StreamLanes, device)  # type: ignore[arg-type]

    def choice(group: dist.ProcessGroup, device_type: str) -> c10d.TransportRequest:
        return c10d.TransportRequest(c10d.Transport.NATIVE, device_type)

    with ExitStack() as stack:
        for target, name, stand_in in (
            (executor, "make_lanes", lanes),
            (stream, "make_lanes", lanes),
            (HostReader, "__init__", device.reading(HostReader.__init__)),
            (c10d, "ledger_for", partial(wire.ledger_for, c10d.ledger_for)),
            (c10d, "default_choice", choice),
            (blocking, "default_choice", choice),
            (_device, "mark", wire.mark),
            (_collectives, "all_gather", wire.all_gather),
            (_collectives, "reduce_scatter", wire.reduce_scatter),
            (_collectives, "all_reduce", wire.all_reduce),
            (_collectives, "broadcast", wire.broadcast),
        ):
            stack.enter_context(patch.object(target, name, stand_in))
        stack.enter_context(device.used())
        yield device

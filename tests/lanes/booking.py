"""Records every read and write of every operation on the lane that issues it.

A schema says which arguments an operation reads, which it writes, and which results are views. An
operation counts as accessing all bytes from its first to its last element in a storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lanes.clocks import Access, Block, Flight, RaceError, Timeline, Trace
from tests.lanes.fake import Accelerator
from tests.lanes.places import BEFORE, Place, here

_SHAPES_ONLY = frozenset(
    "empty empty_strided empty_like zeros_like ones_like full_like rand_like randn_like"
    " randint_like new_empty new_empty_strided new_zeros new_ones new_full is_same_size"
    " record_stream set_ resize_ resize_as_ sym_size sym_stride sym_numel"
    " sym_storage_offset".split()
)
"""Operations that read only shapes; some of them fill their results."""

_BLOCKING = frozenset(
    "_local_scalar_dense equal nonzero masked_select _unique2 unique_dim unique_consecutive"
    " repeat_interleave is_nonzero".split()
)
"""Operations that make the host wait for their result."""


class _Plan(NamedTuple):
    """The effects of an operation on memory."""

    written: frozenset[int | str]
    """Arguments that the operation writes, by number and by name."""
    reads: bool
    """True if it reads its other arguments."""
    makes: bool
    """True if its results are in new memory."""
    fills: bool
    """True if it writes its new memory."""
    blocks: bool
    """True if the host waits for its result."""


@cache
def _plan_of(op: torch._ops.OpOverload) -> _Plan:
    schema = op._schema
    name = schema.name.split("::")[1]
    written: set[int | str] = set()
    for number, arg in enumerate(schema.arguments):
        if op.namespace == "c10d":  # whose schemas do not mark written arguments
            is_written = "input" not in arg.name
        else:
            is_written = arg.alias_info is not None and arg.alias_info.is_write
        if is_written:
            written |= {number, arg.name}
    makes = any(result.alias_info is None for result in schema.returns)
    is_view = bool(schema.returns) and not makes and not written
    if name in _SHAPES_ONLY:
        fills = not name.startswith(("empty", "new_empty"))
        return _Plan(frozenset(), False, makes, fills, False)
    return _Plan(frozenset(written), not is_view, makes, True, name in _BLOCKING)


class Booking(TorchDispatchMode):
    """Runs every operation, and records its accesses in ``trace``."""

    supports_higher_order_operators = True

    def __init__(self, trace: Trace, accelerator: Accelerator) -> None:
        super().__init__()
        self._trace = trace
        self._accelerator = accelerator
        self._suspended = 0

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Record nothing in the block: on a CPU a transport works differently than on a device."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_fake = any(issubclass(cls, FakeTensor) for cls in types)
        if self._suspended or is_fake or not isinstance(op, torch._ops.OpOverload):
            return op(*args, **kwargs)
        if not all(map(is_plain, types)):
            return NotImplemented  # operations on its inner tensors come here
        plan = _plan_of(op)
        if not plan.reads and not plan.makes:
            return op(*args, **kwargs)
        touched = list(_touched(plan, args, kwargs))
        lane, is_crossing = self._lane_of(op, touched)
        tick, place = self._trace.issue(lane), here()
        if plan.reads:
            for tensor, writes in touched:
                self.touch(tensor, lane, tick, place, writes=writes)
        result = op(*args, **kwargs)
        if plan.makes:
            known = {tensor.untyped_storage()._cdata for tensor, _ in touched}
            for tensor in _tensors(result):
                if _has_memory(tensor) and tensor.untyped_storage()._cdata not in known:
                    self._made(tensor, lane, tick, place, fills=plan.fills)
        if plan.blocks or (is_crossing and not kwargs.get("non_blocking", len(args) > 2)):
            self._trace.host.join(lane.clock)
        return result

    def _lane_of(self, op: Any, touched: Sequence[tuple[Tensor, bool]]) -> tuple[Timeline, bool]:
        """Return the timeline of ``op``; True if it copies between the host and the device.

        A device cannot run any other operation on memory of both. On the CPU such a mixture works:
        it is recorded as work of the host after all work of the device.
        """
        current, host = self._accelerator.current, self._trace.host
        # Single numbers come from anywhere.
        on_host = {self.block_of(tensor, current).on_host for tensor, _ in touched if tensor.dim()}
        if True not in on_host:
            return current, False
        if False not in on_host:
            if not all(self.block_of(tensor).on_host for tensor, _ in touched):
                host.join(current.clock)
            return host, False
        if op.overloadpacket is torch.ops.aten.copy_:
            return current, True
        host.join(current.clock)
        return host, False

    def touch(
        self,
        tensor: Tensor,
        lane: Timeline,
        tick: int,
        place: Place,
        *,
        writes: bool,
        flight: Flight | None = None,
    ) -> None:
        """Record an access to all of ``tensor``.

        Raises:
            RaceError: the memory was freed; an access would end the process.
        """
        if not _has_memory(tensor):
            return
        block = self.block_of(tensor, lane)
        start = tensor.data_ptr() - block.address
        length = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        stop = start + (length + 1) * tensor.itemsize
        self._trace.book(block, Access(start, stop, writes, lane, tick, place, flight))

    def block_of(self, tensor: Tensor, user: Timeline | None = None) -> Block:
        """Return the block of ``tensor``.

        Memory that is older than the trace, or that a backend allocated, becomes a block of
        ``user``, its first user; without ``user``, a block of the compute lane.
        """
        storage = tensor.untyped_storage()
        block = self._trace.block_at(storage.data_ptr())
        if block is None:
            if not storage.nbytes():
                raise RaceError(
                    f"a tensor of shape {tuple(tensor.shape)} is used at {here()} while its memory "
                    "is freed"
                )
            lane = user or self._accelerator.default.timeline
            block = self._trace.allocate(storage, lane, BEFORE, on_host=False)
        return block

    def _made(
        self, tensor: Tensor, lane: Timeline, tick: int, place: Place, *, fills: bool
    ) -> None:
        on_host = lane is self._trace.host
        self._trace.allocate(tensor.untyped_storage(), lane, place, on_host=on_host)
        if fills:
            self.touch(tensor, lane, tick, place, writes=True)


def is_plain(cls: type) -> bool:
    """Return whether tensors of the class own memory, rather than wrap other tensors."""
    return cls.__torch_dispatch__ is Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def _has_memory(tensor: Tensor) -> bool:
    return (
        is_plain(type(tensor))
        and tensor.layout is torch.strided
        and tensor.numel() > 0
        and not torch._is_functional_tensor(tensor)
        and tensor.untyped_storage().device.type == "cpu"
    )


def _touched(
    plan: _Plan, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors in the arguments; True for those that the operation writes."""
    for key, value in (*enumerate(args), *kwargs.items()):
        for tensor in _tensors(value):
            if _has_memory(tensor):
                yield tensor, key in plan.written


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)

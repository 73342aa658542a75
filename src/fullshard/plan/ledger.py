"""The books of a dry run: bytes by kind, in each memory, and seconds of operations."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard._torch import autograd as _autograd
from fullshard._torch import collectives as _collectives
from fullshard._torch import memory as _memory
from fullshard.comm import Exchange, Pending
from fullshard.device import DryLanes, is_at_home
from fullshard.plan.flops import flops_of
from fullshard.plan.hardware import Hardware
from fullshard.plan.values import Values, makes_memory, tensors_in

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer_state"
INPUTS = "inputs"
ACTIVATIONS = "activations"
WHOLE_GRADIENTS = "whole_gradients"
BACKWARD = "backward"
STEP = "step"
STAGING = "staging"
ENCODED = "encoded"
"""Kinds of bytes; kinds of the engine's buffers have their names in ``device.BufferKind``."""

_TAKES_NO_TIME = set(
    "empty empty_like empty_strided new_empty new_empty_strided detach alias lift_fresh".split()
)


class Moment(NamedTuple):
    """The bytes that are held from a moment on, by kind.

    The host may issue an operation, and so allocate its memory, long before the device runs it. The
    time of a moment is the time at which the device has finished all operations issued before.
    """

    at_s: float
    held: dict[str, int]
    doing: str
    """The phase of the model at that moment: "forward", "after the forward", ..."""
    unit: str = ""
    """The unit in this phase; empty if the phase belongs to no single unit."""
    home: dict[str, int] = {}  # noqa: RUF012 - never changed
    """The bytes held in the host's memory; ``held`` counts the device's."""

    @property
    def where(self) -> str:
        """The phase of the model at that moment, and the unit."""
        return f"{self.doing} of {self.unit}" if self.unit else self.doing

    @property
    def nbytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.held.values())


class Account:
    """The bytes that are held in one memory, by kind."""

    def __init__(self, now: Callable[[], Moment]) -> None:
        self.most = Moment(0.0, {}, "")
        self._now = now
        self._held: Counter[str] = Counter()
        self._nbytes = self._most_nbytes = 0

    def restart(self) -> None:
        """Forget the peak, but keep the bytes that are held."""
        self._most_nbytes, self.most = self._nbytes, self._now()

    @property
    def held(self) -> dict[str, int]:
        """Bytes that are held now, by kind."""
        return dict(+self._held)

    def change(self, kind: str, nbytes: int) -> None:
        """Add ``nbytes`` to the bytes of ``kind``, and update the peak."""
        self._held[kind] += nbytes
        self._nbytes += nbytes
        if self._nbytes > self._most_nbytes:
            self._most_nbytes, self.most = self._nbytes, self._now()


class PlanLedger(TorchDispatchMode):
    """A mode that books each operation on tensors of the meta device as if it ran.

    A storage counts from the operation that made it until its last reference is gone. It counts
    under the kind that was current then, or the kind of a later ``book``. Each operation takes time
    on the current lane of ``lanes``: for its FLOPs, or for the bytes that it reads and writes.

    The account ``home`` counts memory of the host: tensors given to ``bring_home``, tensors that
    the engine makes there, and results of operations on such tensors alone. These operations take
    the host's time. A copy between host and device takes the time of the link between the two.
    ``carry``, by default that of ``lanes``, starts the collectives that the model issues itself.
    """

    def __init__(
        self,
        hardware: Hardware,
        lanes: DryLanes,
        carry: Callable[[Exchange], Pending] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._carry = carry or lanes.carry
        self.kind = ACTIVATIONS
        self._where = "", ""  # phase of the model, and its unit
        self.values = Values()
        self.flops = 0.0
        self.moments: list[Moment] = []
        self.crossings: list[tuple[str, int]] = []
        self._hardware = hardware
        self._lanes = lanes
        self.device, self.home = Account(self._now), Account(self._now)
        self._books: dict[int, _Entry] = {}  # by the id of the storage

    @contextmanager
    def booking(self, kind: str) -> Iterator[None]:
        """Book memory made in the block under ``kind``."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def book(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Book the storages of plain ``tensors`` under ``kind`` from now on."""
        for tensor in map(_whole, tensors):
            small = not (tensor.is_meta or self._hardware.device == "cpu")  # counts of steps
            if not small or self.home.held:
                self._enter(tensor.untyped_storage(), kind, move=True, at_home=small)

    def bring_home(self, tensors: Iterable[Tensor]) -> None:
        """Move the storages of plain ``tensors`` to the host's account."""
        for tensor in map(_whole, tensors):
            storage = tensor.untyped_storage()
            entry, nbytes = self._books[id(storage)], storage.nbytes()
            if entry.account is self.device:
                self._books[id(storage)] = entry._replace(account=self.home, nbytes=nbytes)
                self.device.change(entry.kind, -entry.nbytes)
                self.home.change(entry.kind, nbytes)

    def resized(self, kind: str, nbytes: int, storage: torch.UntypedStorage | None) -> None:
        """Book a buffer of the engine that changed its size; see ``StorageMeter.watch``."""
        if storage is not None:
            self._enter(storage, str(kind), move=True)
        else:
            self.device.change(str(kind), nbytes)

    def turn_to(self, doing: str, unit: str = "") -> None:
        """Set the phase of the model, and its unit, for later moments."""
        self._where = doing, unit

    def restart(self) -> None:
        """Forget peak, moments, copies and FLOPs so far, but keep the bytes that are held."""
        self.flops = 0.0
        self.moments, self.crossings = [], []
        self.device.restart()
        self.home.restart()

    def note(self) -> None:
        """Add a moment with the bytes that are held now."""
        self.moments.append(self._now())

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``op``, and book its results and its time."""
        with _autograd.no_torch_functions():
            return self._booked(op, types, args, kwargs or {})

    def _booked(self, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the class runs op on its inner tensors, which arrive here
        read = tensors_in(args) + tensors_in(kwargs)
        at_home = [self._is_at_home(one) for one in read if one.is_meta]
        out = self.values.run(op, args, kwargs, read)
        made = tensors_in(out) if isinstance(out, (Tensor, tuple, list)) else []
        if makes_memory(op):
            for tensor in made:
                if tensor.is_meta:
                    home = bool(at_home) and all(at_home)
                    self._enter(tensor.untyped_storage(), self.kind, at_home=home)
        name = op.overloadpacket.__name__
        what = _collectives.functional_collective(op)
        if what is not None:
            nbytes = max(sum(one.nbytes for one in tensors) for tensors in (read, made))
            self._carry(Exchange(what, _collectives.ranks_of_group_named(args[-1]), nbytes)).wait()
            return out
        if op.is_view or name in _TAKES_NO_TIME or not any(one.is_meta for one in (*made, *read)):
            return out
        nbytes = sum(one.nbytes for one in (*read, *made))
        if name == "copy_" and len(set(at_home)) == 2:
            is_non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self._cross(read[0].nbytes, to_host=at_home[0], blocks=not is_non_blocking)
        elif at_home and all(at_home):
            assert self._hardware.host is not None
            took_s = nbytes / self._hardware.host.memory_bandwidth
            self._lanes.take_host(self._hardware.op_s + took_s, name)
        else:
            flops = flops_of(op, args, kwargs, out)
            dtype = str(read[0].dtype if read else torch.float32).removeprefix("torch.")
            self.flops += flops
            self._lanes.spend(self._hardware.op_duration_s(flops, nbytes, dtype), name)
        return out

    def _is_at_home(self, tensor: Tensor) -> bool:
        storage = _whole(tensor).untyped_storage()
        entry = self._books.get(id(storage))
        if entry is None and is_at_home(storage):  # made outside of any mode
            self._enter(storage, GRADIENTS if self.kind == GRADIENTS else STAGING, at_home=True)
            return True
        return entry is not None and entry.account is self.home

    def _cross(self, nbytes: int, *, to_host: bool, blocks: bool) -> None:
        assert self._hardware.host is not None
        way = "to_host" if to_host else "to_device"
        self.crossings.append((way, nbytes))
        self._lanes.spend(nbytes / self._hardware.host.bus_bandwidth, way)
        if blocks:
            self._lanes.mark().synchronize()

    def _enter(
        self,
        storage: torch.UntypedStorage,
        kind: str,
        *,
        move: bool = False,
        at_home: bool = False,
    ) -> None:
        """Book ``storage`` at its present size; ``move`` a booked storage to ``kind``."""
        key = id(storage)
        entry = self._books.get(key)
        if entry is None:
            account = self.home if at_home else self.device
            nbytes = self._rounded(storage.nbytes(), account)
            reference = weakref.ref(storage, partial(self._forget, key))
            self._books[key] = _Entry(reference, kind, nbytes, account)
            account.change(kind, nbytes)
            return
        nbytes = self._rounded(storage.nbytes(), entry.account)
        kind = kind if move else entry.kind
        if (kind, nbytes) != (entry.kind, entry.nbytes):
            self._books[key] = entry._replace(kind=kind, nbytes=nbytes)
            entry.account.change(entry.kind, -entry.nbytes)
            entry.account.change(kind, nbytes)

    def _forget(self, key: int, _: object) -> None:
        entry = self._books.pop(key)
        entry.account.change(entry.kind, -entry.nbytes)

    def _rounded(self, nbytes: int, account: Account) -> int:
        granule = 1 if account is self.home else self._hardware.granule_nbytes
        return -(-nbytes // granule) * granule

    def _now(self) -> Moment:
        at_s, held, home = self._lanes.computed_s, self.device.held, self.home.held
        return Moment(at_s, held, *self._where, home)


def _whole(tensor: Tensor) -> Tensor:
    """Return the tensor on the meta device whose memory ``tensor`` shares, or ``tensor``."""
    whole = _memory.whole_on_meta(tensor)
    return tensor if whole is None else whole


class _Entry(NamedTuple):
    storage: weakref.ref[torch.UntypedStorage]
    kind: str
    nbytes: int
    account: Account

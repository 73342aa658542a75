"""The books of a dry run: which bytes are held for what, and how long each operation takes."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard import _torch
from fullshard.comm import Exchange, Pending
from fullshard.device import DryLanes
from fullshard.plan.flops import flops_of
from fullshard.plan.hardware import Hardware
from fullshard.plan.values import Values, tensors_in

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer_state"
INPUTS = "inputs"
ACTIVATIONS = "activations"
WHOLE_GRADIENTS = "whole_gradients"
BACKWARD = "backward"
STEP = "step"
"""Kinds of bytes; those of the engine's buffers are called as in ``device.Kind``."""

_TAKES_NO_TIME = set(
    "empty empty_like empty_strided new_empty new_empty_strided detach alias lift_fresh".split()
)


class Moment(NamedTuple):
    """The bytes that are held from a moment on, by kind.

    Memory is allocated when an operation is issued, which the host may do long before; moments are
    those at which the device has computed what was issued before.
    """

    at_s: float
    held: dict[str, int]
    doing: str
    """What the model does at that moment: "forward", "after the forward", ..."""
    unit: str = ""
    """The unit that does it; empty if that is not of one unit."""

    @property
    def where(self) -> str:
        """What the model does at that moment, and which unit."""
        return f"{self.doing} of {self.unit}" if self.unit else self.doing

    @property
    def nbytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.held.values())


class Ledger(TorchDispatchMode):
    """A mode that books each operation on tensors of the meta device as if it ran.

    A storage counts from the operation that made it until nothing refers to it any more, under the
    kind that was current then, or that it was ``book`` ed under since. Each operation takes time on
    the current one of ``lanes``: for its FLOPs, or for the bytes that it reads and writes.
    ``carry``, by default that of ``lanes``, takes the collectives that the model issues itself.
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
        self.doing, self.unit = "", ""
        self.values = Values()
        self.flops = 0.0
        self.moments: list[Moment] = []
        self.most = Moment(0.0, {}, "")
        self._hardware = hardware
        self._lanes = lanes
        self._held: Counter[str] = Counter()
        self._nbytes = self._most_nbytes = 0
        self._books: dict[int, _Entry] = {}  # by the id of the storage

    @contextmanager
    def booking(self, kind: str) -> Iterator[None]:
        """Book what is made in the block under ``kind``."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def book(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Book the memory that plain ``tensors`` are in under ``kind`` from now on."""
        for given in tensors:
            whole = _torch.whole_on_meta(given)
            tensor = given if whole is None else whole
            if tensor.is_meta or self._hardware.device == "cpu":
                self._enter(tensor.untyped_storage(), kind, move=True)

    def resized(self, kind: str, nbytes: int, storage: torch.UntypedStorage | None) -> None:
        """Take note that a buffer of the engine changed its size, as ``StorageMeter.watch``."""
        if storage is not None:
            self._enter(storage, str(kind), move=True)
        else:
            self._change(str(kind), nbytes)

    @property
    def held(self) -> dict[str, int]:
        """Bytes that are held now, by kind."""
        return dict(+self._held)

    def turn_to(self, doing: str, unit: str = "") -> None:
        """Take note of what the model does from now on."""
        self.doing, self.unit = doing, unit

    def restart(self) -> None:
        """Forget peak, moments and FLOPs so far, but not what is held."""
        self.flops = 0.0
        self.moments = []
        self._most_nbytes = 0
        self._look()

    def note(self) -> None:
        """Remember what is held now."""
        self.moments.append(self._now())

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``op``, and book what it makes and what it takes."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the class runs it on the tensors inside, which come by here
        kwargs = kwargs or {}
        read = tensors_in(args) + tensors_in(kwargs)
        out = self.values.run(op, args, kwargs, read)
        made = tensors_in(out) if isinstance(out, (Tensor, tuple, list)) else []
        if _makes_memory(op):
            for tensor in made:
                if tensor.is_meta:
                    self._enter(tensor.untyped_storage(), self.kind)
        name = op.overloadpacket.__name__
        what = _torch.functional_collective(op)
        if what is not None:
            nbytes = max(sum(one.nbytes for one in tensors) for tensors in (read, made))
            self._carry(Exchange(what, _torch.ranks_of_group_named(args[-1]), nbytes)).wait()
            return out
        if op.is_view or name in _TAKES_NO_TIME or not any(one.is_meta for one in (*made, *read)):
            return out
        self._take_time(name, flops_of(op, args, kwargs, out), read, made)
        return out

    def _take_time(self, name: str, flops: float, read: list[Tensor], made: list[Tensor]) -> None:
        nbytes = sum(one.nbytes for one in read) + sum(one.nbytes for one in made)
        dtype = str(read[0].dtype if read else torch.float32).removeprefix("torch.")
        self.flops += flops
        self._lanes.spend(self._hardware.op_duration_s(flops, nbytes, dtype), name)

    def _enter(self, storage: torch.UntypedStorage, kind: str, *, move: bool = False) -> None:
        """Book ``storage`` at its present size; ``move`` it to ``kind`` if it is booked already."""
        key, nbytes = id(storage), self._rounded(storage.nbytes())
        entry = self._books.get(key)
        if entry is None:
            reference = weakref.ref(storage, self._forgetting(key))
            self._books[key] = _Entry(reference, kind, nbytes)
            self._change(kind, nbytes)
            return
        kind = kind if move else entry.kind
        if (kind, nbytes) != (entry.kind, entry.nbytes):
            self._books[key] = entry._replace(kind=kind, nbytes=nbytes)
            self._held[entry.kind] -= entry.nbytes
            self._nbytes -= entry.nbytes
            self._change(kind, nbytes)

    def _forgetting(self, key: int) -> Callable[[object], None]:
        def forget(_: object) -> None:
            entry = self._books.pop(key)
            self._change(entry.kind, -entry.nbytes)

        return forget

    def _rounded(self, nbytes: int) -> int:
        granule = self._hardware.granule_nbytes
        return -(-nbytes // granule) * granule

    def _change(self, kind: str, nbytes: int) -> None:
        self._held[kind] += nbytes
        self._nbytes += nbytes
        self._look()

    def _look(self) -> None:
        """Remember what is held if it is more than ever."""
        if self._nbytes > self._most_nbytes:
            self._most_nbytes, self.most = self._nbytes, self._now()

    def _now(self) -> Moment:
        return Moment(self._lanes.computed_s, self.held, self.doing, self.unit)


@cache
def _makes_memory(op: Any) -> bool:
    """Return whether what ``op`` returns is new memory, and not that of its arguments."""
    return all(one.alias_info is None for one in op._schema.returns)


class _Entry(NamedTuple):
    storage: weakref.ref[torch.UntypedStorage]
    kind: str
    nbytes: int

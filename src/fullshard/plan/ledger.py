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
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from fullshard.device import DryLanes
from fullshard.plan.hardware import Hardware

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
    """The bytes that are held from a moment on, by kind."""

    at_s: float
    held: dict[str, int]
    where: str
    """What the model does at that moment."""

    @property
    def nbytes(self) -> int:
        """Bytes of all kinds."""
        return sum(self.held.values())


class Ledger(TorchDispatchMode):
    """A mode that books each operation on tensors of the meta device as if it ran.

    A storage counts from the operation that made it until nothing refers to it any more, under the
    kind that was current then, or that it was ``book`` ed under since. Each operation takes time on
    the current one of ``lanes``: for its FLOPs, or for the bytes that it reads and writes.
    """

    def __init__(self, hardware: Hardware, lanes: DryLanes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kind = ACTIVATIONS
        self.where = ""
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
        """Book the storages of plain ``tensors`` under ``kind`` from now on."""
        for tensor in tensors:
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
        out = op(*args, **kwargs)
        made = [one for one in tree_iter(out) if isinstance(one, Tensor)]
        if _makes_memory(op):
            for tensor in made:
                if tensor.is_meta:
                    self._enter(tensor.untyped_storage(), self.kind)
        name = op.overloadpacket.__name__
        if not op.is_view and name not in _TAKES_NO_TIME:
            self._take_time(op, name, args, kwargs, out, made)
        return out

    def _take_time(
        self, op: Any, name: str, args: Any, kwargs: Any, out: Any, made: list[Tensor]
    ) -> None:
        read = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
        if not any(one.is_meta for one in (*made, *read)):
            return
        nbytes = sum(one.nbytes for one in read) + sum(one.nbytes for one in made)
        count = flop_registry.get(op.overloadpacket)
        flops = float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0
        self.flops += flops
        dtype = str(read[0].dtype if read else torch.float32).removeprefix("torch.")
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
        return Moment(self._lanes.now_s, self.held, self.where)


@cache
def _makes_memory(op: Any) -> bool:
    """Return whether what ``op`` returns is new memory, and not that of its arguments."""
    return all(one.alias_info is None for one in op._schema.returns)


class _Entry(NamedTuple):
    storage: weakref.ref[torch.UntypedStorage]
    kind: str
    nbytes: int

"""A fake accelerator on a CPU: the host issues work, and does not wait for it.

Streams are threads that do their work in order. An operation on tensors of the device queues work
on the current stream; the host learns only the shapes of the results. The host waits where a
program on a GPU would: in ``item()``, ``tolist()``, ``cpu()``, and in operations whose shapes
depend on values. ``Device`` replaces ``torch.cuda`` in ``StreamLanes``.

In the ``with`` block of a device, new tensors of one or more dims are on the device, and so are the
results of operations on them. A 0-dim tensor, such as the step count of an optimizer, stays on the
host until an operation combines it with a tensor of the device.

Memory is not modelled: a freed buffer keeps its memory, so a use after the free goes unnoticed
(``tests/lanes`` looks for such uses). Speed is not modelled either.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

_AT_ONCE = frozenset(
    "empty_like zeros_like ones_like full_like new_empty new_empty_strided new_zeros new_ones"
    " new_full is_same_size".split()
)
"""Operations that depend on shapes alone, and allocate memory that no stream uses yet."""

_errors: list[Exception] = []
"""Exceptions raised by work on streams."""


class Stream:
    """A stand-in for ``torch.cuda.Stream``."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="stream", daemon=True).start()

    def _run(self) -> None:
        # Autograd and version counters have seen the operation when the host issued it.
        versions = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
        with torch._C._AutoDispatchBelowAutograd(), torch._C._ExcludeDispatchKeyGuard(versions):
            while True:
                try:
                    self._work.get()()
                except Exception as error:
                    _errors.append(error)

    def issue(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def wait_event(self, event: Event) -> None:
        self.issue(event.passed.wait)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    """A stand-in for ``torch.cuda.Event``; an event that was never recorded counts as complete."""

    def __init__(self, current: Stream) -> None:
        self._current = current
        self.passed = threading.Event()
        self.passed.set()

    def record(self, stream: Stream | None = None) -> None:
        self.passed = threading.Event()
        (stream or self._current).issue(self.passed.set)

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()
        if _errors:
            raise _errors[0]

    def elapsed_time(self, later: Event) -> float:
        return 0.0


class Device(TorchDispatchMode):
    """The fake accelerator, see the docstring of this file."""

    def __init__(self) -> None:
        super().__init__()
        self._default = Stream()
        self._of_thread = threading.local()

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:
        return Stream()

    def Event(self, enable_timing: bool = False) -> Event:
        return Event(self.current_stream())

    def current_stream(self, device: Any = None) -> Stream:
        stream: Stream = getattr(self._of_thread, "stream", self._default)
        return stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._of_thread.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._of_thread.stream = before

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, schema = kwargs or {}, op._schema
        if any(issubclass(one, FakeTensor) for one in types):
            return op(*args, **kwargs)
        if not all(one.__torch_dispatch__ is Tensor.__torch_dispatch__ for one in types):
            return NotImplemented  # the subclass calls operations on its inner tensors
        name, given = schema.name.split("::")[1], tensors((args, kwargs))
        by_name = dict(zip([one.name for one in schema.arguments], args, strict=False)) | kwargs
        written = [
            by_name[one.name]
            for one in schema.arguments
            if one.name in by_name and one.alias_info is not None and one.alias_info.is_write
        ]
        is_view = not written and any(one.alias_info is not None for one in schema.returns)
        is_view |= torch.Tag.inplace_view in op.tags
        if is_view or name in _AT_ONCE or not any(map(is_away, given)):
            result = op(*args, **kwargs)
            if name in _AT_ONCE or not given:
                put(one for one in tensors(result) if one.dim())
            return result
        if not written:
            result = _shaped_as(op, args, kwargs)
        elif len(schema.returns) in (0, len(written)):
            result = (None, written[0], written)[min(len(schema.returns), 2)]
        else:
            result = NotImplemented
        # Random numbers come from the host's generator, so the host waits.
        is_drawn = torch.Tag.nondeterministic_seeded in op.tags
        if result is NotImplemented or is_drawn or op.namespace != "aten":
            self.current_stream().synchronize()
            result = op(*args, **kwargs)
            put(tensors(result))
            return result
        put([*tensors(result), *tensors(written)])
        places = [] if written else [one.detach() for one in tensors(result)]
        args, kwargs = tree_map_only(Tensor, _passed, (args, kwargs))

        def work() -> None:
            for place, value in zip(places, tensors(op(*args, **kwargs)), strict=False):
                place.copy_(value)

        self.current_stream().issue(work)
        return result

    def reading(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``plain``, which reads a tensor without an operation, preceded by a wait."""

        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(tensor, Tensor) or any(map(is_away, tensors(tensor))):
                self.current_stream().synchronize()
            return plain(tensor, *args, **kwargs)

        return read

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let operations in the block run on the fake device."""

        def cpu(tensor: Tensor) -> Tensor:
            self.current_stream().synchronize()
            with _disable_current_modes():
                return tensor.clone()

        storage = torch.UntypedStorage
        part, resize = storage.__getitem__, storage.resize_

        def part_of(whole: Any, key: Any) -> Any:
            found = part(whole, key)
            found.is_away = getattr(whole, "is_away", False)
            return found

        def keep(memory: Any, nbytes: int) -> Any:  # a stream may still use the memory
            return memory if nbytes <= memory.nbytes() else resize(memory, nbytes)

        with ExitStack() as stack:
            for target, name, stand_in in (
                (Tensor, "cpu", cpu),
                (Tensor, "tolist", self.reading(Tensor.tolist)),
                (Tensor, "numpy", self.reading(Tensor.numpy)),
                (storage, "__getitem__", part_of),
                (storage, "resize_", keep),
            ):
                stack.enter_context(patch.object(target, name, stand_in))
            with self:
                yield


def _passed(tensor: Tensor) -> Tensor:
    """Return a tensor as a kernel sees it: by address, or, on the host, its values of now."""
    return tensor.detach() if is_away(tensor) else tensor.clone()


def _shaped_as(op: Any, args: Any, kwargs: Any) -> Any:
    """Return new tensors for the results; ``NotImplemented`` if their shapes depend on values."""

    def like(one: Tensor, device: str) -> Tensor:
        return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device)

    args, kwargs = tree_map_only(Tensor, lambda one: like(one, "meta"), (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    try:
        shapes = op(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        return NotImplemented
    if not all(one is None or isinstance(one, Tensor) for one in tree_leaves(shapes)):
        return NotImplemented
    return tree_map_only(Tensor, lambda one: like(one, "cpu"), shapes)


def tensors(value: Any) -> list[Tensor]:
    """Return the dense tensors inside of ``value``; of a DTensor, its local tensor."""
    found = [one for one in tree_leaves(value) if isinstance(one, Tensor)]
    found = [getattr(one, "_local_tensor", one) for one in found]
    return [one for one in found if one.layout is torch.strided]


def put(values: Iterable[Tensor]) -> None:
    """Mark tensors as being on the device."""
    for one in values:
        one.untyped_storage().is_away = True  # type: ignore[attr-defined]


def is_away(tensor: Tensor) -> bool:
    """Return whether a tensor is on the device."""
    return getattr(tensor.untyped_storage(), "is_away", False)

"""A run: parameters that step as one tensor; their state is parts of the run's state.

    parameters    | w w w w w w | . . | b b b |    a slice of their buffer
    gradients     | g g g g g g | . . | g g g |    a slice of theirs, laid out alike
    exp_avg       | m m m m m m | . . | m m m |    flat, made by the inner optimizer
    step          3                                made by the inner optimizer too
    steps         [3, 3]                           one copy of step per parameter

    state[w]      exp_avg: a view of the first six, in the form of w; step: a view of steps[0]

The inner optimizer steps ``tensor``, which has memory only during a step: a run that held
references would keep alive parameters that ``.to()`` replaced, and would keep the engine from
reusing the buffer of the gradients. Users see views of the run's state. When a run splits, the
new runs use views of that state too. So edits in place need no copy, and old views stay valid.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, MutableMapping, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor

from fullshard._torch import autograd as _autograd
from fullshard._torch import memory as _memory
from fullshard.optim.flat.scalars import StateOf, is_cut, is_cut_tensor
from fullshard.optim.host import host_like
from fullshard.optim.inner import EMPTY, Steppable
from fullshard.tensors import cut_flat, flat_part_of, local_part, shown_like

_NOTHING: dict[str, Any] = {}
_MISSING = object()


def same(one: Iterable[object], other: Iterable[object]) -> bool:
    """Return whether both hold the same objects in the same order."""
    return all(map(is_, chain(one, (_MISSING,)), chain(other, (_MISSING,))))


class Run(Steppable):
    """Parameters that step as one tensor.

    Attributes:
        params: neighbors in a buffer, or one parameter, or any number without local elements.
        tensor: the parameter of the inner optimizer; it has no memory between steps.
        parts: first index and shape of each parameter's elements in ``tensor``, which is 1-D; None
            if the run has one parameter and ``tensor`` has the shape of its local tensor.
        is_coalesced: whether parameters and gradients must be neighbors.
        flats: by key the buffers of cut state, which ``flat_part_of`` finds.
        is_shown: True once users see the state of the run.
        on_host: whether its cut state lives in host memory or on the device of the parameters;
            None: wherever it is.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        offsets: Sequence[int] | None,
        on_host: bool | None,
        group: int,
    ) -> None:
        """Create a run with parameters at ``offsets``, or None for one that keeps its shape."""
        self.params = tuple(params)
        self.on_host = on_host
        super().__init__(EMPTY.to("meta") if local_part(params[0]).is_meta else EMPTY, group)
        self.parts: tuple[tuple[int, torch.Size], ...] | None = None
        shapes = [local_part(param).shape for param in params]
        self._shape = shapes[0]
        if offsets is not None:
            self.parts = tuple(zip(offsets, shapes, strict=True))
            self._shape = torch.Size([offsets[-1] + shapes[-1].numel()])
        self.is_coalesced = len(self.params) > 1 and self._shape.numel() > 0
        self.is_shown = False
        self._shown: dict[str, object] = {}  # by key: the value shown, or the base of the views
        self._copies: dict[str, Tensor] = {}  # by key: one row for each parameter
        self.flats: dict[str, Tensor] = {}
        self._entries: list[object] = []
        self._version = 0
        self._bound = self._empty

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return local_part(self.params[0]).device

    def is_like(self, other: Run) -> bool:
        """Return whether both have the same parameters, offsets, and place for their state."""
        where = (self.parts, self.on_host) == (other.parts, other.on_host)
        return where and same(self.params, other.params)

    # memory

    def memory(self, first: Tensor) -> Tensor:
        """Return the run's memory, given the local part of its first parameter or gradient."""
        if self.parts is None:
            return first.detach()
        if not self.is_coalesced:
            return first.detach().reshape(-1)
        place = flat_part_of(first)
        assert place is not None, "the first tensor of a coalesced run is no part of a flat buffer"
        return place.flat.narrow(0, place.start, self._shape[0])

    def bind(self, memory: Tensor, grad: Tensor | None) -> None:
        """Bind ``memory`` and ``grad`` to the tensor."""
        super().bind(memory, grad)
        self._bound = memory

    def release(self) -> None:
        """Release memory and gradient of the tensor."""
        if not _memory.is_at(self.tensor, self._bound):  # the class gave it other memory
            self._bound.copy_(self.tensor.data)
        super().release()
        self._bound = self._empty

    # state

    def is_untouched(self, state: StateOf) -> bool:
        """Return whether ``state`` is as shown; edits in memory of the run do not count."""
        owns = map(state.get, self.params, repeat(_NOTHING))
        return self._version == _autograd.versions(self._copies.values()) and same(
            chain.from_iterable(map(dict.values, owns)), self._entries
        )

    def read(
        self, state: StateOf, flats: Container[int], scalars: Container[str]
    ) -> dict[str, Any]:
        """Return state for the tensor, put together from that of the parameters.

        State that one of ``flats`` (``id`` of buffers) already holds in the layout of the run is
        used in place. ``scalars``: see ``is_cut``.
        """
        values: dict[str, Any] = {}
        for key, value in state.get(self.params[0], _NOTHING).items():
            if is_cut_tensor(self.params[0], key, value, scalars):
                locals_now = [local_part(state[param][key]).detach() for param in self.params]
                values[key] = self._merge(key, locals_now, flats)
            else:
                values[key] = value.detach().clone() if isinstance(value, Tensor) else value
        return values

    def cut(self, values: Mapping[str, Any], scalars: Container[str]) -> dict[str, Tensor]:
        """Return the state with one element per element of the tensor; ``scalars``: ``is_cut``."""
        return {
            key: value
            for key, value in values.items()
            if isinstance(value, Tensor) and is_cut(key, value.shape, self._shape, scalars)
        }

    def show(
        self,
        values: dict[str, Any],
        state: MutableMapping[Tensor, dict[str, Any]],
        scalars: Container[str],
    ) -> None:
        """Show ``values``, the inner optimizer's state of the tensor, in ``state``.

        ``scalars``: see ``is_cut``.
        """
        news: dict[str, Sequence[object]] = {}
        for key, value in values.items():
            if isinstance(value, Tensor):
                if is_cut(key, value.shape, self._shape, scalars):
                    self._show_cut(key, values, news)
                    continue
                if len(self.params) > 1:
                    self._show_shared(key, value, news)
                    continue
            if value is not self._shown.get(key, _MISSING):
                self._shown[key] = value
                news[key] = [value] * len(self.params)
        gone = self._shown.keys() - values.keys()
        if news or gone or not self.is_shown:
            self._write(news, gone, state)
        self.is_shown = True
        self._version = _autograd.versions(self._copies.values())

    def _show_cut(
        self, key: str, values: dict[str, Any], news: dict[str, Sequence[object]]
    ) -> None:
        value, shown = values[key], self._shown.get(key)
        if value is shown:
            return
        if isinstance(shown, Tensor) and _is_alike(value, shown):
            values[key] = shown.copy_(value)  # new each step; users keep the old tensor
            return
        grad = self.tensor.grad
        is_grad = grad is not None and grad.numel() and _memory.is_at(value, grad)  # is released
        if is_grad or (self.parts is not None and not value.is_contiguous()):
            values[key] = value = value.clone()
        views = [value]
        if self.parts is not None:
            flat = self.flats[key] = value if shown is not None else self.flats.get(key, value)
            views = self._parts_of(flat, value.storage_offset() - flat.storage_offset())
        self._shown[key] = value
        news[key] = list(map(shown_like, self.params, views))

    def _show_shared(self, key: str, value: Tensor, news: dict[str, Sequence[object]]) -> None:
        copies = self._copies.get(key)
        if copies is None or not _is_alike(copies, value, rows=True):
            copies = value.new_empty((len(self.params), *value.shape))
            self._copies[key] = copies
            self._shown[key] = copies
            news[key] = copies.unbind()
        copies.copy_(value)

    def _write(
        self,
        news: dict[str, Sequence[object]],
        gone: Iterable[str],
        state: MutableMapping[Tensor, dict[str, Any]],
    ) -> None:
        owns = [state[param] for param in self.params]
        for key in list(gone):
            holders: tuple[dict[str, Any], ...] = (self._shown, self._copies, self.flats, *owns)
            for holder in holders:
                holder.pop(key, None)
        for key, entries in news.items():
            for own, entry in zip(owns, entries, strict=True):
                own[key] = entry
        self._entries = [*chain.from_iterable(map(dict.values, owns))]

    def _parts_of(self, flat: Tensor, start: int = 0) -> list[Tensor]:
        """Return each parameter's part of ``flat``, where the run's tensor begins at ``start``."""
        return cut_flat(flat, ((start + at, shape) for at, shape in self.parts or ()))

    def _merge(self, key: str, locals_now: list[Tensor], flats: Container[int]) -> Tensor:
        first = locals_now[0]
        if self.parts is None:
            return self._new(first).copy_(first)
        found = [part for part in map(flat_part_of, locals_now) if part is not None]
        flat, _, start = found[0] if found else (None, 0, 0)
        if flat is not None and id(flat) in flats:
            places = [(id(part.flat), part.start) for part in found]
            if places == [(id(flat), start + at) for at, _ in self.parts]:
                self.flats[key] = flat
                return flat.narrow(0, start, self._shape[0])
        merged = self._new(first, self._shape).zero_()
        torch._foreach_copy_(self._parts_of(merged), locals_now)
        return merged

    def _new(self, like: Tensor, shape: torch.Size | None = None) -> Tensor:
        """Return memory like ``like``, or of another shape, where the state of the run lives."""
        device = like.device if self.on_host is None else self.device
        dry = torch.empty_like(like, device="meta")
        if shape is not None:
            dry = dry.new_empty(shape)
        return host_like(dry, device) if self.on_host else torch.empty_like(dry, device=device)


def _is_alike(shown: Tensor, value: Tensor, *, rows: bool = False) -> bool:
    shape = shown.shape[1:] if rows else shown.shape
    return (shape, shown.dtype, shown.device) == (value.shape, value.dtype, value.device)

"""A run: parameters that step as one tensor, and their state as parts of its state.

    parameters    | w w w w w w | . . | b b b |    a slice of the buffer that they lie in
    gradients     | g g g g g g | . . | g g g |    a slice of theirs, which lies alike
    exp_avg       | m m m m m m | . . | m m m |    flat, made by the inner optimizer
    step          3                                ... and so is this
    steps         [3, 3]                           a copy of it for each parameter

    state[w]      exp_avg: a view of the first six, in the form of w; step: a view of steps[0]

The inner optimizer works on ``tensor``, to which memory is lent for the time of a step: a run that
held on to parameters would keep what ``.to()`` replaced, one that held on to gradients would keep
the engine from using their buffer again. What users see is memory of the run, and so are parts of
it where runs split: edits in place need no copying, and what users hold stays true.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, MutableMapping, Sequence
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.optim.states import StateOf, is_cut, is_cut_tensor
from fullshard.tensors import announce_flat, flat_part_of, local_part, shown_like

_NOTHING: dict[str, Any] = {}
_MISSING = object()


def same(one: Iterable[object], other: Iterable[object]) -> bool:
    """Whether both are the same objects, as many and in the same order."""
    return all(map(is_, chain(one, (_MISSING,)), chain(other, (_MISSING,))))


class Part(NamedTuple):
    """Where the elements of a parameter are in the tensor of its run."""

    offset: int
    numel: int
    shape: torch.Size


class Run:
    """Parameters that step as one tensor.

    Attributes:
        params: neighbours in a buffer, or one parameter, or any number without elements here.
        tensor: what the inner optimizer knows; without memory between steps.
        parts: where parameters are in the tensor, which is 1-D; None if it has the shape of the
            one parameter that there is.
        is_shown: whether users see its state.
    """

    def __init__(self, params: Sequence[Tensor], offsets: Sequence[int] | None) -> None:
        """``offsets``: of each parameter in the tensor; None for one that stays as it is."""
        self.params = tuple(params)
        self.tensor = nn.Parameter(torch.empty(0, device="cpu"))
        self.parts: tuple[Part, ...] | None = None
        shapes = [local_part(param).shape for param in params]
        self._shape = shapes[0]
        if offsets is not None:
            self.parts = tuple(
                Part(offset, shape.numel(), shape)
                for offset, shape in zip(offsets, shapes, strict=True)
            )
            self._shape = torch.Size([self.parts[-1].offset + self.parts[-1].numel])
        self.is_shown = False
        self._shown: dict[str, object] = {}  # what the user's views are views of, or it itself
        self._copies: dict[str, Tensor] = {}  # one row for each parameter of what they share
        self._flats: dict[str, Tensor] = {}  # the announced buffers that state lies in
        self._entries: list[object] = []
        self._version = 0

    @property
    def numel(self) -> int:
        """Elements of the tensor, those of nobody included."""
        return self._shape.numel()

    @property
    def is_joined(self) -> bool:
        """Whether parameters and gradients must be neighbours."""
        return len(self.params) > 1 and self.numel > 0

    @property
    def flats(self) -> Iterable[Tensor]:
        """The buffers of the state, which can be found by ``flat_part_of`` while this lives."""
        return self._flats.values()

    def is_like(self, other: Run) -> bool:
        """Whether both are the same parameters, in the same places."""
        return self.parts == other.parts and same(self.params, other.params)

    # memory

    def memory(self, first: Tensor) -> Tensor | None:
        """The memory of the run, from the local tensor of its first parameter or gradient.

        None if that is not in a buffer with room for the run.
        """
        if self.parts is None:
            return first.detach()
        if not self.is_joined:
            return first.detach().reshape(-1)
        place = flat_part_of(first)
        if place is None or place.start + self._shape[0] > place.flat.numel():
            return None
        return place.flat.narrow(0, place.start, self._shape[0])

    def lend(self, memory: Tensor, grad: Tensor | None) -> None:
        """Give the tensor its memory."""
        self.tensor.data = memory
        _torch.set_grad(self.tensor, grad)

    def take_back(self) -> None:
        """Take the memory from the tensor."""
        self.tensor.grad = None
        self.tensor.data = _EMPTY

    # state

    def is_untouched(self, state: StateOf) -> bool:
        """Whether ``state`` still is what was shown, as far as it does not share our memory."""
        owns = map(state.get, self.params, repeat(_NOTHING))
        return self._version == _torch.versions(self._copies.values()) and same(
            chain.from_iterable(map(dict.values, owns)), self._entries
        )

    def read(
        self, state: StateOf, flats: Container[int], singles: Container[str]
    ) -> dict[str, Any]:
        """The state for the tensor, from that of the parameters, which are of one age.

        Where it lies in one of ``flats`` (by ``id``) as the run does, it is used in place.
        ``singles``: see ``is_cut``.
        """
        values: dict[str, Any] = {}
        for key, value in state.get(self.params[0], _NOTHING).items():
            if is_cut_tensor(self.params[0], key, value, singles):
                locals_now = [local_part(state[param][key]).detach() for param in self.params]
                values[key] = self._join(key, locals_now, flats)
            else:
                values[key] = value.detach().clone() if isinstance(value, Tensor) else value
        return values

    def show(
        self,
        values: dict[str, Any],
        state: MutableMapping[Tensor, dict[str, Any]],
        singles: Container[str],
    ) -> None:
        """Let ``state`` show ``values``, the inner optimizer's state of the tensor.

        ``singles``: see ``is_cut``.
        """
        news: dict[str, Sequence[object]] = {}
        for key, value in values.items():
            if isinstance(value, Tensor):
                if is_cut(key, value.shape, self._shape, singles):
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
        self._version = _torch.versions(self._copies.values())

    def _show_cut(
        self, key: str, values: dict[str, Any], news: dict[str, Sequence[object]]
    ) -> None:
        value, shown = values[key], self._shown.get(key)
        if value is shown:
            return
        if isinstance(shown, Tensor) and _is_alike(value, shown):
            values[key] = shown.copy_(value)  # made anew each step: what users see is the old one
            return
        grad = self.tensor.grad
        if grad is not None and grad.numel() and value.data_ptr() == grad.data_ptr():
            values[key] = value = value.clone()  # a gradient kept for later, which is only lent
        if self.parts is not None and (key not in self._flats or shown is not None):
            announce_flat(value, ((part.offset, part.numel) for part in self.parts))
            self._flats[key] = value
        self._shown[key] = value
        news[key] = [
            shown_like(param, view)
            for param, view in zip(self.params, self._views(value), strict=True)
        ]

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
            holders: tuple[dict[str, Any], ...] = (self._shown, self._copies, self._flats, *owns)
            for holder in holders:
                holder.pop(key, None)
        for key, entries in news.items():
            for own, entry in zip(owns, entries, strict=True):
                own[key] = entry
        self._entries = [*chain.from_iterable(map(dict.values, owns))]

    def _views(self, value: Tensor) -> list[Tensor]:
        """For each parameter its part of ``value``, in its shape."""
        if self.parts is None:
            return [value]
        views = [value.narrow(0, part.offset, part.numel).view(part.shape) for part in self.parts]
        return [_torch.own_storage(view) for view in views]

    def _join(self, key: str, locals_now: list[Tensor], flats: Container[int]) -> Tensor:
        if self.parts is None:
            return locals_now[0].clone()
        flat, start = self._neighbours(locals_now)
        if flat is not None and id(flat) in flats:
            self._flats[key] = flat
            return flat.narrow(0, start, self._shape[0])
        joined = locals_now[0].new_zeros(self._shape)
        views = [joined.narrow(0, part.offset, part.numel).view(part.shape) for part in self.parts]
        torch._foreach_copy_(views, locals_now)
        return joined

    def _neighbours(self, locals_now: Sequence[Tensor]) -> tuple[Tensor | None, int]:
        """The buffer that tensors lie in as the parts do, and where the first of them begins."""
        places = [flat_part_of(local) for local in locals_now]
        first = places[0]
        for place, part in zip(places, self.parts or (), strict=True):
            if place is None or first is None or place.flat is not first.flat:
                return None, 0
            if place.start - first.start != part.offset:
                return None, 0
        return (None, 0) if first is None else (first.flat, first.start)


_EMPTY = torch.empty(0, device="cpu")


def _is_alike(shown: Tensor, value: Tensor, *, rows: bool = False) -> bool:
    shape = shown.shape[1:] if rows else shown.shape
    return (shape, shown.dtype, shown.device) == (value.shape, value.dtype, value.device)

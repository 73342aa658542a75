"""One Parameter over all of a unit's shard, instead of pieces: ``use_orig_params=False``.

The engine still works with the pieces, which users do not see. The flat parameter is another view
of the memory of the pieces, and its gradient another view of the memory of their gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fullshard._torch import autograd as _autograd
from fullshard._torch import nn as _nn
from fullshard.engine import Bucket, Unit
from fullshard.errors import ProtocolError
from fullshard.frontend.places import Place, Places
from fullshard.tensors import AbsentParameter, PlacedPiece, PlainForm, announce_pieces, flat_part_of
from fullshard.tensors.form import clean_name

FLAT_PARAM = "_flat_param"
"""Name of the flat parameter in the wrapped module."""


def innermost(module: nn.Module) -> nn.Module:
    """Return ``module`` without the activation checkpoint wrappers around it."""
    while hasattr(module, "_checkpoint_wrapped_module"):
        module = module._checkpoint_wrapped_module  # type: ignore[assignment]
    return module


class FlatParameter:
    """A flat parameter, kept in step with the pieces of its bucket; an ``engine.Front``."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        trainable = any(param.requires_grad for param in bucket.sharded_params)
        self.param = nn.Parameter(bucket.shard.data, requires_grad=trainable)
        self._with_grad: set[int] = set()  # indices of the pieces with a gradient
        self.introduce()

    def copy(self, bucket: Bucket, memo: dict[Any, Any]) -> FlatParameter:
        """See ``engine.Front``."""
        new = FlatParameter(bucket)
        new.param.requires_grad_(self.param.requires_grad)
        new.param.__dict__.update(copy.deepcopy(vars(self.param), memo))  # what users put on it
        memo[id(self.param)], memo[id(self)] = new.param, new
        return new

    def introduce(self) -> None:
        """Announce the mesh and placements of the flat parameter's elements, usually all alike."""
        form, pieces = self.bucket.spec.form, self.bucket.spec.pieces
        assert isinstance(form, PlainForm)
        places = form.dtensors.places
        if self.bucket.spec.parallel is None:
            parts = [PlacedPiece(places[0], 0, self.param.numel())]
        else:
            parts = [
                PlacedPiece(place, piece.offset, piece.numel)
                for place, piece in zip(places, pieces, strict=True)
            ]
        announce_pieces(self.param, parts)
        _nn.mark_flattened(self.param, map(clean_name, self.bucket.names))

    @property
    def numel(self) -> int:
        """Number of elements in the parameters, without padding."""
        return sum(param.numel for param in self.bucket.spec.layout.params)

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Return the part of each parameter in ``flat``, which has the layout of the shard."""
        spec = self.bucket.spec
        return [flat.narrow(0, p.offset, p.numel).view(p.shape) for p in spec.pieces]

    def follow(self) -> None:
        """Give the pieces the memory and ``requires_grad`` that the flat parameter has now.

        Raises:
            ProtocolError: if the flat parameter has another shape than the shard.
        """
        data = self.param.data
        if data.shape != self.bucket.shard.shape:
            raise ProtocolError(
                f"Cannot writeback: the flat parameter of {', '.join(self.bucket.names)} was given "
                f"data of shape {tuple(data.shape)}, expected {tuple(self.bucket.shard.shape)}"
            )
        moved = (data.device, data.dtype) != (self.bucket.shards.device, self.bucket.shards.dtype)
        if moved or (not data.is_meta and data.data_ptr() != self.bucket.shard.data_ptr()):
            params = self.bucket.sharded_params
            for number, (param, piece) in enumerate(zip(params, self.pieces(data), strict=True)):
                if param.is_meta == piece.is_meta:
                    param.data = piece
                else:  # tensors of the two kinds cannot take each other's data
                    params[number] = nn.Parameter(piece, requires_grad=param.requires_grad)
        for param in self.bucket.sharded_params:
            if param.requires_grad != self.param.requires_grad:
                param.requires_grad_(self.param.requires_grad)

    def lead(self) -> None:
        """See ``engine.Front``."""
        if self.param.data_ptr() != self.bucket.shard.data_ptr() or self.bucket.shard.is_meta:
            self.param.data = self.bucket.shard.data

    def tell_gradients(self) -> None:
        """See ``engine.Front``."""
        grad = self.param.grad
        if grad is not None:
            for number, piece in enumerate(self.pieces(grad)):
                if number in self._with_grad:
                    _autograd.set_grad(self.bucket.sharded_params[number], piece)

    def take_gradients(self) -> None:
        """See ``engine.Front``; the pieces drop theirs, else ``zero_grad`` would free no memory."""
        grads = [param.grad for param in self.bucket.sharded_params]
        self._with_grad = {number for number, grad in enumerate(grads) if grad is not None}
        for param in self.bucket.sharded_params:
            param.grad = None
        if not self._with_grad:
            self.param.grad = None
            return
        if self.param.grad is None:
            _autograd.set_grad(self.param, self._one_memory(grads))
        whole = self.param.grad
        assert whole is not None
        for own, grad in zip(self.pieces(whole), grads, strict=True):
            if grad is None:
                own.zero_()
            elif own.data_ptr() != grad.data_ptr():
                own.copy_(grad)

    def _one_memory(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the 1-D tensor that ``grads`` are views of, or a new one of zeros."""
        numel = self.bucket.spec.layout.shard_numel
        for piece, grad in zip(self.bucket.spec.pieces, grads, strict=True):
            part = None if grad is None else flat_part_of(grad)
            if part is not None and part.start == piece.offset and len(part.flat) >= numel:
                return part.flat[:numel]
        dtype = next(grad.dtype for grad in grads if grad is not None)
        return torch.zeros_like(self.param, dtype=dtype)


class FlatPlaces(Places):
    """Places that hold no parameters while these are sharded; one module shows the flat parameter.

    As in PyTorch, attributes of the modules then replace the parameters and have their dtypes.
    """

    def __init__(self, places: Sequence[Sequence[Sequence[Place]]], holder: nn.Module) -> None:
        super().__init__(places)
        self._holder = holder
        self.fronts: list[FlatParameter] = []
        self._in_pieces = False
        self._absent: list[AbsentParameter] = []  # one for each slot, once there is a need
        self._absent_of: tuple[torch.dtype, torch.device, bool] | None = None

    def in_their_place(self) -> Sequence[Place]:
        """Return the place of the flat parameter."""
        return [Place(self._holder, FLAT_PARAM) for _ in self.fronts]

    def front_for(self, buckets: Sequence[Bucket]) -> None:
        """Make the flat parameter of the only bucket, if there is a bucket."""
        for bucket in buckets:
            front = FlatParameter(bucket)
            bucket.front = front
            self.fronts.append(front)

    def _show(self, params: Sequence[Sequence[nn.Parameter]]) -> None:
        lent = self._lent
        is_lent = lent is not None and any(one is not None for one in lent)
        hidden = self.shows_sharded and not is_lent and not self._in_pieces
        none: Any = [[None] * len(own) for own in params]
        super()._show(none if hidden else params)
        for front in self.fronts:
            own = self._holder._parameters
            if hidden:
                own[FLAT_PARAM] = front.param
            else:
                own.pop(FLAT_PARAM, None)
        self._stand_in(hidden)

    def _stand_in(self, hidden: bool) -> None:
        """Set attributes in place of parameters, or remove them, as they hide ``_parameters``."""
        if hidden:
            self._refresh_absent()
        for slot, absent in zip(self._slots, self._absent, strict=False):
            attributes = vars(slot.place.module)
            is_ours = isinstance(attributes.get(slot.name), AbsentParameter)
            if hidden and (is_ours or slot.name not in attributes):
                attributes[slot.name] = absent
            elif is_ours:
                del attributes[slot.name]

    def _refresh_absent(self) -> None:
        """Make the stand-ins, unless the existing ones still describe the parameters."""
        for front in self.fronts:  # one at most
            spec = front.bucket.spec
            dtype = spec.unsharded_dtype(front.bucket.shards.dtype)
            facts = (dtype, spec.device, front.param.requires_grad)
            if facts != self._absent_of:
                self._absent_of = facts
                names, params = front.bucket.names, spec.layout.params
                self._absent = [
                    AbsentParameter.of(clean_name(names[n]), params[n].shape, *facts)
                    for n in (slot.number for slot in self._slots)
                ]

    @contextmanager
    def showing_pieces(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """See ``Places``; otherwise modules show the flat parameter or unsharded parameters."""
        for front in self.fronts:
            front.follow()
        before = self.shows_sharded, self.hidden_by
        self._in_pieces = True
        self.show_sharded(buckets)
        try:
            yield
        finally:
            self._in_pieces = False
            self.shows_sharded, self.hidden_by = before
            self._show_again(buckets)

    def take_over(self, unit: Unit, *, keeps_ties: bool = False) -> None:
        """See ``engine.Registration``."""
        for front in self.fronts:
            shown = self._holder._parameters.get(FLAT_PARAM)
            if shown is not None and shown is not front.param:
                front.param = shown
                front.introduce()
            front.follow()
        super().take_over(unit, keeps_ties=keeps_ties)

    def _take_over_sharded(self, unit: Unit, *, keeps_ties: bool) -> None:
        """Raise if a module holds a parameter that belongs to the flat parameter."""
        for slot in self._slots if self._lent is None and not self._in_pieces else ():
            now = slot.params.get(slot.name)
            if now is not None:
                raise self._refusal(unit, slot, now)

    def _point(self, targets: dict[int, tuple[int, int]]) -> None:
        super()._point(targets)
        self._absent_of = None

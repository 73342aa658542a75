"""One Parameter over all of a bucket's shard, instead of pieces: ``use_orig_params=False``.

The engine still works with the pieces, which users do not see. The flat parameter is another view
of the memory of the pieces, and its gradient another view of the memory of their gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fullshard._torch import autograd as _autograd
from fullshard._torch import nn as _nn
from fullshard.engine.spec import BucketSpec
from fullshard.errors import ProtocolError
from fullshard.tensors import PlacedPiece, announce_pieces, flat_part_of
from fullshard.tensors.form import clean_name


class FlatParameter:
    """A parameter that modules show instead of the sharded parameters of a bucket, its pieces.

    It is another view of ``shard``, the memory of the pieces.
    """

    def __init__(self, spec: BucketSpec, params: list[nn.Parameter], shard: Tensor) -> None:
        self.spec, self.shard, self._params = spec, shard, params
        self.param = nn.Parameter(shard.data, requires_grad=any(p.requires_grad for p in params))
        self._with_grad: set[int] = set()  # indices of the pieces with a gradient
        self.introduce()

    def copy(
        self, spec: BucketSpec, params: list[nn.Parameter], shard: Tensor, memo: dict[Any, Any]
    ) -> FlatParameter:
        """Return the flat parameter of a copied bucket, and enter both into ``memo``."""
        new = FlatParameter(spec, params, shard)
        new.param.requires_grad_(self.param.requires_grad)
        new.param.__dict__.update(copy.deepcopy(vars(self.param), memo))  # what users put on it
        memo[id(self.param)], memo[id(self)] = new.param, new
        return new

    def introduce(self) -> None:
        """Announce the mesh and placements of the flat parameter's elements, usually all alike."""
        places, pieces = self.spec.form.places, self.spec.pieces
        if self.spec.parallel is None:
            parts = [PlacedPiece(places[0], 0, self.param.numel())]
        else:
            parts = [
                PlacedPiece(place, piece.offset, piece.numel)
                for place, piece in zip(places, pieces, strict=True)
            ]
        announce_pieces(self.param, parts)
        _nn.mark_flattened(self.param, map(clean_name, self._names))

    @property
    def _names(self) -> list[str]:
        return [param.name for param in self.spec.layout.params]

    def follow(self) -> None:
        """Give the pieces the memory and ``requires_grad`` that the flat parameter has now.

        Raises:
            ProtocolError: if the flat parameter has another shape than the shard.
        """
        data = self.param.data
        if data.shape != self.shard.shape:
            raise ProtocolError(
                f"Cannot writeback: the flat parameter of {', '.join(self._names)} was given "
                f"data of shape {tuple(data.shape)}, expected {tuple(self.shard.shape)}"
            )
        moved = (data.device, data.dtype) != (self.shard.device, self.shard.dtype)
        if moved or (not data.is_meta and data.data_ptr() != self.shard.data_ptr()):
            params = self._params
            for number, (param, piece) in enumerate(
                zip(params, self.spec.parts_of(data), strict=True)
            ):
                if param.is_meta == piece.is_meta:
                    param.data = piece
                else:  # tensors of the two kinds cannot take each other's data
                    params[number] = nn.Parameter(piece, requires_grad=param.requires_grad)
        for param in self._params:
            if param.requires_grad != self.param.requires_grad:
                param.requires_grad_(self.param.requires_grad)

    def lead(self, shard: Tensor) -> None:
        """Point the parameter to ``shard``, the memory of the pieces from now on."""
        self.shard = shard
        if self.param.data_ptr() != shard.data_ptr() or shard.is_meta:
            self.param.data = shard.data

    def tell_gradients(self) -> None:
        """Give the pieces the gradient of the flat parameter, which the user may have changed."""
        grad = self.param.grad
        if grad is not None:
            for number, piece in enumerate(self.spec.parts_of(grad)):
                if number in self._with_grad:
                    _autograd.set_grad(self._params[number], piece)

    def take_gradients(self) -> None:
        """Move the gradients of the pieces here; else ``zero_grad`` would free no memory."""
        grads = [param.grad for param in self._params]
        self._with_grad = {number for number, grad in enumerate(grads) if grad is not None}
        for param in self._params:
            param.grad = None
        if not self._with_grad:
            self.param.grad = None
            return
        if self.param.grad is None:
            _autograd.set_grad(self.param, self._one_memory(grads))
        whole = self.param.grad
        assert whole is not None
        for own, grad in zip(self.spec.parts_of(whole), grads, strict=True):
            if grad is None:
                own.zero_()
            elif own.data_ptr() != grad.data_ptr():
                own.copy_(grad)

    def _one_memory(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Return the 1-D tensor that ``grads`` are views of, or a new one of zeros."""
        numel = self.spec.layout.shard_numel
        for piece, grad in zip(self.spec.pieces, grads, strict=True):
            part = None if grad is None else flat_part_of(grad)
            if part is not None and part.start == piece.offset and len(part.flat) >= numel:
                return part.flat[:numel]
        dtype = next(grad.dtype for grad in grads if grad is not None)
        return torch.zeros_like(self.param, dtype=dtype)

"""One Parameter over all of a bucket's shard, instead of pieces: ``use_orig_params=False``.

The engine still works with the pieces, which users do not see. The flat parameter is another view
of the memory of the pieces. Only the flat parameter has a gradient.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from itertools import compress, count
from typing import Any

from torch import Tensor, nn

from fullshard._torch import autograd as _autograd
from fullshard._torch import nn as _nn
from fullshard.engine.spec import BucketSpec
from fullshard.errors import ProtocolError
from fullshard.tensors import PlacedPiece, announce_pieces
from fullshard.tensors.form import clean_name


class FlatParameter:
    """A parameter that modules show instead of the sharded parameters of a bucket, its pieces.

    The parameter is another view of ``shard``, the memory of the pieces.
    """

    def __init__(self, spec: BucketSpec, params: list[nn.Parameter], shard: Tensor) -> None:
        self.spec, self.shard, self._params = spec, shard, params
        self.param = nn.Parameter(shard.data, requires_grad=any(p.requires_grad for p in params))
        self._with_grad: set[int] = set()  # indices of the pieces with a part in ``_own_grad``
        self._own_grad: weakref.ref[Tensor] | None = None  # the gradient that we have set last
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

    def gradients(self) -> list[Tensor | None]:
        """Return each piece's part of the gradient; None for pieces that have none."""
        grad, present = self.param.grad, self._present()
        if grad is None:
            return [None] * len(self._params)
        parts = enumerate(self.spec.parts_of(grad))
        return [part if number in present else None for number, part in parts]

    def _present(self) -> set[int]:
        """Return the pieces with a gradient: all of them if the user has set the gradient."""
        is_own = self._own_grad is not None and self._own_grad() is self.param.grad
        return self._with_grad if is_own else set(range(len(self._params)))

    def add_gradients(self, flat: Tensor, present: Sequence[bool]) -> None:
        """Add ``flat``, in the order of the shard, to the gradient, or make it the gradient.

        ``present`` says which pieces have a gradient. This zeroes the parts of the others in
        ``flat``.
        """
        if not any(present):
            return
        for part, is_present in zip(self.spec.parts_of(flat), present, strict=True):
            if not is_present:
                part.zero_()
        if self.param.grad is None:
            self.set_gradients(flat, present)
        else:
            self._own(self.param.grad.add_(flat), {*self._present(), *compress(count(), present)})

    def set_gradients(self, flat: Tensor, present: Sequence[bool]) -> None:
        """Set the gradient to ``flat``, zero in absent pieces; to None if no piece is present."""
        if not any(present):
            self.param.grad = None
            return
        if self.param.grad is None:
            _autograd.set_grad(self.param, flat)
        else:
            self.param.grad.copy_(flat)
        assert self.param.grad is not None
        self._own(self.param.grad, set(compress(count(), present)))

    def _own(self, grad: Tensor, present: set[int]) -> None:
        # Weak: the engine reuses the memory of gradients that users have dropped.
        self._own_grad, self._with_grad = weakref.ref(grad), present

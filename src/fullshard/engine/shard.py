"""What a rank keeps of the parameters of a bucket between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from fullshard.engine.spec import BucketSpec
from fullshard.errors import ProtocolError
from fullshard.layout import Segment
from fullshard.tensors import carry_attributes, local_part, plain


class Shards(Protocol):
    """This rank's pieces of some parameters, all of one device and dtype."""

    locals: list[Tensor]
    """The local tensors that sharded parameters are made around."""
    made: Sequence[Mapping[str, Any]]
    """The attributes that they had at first; what else is on one was put there."""

    @property
    def device(self) -> torch.device:
        """Where they are."""

    @property
    def dtype(self) -> torch.dtype:
        """What they are made of."""

    @property
    def nbytes(self) -> int:
        """The memory they take."""

    def show(self, locals_: Sequence[Tensor]) -> None:
        """Know the local tensors as users do: parameters may be around views of what we made."""

    def padded(self, index: int, device: torch.device) -> Tensor:
        """A piece on ``device``, with the rows of padding that make it as large as rank 0's.

        Itself, where it is so already; else what was put on it is on that as well.
        """

    def values(self) -> Tensor:
        """What is kept, 1-D in the order of the layout; itself, or a copy to ``put`` back."""

    def put(self, values: Tensor) -> None:
        """Keep what was written into ``values()``."""

    def copy(self) -> Self:
        """The same in memory of its own."""

    def adopted(self, pieces: Sequence[Tensor]) -> Self:
        """The same with the values, device and dtype of ``pieces``, shaped as ``locals`` are."""


def cut_shards(spec: BucketSpec, originals: Sequence[Tensor]) -> Shards:
    """Keep this rank's pieces of ``originals``, whole parameters of one dtype.

    Of tensor-parallel ones their local tensors are cut.
    """
    wholes = [local_part(original).detach() for original in originals]
    if spec.are_wrapped:
        return SeparateShards.cut(spec, wholes)
    return FlatShard.cut(spec, wholes)


class FlatShard:
    """All pieces in one 1-D tensor, ``layout.shard_numel`` elements."""

    def __init__(self, spec: BucketSpec, flat: Tensor) -> None:
        self._spec = spec
        self.flat = flat
        self.locals = spec.own_views(flat)
        self.made: Sequence[Mapping[str, Any]] = [{}] * len(self.locals)

    @classmethod
    def cut(cls, spec: BucketSpec, wholes: Sequence[Tensor]) -> Self:
        """See ``cut_shards``."""
        first = wholes[0]
        device = first.device if first.is_meta else spec.home
        flat = torch.zeros(spec.layout.shard_numel, dtype=first.dtype, device=device)
        for segment, whole in zip(spec.segments, wholes, strict=True):
            cut_into(whole, segment, flat)
        return cls(spec, flat)

    @property
    def device(self) -> torch.device:
        """See ``Shards``."""
        return self.flat.device

    @property
    def dtype(self) -> torch.dtype:
        """See ``Shards``."""
        return self.flat.dtype

    @property
    def nbytes(self) -> int:
        """See ``Shards``."""
        return self.flat.nbytes

    def show(self, locals_: Sequence[Tensor]) -> None:
        """See ``Shards``."""
        self.locals = list(locals_)

    def padded(self, index: int, device: torch.device) -> Tensor:
        """See ``Shards``; padding is part of the shard, and zero."""
        offset = self._spec.pieces[index].offset
        shape = self._spec.layout.local_shape(0, index)
        numel = torch.Size(shape).numel()
        padded = self.flat.narrow(0, offset, numel).view(shape)
        return _stand_in(self.locals[index], padded, device, self.made[index])

    def values(self) -> Tensor:
        """See ``Shards``; itself."""
        return self.flat

    def put(self, values: Tensor) -> None:
        """See ``Shards``; it was written to itself."""

    def copy(self) -> Self:
        """See ``Shards``."""
        return type(self)(self._spec, self.flat.clone())

    def adopted(self, pieces: Sequence[Tensor]) -> Self:
        """See ``Shards``."""
        device, dtype = pieces[0].device, pieces[0].dtype
        new = type(self)(self._spec, torch.zeros_like(self.flat, device=device, dtype=dtype))
        for own, piece in zip(new.locals, pieces, strict=True):
            if device.type != "meta":
                own.copy_(piece)
        return new


class SeparateShards:
    """Pieces of a tensor class that wraps others: of the same class, each padded by itself."""

    def __init__(self, spec: BucketSpec, padded: list[Tensor]) -> None:
        self._spec = spec
        self._padded = padded
        self.locals = [
            whole.narrow(0, 0, piece.shape[0])
            for whole, piece in zip(padded, spec.pieces, strict=True)
        ]
        self.made: Sequence[Mapping[str, Any]] = [dict(vars(local)) for local in self.locals]

    @classmethod
    def cut(cls, spec: BucketSpec, wholes: Sequence[Tensor]) -> Self:
        """See ``cut_shards``."""
        padded = []
        for index, (whole, piece) in enumerate(zip(wholes, spec.pieces, strict=True)):
            start = sum(spec.layout.local_shape(r, index)[0] for r in range(spec.comm.rank))
            own = _zeros_like(whole, spec.layout.local_shape(0, index))
            if not whole.is_meta and piece.shape[0]:
                part = whole.narrow(0, start, piece.shape[0])
                own.narrow(0, 0, piece.shape[0]).copy_(part)
            padded.append(own if whole.is_meta else own.to(spec.home))
        return cls(spec, padded)

    @property
    def device(self) -> torch.device:
        """See ``Shards``."""
        return self._padded[0].device

    @property
    def dtype(self) -> torch.dtype:
        """See ``Shards``."""
        return self._padded[0].dtype

    @property
    def nbytes(self) -> int:
        """As many as plain tensors would take; what a class really takes is its own affair."""
        return sum(padded.numel() * padded.element_size() for padded in self._padded)

    def show(self, locals_: Sequence[Tensor]) -> None:
        """See ``Shards``."""
        self.locals = list(locals_)
        self.made = [dict(vars(local)) for local in self.locals]

    def padded(self, index: int, device: torch.device) -> Tensor:
        """See ``Shards``."""
        return _stand_in(self.locals[index], self._padded[index], device, self.made[index])

    def values(self) -> Tensor:
        """See ``Shards``; plain copies."""
        numel = self._spec.layout.shard_numel
        values = torch.zeros(numel, dtype=self.dtype, device=self.device)
        for part, local in self._parts(values):
            part.copy_(plain(local))
        return values

    def put(self, values: Tensor) -> None:
        """See ``Shards``."""
        for part, local in self._parts(values):
            local.copy_(part)

    def _parts(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The part of ``values`` for each piece that is not empty, and that."""
        for piece, local in zip(self._spec.pieces, self.locals, strict=True):
            if piece.numel:
                yield values.narrow(0, piece.offset, piece.numel).view(piece.shape), local

    def copy(self) -> Self:
        """See ``Shards``."""
        return type(self)(self._spec, [padded.clone() for padded in self._padded])

    def adopted(self, pieces: Sequence[Tensor]) -> Self:
        """See ``Shards``."""
        padded = []
        for index, piece in enumerate(pieces):
            own = _zeros_like(piece, self._spec.layout.local_shape(0, index))
            if not piece.is_meta and len(piece):
                own.narrow(0, 0, len(piece)).copy_(piece)
            padded.append(own)
        return type(self)(self._spec, padded)


def carry_put_on(
    old: Shards,
    found: Sequence[Tensor],
    new: Shards,
    copied: Callable[[Any], Any] = lambda value: value,
) -> None:
    """Put on the pieces ``new`` what was put on ``found``, which may be others than those of old.

    Of others nobody knows what they were made with: they give what pieces of their class lack.
    """
    for number, (piece, target) in enumerate(zip(found, new.locals, strict=True)):
        made = old.made[number]
        if piece is not old.locals[number]:
            made = {name: value for name, value in vars(piece).items() if name in vars(target)}
        carry_attributes(piece, target, made, copied)


def _stand_in(
    local: Tensor, padded: Tensor, device: torch.device, made: Mapping[str, Any]
) -> Tensor:
    """``local``, or where that is smaller or elsewhere, ``padded`` with what was put on it."""
    found = local if local.shape == padded.shape else padded
    if found.device != device:
        found = found.to(device)
    if found is not local:
        carry_attributes(local, found, made, _moved_to(device))
    return found


def _moved_to(device: torch.device) -> Callable[[Any], Any]:
    return lambda value: value.to(device) if isinstance(value, Tensor) else value


def check_at_home(spec: BucketSpec, device: torch.device, names: Sequence[str]) -> None:
    """Refuse offloaded shards that were moved away from the host.

    Raises:
        ProtocolError: they are elsewhere.
    """
    if spec.offload is not None and device.type not in ("cpu", "meta"):
        raise ProtocolError(
            f"parameters are offloaded to the CPU, but were moved to {device}: {', '.join(names)}. "
            "Move the module back with .to('cpu'), materialize it with to_empty(device='cpu'), or "
            "load a state dict of CPU tensors"
        )


def _zeros_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Of the class of ``tensor``, with a shape that differs in its first dim only."""
    return tensor.new_zeros(shape)


def cut_into(whole: Tensor, segment: Segment, shard: Tensor) -> None:
    """Copy one segment of ``whole`` to its place in ``shard``."""
    if whole.is_meta or not segment.numel:
        return
    whole = whole.contiguous()
    source = whole.as_strided(
        (segment.count, segment.length),
        (segment.step, 1),
        whole.storage_offset() + segment.start,
    )
    target = shard.narrow(0, segment.shard_offset, segment.numel)
    target.view(segment.count, segment.length).copy_(source)

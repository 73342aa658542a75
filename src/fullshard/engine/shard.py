"""The shards: pieces of a bucket's parameters that a rank keeps between steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from fullshard.engine.spec import BucketSpec
from fullshard.errors import ProtocolError
from fullshard.layout import Segment
from fullshard.tensors import carry_attributes, local_part, plain


class Shards:
    """This rank's pieces of some parameters, in one 1-D tensor of ``layout.shard_numel`` elements.

    All pieces have one device and dtype. Pieces that cannot share one tensor: ``SeparateShards``.
    """

    def __init__(self, spec: BucketSpec, flat: Tensor) -> None:
        self.flat = flat
        self._keep(spec, [flat], spec.own_views(flat))

    def _keep(self, spec: BucketSpec, memory: Sequence[Tensor], locals_: list[Tensor]) -> None:
        self._spec = spec
        self._memory = memory
        self.locals = locals_
        """The local tensors behind the sharded parameters."""
        self.made: Sequence[Mapping[str, Any]] = [{}] * len(locals_)
        """The attributes that each local tensor had at first; users or hooks set any others."""

    @classmethod
    def cut(cls, spec: BucketSpec, tensors: Sequence[Tensor]) -> Self:
        """See ``cut_shards``."""
        first = tensors[0]
        device = first.device if first.is_meta else spec.home
        flat = torch.zeros(spec.layout.shard_numel, dtype=first.dtype, device=device)
        for segment, full in zip(spec.segments, tensors, strict=True):
            cut_into(full, segment, flat)
        return cls(spec, flat)

    @property
    def device(self) -> torch.device:
        """Device of the pieces."""
        return self._memory[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the pieces."""
        return self._memory[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes that plain tensors take; only a subclass of Tensor knows its real memory."""
        return sum(own.numel() * own.element_size() for own in self._memory)

    def show(self, locals_: Sequence[Tensor]) -> None:
        """Replace ``locals`` by the tensors that parameters show, perhaps views of our tensors."""
        self.locals = list(locals_)

    def padded(self, index: int, device: torch.device) -> Tensor:
        """Return a piece on ``device``, padded with rows to the size of rank 0's piece.

        Return the local tensor itself if it fits; otherwise carry over attributes set on it.
        """
        local, padded, made = self.locals[index], self._padded(index), self.made[index]
        found = local if local.shape == padded.shape else padded
        if found.device != device:
            found = found.to(device)
        if found is not local:
            carry_attributes(local, found, made, _moved_to(device))
        return found

    def _padded(self, index: int) -> Tensor:
        """Return the memory of a piece and its padding, which is part of the shard, and zero."""
        offset = self._spec.pieces[index].offset
        shape = self._spec.layout.local_shape(0, index)
        return self.flat.narrow(0, offset, torch.Size(shape).numel()).view(shape)

    def values(self) -> Tensor:
        """Return all values, 1-D in the order of the layout: the memory, or a copy to ``put``."""
        return self.flat

    def put(self, values: Tensor) -> None:
        """Store the changed result of ``values()``, unless that is the memory itself."""

    def copy(self) -> Self:
        """Return a copy in separate memory."""
        return type(self)(self._spec, self.flat.clone())

    def adopted(self, pieces: Sequence[Tensor]) -> Self:
        """Return new shards with values, device and dtype of ``pieces``, shaped like ``locals``."""
        device, dtype = pieces[0].device, pieces[0].dtype
        new = type(self)(self._spec, torch.zeros_like(self.flat, device=device, dtype=dtype))
        for own, piece in zip(new.locals, pieces, strict=True):
            if device.type != "meta":
                own.copy_(piece)
        return new


def cut_shards(spec: BucketSpec, originals: Sequence[Tensor]) -> Shards:
    """Return this rank's pieces of ``originals``, full parameters of one dtype.

    For tensor-parallel parameters, cut the local tensors.
    """
    tensors = [local_part(original).detach() for original in originals]
    return (SeparateShards if spec.are_wrapped else Shards).cut(spec, tensors)


class SeparateShards(Shards):
    """The pieces of parameters of a wrapper subclass: of the same class, each padded alone."""

    def __init__(self, spec: BucketSpec, padded: list[Tensor]) -> None:
        both = zip(padded, spec.pieces, strict=True)
        self._keep(spec, padded, [own.narrow(0, 0, piece.shape[0]) for own, piece in both])
        self.show(self.locals)

    @classmethod
    def cut(cls, spec: BucketSpec, tensors: Sequence[Tensor]) -> Self:
        """See ``cut_shards``."""
        padded = []
        for index, (full, piece) in enumerate(zip(tensors, spec.pieces, strict=True)):
            longest = spec.layout.local_shape(0, index)
            own = full.new_zeros(longest)
            if not full.is_meta and piece.shape[0]:
                # As FSDP2 cuts: subclasses may know this operation only, such as torchao's NF4.
                part = full.split(longest[0])[spec.comm.rank]
                own.narrow(0, 0, piece.shape[0]).copy_(part)
            padded.append(own if full.is_meta else own.to(spec.home))
        return cls(spec, padded)

    def show(self, locals_: Sequence[Tensor]) -> None:
        """See ``Shards``; the attributes that the tensors have now count as made."""
        super().show(locals_)
        self.made = [dict(vars(local)) for local in self.locals]

    def _padded(self, index: int) -> Tensor:
        return self._memory[index]

    def values(self) -> Tensor:
        """See ``Shards``; return a plain copy."""
        numel = self._spec.layout.shard_numel
        values = torch.zeros(numel, dtype=self.dtype, device=self.device)
        for part, local in zip(self._spec.parts_of(values), self.locals, strict=True):
            if part.numel():
                part.copy_(plain(local))
        return values

    def put(self, values: Tensor) -> None:
        """See ``Shards``."""
        for part, local in zip(self._spec.parts_of(values), self.locals, strict=True):
            if part.numel():
                local.copy_(part)

    def copy(self) -> Self:
        """See ``Shards``."""
        return type(self)(self._spec, [own.clone() for own in self._memory])

    def adopted(self, pieces: Sequence[Tensor]) -> Self:
        """See ``Shards``."""
        padded = []
        for index, piece in enumerate(pieces):
            own = piece.new_zeros(self._spec.layout.local_shape(0, index))
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
    """Set on ``new`` pieces the attributes set on ``found``, which may not be pieces of ``old``.

    For foreign pieces the initial attributes are unknown: carry over those that ``new`` lacks.
    """
    for number, (piece, target) in enumerate(zip(found, new.locals, strict=True)):
        made = old.made[number]
        if piece is not old.locals[number]:
            made = {name: value for name, value in vars(piece).items() if name in vars(target)}
        carry_attributes(piece, target, made, copied)


def _moved_to(device: torch.device) -> Callable[[Any], Any]:
    return lambda value: value.to(device) if isinstance(value, Tensor) else value


def check_at_home(spec: BucketSpec, device: torch.device, names: Sequence[str]) -> None:
    """Refuse offloaded shards that were moved away from the host.

    Raises:
        ProtocolError: ``device`` is neither the CPU nor meta, but shards are offloaded.
    """
    if spec.offload is not None and device.type not in ("cpu", "meta"):
        raise ProtocolError(
            f"parameters are offloaded to the CPU, but were moved to {device}: {', '.join(names)}. "
            "Move the module back with .to('cpu'), materialize it with to_empty(device='cpu'), or "
            "load a state dict of CPU tensors"
        )


def cut_into(full: Tensor, segment: Segment, shard: Tensor) -> None:
    """Copy one segment of ``full`` to its place in ``shard``."""
    if full.is_meta or not segment.numel:
        return
    full = full.contiguous()
    source = full.as_strided(
        (segment.count, segment.length),
        (segment.step, 1),
        full.storage_offset() + segment.start,
    )
    target = shard.narrow(0, segment.shard_offset, segment.numel)
    target.view(segment.count, segment.length).copy_(source)

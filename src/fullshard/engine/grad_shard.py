"""The gradients that users see, as parts of one tensor. See [Note: the tensors of a bucket]."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from fullshard._torch import memory as _memory
from fullshard.device import StorageMeter
from fullshard.engine.reduce_input import Reduced
from fullshard.engine.spec import BucketSpec
from fullshard.tensors import cut_flat

# The mean size in bytes up to which gradients are kept from step to step.
_KEPT_NBYTES = 16 << 10
_MOST_SETS = 16  # number of sets of parameters to reduce whose layouts are kept


class GradShard:
    """This rank's slice of a reduction's result, with the gradients that it contains.

    Each gradient has a separate storage, so that it can be copied, pickled without its neighbors,
    and compiled.

    Making a DTensor costs as much host time as reducing a small one, so small gradients are reused
    for the next step if nobody but us holds any of them. Larger gradients are freed: between
    steps, and while activations pile up, memory is worth more.
    """

    def __init__(
        self, reduced: Reduced, flat: Tensor, dtypes: Sequence[torch.dtype] | None = None
    ) -> None:
        """Make gradients as views of ``flat``, or as copies in the given ``dtypes``."""
        self.reduced = reduced  # the parameters that the gradients belong to, in this order
        self.flat = flat  # 1-D, layout.shard_numel elements and the flags
        spec = reduced.spec
        self.locals = spec.own_views(flat) if dtypes is None else _cast(spec, flat, dtypes)
        self.shown = [
            spec.form.wrap(index, local)
            for index, local in zip(reduced.indices, self.locals, strict=True)
        ]
        self._storages = [tensor.untyped_storage() for tensor in (flat, *self.locals)]
        self._unheld = self._counted()

    @property
    def flags(self) -> Tensor:
        """See ``Reduced.flags``."""
        return self.reduced.flags(self.flat)

    def is_free(self) -> bool:
        """Return whether nobody else refers to the gradients or to their memory."""
        return self._counted() == self._unheld

    def _counted(self) -> tuple[int, int]:
        """Return the number of references to the memory, and to the tensors."""
        holders = _memory.num_holders(self.shown) + _memory.num_holders(self.locals)
        return _memory.num_owners(self._storages), holders


class ReducedSets:
    """The sets of a bucket's parameters that were reduced together, with their layouts.

    There is usually one set; another one costs time in its first step only.
    """

    def __init__(self, spec: BucketSpec, meter: StorageMeter) -> None:
        self._spec = spec
        self._meter = meter
        self.now = Reduced.of(spec, tuple(range(len(spec.layout.params))), meter)
        self._known = {self.now.indices: self.now}
        self._last: GradShard | None = None

    def choose(self, indices: tuple[int, ...]) -> Reduced:
        """Return the set of these parameters, and make it the set that is reduced next."""
        if indices != self.now.indices:
            known = self._known.get(indices)
            if known is None:
                if len(self._known) >= _MOST_SETS:
                    self._known.clear()
                known = self._known[indices] = Reduced.of(self._spec, indices, self._meter)
            # The collective notices if other ranks reduce fewer.
            known.is_agreed = len(indices) == len(known.names)
            self.now = known
        return self.now

    def result(self, numel: int, dtype: torch.dtype, device: torch.device) -> GradShard:
        """Return last step's gradients of the set if nobody holds them any more, else new ones."""
        last = self._last
        if last is not None and last.reduced is self.now and last.is_free():
            return last
        new = GradShard(self.now, torch.empty(numel, dtype=dtype, device=device))
        self._last = new if new.flat.nbytes <= _KEPT_NBYTES * len(new.shown) else None
        return new


def _cast(spec: BucketSpec, flat: Tensor, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Copy the pieces of ``flat`` to these dtypes; neighbors of one dtype stay neighbors."""
    pieces = spec.pieces
    order = sorted(range(len(pieces)), key=pieces.__getitem__)
    views: dict[int, Tensor] = {}
    for dtype, group in groupby(order, key=dtypes.__getitem__):
        members = list(group)
        start, last = pieces[members[0]].offset, pieces[members[-1]]
        part = flat[start : last.offset + last.numel].to(dtype, copy=True)
        places = ((pieces[i].offset - start, pieces[i].shape) for i in members)
        views |= zip(members, cut_flat(part, places), strict=True)
    return [views[i] for i in range(len(pieces))]

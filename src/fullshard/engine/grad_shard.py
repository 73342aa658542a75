"""The gradients that users see, as parts of one slice. See [Note: the tensors of a bucket]."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.engine.reduce_input import Reduced
from fullshard.engine.spec import BucketSpec
from fullshard.tensors import announce_flat

# The mean size up to which gradients are kept from step to step.
_KEPT_NBYTES = 16 << 10


class GradShard:
    """One slice of a reduction's result, with the gradients that lie in it.

    Each has a storage of its own, so that it can be copied, pickled without its neighbours, and
    compiled.

    Making a DTensor costs as much host time as adding a small one up, so a set of small ones is
    used again for the next step, if nobody but us holds any part of it. Larger ones are given
    back: between steps, and while activations pile up, memory is worth more.
    """

    def __init__(
        self, reduced: Reduced, flat: Tensor, dtypes: Sequence[torch.dtype] | None = None
    ) -> None:
        """``dtypes``: of each gradient, which is then no view of ``flat``; None: that of it."""
        self.reduced = reduced  # whose gradients these are, in this order
        self.flat = flat  # 1-D, layout.shard_numel elements and the flags
        spec = reduced.spec
        self.locals = spec.own_views(flat) if dtypes is None else _cast(spec, flat, dtypes)
        self.shown = [
            spec.form.wrap(number, local)
            for number, local in zip(reduced.numbers, self.locals, strict=True)
        ]
        self._storages = [tensor.untyped_storage() for tensor in (flat, *self.locals)]
        self._unheld = self._counted()

    @property
    def is_small(self) -> bool:
        """Whether it is worth keeping for the next step."""
        return self.flat.nbytes <= _KEPT_NBYTES * len(self.shown)

    @property
    def flags(self) -> Tensor:
        """See ``Reduced.flags``."""
        return self.reduced.flags(self.flat)

    def is_free(self) -> bool:
        """Whether no one else refers to the gradients or to their memory."""
        return self._counted() == self._unheld

    def _counted(self) -> tuple[int, int]:
        """How many refer to the memory, and to the tensors."""
        holders = _torch.num_holders(self.shown) + _torch.num_holders(self.locals)
        return _torch.num_owners(self._storages), holders


def _cast(spec: BucketSpec, flat: Tensor, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Pieces of ``flat`` in these dtypes; those that are neighbours stay so where dtypes agree."""
    pieces = spec.pieces
    order = sorted(range(len(pieces)), key=pieces.__getitem__)
    views: dict[int, Tensor] = {}
    for dtype, group in groupby(order, key=dtypes.__getitem__):
        members = list(group)
        start, last = pieces[members[0]].offset, pieces[members[-1]]
        part = flat[start : last.offset + last.numel].to(dtype, copy=True)
        announce_flat(part, ((pieces[i].offset - start, pieces[i].numel) for i in members))
        for i in members:
            views[i] = _torch.own_part(part, pieces[i].offset - start, pieces[i].shape)
            _torch.keep_alive(views[i], part)
    return [views[i] for i in range(len(pieces))]

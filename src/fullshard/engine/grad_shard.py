"""The gradients that users see, as views of one slice. See [Note: the tensors of a bucket]."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from fullshard import _torch
from fullshard.engine.spec import BucketSpec
from fullshard.tensors import announce_flat

__all__ = ["GradShard"]

# The mean size up to which gradients are kept from step to step.
_KEPT_NBYTES = 16 << 10


class GradShard:
    """One slice of a reduction's result, with the gradients that are views of it.

    Making a DTensor costs as much host time as adding a small one up, so a set of small ones is
    used again for the next step, if nobody but us holds any part of it. Larger ones are given
    back: between steps, and while activations pile up, memory is worth more.
    """

    def __init__(
        self, spec: BucketSpec, flat: Tensor, dtypes: Sequence[torch.dtype] | None = None
    ) -> None:
        """``dtypes``: of each gradient, which is then no view of ``flat``; None: that of it."""
        self.flat = flat  # 1-D, layout.shard_numel elements and the flags
        # Views, which keep what they are of alive: whoever has one finds its neighbours.
        self.locals = spec.local_views(flat) if dtypes is None else _cast(spec, flat, dtypes)
        self.shown = [spec.form.wrap(i, local) for i, local in enumerate(self.locals)]
        self._num_owners = _torch.num_owners(flat)

    @property
    def is_small(self) -> bool:
        """Whether it is worth keeping for the next step."""
        return self.flat.nbytes <= _KEPT_NBYTES * len(self.shown)

    def is_free(self) -> bool:
        """Whether no one else refers to the gradients or to their memory."""
        return _torch.none_is_held(self.shown) and _torch.num_owners(self.flat) == self._num_owners


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
            local = part.narrow(0, pieces[i].offset - start, pieces[i].numel)
            views[i] = local.view(pieces[i].shape)
    return [views[i] for i in range(len(pieces))]

"""The gradients that users see, as views of one slice. See [Note: the tensors of a bucket]."""

from __future__ import annotations

from torch import Tensor

from fullshard import _torch
from fullshard.engine.reduce_input import Reduced

__all__ = ["GradShard"]

# The mean size up to which gradients are kept from step to step.
_KEPT_NBYTES = 16 << 10


class GradShard:
    """One slice of a reduction's result, with the gradients that are views of it.

    Making a DTensor costs as much host time as adding a small one up, so a set of small ones is
    used again for the next step, if nobody but us holds any part of it. Larger ones are given
    back: between steps, and while activations pile up, memory is worth more.
    """

    def __init__(self, reduced: Reduced, flat: Tensor) -> None:
        self.reduced = reduced  # whose gradients these are, in this order
        self.flat = flat  # 1-D, layout.shard_numel elements and the flags
        # Views, which keep ``flat`` itself alive: whoever has one finds its neighbours.
        spec = reduced.spec
        self.locals = spec.local_views(flat)
        self.shown = [
            spec.form.wrap(number, local)
            for number, local in zip(reduced.numbers, self.locals, strict=True)
        ]
        self._num_owners = _torch.num_owners(flat)

    @property
    def is_small(self) -> bool:
        """Whether it is worth keeping for the next step."""
        return self.flat.nbytes <= _KEPT_NBYTES * len(self.shown)

    def is_free(self) -> bool:
        """Whether no one else refers to the gradients or to their memory."""
        return _torch.none_is_held(self.shown) and _torch.num_owners(self.flat) == self._num_owners

"""The dtypes of gradients: computed, on their way, and as users see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn

from fullshard import _torch
from fullshard.engine.spec import BucketSpec
from fullshard.errors import ConfigError
from fullshard.tensors import ParallelSpec


@dataclass(frozen=True)
class GradDtypes:
    """What is decided about the gradients of a bucket, by its spec and its parameters."""

    computed: torch.dtype
    """Of the unsharded parameters."""
    reduced: torch.dtype
    """In which they are reduced; of several that are wanted, the one that holds them all."""
    wire: torch.dtype
    """In which they travel, as long as they are what one backward computed."""
    shown: tuple[torch.dtype, ...]
    """Of each parameter's ``.grad``."""

    @classmethod
    def of(
        cls, spec: BucketSpec, computed: torch.dtype, params: Sequence[nn.Parameter]
    ) -> GradDtypes:
        """Decide for unsharded parameters of dtype ``computed``.

        ``params`` are those that users see, and set ``grad_dtype`` of.
        """
        wanted = _torch.grad_dtypes(params)
        reduced = spec.reduce_dtype or computed
        if computed.is_complex:  # real and imaginary parts in no fewer bits than those of both
            reduced = torch.promote_types(computed, reduced)
        if spec.reduce_dtype is None and spec.follows_grad_dtype:
            reduced = reduce(torch.promote_types, [dtype or computed for dtype in wanted])
        shown = tuple(spec.grad_dtype or dtype or reduced for dtype in wanted)
        narrows = spec.reducing.adds_wide and reduced is torch.float32 and computed.itemsize < 4
        wide = spec.reducing.world > 1 and _come_wide(spec, params)
        return cls(computed, reduced, computed if narrows and not wide else reduced, shown)

    @staticmethod
    def check(spec: BucketSpec, params: Sequence[nn.Parameter]) -> None:
        """Refuse gradients of any dtype where ranks could not agree on one for the reduction.

        Raises:
            ConfigError: ``grad_dtype`` of a trainable parameter is None, and nothing else says in
                which dtype gradients are reduced.
        """
        if spec.reduce_dtype is not None or not spec.follows_grad_dtype:
            return
        for named, param in zip(spec.layout.params, params, strict=True):
            if param.requires_grad and param.grad_dtype is None:
                raise ConfigError(
                    f"parameter {named.name} has grad_dtype=None, so its gradient may have any "
                    "dtype, which ranks without one would have to guess; give "
                    "MixedPrecisionPolicy(reduce_dtype=...) the dtype to reduce in, or set "
                    "grad_dtype"
                )

    @property
    def one_shown(self) -> torch.dtype | None:
        """The dtype of all ``.grad``, if it is one."""
        return self.shown[0] if len(set(self.shown)) == 1 else None

    def expect(self, spec: BucketSpec, params: Sequence[nn.Parameter]) -> None:
        """Let autograd leave gradients of the unsharded ``params`` in as many bits as are reduced.

        Those that come in fewer stay so until they are copied, but for what has to be added up
        outside of data parallelism before. Where ranks count on what was computed, as they must
        agree on a dtype before a gradient is there, autograd rounds to that.
        """
        if not spec.follows_grad_dtype or not _is_wider(self.reduced, self.computed):
            return
        if spec.reducing.world > 1 and self.wire is self.computed:
            return
        parallel = spec.parallel or [None] * len(params)
        for param, lies in zip(params, parallel, strict=True):
            param.grad_dtype = self.reduced if _sums_elsewhere(lies) else None


def _come_wide(spec: BucketSpec, params: Sequence[nn.Parameter]) -> bool:
    """Whether gradients in more bits than computation has were asked for, or come about anyway."""
    if not spec.follows_grad_dtype:
        return False
    is_set = any(_torch.explicit_grad_dtype(param) is not None for param in params)
    return is_set or any(map(_sums_elsewhere, spec.parallel or ()))


def _is_wider(one: torch.dtype, other: torch.dtype) -> bool:
    both_float = one.is_floating_point and other.is_floating_point
    return both_float and one.itemsize > other.itemsize


def _sums_elsewhere(parallel: ParallelSpec | None) -> bool:
    return parallel is not None and parallel.may_sum_gradients

"""The dtypes of gradients: as computed, during reduction, and as users see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn

from fullshard._torch import autograd as _autograd
from fullshard.engine.spec import BucketSpec
from fullshard.errors import ConfigError
from fullshard.tensors import ParallelSpec


@dataclass(frozen=True)
class GradDtypes:
    """The dtypes of a bucket's gradients, which follow from its spec and its parameters."""

    computed: torch.dtype
    """The dtype of the unsharded parameters."""
    reduced: torch.dtype
    """The dtype of the reduction; if several are wanted, the one that holds all of them."""
    wire: torch.dtype
    """The dtype in which gradients of a single backward travel, unless ``narrow`` is narrower."""
    narrow: torch.dtype | None
    """The dtype in which ``WirePolicy`` wants gradients of fp32 to travel, if that is all."""
    shown: tuple[torch.dtype, ...]
    """The dtype of each parameter's ``.grad``."""

    @classmethod
    def of(
        cls, spec: BucketSpec, computed: torch.dtype, params: Sequence[nn.Parameter]
    ) -> GradDtypes:
        """Return the dtypes for unsharded parameters of dtype ``computed``.

        ``params`` are the parameters that users see, and on which users set ``grad_dtype``.
        """
        wanted = _autograd.grad_dtypes(params)
        reduced = spec.reduce_dtype or computed
        if computed.is_complex:  # a complex dtype whose parts have no fewer bits than either dtype
            reduced = torch.promote_types(computed, reduced)
        if spec.reduce_dtype is None and spec.follows_grad_dtype:
            reduced = reduce(torch.promote_types, [dtype or computed for dtype in wanted])
        shown = tuple(spec.grad_dtype or dtype or reduced for dtype in wanted)
        narrows = spec.reducing.adds_wide and reduced is torch.float32 and computed.itemsize < 4
        wide = spec.reducing.world > 1 and _come_wide(spec, params)
        wire = computed if narrows and not wide else reduced
        codec = spec.wire.reducing
        return cls(computed, reduced, wire, None if codec is None else codec.dtype, shown)

    def sent(self, *, pending: bool) -> torch.dtype:
        """Return the dtype in which gradients travel, ``pending`` ones of earlier passes or not."""
        dtype = self.reduced if pending else self.wire
        return self.narrow if self.narrow and dtype is torch.float32 else dtype

    @staticmethod
    def check(spec: BucketSpec, params: Sequence[nn.Parameter]) -> None:
        """Refuse ``grad_dtype=None`` where ranks could not agree on a dtype for the reduction.

        Raises:
            ConfigError: ``grad_dtype`` of a trainable parameter is None, and nothing else sets the
                dtype in which gradients are reduced.
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
        """The dtype of every ``.grad`` if all have the same dtype, else None."""
        return self.shown[0] if len(set(self.shown)) == 1 else None

    def expect(self, spec: BucketSpec, params: Sequence[nn.Parameter]) -> None:
        """Keep autograd from rounding gradients of the unsharded ``params`` below ``reduced``.

        Narrower gradients stay narrow until they are copied, except those that must first be summed
        outside of data parallelism. Where all ranks rely on the dtype ``computed``, because they
        must agree on a dtype before any gradient exists, autograd rounds to ``computed``.
        """
        if not spec.follows_grad_dtype or not _is_wider(self.reduced, self.computed):
            return
        if spec.reducing.world > 1 and self.wire is self.computed:
            return
        parallel = spec.parallel or [None] * len(params)
        for param, lies in zip(params, parallel, strict=True):
            param.grad_dtype = self.reduced if _sums_elsewhere(lies) else None


def _come_wide(spec: BucketSpec, params: Sequence[nn.Parameter]) -> bool:
    """Return whether gradients wider than computation are requested, or arise anyway."""
    if not spec.follows_grad_dtype:
        return False
    is_set = any(_autograd.explicit_grad_dtype(param) is not None for param in params)
    return is_set or any(map(_sums_elsewhere, spec.parallel or ()))


def _is_wider(one: torch.dtype, other: torch.dtype) -> bool:
    both_float = one.is_floating_point and other.is_floating_point
    return both_float and one.itemsize > other.itemsize


def _sums_elsewhere(parallel: ParallelSpec | None) -> bool:
    return parallel is not None and parallel.may_sum_gradients

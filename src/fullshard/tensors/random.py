"""Random numbers for sharded tensors that do not depend on how the tensors are sharded.

PyTorch fills a DTensor at random separately on each rank. Ranks with equal seeds, as they should
have, draw the same numbers for different parts, and another world size draws other numbers. On the
meshes that fullshard uses, every rank draws the full tensor and keeps its own part. So a model made
on the meta device starts like the unsharded model with the same seed, and generators end in the
same state. The cost is memory for one full parameter at a time.

Functions that draw again until a condition holds, such as ``trunc_normal_``, convert a bool tensor
to a bool. PyTorch uses this rank's elements; here all ranks get the answer for all elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard._torch import dtensor as _dtensor
from fullshard.tensors.parts import (
    aten_ops,
    gathered,
    is_partial,
    keep_own_part,
    part_like,
    replicated,
)

aten = torch.ops.aten

RANDOM_FILLS = aten_ops(
    "uniform_.default normal_.default bernoulli_.float bernoulli_.Tensor exponential_.default"
    " cauchy_.default log_normal_.default geometric_.default random_.default random_.to"
    " random_.from"
)
"""Operations that overwrite their first argument, whatever its values."""

RANDOM_LIKE = aten_ops(
    "rand_like.default randn_like.default randint_like.default randint_like.low_dtype"
)


def _fill(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    if is_partial(target):
        return _dtensor.default_dtensor_op(op, args, kwargs)
    device = _dtensor.local_of(target).device
    # The order in which numbers are drawn depends on strides.
    full = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=device)
    op(full, *map(gathered, args[1:]), **kwargs)
    return keep_own_part(op, full, target)


def _draw_like(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    if is_partial(target):
        return _dtensor.default_dtensor_op(op, args, kwargs)
    like = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device="meta")
    device = kwargs.get("device") or _dtensor.local_of(target).device
    full = op(like, *args[1:], **{**kwargs, "device": device})
    return _dtensor.dtensor_like(target, part_like(full, target, op).clone())


def _draw_from(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    full = op(gathered(target), *args[1:], **kwargs)
    if full.shape != target.shape or is_partial(target):
        return replicated(full, target.device_mesh)
    return _dtensor.dtensor_like(target, part_like(full, target, op).clone())


def _ask(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Give all ranks the same answer to ``bool(tensor)``, which steers what they do next.

    A number that is read remains this rank's, as in PyTorch: code that logs a number on a single
    rank must not wait for other ranks.
    """
    local = _dtensor.local_of(target)
    if local.dtype is torch.bool:
        # As integers, because not every backend can add bools.
        local = gathered(_dtensor.dtensor_like(target, local.int())) != 0
    return op(local)


RANDOM_HANDLERS = {
    **dict.fromkeys(RANDOM_FILLS, _fill),
    **dict.fromkeys(RANDOM_LIKE, _draw_like),
    **dict.fromkeys(aten_ops("bernoulli.default multinomial.default"), _draw_from),
    aten._local_scalar_dense.default: _ask,
}

"""Random numbers for sharded tensors that do not depend on how these are sharded.

A DTensor that is filled at random draws each rank's part for itself: ranks that were seeded alike,
as they should be, draw the same numbers for different parts, and another world size draws others.
On the meshes that fullshard uses, every rank draws the whole tensor and keeps its own part, so a
model made on the meta device starts like the unsharded model with the same seed, and generators
are where they would be. One whole parameter at a time is in memory for it.

What draws again until a condition holds, such as ``trunc_normal_``, asks a bool tensor about its
elements. PyTorch answers with those of this rank; here all ranks get the answer of all elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard import _torch
from fullshard.tensors.own_parts import (
    gathered,
    is_partial,
    keep_own_part,
    own_part_of,
    replicated,
)

aten = torch.ops.aten

RANDOM_FILLS = (
    aten.uniform_.default,
    aten.normal_.default,
    aten.bernoulli_.float,
    aten.bernoulli_.Tensor,
    aten.exponential_.default,
    aten.cauchy_.default,
    aten.log_normal_.default,
    aten.geometric_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
)
"""They overwrite their first argument, whatever is in it."""

RANDOM_LIKE = (
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
)

_FROM_VALUES = (aten.bernoulli.default, aten.multinomial.default)


def _fill(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    if is_partial(target):
        return _torch.default_dtensor_op(op, args, kwargs)
    device = _torch.local_of(target).device
    # The order in which numbers are drawn depends on strides.
    whole = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device=device)
    op(whole, *map(gathered, args[1:]), **kwargs)
    return keep_own_part(op, whole, target)


def _draw_like(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    if is_partial(target):
        return _torch.default_dtensor_op(op, args, kwargs)
    like = torch.empty_strided(target.shape, target.stride(), dtype=target.dtype, device="meta")
    device = kwargs.get("device") or _torch.local_of(target).device
    whole = op(like, *args[1:], **{**kwargs, "device": device})
    return _torch.dtensor_like(target, own_part_of(op, whole, target).clone())


def _draw_from(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    whole = op(gathered(target), *args[1:], **kwargs)
    if whole.shape != target.shape or is_partial(target):
        return replicated(whole, target.device_mesh)
    return _torch.dtensor_like(target, own_part_of(op, whole, target).clone())


def _ask(op: Any, target: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """``bool(tensor)`` steers what ranks do next, so they get one answer.

    A number that is read stays this rank's, as in PyTorch: whoever logs one on a single rank must
    not wait for the others.
    """
    local = _torch.local_of(target)
    if local.dtype is torch.bool:
        # As integers: not every backend adds up bools.
        local = gathered(_torch.dtensor_like(target, local.int())) != 0
    return op(local)


RANDOM_HANDLERS = {
    **dict.fromkeys(RANDOM_FILLS, _fill),
    **dict.fromkeys(RANDOM_LIKE, _draw_like),
    **dict.fromkeys(_FROM_VALUES, _draw_from),
    aten._local_scalar_dense.default: _ask,
}

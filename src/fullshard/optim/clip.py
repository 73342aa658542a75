"""Gradient norms and their clipping, in one collective for all parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import compress, count, pairwise
from operator import add, attrgetter, itemgetter, ne
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fullshard._torch import dtensor as _dtensor
from fullshard.errors import ConfigError, NonFiniteError
from fullshard.tensors import Sharding, cut_flat, flat_starts, placed_pieces_of, sharding_of


def coalesced(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return ``tensors`` with neighbors in a buffer merged into one 1-D view each.

    Neighbors have no padding between them. Tensors without elements are left out. Views are sorted
    by the first index of their tensors, never by address: the rounding of sums over the views must
    not depend on addresses.
    """
    filled = list(filter(Tensor.numel, tensors))
    try:
        flats, starts = flat_starts(filled)
    except RuntimeError:  # sparse
        return filled
    if not all(map(Tensor.is_contiguous, filled)) or len({t.device for t in filled}) != 1:
        return filled
    ids, firsts, order = zip(*sorted(zip(map(id, flats), starts, count())), strict=True)
    ends = list(map(add, firsts, map(Tensor.numel, map(filled.__getitem__, order))))
    is_cut = map(ne, zip(ids, ends, strict=True), zip(ids[1:], firsts[1:], strict=True))
    found: list[tuple[int, Tensor]] = []
    for first, stop in pairwise((0, *compress(count(1), is_cut), len(order))):
        those, flat = order[first:stop], flats[order[first]]
        if len(those) > 1 and flat is not None and flat.dtype == filled[those[0]].dtype:
            view = flat.narrow(0, firsts[first], ends[stop - 1] - firsts[first])
            found.append((min(those), view))
        else:
            found += [(number, filled[number]) for number in those]
    return [view for _, view in sorted(found, key=itemgetter(0))]


class _SameGroups(NamedTuple):
    """Local gradients sharded over the same process groups.

    Attributes:
        sharding: the groups.
        locals: the gradients.
        coalesced: their elements in as few tensors as possible.
    """

    sharding: Sharding
    locals: list[Tensor]
    coalesced: list[Tensor]


def grad_norm(
    parameters: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Return the norm of the gradients of ``parameters``, taken as one vector.

    Args:
        parameters: one or several parameters: sharded or replicated DTensors on any meshes, those
            of ``FullyShardedDataParallel``, and other plain tensors, which must be the same on all
            ranks. Replicas count once; parameters without a gradient do not count. Ranks of other
            experts may lack other gradients.
        norm_type: any p, ``inf`` included.
        error_if_nonfinite: raise if the norm is not finite; the check waits for the device.
        foreach: False computes the norm of one tensor at a time.

    Returns:
        A plain 0-dim tensor in fp32 or wider, the same on all ranks.

    Raises:
        NonFiniteError: the norm is not finite and ``error_if_nonfinite`` is set.
        UnsupportedError: a gradient is a partial sum.
    """
    return NormedGradients(parameters, norm_type, error_if_nonfinite, foreach).norm


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients of ``parameters`` so that their norm is at most ``max_norm``.

    Interface and arithmetic are those of ``torch.nn.utils.clip_grad_norm_``, with one all-reduce
    for each mesh dimension over which parameters are sharded.

    Returns:
        The norm before clipping, a plain tensor; see ``grad_norm``, also for arguments and errors.
    """
    grads = NormedGradients(parameters, norm_type, error_if_nonfinite, foreach)
    grads.clip(max_norm)
    return grads.norm


class NormedGradients:
    """The gradients of ``parameters`` with their norm, to be clipped or not; see ``grad_norm``."""

    def __init__(
        self,
        parameters: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> None:
        self._alike, self._foreach = _sorted_by_groups(parameters), foreach
        self.norm = _norm(self._alike, norm_type, error_if_nonfinite, foreach)

    def clip(self, max_norm: float) -> None:
        """Scale the gradients as ``clip_grad_norm_`` does."""
        scale = (max_norm / (self.norm + 1e-6)).clamp(max=1.0)
        for one in self._alike:
            by_device: dict[torch.device, list[Tensor]] = {}
            for grad in one.coalesced:
                by_device.setdefault(grad.device, []).append(grad)
            for device, grads in by_device.items():
                device_scale = scale.to(device)
                if self._foreach is False:
                    for grad in grads:
                        grad.mul_(device_scale.to(grad.dtype))
                else:
                    torch._foreach_mul_(grads, device_scale)


def _sorted_by_groups(parameters: Tensor | Iterable[Tensor]) -> list[_SameGroups]:
    """Return the local gradients, in an order that missing gradients do not change.

    Ranks with different experts have different gradients, and must reduce over the same groups in
    the same order.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    pairs = zip(params, map(attrgetter("grad"), params), strict=True)
    grads: list[tuple[Tensor, Any]] = [
        (param, _none_of(param) if grad is None else grad)
        for param, grad in pairs
        if grad is not None or (param.requires_grad and not param.is_meta)
    ]
    found: dict[Sharding, list[Tensor]] = {}
    locals_of: dict[tuple[int, tuple[type, ...]], list[Tensor]] = {}

    def alike(mesh: DeviceMesh, placements: Sequence[Placement]) -> list[Tensor]:
        key = (id(mesh), tuple(map(type, placements)))
        there = locals_of.get(key)
        if there is None:  # gradients of equal meshes are alike, too
            sharding = sharding_of(mesh, placements)
            there = locals_of[key] = found.setdefault(sharding, [])
        return there

    for param, grad in grads:
        if isinstance(grad, DTensor):
            alike(grad.device_mesh, grad.placements).append(_dtensor.local_of(grad))
            continue
        parts = placed_pieces_of(param)
        if not parts:
            found.setdefault(_PLAIN, []).append(grad)
        spans = [(start, numel) for _, start, numel, _ in parts]
        if len(parts) == 1 or not grad.numel():
            locals_now = [grad] * len(parts)
        elif grad.is_contiguous():
            locals_now = cut_flat(grad, ((start, (numel,)) for start, numel in spans))
        else:
            locals_now = [grad.narrow(0, *span) for span in spans]
        for ((mesh, placements), *_), local in zip(parts, locals_now, strict=True):
            alike(mesh, placements).append(local)
    return [_SameGroups(sharding, those, coalesced(those)) for sharding, those in found.items()]


def _none_of(param: Tensor) -> Tensor:
    """Return a gradient of no elements that lies where ``param`` does."""
    if not isinstance(param, DTensor):
        return param.new_empty(0)
    return _dtensor.dtensor_like(param, _dtensor.local_of(param).new_empty(0))


_PLAIN = Sharding((), 1)


def _norm(
    alike: list[_SameGroups], norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> Tensor:
    norm_type = math.inf if norm_type == "inf" else norm_type  # type: ignore[comparison-overlap]
    if not norm_type > 0:
        raise ConfigError(f"norm_type is {norm_type}, expected a number above 0, or inf")
    together: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for one in alike:
        together.setdefault(one.sharding.groups, []).append(_part(one, norm_type, foreach))
    if not together:
        return torch.tensor(0.0)
    parts = [_over(groups, parts, norm_type) for groups, parts in together.items()]
    combined = torch.stack([part.to(parts[0].device) for part in parts])
    is_max = math.isinf(norm_type)
    norm = combined.amax() if is_max else combined.sum().pow(1.0 / norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise NonFiniteError(
            f"the norm of order {norm_type} of the gradients is {norm.item()}; to clip them all "
            "the same, set error_if_nonfinite=False"
        )
    return norm


def _part(one: _SameGroups, norm_type: float, foreach: bool | None) -> Tensor:
    """Return this rank's sum of powers divided by ``copies``, or, for order inf, its maximum."""
    wide = torch.float32
    for dtype in {grad.dtype for grad in one.locals}:
        wide = torch.promote_types(wide, dtype.to_real())
    device = one.locals[0].device
    grads = [grad.abs() if grad.is_complex() else grad for grad in one.coalesced]
    if not grads:
        return torch.zeros((), dtype=wide, device=device)
    if foreach is False:
        norms = [torch.linalg.vector_norm(grad, norm_type, dtype=wide) for grad in grads]
    else:
        norms = list(torch._foreach_norm(grads, norm_type, dtype=wide))
    stacked = torch.stack([norm.to(device) for norm in norms])
    if math.isinf(norm_type):
        return stacked.amax()
    return stacked.pow(norm_type).sum() / one.sharding.copies


def _over(
    groups: tuple[dist.ProcessGroup, ...], parts: Sequence[Tensor], norm_type: float
) -> Tensor:
    """Combine the parts of all ranks of ``groups``, with one all-reduce per group."""
    is_max = math.isinf(norm_type)
    stacked = torch.stack([part.to(parts[0].device) for part in parts])
    sharding = Sharding(groups, 1)
    return sharding.largest(stacked.amax()) if is_max else sharding.total(stacked.sum())

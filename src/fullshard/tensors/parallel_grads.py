"""From what autograd left on tensor-parallel parameters to plain local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from fullshard import _torch
from fullshard.comm import all_reduce
from fullshard.errors import ProtocolError
from fullshard.tensors.parallel import ParallelSpec


class _WrongGradient(ProtocolError, AssertionError):
    """A gradient that does not lie where its parameter does."""


@torch.no_grad()
def local_gradients(
    grads: Sequence[Tensor | None], specs: Sequence[ParallelSpec | None]
) -> list[Tensor | None]:
    """The local tensors of gradients, placed as their parameters are.

    Asynchronous results are awaited. A gradient that is a pending sum or mean over a dim that is
    not data-parallel is all-reduced over it, all such gradients of the call in one all-reduce for
    each process group and dtype, in which they are computed. Ranks of such a group must agree on
    which parameters have a gradient; those of other groups need not.

    Over data-parallel dims of a full mesh gradients are left pending, since the engine reduces
    over those next. [Note: pending sums over data-parallel dims] That takes the mean of what ranks
    have, whether they hold terms of a sum (Partial), or alike results (Replicate), as in torch:

        Replicate        the mean is the gradient
        Partial("avg")   the mean is the gradient
        Partial("sum")   the mean is the gradient divided by the number of data-parallel ranks.
                         DTensor gives these where the input is Shard on the data-parallel dims,
                         and the loss their global sum. A user of torch who wants the gradient of
                         that loss sets a gradient divide factor of 1; so it is with us

    Args:
        grads: of whole parameters, None where there is none. Not written to.
        specs: of the parameters, None for plain ones, whose gradients are returned as they are.

    Returns:
        Plain tensors of each spec's ``local_shape``. What was placed well shares memory with its
        gradient; what was all-reduced lies in one new buffer with others.

    Raises:
        ProtocolError: a parameter that is a DTensor has a plain gradient, or one on another mesh;
            also an AssertionError.
    """
    results = list(grads)
    misplaced: list[_Misplaced] = []
    for i, (grad, spec) in enumerate(zip(grads, specs, strict=True)):
        if grad is None or spec is None:
            continue
        shown = _checked(_torch.waited(grad), spec)
        results[i] = local = _torch.waited(_torch.local_of(shown))
        target = _target(shown.placements, spec)
        if shown.placements != target:
            misplaced.append(_Misplaced(i, spec, local, shown.placements, target))
    if misplaced:
        for one in map(_moved, _summed(misplaced)):
            results[one.position] = one.local
    return results


class _Misplaced(NamedTuple):
    """A gradient that is not placed as its parameter is."""

    position: int
    spec: ParallelSpec
    local: Tensor
    placements: tuple[Placement, ...]
    target: tuple[Placement, ...]

    def is_pending(self, dim: int) -> bool:
        """Whether its sum or mean over a mesh dim is to be made by us.

        Not where ranks along another dim hold what is no sum: the order would matter.
        """
        return (
            dim < len(self.placements)
            and _torch.is_sum(self.placements[dim])
            and not isinstance(self.target[dim], Partial)
            and all(not p.is_partial() or _torch.is_sum(p) for p in self.placements)
        )

    def summed(self, dim: int, local: Tensor) -> _Misplaced:
        """The same once all ranks along the mesh dim have its sum."""
        placements = (*self.placements[:dim], Replicate(), *self.placements[dim + 1 :])
        return self._replace(local=local, placements=placements)


def _checked(grad: Tensor, spec: ParallelSpec) -> DTensor:
    if not isinstance(grad, DTensor):
        raise _WrongGradient(
            f"the gradient of a parameter of shape {tuple(spec.shape)}, a DTensor placed "
            f"{spec.placements}, is a plain tensor of shape {tuple(grad.shape)}; whoever computes "
            "it must return a DTensor"
        )
    if grad.device_mesh != spec.mesh:
        raise _WrongGradient(
            f"the gradient of a parameter of shape {tuple(spec.shape)} lies on "
            f"{grad.device_mesh}, the parameter on {spec.mesh}"
        )
    return grad


def _target(placements: tuple[Placement, ...], spec: ParallelSpec) -> tuple[Placement, ...]:
    """Where the local gradient is wanted: as the parameter, but pending over data-parallel dims."""
    if not spec.dp_dims:
        return spec.placements
    target = list(spec.placements)
    for dim in spec.dp_dims:
        if _torch.is_sum(placements[dim]):
            target[dim] = placements[dim]
    return tuple(target)


def _summed(gradients: Sequence[_Misplaced]) -> list[_Misplaced]:
    """``gradients``, none of them a pending sum any more, in one all-reduce for each group."""
    done = list(gradients)
    for dim in range(max(len(gradient.placements) for gradient in done)):
        batches: dict[tuple[dist.ProcessGroup, torch.dtype], list[int]] = {}
        for i, gradient in enumerate(done):
            if gradient.is_pending(dim):
                group = gradient.spec.mesh.get_group(dim)
                batches.setdefault((group, gradient.local.dtype), []).append(i)
        for (group, _), batch in batches.items():
            sums = _sum_batch([done[i] for i in batch], dim, group)
            for i, total in zip(batch, sums, strict=True):
                done[i] = done[i].summed(dim, total)
    return done


def _sum_batch(batch: Sequence[_Misplaced], dim: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Sums, or means, over ``group``, in new memory: others may hold the gradients."""
    locals_ = [gradient.local for gradient in batch]
    numels = [local.numel() for local in locals_]
    joined = locals_[0].new_empty(sum(numels))
    totals = [
        part.view(local.shape) for part, local in zip(joined.split(numels), locals_, strict=True)
    ]
    torch._foreach_copy_(totals, locals_)
    # Before they are added up, so that few bits do not overflow.
    means = [
        total
        for total, gradient in zip(totals, batch, strict=True)
        if _torch.is_mean(gradient.placements[dim])
    ]
    if means:
        torch._foreach_div_(means, group.size())
    if len(joined):
        all_reduce(joined, group, is_max=False)
    return totals


def _moved(gradient: _Misplaced) -> _Misplaced:
    """``gradient`` where it is wanted; for what is rare, by DTensor, one at a time.

    From Replicate to Shard nothing is communicated.
    """
    if gradient.placements == gradient.target:
        return gradient
    spec = gradient.spec.spec_for(gradient.placements, gradient.local.dtype)
    shown = _torch.dtensor_from_spec(gradient.local, spec, requires_grad=False, cls=DTensor)
    moved = shown.redistribute(placements=gradient.target)
    return gradient._replace(
        local=_torch.waited(_torch.local_of(moved)), placements=gradient.target
    )

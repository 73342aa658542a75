"""Turn the gradients that autograd left on tensor-parallel parameters into plain local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from fullshard._torch import dtensor as _dtensor
from fullshard.comm import all_reduce
from fullshard.errors import AssertedProtocolError
from fullshard.tensors.parallel import ParallelSpec


@torch.no_grad()
def local_gradients(
    grads: Sequence[Tensor | None], specs: Sequence[ParallelSpec | None]
) -> list[Tensor | None]:
    """Return the local tensors of gradients, placed like the parameters.

    Asynchronous results are awaited. A gradient may be a pending sum or mean over a mesh dim that
    is not data-parallel. Such a gradient is all-reduced over this dim, in its own dtype. All such
    gradients of a call share one all-reduce for each process group and dtype. Ranks of such a group
    must agree on which parameters have a gradient; ranks of other groups need not.

    Over data-parallel dims of a full mesh, gradients are left pending, because the engine reduces
    over these dims next. [Note: pending sums over data-parallel dims] As in torch, the engine takes
    the mean of all ranks, both of terms of a sum (Partial) and of equal results (Replicate).

        Replicate        the mean is the gradient.
        Partial("avg")   the mean is the gradient.
        Partial("sum")   the mean is the gradient divided by the number of data-parallel ranks.
                         DTensor produces this placement if the input is Shard on the data-parallel
                         dims and the loss is a global sum. To get the gradient of that loss, set a
                         gradient divide factor of 1, as in torch.

    Args:
        grads: gradients of unsharded parameters, None for no gradient. Not written to.
        specs: specs of the parameters; None for a plain one, whose gradient is returned as it is.

    Returns:
        Plain tensors of each spec's ``local_shape``. A result that needed no change shares memory
        with its gradient; all-reduced results share a new buffer.

    Raises:
        ProtocolError: if a parameter that is a DTensor has a plain gradient, or a gradient on
            another mesh; the error is also an AssertionError.
    """
    results = list(grads)
    misplaced: list[_Misplaced] = []
    for i, (grad, spec) in enumerate(zip(grads, specs, strict=True)):
        if grad is None or spec is None:
            continue
        if spec.annotation is None:
            shown = _checked(_dtensor.waited(grad), spec)
            local, placements = _dtensor.waited(_dtensor.local_of(shown)), shown.placements
        else:
            local, placements = _dtensor.waited(grad), spec.annotation.gradients
        results[i] = local
        target = _target(placements, spec)
        if placements != target:
            misplaced.append(_Misplaced(i, spec, local, placements, target))
    if misplaced:
        for one in map(_moved, _summed(misplaced)):
            results[one.position] = one.local
    return results


class _Misplaced(NamedTuple):
    """A gradient whose ``placements`` differ from ``target``."""

    position: int
    spec: ParallelSpec
    local: Tensor
    placements: tuple[Placement, ...]
    target: tuple[Placement, ...]

    def is_pending(self, dim: int) -> bool:
        """Return whether we must compute the pending sum or mean over mesh dim ``dim``.

        False if a dim has a pending reduction of another kind, because the order would matter.
        """
        return (
            dim < len(self.placements)
            and _dtensor.is_sum(self.placements[dim])
            and not isinstance(self.target[dim], Partial)
            and all(not p.is_partial() or _dtensor.is_sum(p) for p in self.placements)
        )

    def summed(self, dim: int, local: Tensor) -> _Misplaced:
        """Return the gradient with ``local``, its sum over mesh dim ``dim``, as local tensor."""
        placements = (*self.placements[:dim], Replicate(), *self.placements[dim + 1 :])
        return self._replace(local=local, placements=placements)


def _checked(grad: Tensor, spec: ParallelSpec) -> DTensor:
    if not isinstance(grad, DTensor):
        raise AssertedProtocolError(
            f"the gradient of a parameter of shape {tuple(spec.shape)}, a DTensor placed "
            f"{spec.placements}, is a plain tensor of shape {tuple(grad.shape)}; whoever computes "
            "it must return a DTensor"
        )
    if grad.device_mesh != spec.mesh:
        raise AssertedProtocolError(
            f"the gradient of a parameter of shape {tuple(spec.shape)} lies on "
            f"{grad.device_mesh}, the parameter on {spec.mesh}"
        )
    return grad


def _target(placements: tuple[Placement, ...], spec: ParallelSpec) -> tuple[Placement, ...]:
    """Return the parameter's placements, but pending sums where data-parallel dims have them."""
    if not spec.dp_dims:
        return spec.placements
    target = list(spec.placements)
    for dim in spec.dp_dims:
        if _dtensor.is_sum(placements[dim]):
            target[dim] = placements[dim]
    return tuple(target)


def _summed(gradients: Sequence[_Misplaced]) -> list[_Misplaced]:
    """Return ``gradients`` without pending sums, by one all-reduce for each group and dtype."""
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
    """Return sums or means over ``group``, in new memory: gradients may be referenced elsewhere."""
    locals_ = [gradient.local for gradient in batch]
    numels = [local.numel() for local in locals_]
    joined = locals_[0].new_empty(sum(numels))
    totals = [
        part.view(local.shape) for part, local in zip(joined.split(numels), locals_, strict=True)
    ]
    torch._foreach_copy_(totals, locals_)
    # Divided before the sum, so that narrow dtypes do not overflow.
    means = [
        total
        for total, gradient in zip(totals, batch, strict=True)
        if _dtensor.is_mean(gradient.placements[dim])
    ]
    if means:
        torch._foreach_div_(means, group.size())
    if len(joined):
        all_reduce(joined, group, is_max=False)
    return totals


def _moved(gradient: _Misplaced) -> _Misplaced:
    """Return ``gradient`` with its target placements; rare cases go through DTensor one by one.

    A change from Replicate to Shard communicates nothing.
    """
    if gradient.placements == gradient.target:
        return gradient
    spec = gradient.spec.spec_for(gradient.placements, gradient.local.dtype)
    shown = _dtensor.dtensor_from_spec(gradient.local, spec, requires_grad=False, cls=DTensor)
    moved = shown.redistribute(placements=gradient.target)
    return gradient._replace(
        local=_dtensor.waited(_dtensor.local_of(moved)), placements=gradient.target
    )

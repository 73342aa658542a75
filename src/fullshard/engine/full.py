"""Full parameters: tensors in the dtype of the shards, and the path back into a shard.

Nothing here knows of residencies. Parameters made by ``unshard`` are for computation: in the dtype
of mixed precision, leaves of autograd, in memory that comes and goes. Those made here are for users
who read and write values: ordinary tensors, which live as long as somebody holds them.

Throughout, ``flat`` is 1-D and in the order of a shard: the shard itself, or gradients laid out
like the shard. This tensor may be on another device than the bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fullshard._torch import memory as _memory
from fullshard.comm import broadcast_pieces
from fullshard.device import BufferKind, StorageMeter
from fullshard.engine.copies import copy_all, gather_plan, places_of_copies, written_in_place
from fullshard.engine.shard import cut_into
from fullshard.engine.spec import BucketSpec
from fullshard.layout import plan_param_gather


def gather_full(spec: BucketSpec, flat: Tensor, meter: StorageMeter) -> list[Tensor]:
    """Return all full parameters of a bucket; one batch of collectives among ``comm``.

    For tensor-parallel parameters, return local tensors. All share memory, but each pickles alone.
    """
    layout = spec.layout
    flat = flat.to(spec.device)
    plan = gather_plan(layout, flat.itemsize)
    full = flat.new_empty(layout.unsharded_numel)
    staging = flat.new_empty(layout.world * plan.staged_numel)
    sources = [flat.narrow(0, part.shard_offset, part.numel) for part in plan.direct]
    outputs = written_in_place(plan, layout.world, full)
    if plan.staged_numel:
        sources.append(flat[: plan.staged_numel])
        outputs.append(staging)
    with meter.holding(BufferKind.FULL, full.nbytes + staging.nbytes):
        spec.comm.all_gather(outputs, sources).wait()
        copy_all(*places_of_copies(plan.copies, full, staging, layout.unsharded_offsets))
    places = zip(layout.unsharded_offsets, layout.params, strict=True)
    return [
        _memory.own_storage(full.narrow(0, offset, param.numel).view(param.shape))
        for offset, param in places
    ]


def gather_full_param(spec: BucketSpec, flat: Tensor, index: int, meter: StorageMeter) -> Tensor:
    """Return one full parameter of a bucket in separate memory; a collective of ``comm``."""
    layout, param = spec.layout, spec.layout.params[index]
    if not param.numel:
        return flat.new_empty(param.shape, device=spec.device)
    plan = plan_param_gather(layout, index)
    if plan is None:
        own = spec.segments[index]
        piece = flat.narrow(0, own.shard_offset, own.numel).to(spec.device)
        lengths = [layout.segments_of(rank)[index].numel for rank in range(layout.world)]
        with meter.holding(BufferKind.FULL, param.numel * flat.itemsize):
            return broadcast_pieces(piece, lengths, spec.comm).view(param.shape)
    source = flat.narrow(0, plan.shard_offset, plan.numel).to(spec.device)
    staging = source.new_empty(layout.world * plan.numel)
    with meter.holding(BufferKind.FULL, staging.nbytes):
        spec.comm.all_gather([staging], [source]).wait()
        if not plan.copies:
            return _memory.own_storage(staging[: param.numel].view(param.shape))
        full = source.new_empty(param.numel)
        with meter.holding(BufferKind.FULL, full.nbytes):
            copy_all(*places_of_copies(plan.copies, full, staging, {index: 0}))
    return full.view(param.shape)


def is_first(spec: BucketSpec) -> bool:
    """Return whether this is rank 0 of the data-parallel mesh, replicas included."""
    return spec.comm.rank == 0 and is_first_copy(spec)


def is_first_copy(spec: BucketSpec) -> bool:
    """Return whether this rank's shard belongs to the first copy of the parameters."""
    return spec.replicas is None or spec.replicas.rank == 0


def cut_first(spec: BucketSpec, index: int, full: Tensor | None, flat: Tensor) -> None:
    """Cut the first rank's ``full`` parameter into ``flat`` on all ranks of the first copy.

    All other ranks pass None. ``share_first`` brings the values to the other copies.
    """
    if not is_first_copy(spec):
        return
    if full is None:
        full = torch.empty(spec.layout.params[index].shape, dtype=flat.dtype, device=spec.device)
    full = full.to(spec.device, flat.dtype).contiguous()
    spec.comm.broadcast(full, 0).wait()
    cut_into(full, spec.segments[index], flat)


def share_first(spec: BucketSpec, flat: Tensor) -> None:
    """Overwrite ``flat`` in all copies with its values in the first copy."""
    if spec.replicas is not None:
        shared = flat.to(spec.device)
        spec.replicas.broadcast(shared, 0).wait()
        if shared is not flat:
            flat.copy_(shared)


def flags_of_first(spec: BucketSpec, flags: Sequence[int]) -> list[int]:
    """Return the first rank's ``flags``, numbers that fit into uint8, on all ranks."""
    values = torch.tensor(flags, dtype=torch.uint8, device=spec.device)
    for wire in (spec.comm, spec.replicas):
        if wire is not None:
            wire.broadcast(values, 0).wait()
    return values.tolist()


def any_rank(spec: BucketSpec, flags: Iterable[bool], *, over_copies: bool = False) -> list[bool]:
    """Return, for each flag, whether some rank of this copy, or of any copy, has set it."""
    values = torch.tensor(list(flags), dtype=torch.uint8, device=spec.device)
    for wire in (spec.comm, spec.replicas if over_copies else None):
        if wire is not None and wire.world > 1:
            gathered = values.new_empty(wire.world * values.numel())
            wire.all_gather([gathered], [values]).wait()
            values = gathered.view(wire.world, -1).amax(0)
    return [bool(value) for value in values.tolist()]


def differing(spec: BucketSpec, tensors: Sequence[Tensor | None]) -> list[bool]:
    """Return, for the full tensor of each parameter, whether it differs between ranks.

    Compare bit by bit, replicas included; a tensor that only some ranks have differs.
    """
    some, none = [t is not None for t in tensors], [t is None for t in tensors]
    both = zip(
        any_rank(spec, some, over_copies=True), any_rank(spec, none, over_copies=True), strict=True
    )
    is_apart = [here and there for here, there in both]
    for index, tensor in enumerate(tensors):
        if tensor is None or is_apart[index]:
            continue
        own = tensor.to(spec.device).contiguous()
        for wire in (spec.comm, spec.replicas):
            if wire is not None and wire.world > 1:
                others = own.clone()
                wire.broadcast(others, 0).wait()
                is_apart[index] |= not torch.equal(_bits(own), _bits(others))
    return any_rank(spec, is_apart, over_copies=True)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)

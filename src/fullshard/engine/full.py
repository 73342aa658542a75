"""Full parameters: tensors in the dtype of the shards, and the path back into a shard.

Nothing here knows of residencies. Parameters made by ``unshard`` are for computation: in the dtype
of mixed precision, leaves of autograd, in memory that comes and goes. Those made here are for users
who read and write values: ordinary tensors, which live as long as somebody holds them.

Throughout, ``flat`` is 1-D and in the order of a shard: the shard itself, or gradients laid out
like the shard. This tensor may be on another device than the bucket.

A ``Loan`` lends the full parameters of a unit to the user, and takes them back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

import torch
from torch import Tensor, nn

from fullshard._torch import autograd as _autograd
from fullshard._torch import memory as _memory
from fullshard.comm import broadcast_pieces
from fullshard.device import Buffer, BufferKind, Lanes, StorageMeter
from fullshard.engine.bucket import Bucket
from fullshard.engine.policy import WirePolicy
from fullshard.engine.shard import cut_into
from fullshard.engine.spec import BucketSpec
from fullshard.engine.unit import Lending, Unit
from fullshard.engine.unshard import FlatGather, copy_all, places_of_copies
from fullshard.errors import ConfigError, FullshardError, ProtocolError
from fullshard.layout import plan_param_gather
from fullshard.tensors import local_gradients, local_part, shown_like


def gather_full(spec: BucketSpec, flat: Tensor, meter: StorageMeter) -> list[Tensor]:
    """Return all full parameters of a bucket; one batch of collectives among ``comm``.

    For tensor-parallel parameters, return local tensors. All share memory, but each pickles alone.
    """
    layout, kind, uncounted = spec.layout, BufferKind.FULL, StorageMeter()
    flat, spec = flat.to(spec.device), replace(spec, offload=None, wire=WirePolicy())
    buffer = Buffer(layout.unsharded_numel, flat.dtype, flat.device, kind=kind, meter=uncounted)
    gather = FlatGather(spec, flat, buffer, Lanes(), uncounted)
    with meter.holding(kind, sum(one.nbytes for one in gather.buffers)):
        gather.start().wait()
        gather.finish()
    places = zip(layout.unsharded_offsets, layout.params, strict=True)
    return [
        _memory.own_storage(buffer.tensor.narrow(0, offset, param.numel).view(param.shape))
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
    has, lacks = [t is not None for t in tensors], [t is None for t in tensors]
    found = any_rank(spec, [*has, *lacks], over_copies=True)
    is_apart = list(map(and_, found[: len(has)], found[len(has) :]))
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


@dataclass(frozen=True)
class Terms:
    """The user's choices for a loan; see ``unshard_params``."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False
    check: bool = False
    call: str = "unshard_params()"
    """The call that the user made, for messages."""


class Loan:
    """The full parameters that a unit's modules show during a loan, on all ranks or on rank 0.

    Full parameters are separate tensors. Writes to them go unnoticed until they are taken back, and
    a user who keeps one keeps its memory. The unit itself stays as it was, hidden behind them.
    """

    def __init__(self, unit: Unit, terms: Terms, meter: StorageMeter) -> None:
        """Gather the full parameters and show them; a collective of the ranks of each bucket."""
        self._unit = unit
        self._terms = terms
        self._meter = meter
        self._nbytes = 0
        self._taken: list[list[Tensor] | None] = [None] * len(unit.buckets)
        with torch.inference_mode(False), torch.no_grad():
            self._lent = [self._fill(bucket) for bucket in unit.buckets]
        meter.change(BufferKind.FULL, self._nbytes)
        unit.registration.lend(unit.buckets, self._lent)
        unit.lending = Lending(
            terms.call,
            to_first=terms.rank0_only,
            is_shown=all(params is not None for params in self._lent),
        )

    def _fill(self, bucket: Bucket) -> list[nn.Parameter] | None:
        """Return the full parameters of a bucket, with gradients if the terms ask for them."""
        spec, terms = bucket.spec, self._terms
        if terms.rank0_only and not is_first_copy(spec):
            return None
        values: list[Tensor] = gather_full(spec, bucket.shards.values(), self._meter)
        grads = self._gather_grads(bucket) if terms.with_grads else [None] * len(values)
        if terms.rank0_only and not is_first(spec):
            return None
        if terms.offload_to_cpu:
            values = [value.cpu() for value in values]
            grads = [None if grad is None else grad.cpu() for grad in grads]
        else:
            self._nbytes += sum(t.nbytes for t in (*values, *grads) if t is not None)
        params = []
        for i, (value, grad, own) in enumerate(
            zip(values, grads, bucket.sharded_params, strict=True)
        ):
            param = spec.unsharded_param(i, value)
            param.requires_grad_(own.requires_grad)
            if grad is not None:
                _autograd.set_grad(param, shown_like(param, grad))
            params.append(param)
        return params

    def _gather_grads(self, bucket: Bucket) -> list[Tensor | None]:
        """Return full gradients: None if no rank has one, zeros in the part of ranks without."""
        spec, front = bucket.spec, bucket.front
        own = [p.grad for p in bucket.sharded_params] if front is None else front.gradients()
        present = any_rank(spec, [grad is not None for grad in own])
        if not any(present):
            return [None] * len(own)
        row = _zero_row(bucket)
        for part, grad in zip(spec.parts_of(row), own, strict=True):
            if grad is not None:
                part.copy_(spec.form.local(grad))
        full = gather_full(spec, row, self._meter)
        shown = bucket.grad_dtypes().shown
        return [
            grad.to(dtype) if has else None
            for grad, has, dtype in zip(full, present, shown, strict=True)
        ]

    def take_back(self, *, keep: bool) -> FullshardError | None:
        """Show the unit's own parameters again; the unit is as usable as before the loan.

        Args:
            keep: whether to keep what the user wrote, on this rank.

        Returns:
            The reason why the writes cannot be kept, or None: the modules show something that
            cannot be a parameter, or ranks wrote different values and ``check`` was set.
        """
        self._unit.lending = None
        self._meter.change(BufferKind.FULL, -self._nbytes)
        problem: FullshardError | None = None
        try:
            self._taken = self._unit.registration.take_back(self._unit.buckets)
        except ConfigError as error:
            problem, keep = error, False
        for bucket, params in zip(self._unit.buckets, self._taken, strict=True):
            if bucket.front is not None and len({p.requires_grad for p in params or ()}) > 1:
                problem, keep = _frozen_in_part(self._terms.call, bucket), False
        tied = self._unit.registration.lent_ties(self._unit.buckets)
        if tied and self._terms.rank0_only:
            problem, keep = _tied_on_one_rank(self._terms.call, tied), False
        if not self._terms.writeback:
            return None
        if self._terms.check:
            with torch.no_grad():
                problem = self._check(keep=keep) or problem
        return problem

    def write(self, *, keep: bool) -> None:
        """Write the values taken back into the shards if ``keep`` is True.

        For terms with ``writeback`` only; the caller then calls ``Engine.rewritten``.
        """
        self._unit.wait_for_readers()  # before the shards are written
        if keep and not self._terms.rank0_only:
            self._unit.registration.tie(self._unit.buckets)
        with torch.inference_mode(False), torch.no_grad():
            if keep or self._terms.rank0_only:
                for bucket, params in zip(self._unit.buckets, self._taken, strict=True):
                    self._write(bucket, params, keep=keep)

    def _write(self, bucket: Bucket, params: Sequence[Tensor] | None, *, keep: bool) -> None:
        """If ``keep``, write this rank's values into the shard, or rank 0's with ``rank0_only``."""
        spec, num = bucket.spec, len(bucket.sharded_params)
        values: list[Tensor | None] = [None] * num
        grads, flags = values, [False] * (1 + 2 * num)
        if params is not None:
            values = [local_part(param).detach() for param in params]
            grads = _grads(bucket, params) if self._terms.with_grads else grads
            flags = [keep, *(p.requires_grad for p in params), *(g is not None for g in grads)]
        if self._terms.rank0_only:
            flags = list(map(bool, flags_of_first(spec, flags)))
        is_kept, trainable, present = flags[0], flags[1 : 1 + num], flags[1 + num :]
        if not is_kept:
            return
        flat = bucket.shards.values()
        self._cut(spec, values, [True] * num, flat)
        bucket.shards.put(flat)
        _freeze(bucket, trainable)
        if self._terms.with_grads:
            row = _zero_row(bucket)
            self._cut(spec, grads, present, row)
            _put_grads(bucket, row, present)

    def _cut(
        self,
        spec: BucketSpec,
        tensors: Sequence[Tensor | None],
        present: Sequence[bool],
        flat: Tensor,
    ) -> None:
        """Write own elements of full ``tensors`` into ``flat``, leave padding; see ``_write``."""
        for index, (full, segment) in enumerate(zip(tensors, spec.segments, strict=True)):
            if not present[index]:
                continue
            if self._terms.rank0_only:
                cut_first(spec, index, full, flat)
            elif full is not None:
                cut_into(full, segment, flat)
        if self._terms.rank0_only and any(present):
            share_first(spec, flat)

    def _check(self, *, keep: bool) -> FullshardError | None:
        """Return an error if ranks wrote different values, or only some of them keep theirs."""
        names: list[str] = []
        is_left = False
        for bucket, params in zip(self._unit.buckets, self._taken, strict=True):
            if any(any_rank(bucket.spec, [not keep or params is None], over_copies=True)):
                is_left = True
                continue
            assert params is not None
            is_apart = differing(bucket.spec, [local_part(param).detach() for param in params])
            if self._terms.with_grads:
                grads = differing(bucket.spec, _grads(bucket, params))
                is_apart = [one or other for one, other in zip(is_apart, grads, strict=True)]
            names += [name for name, apart in zip(bucket.names, is_apart, strict=True) if apart]
        where = f"{self._terms.call} with check=True, unit {self._unit.shown_name}: "
        if is_left and keep:
            return ProtocolError(
                where + "what some ranks wrote cannot be kept, so nothing of it was"
            )
        if names:
            return ProtocolError(
                where + f"ranks wrote different values to {', '.join(names)}; nothing was kept. "
                "Write the same everywhere, or use rank0_only=True"
            )
        return None


def _tied_on_one_rank(call: str, names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"parameters {', '.join(names)} were tied to others inside of {call} with "
        "rank0_only=True, which other ranks do not see. Nothing was written back; tie parameters "
        "on all ranks, outside of the with block or with rank0_only=False"
    )


def _frozen_in_part(call: str, bucket: Bucket) -> ConfigError:
    return ConfigError(
        f"inside of {call} only some of the {len(bucket.names)} parameters that are one flat "
        f"parameter with {bucket.names[0]} were frozen or unfrozen. Nothing was written back; "
        "freeze all of them, or set use_orig_params=True"
    )


def _grads(bucket: Bucket, params: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients that the user left, full over the data-parallel ranks."""
    grads = [param.grad for param in params]
    if bucket.spec.parallel:  # lent gradients of annotated parameters are sums already
        specs = [one if one and not one.annotation else None for one in bucket.spec.parallel]
        grads = local_gradients(grads, specs)
    return [None if grad is None else grad.detach() for grad in grads]


def _zero_row(bucket: Bucket) -> Tensor:
    """Return zeros in the order of the shard, in a dtype that holds all gradients."""
    numel = bucket.spec.layout.shard_numel
    dtype = reduce(torch.promote_types, bucket.grad_dtypes().shown)
    return torch.zeros(numel, dtype=dtype, device=bucket.shards.device)


def _put_grads(bucket: Bucket, row: Tensor, present: Sequence[bool]) -> None:
    """Set the gradients of the sharded parameters from ``row``; None where not ``present``."""
    spec, dtypes = bucket.spec, bucket.grad_dtypes().shown
    if bucket.front is not None:
        bucket.front.set_gradients(row.to(dtypes[0]), present)
        return
    views = spec.own_views(row)
    for i, param in enumerate(bucket.sharded_params):
        if not present[i]:
            param.grad = None
        elif param.grad is None:
            _autograd.set_grad(param, spec.form.wrap(i, views[i].to(dtypes[i])))
        else:
            spec.form.local(param.grad).copy_(views[i])


def _freeze(bucket: Bucket, flags: Sequence[bool]) -> None:
    """Freeze and unfreeze the sharded parameters as the user did the full parameters."""
    if bucket.front is not None:
        bucket.front.param.requires_grad_(flags[0])
    for param, flag in zip(bucket.sharded_params, flags, strict=True):
        if param.requires_grad != flag:
            param.requires_grad_(flag)

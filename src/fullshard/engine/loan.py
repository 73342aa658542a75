"""Loans: full parameters of a unit, lent to the user and taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor, nn

from fullshard._torch import autograd as _autograd
from fullshard.device import BufferKind, StorageMeter
from fullshard.engine.bucket import Bucket
from fullshard.engine.full import (
    any_rank,
    cut_first,
    differing,
    flags_of_first,
    gather_full,
    is_first,
    is_first_copy,
    share_first,
)
from fullshard.engine.shard import cut_into
from fullshard.engine.unit import Lending, Unit
from fullshard.errors import ConfigError, FullshardError, ProtocolError
from fullshard.tensors import local_gradients, local_part


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
                parallel = spec.parallel[i] if spec.parallel else None
                _autograd.set_grad(param, grad if parallel is None else parallel.wrap(grad))
            params.append(param)
        return params

    def _gather_grads(self, bucket: Bucket) -> list[Tensor | None]:
        """Return full gradients: None if no rank has one, zeros in the part of ranks without."""
        if bucket.front is not None:
            bucket.front.tell_gradients()
        spec, own = bucket.spec, [param.grad for param in bucket.sharded_params]
        if bucket.front is not None:
            bucket.front.take_gradients()
        present = any_rank(spec, [grad is not None for grad in own])
        if not any(present):
            return [None] * len(own)
        row = _zero_row(bucket)
        for piece, grad in zip(spec.pieces, own, strict=True):
            if grad is not None:
                local = spec.form.local(grad).reshape(-1)
                row.narrow(0, piece.offset, piece.numel).copy_(local)
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
            for bucket, params in zip(self._unit.buckets, self._taken, strict=True):
                if self._terms.rank0_only:
                    self._write_first(bucket, params, keep=keep)
                elif keep and params is not None:
                    self._write_own(bucket, params)

    def _write_own(self, bucket: Bucket, params: Sequence[Tensor]) -> None:
        """Write this rank's own elements into its shard, never padding."""
        flat = bucket.shards.values()
        for segment, param in zip(bucket.spec.segments, params, strict=True):
            cut_into(local_part(param).detach(), segment, flat)
        bucket.shards.put(flat)
        _freeze(bucket, [param.requires_grad for param in params])
        if self._terms.with_grads:
            grads = _grads(bucket, params)
            row = _zero_row(bucket)
            for segment, grad in zip(bucket.spec.segments, grads, strict=True):
                if grad is not None:
                    cut_into(grad, segment, row)
            _put_grads(bucket, row, [grad is not None for grad in grads])

    def _write_first(self, bucket: Bucket, params: Sequence[Tensor] | None, *, keep: bool) -> None:
        """Write rank 0's values into all shards, if rank 0 says to keep them."""
        spec, num = bucket.spec, len(bucket.sharded_params)
        grads: list[Tensor | None] = [None] * num
        flags = [0] * (1 + 2 * num)
        if params is not None:
            grads = _grads(bucket, params) if self._terms.with_grads else grads
            flags = [keep, *(p.requires_grad for p in params), *(g is not None for g in grads)]
        is_kept, *flags = flags_of_first(spec, flags)
        if not is_kept:
            return
        flat = bucket.shards.values()
        for i in range(num):
            full = None if params is None else local_part(params[i]).detach()
            cut_first(spec, i, full, flat)
        share_first(spec, flat)
        bucket.shards.put(flat)
        _freeze(bucket, [bool(flag) for flag in flags[:num]])
        if self._terms.with_grads:
            present = [bool(flag) for flag in flags[num:]]
            row = _zero_row(bucket)
            for i in range(num):
                if present[i]:
                    cut_first(spec, i, grads[i], row)
            if any(present):
                share_first(spec, row)
            _put_grads(bucket, row, present)

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
        where = f"{self._terms.call} with check=True, unit {self._unit.name or '(root)'}: "
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


def _grads(bucket: Bucket, params: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients that the user left, full over the data-parallel ranks."""
    grads = [param.grad for param in params]
    if bucket.spec.parallel:
        grads = local_gradients(grads, bucket.spec.parallel)
    return [None if grad is None else grad.detach() for grad in grads]


def _zero_row(bucket: Bucket) -> Tensor:
    """Return zeros in the order of the shard, in a dtype that holds all gradients."""
    numel = bucket.spec.layout.shard_numel
    dtype = reduce(torch.promote_types, bucket.grad_dtypes().shown)
    return torch.zeros(numel, dtype=dtype, device=bucket.shards.device)


def _put_grads(bucket: Bucket, row: Tensor, present: Sequence[bool]) -> None:
    """Set the gradients of the sharded parameters from ``row``; None where not ``present``."""
    spec = bucket.spec
    views = spec.own_views(row)
    dtypes = bucket.grad_dtypes().shown
    for i, param in enumerate(bucket.sharded_params):
        if not present[i]:
            param.grad = None
        elif param.grad is None:
            _autograd.set_grad(param, spec.form.wrap(i, views[i].to(dtypes[i])))
        else:
            spec.form.local(param.grad).copy_(views[i])
    if bucket.front is not None:
        bucket.front.take_gradients()


def _freeze(bucket: Bucket, flags: Sequence[bool]) -> None:
    """Freeze and unfreeze the sharded parameters as the user did the full parameters."""
    for param, flag in zip(bucket.sharded_params, flags, strict=True):
        if param.requires_grad != flag:
            param.requires_grad_(flag)

"""The path from unsharded gradients to sharded ones. See [Note: the tensors of a bucket]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fullshard._torch import autograd as _autograd
from fullshard.comm import Done, Pending
from fullshard.device import Lane, Lanes, StorageMeter
from fullshard.engine.dtypes import GradDtypes
from fullshard.engine.flat_param import FlatParameter
from fullshard.engine.grad_shard import GradShard, ReducedSets
from fullshard.engine.policy import ReducePolicy
from fullshard.engine.reduce_input import Reduced, ReduceInput
from fullshard.engine.spec import BucketSpec, bring_home
from fullshard.errors import ProtocolError
from fullshard.tensors import local_gradients, plain


class Partial(NamedTuple):
    """A row of gradients that is reduced over shards and waits for the replicas."""

    reduced: Reduced
    row: Tensor
    present: list[bool]
    """For each parameter of ``reduced``, True if this rank had a gradient in some pass."""


@dataclass
class Waiting:
    """The gradients of earlier passes that a bucket keeps until a backward reduces them."""

    pending: list[Tensor | None] | None = None
    """Unsharded gradients, by parameter; None on all ranks if no rank accumulated any."""
    partial: Partial | None = None
    """Gradients reduced over shards, but not over replicas."""
    prior: frozenset[int] = frozenset()
    """Indices of all parameters that may have such gradients; the same on all ranks."""

    def clear(self) -> None:
        """Forget all waiting gradients."""
        self.pending, self.partial, self.prior = None, None, frozenset()

    def move(self, device: torch.device, reduced: torch.dtype) -> None:
        """Move waiting gradients to ``device``; cast partial ones to the dtype ``reduced``."""
        if self.pending is not None:
            self.pending = [None if grad is None else grad.to(device) for grad in self.pending]
        if self.partial is not None:
            self.partial = self.partial._replace(row=self.partial.row.to(device, reduced))


@dataclass
class _Reduction:
    """A reduction that was started, over shards first, then over replicas if there are any."""

    pending: Pending
    reduced: Reduced  # gives the order of all fields below
    row: Tensor  # 1-D, the result: layout.shard_numel elements and the flags
    source: ReduceInput | None  # None: already reduced over shards
    present: list[bool]  # which parameters have a gradient on this rank
    shown: GradShard | None  # gradients over ``row``, if they were made before
    prior: frozenset[int]  # parameter indices with gradients of earlier passes, even if now frozen


class Unresolved(NamedTuple):
    """A result that waits for its flags: this rank lacks some gradients, or sets may differ."""

    shown: GradShard
    prior: frozenset[int]


class Reducible(Protocol):
    """The part of a bucket that ``Gradients`` needs."""

    spec: BucketSpec
    sharded_params: list[nn.Parameter]
    waiting: Waiting
    reduce_policy: ReducePolicy
    front: FlatParameter | None


class Gradients:
    """The reducer of a bucket's gradients, from unsharded parameters to sharded parameters.

    It reduces the parameters that are trainable now, and those with gradients of earlier passes. A
    reduction has the same size on all ranks, whichever ranks have a gradient: ranks
    without one send zeros, and one flag per parameter says whether some rank had a gradient. So
    ``.grad`` stays None exactly where no rank computed a gradient, without an extra collective.
    """

    def __init__(
        self,
        bucket: Reducible,
        params: Sequence[nn.Parameter],
        dtypes: GradDtypes,
        lanes: Lanes,
        meter: StorageMeter,
    ) -> None:
        spec = bucket.spec
        self.params = params
        self._bucket = bucket
        self._spec = spec
        self._waiting = bucket.waiting
        self._dtypes = dtypes
        self._lanes = lanes
        self._comm = lanes.wire(Lane.REDUCE, spec.reducing)
        copies = spec.replicas and spec.encoding_gradients(spec.replicas)
        self._replicas = copies and lanes.wire(Lane.REDUCE, copies)
        self._in_flight: _Reduction | None = None
        self._unresolved: Unresolved | None = None
        self._meter = meter
        self._sets = ReducedSets(spec, meter)
        dtypes.expect(spec, params)
        bucket.waiting.move(params[0].device, dtypes.reduced)

    def start(self) -> None:
        """Start to reduce present and pending gradients, if any parameter can have one."""
        indices = self._indices()
        if not indices:
            self.discard()  # gradients of parameters frozen since the forward
            self._waiting.pending = None
            return
        resolve_presence([self], self._lanes)  # this reduction may write to the same memory
        reduced = self._sets.choose(indices)
        has_pending, prior = self._waiting.pending is not None, self._waiting.prior
        buffer = reduced.input(self._wire_dtype(has_pending=has_pending), self.params[0].device)
        grads = self._take(indices)  # adds up with those pending, which frees memory
        try:
            buffer.allocate()
        except Exception as error:
            if has_pending:
                unit = self._spec.label.text.partition(" (")[0]
                error.add_note(
                    f"fullshard: gradients of earlier backwards are lost for {unit}. Call "
                    "reset_iter_state() and repeat the step from its first backward"
                )
            raise
        source = buffer.fill(grads)
        # Frozen parameters without earlier gradients count as present: their flags are not read.
        present = [
            grad is not None
            or not (self._bucket.sharded_params[index].requires_grad or index in prior)
            for index, grad in zip(indices, grads, strict=True)
        ]
        self._lanes.join(Lane.COMPUTE, Lane.COMPUTE)
        del grads  # their memory may be reused for the allocations below
        self._lanes.join(Lane.REDUCE, Lane.COMPUTE)
        try:
            with self._lanes.on(Lane.REDUCE):
                shown, row = self._result_for(buffer.row, source.device)
                pending = self._comm.reduce_scatter_mean(row, source)
        except BaseException:
            self._leave(buffer)
            raise
        self._in_flight = _Reduction(pending, reduced, row, buffer, present, shown, prior)
        self._waiting.prior = frozenset()

    def _trainable(self) -> tuple[int, ...]:
        """Return the indices of the parameters that are not frozen; the same on all ranks."""
        flags = _autograd.requires_grad(self._bucket.sharded_params)
        return tuple(compress(range(len(self.params)), flags))

    def _indices(self) -> tuple[int, ...]:
        """Return the indices of the parameters to reduce, ascending; the same on all ranks."""
        indices = self._trainable()
        if self._waiting.prior:
            indices = tuple(sorted(self._waiting.prior.union(indices)))
        if indices and self._spec.clean_padding:  # all gradients are seen as one tensor
            return tuple(range(len(self.params)))
        return indices

    def _wire_dtype(self, *, has_pending: bool) -> torch.dtype:
        """Return the dtype in which gradients travel; the same on all ranks.

        If the wire adds in a wide dtype, whatever travels, a gradient computed in a narrow dtype
        need not be widened before: the sum is the same, bit for bit.
        """
        dtypes = self._dtypes
        if self._spec.reducing.world > 1:
            return dtypes.sent(pending=has_pending)
        # There is no other rank to agree with.
        came = {grad.dtype for param in self.params if (grad := param.grad) is not None}
        return dtypes.wire if not has_pending and came <= {dtypes.wire} else dtypes.reduced

    def _result_for(self, numel: int, device: torch.device) -> tuple[GradShard | None, Tensor]:
        """Return the target of the reduction: last step's gradients if free, else new memory.

        Gradients that go on to replicas, now or later, or are shown in several dtypes, keep the
        dtype of the reduction; so do offloaded ones, which are shown on the host.
        """
        dtype = self._dtypes.one_shown
        if self._spec.replicas is not None or self._spec.offload is not None or dtype is None:
            return None, torch.empty(numel, dtype=self._dtypes.reduced, device=device)
        shown = self._sets.result(numel, dtype, device)
        return shown, shown.flat

    def all_reduce(self) -> None:
        """Continue over the replicas, partial gradients included; or reduce only the partial."""
        replicas = self._replicas
        if replicas is None or (self._in_flight is None and self._waiting.partial is None):
            return
        with self._lanes.on(Lane.REDUCE):
            reduced, row, present = self._end_first_half()
        reduction = self._in_flight
        if reduction is not None:
            self._end(reduction)  # until the second half has begun
        with self._lanes.on(Lane.REDUCE):
            if reduction is None:
                prior, self._waiting.prior = self._waiting.prior, frozenset()
                reduction = _Reduction(Done(), reduced, row, None, present, None, prior)
            reduction.row = row
            reduction.present = present
            reduction.pending = replicas.all_reduce_mean(row)
        self._in_flight = reduction

    def keep_partial(self) -> None:
        """Put off the reduction over replicas."""
        if self._spec.replicas is None:
            self.finish()
        elif self._in_flight is not None:
            with self._lanes.on(Lane.REDUCE):
                self._waiting.partial = self._end_first_half()
            self._waiting.prior = frozenset(self._waiting.partial.reduced.indices)
            self._end(self._in_flight)

    def _end_first_half(self) -> Partial:
        """Return the sum over shards, of this pass and of the passes that were kept partial.

        The sum works whichever parameters had gradients in which pass: all rows are in layout
        order, and flags add up like gradients. Parameters unfrozen since then add nothing; frozen
        parameters are still reduced, for the gradients of earlier passes.
        """
        partial, self._waiting.partial = self._waiting.partial, None
        reduction = self._in_flight
        if reduction is None:
            assert partial is not None
            return partial
        self._lanes.wait(reduction.pending)
        now = Partial(reduction.reduced, reduction.row, reduction.present)
        if partial is None:
            return now
        indices = partial.reduced.indices
        before = dict(zip(indices, partial.present, strict=True))
        present = [
            here or before.get(index, False)
            for index, here in zip(now.reduced.indices, now.present, strict=True)
        ]
        if indices == now.reduced.indices:
            return Partial(now.reduced, partial.row.add_(now.row), present)
        torch._foreach_add_(
            now.reduced.parts(now.row, indices), partial.reduced.parts(partial.row, indices)
        )
        return now._replace(present=present)

    def finish(self) -> None:
        """Put the reduced gradients on the sharded parameters, unless flags must be read first.

        ``resolve_presence`` puts them there if other ranks' flags must be read from a device. So
        the host waits for the device once, for all buckets, and not before backward has ended.
        """
        if self._in_flight is None:
            return
        reduction = self._in_flight
        try:
            with self._lanes.on(Lane.REDUCE):
                self._lanes.wait(reduction.pending)
                self._edit(reduction.reduced.spec, reduction.row)
                shown = reduction.shown
                if shown is None:
                    shown = self._at_home(reduction.reduced, reduction.row)
                present = reduction.present
                if shown.reduced.is_agreed and (
                    self._bucket.reduce_policy.fill_absent or all(present)
                ):
                    self._assign(shown, [True] * len(present), reduction.prior)
                elif reduction.row.is_meta:  # a dry run, where all ranks count as alike
                    self._assign(shown, present, reduction.prior)
                else:
                    self._unresolved = Unresolved(shown, reduction.prior)
        except BaseException:
            self._leave(reduction.source)
            raise
        self._end(reduction)

    def _at_home(self, reduced: Reduced, row: Tensor) -> GradShard:
        """Return ``row`` as the gradients that users see, on the device of the shards."""
        offload, one = self._spec.offload, self._dtypes.one_shown
        dtype = one or row.dtype
        row = row.to(dtype) if offload is None else bring_home(row, dtype, offload, self._lanes)
        shown = [self._dtypes.shown[index] for index in reduced.indices]
        return GradShard(reduced, row, None if one else shown)

    def _edit(self, spec: BucketSpec, row: Tensor) -> None:
        """Apply the user's hook and divisor to the reduced gradients."""
        policy = self._bucket.reduce_policy
        if policy.hook is not None:
            with self._lanes.on_user_stream(policy.hook_stream):
                for start, length in spec.gaps:
                    row.narrow(0, start, length).zero_()  # so that norms ignore the padding
                policy.hook(row[: spec.layout.shard_numel])
        if policy.divide_by is not None:
            copies = 1 if spec.replicas is None else spec.replicas.world
            row.mul_(spec.comm.world * copies / policy.divide_by)

    def _end(self, reduction: _Reduction) -> None:
        """Make computation wait for the reduction, and free the buffer that was reduced."""
        self._in_flight = None
        self._lanes.join(Lane.COMPUTE, Lane.REDUCE)
        if reduction.source is not None:
            reduction.source.free()
            reduction.source = None

    def _leave(self, source: ReduceInput | None) -> None:
        """Forget a reduction that failed, and all memory that the backend may still use for it."""
        self._in_flight = None
        if source is not None:
            source.leave()
        self._sets = ReducedSets(self._spec, self._meter)

    def accumulate(self) -> None:
        """Keep the gradients unsharded until a backward that reduces them.

        Gradients accumulate in the wider of the dtypes of computation and reduction, so that
        waiting loses no bits that reducing at once would have kept.
        """
        dtype = torch.promote_types(self._dtypes.computed, self._dtypes.reduced)
        kept = self._take(range(len(self.params)))
        for i, grad in enumerate(kept):  # one at a time, so that each original is freed early
            kept[i] = None if grad is None else grad.detach().to(dtype)
            self._lanes.join(Lane.COMPUTE, Lane.COMPUTE)
        self._waiting.pending = kept
        self._waiting.prior = self._waiting.prior.union(self._trainable())

    def discard(self) -> None:
        """Clear the gradients of the unsharded parameters, such as those of a dead backward."""
        for param in self.params:
            param.grad = None

    def abandon(self) -> None:
        """Drop the gradients of a backward, and forget a reduction that may never end."""
        self.discard()
        self._unresolved = None
        if self._in_flight is not None:
            self._leave(self._in_flight.source)

    def _take(self, indices: Iterable[int]) -> list[Tensor | None]:
        """Take off all gradients, add the pending ones, and return the gradients of ``indices``.

        Gradients of parameters that are frozen now are dropped. If the model computes on several
        streams, a gradient may come from any of them. All streams must wait for each other before
        gradients are read, and again before their memory returns to one stream.
        """
        self._lanes.join(Lane.COMPUTE, Lane.COMPUTE)
        trained = _autograd.requires_grad(self._bucket.sharded_params)  # now, not in the forward
        pairs = zip(self.params, trained, strict=True)
        grads = [param.grad if is_trained else None for param, is_trained in pairs]
        self.discard()
        if self._spec.parallel:
            grads = local_gradients(grads, self._spec.parallel)
        if self._spec.are_wrapped:
            grads = [None if grad is None else plain(grad) for grad in grads]
        inspect = self._bucket.reduce_policy.inspect
        if inspect is not None:
            inspect([param.name for param in self._spec.layout.params], grads)
        pending, self._waiting.pending = self._waiting.pending, None
        if pending is None:
            return [grads[index] for index in indices]
        both = [
            (waited, grad)
            for waited, grad in zip(pending, grads, strict=True)
            if waited is not None and grad is not None
        ]
        if both:
            sums = [waited for waited, _ in both]
            torch._foreach_add_(sums, [grad for _, grad in both])
        return [grads[i] if pending[i] is None else pending[i] for i in indices]

    @property
    def unread_flags(self) -> Tensor | None:
        """The presence flags that ``resolve_presence`` must read, or None if it need not."""
        return None if self._unresolved is None else self._unresolved.shown.flags

    def resolve(self, flags: Sequence[float]) -> None:
        """Put the gradients on the sharded parameters, now that their ``flags`` are read.

        Raises:
            ProtocolError: ranks have frozen different parameters; no gradient was changed.
        """
        assert self._unresolved is not None
        (shown, prior), self._unresolved = self._unresolved, None
        present = shown.reduced.present(flags)
        if self._bucket.reduce_policy.fill_absent:
            present = [True] * len(present)
        self._assign(shown, present, prior)

    def _assign(self, result: GradShard, present: Sequence[bool], prior: frozenset[int]) -> None:
        """Set gradients, or add them to those present; then call post-accumulate hooks.

        As without sharding, parameters frozen since then keep gradients of passes before.
        """
        params, front = self._bucket.sharded_params, self._bucket.front
        wanted = [
            has and (params[index].requires_grad or index in prior)
            for index, has in zip(result.reduced.indices, present, strict=True)
        ]
        if front is None:
            seen = self._put(result, wanted)
        else:
            seen = [front.param] if any(wanted) else []
            front.add_gradients(result.flat[: self._spec.layout.shard_numel], wanted)
        for param, hook in _autograd.post_accumulate_grad_hooks(seen):
            hook(param)  # as autograd would call the hook; an optimizer may step in it

    def _put(self, result: GradShard, wanted: Sequence[bool]) -> list[nn.Parameter]:
        """Set or add the ``wanted`` gradients, and return their parameters."""
        params = [self._bucket.sharded_params[index] for index in result.reduced.indices]
        put = _autograd.put_grad if self._spec.grad_dtype is None else _autograd.set_grad
        sums: list[Tensor] = []
        parts: list[Tensor] = []
        for i, param in compress(enumerate(params), wanted):
            if param.grad is None:
                put(param, result.shown[i])
            else:
                sums.append(self._spec.form.local(param.grad))
                parts.append(result.locals[i])
        if sums:
            torch._foreach_add_(sums, parts)
        return list(compress(params, wanted))


def resolve_presence(unread: Iterable[Gradients], lanes: Lanes) -> None:
    """Read the presence flags of all ``unread``, once for all of them, and set the gradients.

    Raises:
        ProtocolError: see ``Gradients.resolve``; the rest of ``unread`` was resolved.
    """
    asked = [(one, flags) for one in unread if (flags := one.unread_flags) is not None]
    if not asked:
        return
    failure: ProtocolError | None = None
    with lanes.on(Lane.REDUCE):
        flags_read = lanes.read([flags for _, flags in asked])
        for (one, _), read in zip(asked, flags_read, strict=True):
            try:
                one.resolve(read)
            except ProtocolError as error:
                failure = failure or error
    lanes.join(Lane.COMPUTE, Lane.REDUCE)
    if failure is not None:
        raise failure

"""A bucket: parameters of one unit that share mesh, dtype and trainability.

[Note: the tensors of a bucket]

    sharded_params[i]   what user and optimizer see between steps; local tensors are views of
    shard               this rank's slice of every parameter, 1-D, ``layout.shard_numel`` elements
    all_gather_input    ``shard``, or, in another dtype, our own slices of what will be gathered
    gather_output       rank-major result of the all-gather for what cannot be gathered in place,
                        copied in one batch into ``unsharded``; does not exist where the layout is
                        zero-copy (``layout.plan_gather``)
    unsharded           all parameters, whole, 1-D; empty storage while resharded. At shard size 1
                        without a cast it does not exist: the parameters borrow ``shard``
    unsharded.params[i] nn.Parameters over ``unsharded``: what modules compute with, and the leaves
                        of autograd. The same objects as long as the bucket lives
    secondary           this rank's slice of ``unsharded``, of which a few ranks have one each; what
                        resharding to a smaller group leaves after forward
    pending[i]          whole gradients that wait for a backward that reduces (no-sync)
    reduce_input        gradients rank-major in layout order, in the dtype on the wire, with one
                        element per parameter behind each slice: 1 if it has a gradient
    partial             what is reduced over shards and waits for the reduction over replicas
    grad_shard          the mean over ranks of this rank's slice; sharded_params[i].grad are views

Of parameters that are tensor-parallel DTensors all of this holds local tensors; ``sharded_params``
and ``unsharded.params`` show DTensors around them.

``bucket.py`` holds the first two, ``unshard.py`` the next five, ``reduce.py`` and
``reduce_input.py`` and ``grad_shard.py`` the last four.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fullshard import _torch
from fullshard.device import Lanes, StorageMeter
from fullshard.engine.policy import ReducePolicy
from fullshard.engine.reduce import Gradients, Waiting
from fullshard.engine.spec import BucketSpec
from fullshard.engine.unshard import Unsharded
from fullshard.errors import ConfigError
from fullshard.layout import Segment
from fullshard.tensors import local_part

__all__ = ["Bucket"]


class Bucket:
    """One layout, one shard, one unsharded buffer. See [Note: the tensors of a bucket]."""

    def __init__(self, spec: BucketSpec, originals: Sequence[nn.Parameter]) -> None:
        """Cut ``originals`` (whole parameters, one dtype) and keep this rank's pieces.

        Of tensor-parallel ones their local tensors are cut.
        """
        self.spec = spec
        first = originals[0]
        device = first.device if first.device.type == "meta" else spec.device
        self.shard = torch.zeros(spec.layout.shard_numel, dtype=first.dtype, device=device)
        for segment, original in zip(spec.segments, originals, strict=True):
            _cut(local_part(original).detach(), segment, self.shard)
        self.sharded_params = [
            nn.Parameter(spec.form.wrap(i, local), requires_grad=original.requires_grad)
            for i, (local, original) in enumerate(
                zip(spec.own_views(self.shard), originals, strict=True)
            )
        ]
        # The very objects: a Parameter may wrap a view of what it was made from.
        self._locals = [spec.form.local(param) for param in self.sharded_params]
        self.unsharded: Unsharded | None = None
        self.gradients: Gradients | None = None
        self._waiting: Waiting | None = None  # gradients, while there is no unsharded side
        self.reduce_policy = ReducePolicy()
        self._requires_grad: list[bool] | None = None  # as the unsharded parameters were set last

    def copy(self, memo: dict[Any, Any]) -> Bucket:
        """The same with memory of its own, resharded; ``memo`` learns of its parameters."""
        new = copy.copy(self)
        new.dematerialize()
        new._waiting = None
        new.shard = self.shard.clone()
        new.sharded_params = []
        for i, (old, local) in enumerate(
            zip(self.sharded_params, self.spec.own_views(new.shard), strict=True)
        ):
            param = nn.Parameter(self.spec.form.wrap(i, local), requires_grad=old.requires_grad)
            param.__dict__.update(copy.deepcopy(vars(old), memo))  # what users put on it
            memo[id(old)] = param
            new.sharded_params.append(param)
        new._locals = [self.spec.form.local(param) for param in new.sharded_params]
        return new

    @property
    def names(self) -> list[str]:
        """Fully qualified names of the parameters."""
        return [param.name for param in self.spec.layout.params]

    @property
    def trainable(self) -> bool:
        """Whether there is anything to reduce; the same on all ranks."""
        return any(param.requires_grad for param in self.sharded_params)

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded buffer."""
        dtype = self.spec.unsharded_dtype(self.shard.dtype)
        return self.spec.layout.unsharded_numel * dtype.itemsize

    def materialize(self, lanes: Lanes, meter: StorageMeter) -> Unsharded:
        """Make the unsharded side, once; it starts without memory."""
        if self.unsharded is None:
            self.unsharded = Unsharded(self.spec, self.shard, lanes, meter)
            self.gradients = Gradients(
                self.spec, self.unsharded.params, self.sharded_params, lanes, meter
            )
            self.gradients.policy = self.reduce_policy
            if self._waiting is not None:
                self.gradients.take_up(self._waiting)
                self._waiting = None
            self._requires_grad = None
        return self.unsharded

    def change_reduction(self, **changes: Any) -> None:
        """Replace fields of ``ReducePolicy``."""
        self.reduce_policy = replace(self.reduce_policy, **changes)
        if self.gradients is not None:
            self.gradients.policy = self.reduce_policy

    def rewire(self, **wires: Any) -> None:
        """Replace wires of ``spec``; only while the bucket is resharded and nothing is pending."""
        self.spec = replace(self.spec, **wires)
        self.dematerialize()

    @property
    def whole(self) -> Unsharded:
        """The unsharded side, which has been made."""
        assert self.unsharded is not None
        return self.unsharded

    def sync_requires_grad(self) -> None:
        """Freeze and unfreeze the unsharded parameters as the user did the sharded ones."""
        if self.unsharded is None:
            return
        self.keep_requires_grad()
        for sharded, whole in zip(self.sharded_params, self.unsharded.params, strict=True):
            if whole.requires_grad != sharded.requires_grad:
                whole.requires_grad_(sharded.requires_grad)
        self._requires_grad = [param.requires_grad for param in self.unsharded.params]

    def keep_requires_grad(self) -> None:
        """Freeze and unfreeze the sharded parameters as the user did the unsharded ones."""
        last = self._requires_grad
        if last is None or self.unsharded is None:
            return
        flags = [param.requires_grad for param in self.unsharded.params]
        if flags == last:
            return
        for sharded, flag, old in zip(self.sharded_params, flags, last, strict=True):
            if flag != old:
                sharded.requires_grad_(flag)
        self._requires_grad = flags

    def dematerialize(self) -> None:
        """Forget the unsharded side, but for gradients that wait; only while it is resharded."""
        if self.gradients is not None:
            self._waiting = self.gradients.waiting()
        self.unsharded = self.gradients = None

    def forget_gradients(self) -> None:
        """Forget all that were not reduced."""
        self._waiting = None
        if self.gradients is not None:
            self.gradients.forget()

    def is_current(self) -> bool:
        """Whether the sharded parameters are still the views of ``shard`` that we made."""
        local = self.spec.form.local
        return all(
            local(param) is view
            for param, view in zip(self.sharded_params, self._locals, strict=True)
        )

    def version(self) -> int:
        """Grows when a sharded parameter is visibly written, as a whole or by its local tensor."""
        return _torch.versions(self.sharded_params) + _torch.versions(self._locals)

    def replace(self, index: int, param: nn.Parameter) -> None:
        """Take ``param``, which lies as ours does, for parameter ``index``; ``adopt`` it later."""
        self.sharded_params[index] = param

    def adopt(self) -> None:
        """Make ``shard`` hold what the sharded parameters hold, and be their memory again.

        For after ``.to()``, a load or the user put other tensors in place of our views. The bucket
        is resharded meanwhile.

        Raises:
            ConfigError: the parameters are no longer of one device and dtype.
        """
        locals_now = [self.spec.form.local(param).detach() for param in self.sharded_params]
        kinds = {(local.device, local.dtype) for local in locals_now}
        if len(kinds) > 1:
            found = (
                f"{name} {local.dtype} {local.device}"
                for name, local in zip(self.names, locals_now, strict=True)
            )
            raise ConfigError(
                "parameters that are sharded together now differ in device or dtype: "
                f"{', '.join(found)}; move, cast or load the whole sharded module, not single "
                "parameters of it"
            )
        ((device, dtype),) = kinds
        same_kind = (device, dtype) == (self.shard.device, self.shard.dtype)
        self.shard = torch.zeros_like(self.shard, device=device, dtype=dtype)
        views = self.spec.own_views(self.shard)
        for param, view, local in zip(self.sharded_params, views, locals_now, strict=True):
            if device.type != "meta":
                view.copy_(local)
            self.spec.form.repoint(param, view)
        self._locals = [self.spec.form.local(param) for param in self.sharded_params]
        if self.unsharded is not None and same_kind and not self.unsharded.borrows:
            self.unsharded.shard = self.shard
        else:
            self.dematerialize()


def _cut(whole: Tensor, segment: Segment, shard: Tensor) -> None:
    """Copy one segment of ``whole`` to its place in ``shard``."""
    if whole.device.type == "meta" or not segment.numel:
        return
    whole = whole.contiguous()
    source = whole.as_strided(
        (segment.count, segment.length),
        (segment.step, 1),
        whole.storage_offset() + segment.start,
    )
    target = shard.narrow(0, segment.shard_offset, segment.numel)
    target.view(segment.count, segment.length).copy_(source)

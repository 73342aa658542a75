"""A bucket: parameters of one unit that share mesh, dtypes and trainability.

[Note: the tensors of a bucket]

    sharded_params[i]   parameters for user and optimizer between steps, around local tensors.
    shards              this rank's local shards of the parameters: usually views of ``flat``, 1-D
                        with ``layout.shard_numel`` elements. Wrapper subclasses are separate.
    all_gather_input    the flat shard; if a cast is needed, this rank's slices of the result of
                        the gather. On the device, even if shards are offloaded to the CPU.
    gather_output       rank-major result of the all-gather for parameters that cannot be gathered
                        in place, copied in one batch into ``unsharded``. Does not exist if the
                        layout is zero-copy (``layout.plan_gather``).
    unsharded           all parameters, 1-D; storage is empty while resharded. Does not exist
                        at shard size 1 without a cast: the parameters then borrow the shard.
    unsharded.params[i] nn.Parameters over ``unsharded``, with which modules compute; the leaves of
                        autograd. The same objects until ``Bucket.dematerialize``.
    secondary           this rank's slice of ``unsharded``, one for each of a few ranks. A unit
                        that is resharded to a smaller group after forward keeps only this slice.
    pending[i]          unsharded gradients that wait for a backward that reduces them (no-sync).
    reduce_input        gradients, rank-major in layout order, in the dtype of the reduction. Behind
                        each rank's slice is one flag per parameter: 1 if it has a gradient.
                        Parameters frozen after sharding have only the flag. The others are packed
                        as in a layout without the frozen ones (``layout.subset``).
    partial             gradients reduced over shards that wait for the reduction over replicas.
    grad_shard          the mean over ranks of this rank's slice; sharded_params[i].grad are views.

For tensor-parallel DTensors, all of these hold local tensors; ``sharded_params`` and
``unsharded.params`` show them as DTensors.

``bucket.py`` holds the first, ``shard.py`` the second, and ``unshard.py`` the next five, or
``extended.py`` for tensors with all-gather hooks. ``reduce.py`` holds ``pending`` and ``partial``.
``reduce_input.py`` and ``grad_shard.py`` hold the other two.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard._torch import autograd as _autograd
from fullshard._torch import memory as _memory
from fullshard.comm import Label
from fullshard.device import Lanes, StorageMeter
from fullshard.engine.dtypes import GradDtypes
from fullshard.engine.extended import check_extendable
from fullshard.engine.flat_param import FlatParameter
from fullshard.engine.policy import ReducePolicy, WireCheck
from fullshard.engine.reduce import Gradients, Waiting
from fullshard.engine.shard import SeparateShards, Shards, carry_put_on, check_at_home, cut_shards
from fullshard.engine.spec import BucketSpec, num_flags
from fullshard.engine.unshard import Unsharded
from fullshard.errors import ConfigError, ProtocolError
from fullshard.tensors import Shown, gathered_by_itself, local_part


class Bucket:
    """A layout, a shard and an unsharded buffer. See [Note: the tensors of a bucket]."""

    def __init__(self, spec: BucketSpec, originals: Sequence[nn.Parameter]) -> None:
        """Cut ``originals``, full parameters of one dtype, and keep the local shards."""
        self.spec = spec.labelled(Label())
        self.shards: Shards = cut_shards(spec, originals)
        self.sharded_params = [
            spec.form.parameter(i, local, original)
            for i, (local, original) in enumerate(zip(self.shards.locals, originals, strict=True))
        ]
        self._show_locals()
        self.unsharded: Unsharded | None = None
        self.gradients: Gradients | None = None
        self.front: FlatParameter | None = None
        if spec.form.shown is Shown.FLAT:
            self.front = FlatParameter(self.spec, self.sharded_params, self.shard)
        self.waiting = Waiting()
        self.reduce_policy = ReducePolicy()
        self.keeps_memory = False  # True: resharding does not free the unsharded parameters
        self._num_holders = 0  # of the unsharded parameters, when they were made
        self._requires_grad: list[bool] | None = None  # last flags set on unsharded parameters
        # Each ``grad_dtype`` that the user set, because casts and loads forget it.
        self._set_grad_dtypes = list(map(_autograd.explicit_grad_dtype, self.sharded_params))

    def copy(self, memo: dict[Any, Any]) -> Bucket:
        """Return a resharded copy with separate memory; enter its parameters into ``memo``."""
        new = copy.copy(self)
        label = copy.copy(self.spec.label)
        new.spec = replace(self.spec.labelled(label), wire_check=WireCheck())
        inspect = copy.deepcopy(self.reduce_policy.inspect)  # it collects findings
        new.reduce_policy = replace(self.reduce_policy, inspect=inspect)
        new.unsharded = new.gradients = None
        new.waiting = Waiting()
        new.shards = self.shards.copy()
        new.sharded_params = []
        new._set_grad_dtypes = list(self._set_grad_dtypes)
        for i, (old, local) in enumerate(zip(self.sharded_params, new.shards.locals, strict=True)):
            param = nn.Parameter(self.spec.form.wrap(i, local), requires_grad=old.requires_grad)
            param.__dict__.update(copy.deepcopy(vars(old), memo))  # attributes that users set
            memo[id(old)] = param
            _autograd.keep_grad_dtype(_autograd.explicit_grad_dtype(old), param)
            new.sharded_params.append(param)
        new._show_locals()
        memo |= {id(a): b for a, b in zip(self.shards.locals, new.shards.locals, strict=True)}
        carry_put_on(self.shards, self.shards.locals, new.shards, partial(copy.deepcopy, memo=memo))
        if self.front is not None:
            new.front = self.front.copy(new.spec, new.sharded_params, new.shard, memo)
        return new

    @property
    def shard(self) -> Tensor:
        """The flat shard, which the bucket must have."""
        assert not isinstance(self.shards, SeparateShards)
        return self.shards.flat

    def _show_locals(self) -> None:
        """Take the local tensors from the parameters, which may wrap views of those we made."""
        self.shards.show([self.spec.form.local(param) for param in self.sharded_params])
        for i, param in enumerate(self.sharded_params):
            self.spec.form.introduce(i, param)

    @property
    def names(self) -> list[str]:
        """FQNs of the parameters."""
        return [param.name for param in self.spec.layout.params]

    @property
    def stepped_params(self) -> Sequence[nn.Parameter]:
        """The parameters that optimizers hold, and modules show while the bucket is sharded."""
        return self.sharded_params if self.front is None else [self.front.param]

    @property
    def trainable(self) -> bool:
        """True if any parameter is trainable; the same on all ranks."""
        return any(param.requires_grad for param in self.sharded_params)

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded buffer."""
        dtype = self.spec.unsharded_dtype(self.shards.dtype)
        return self.spec.layout.unsharded_numel * dtype.itemsize

    @property
    def reduction_nbytes(self) -> int:
        """Bytes of ``reduce_input`` in the dtype of the reduction; the wire may take fewer."""
        layout = self.spec.layout
        row = layout.shard_numel + num_flags(len(layout.params))
        return layout.world * row * self.grad_dtypes().reduced.itemsize

    @property
    def is_materialized(self) -> bool:
        """True if there is an unsharded side that can be used."""
        return self.unsharded is not None and not self.unsharded.is_lost

    @property
    def is_gathered(self) -> bool:
        """True from the start of a gather until its memory is freed."""
        return self.is_materialized and self.materialized.is_gathered

    def materialize(self, lanes: Lanes, meter: StorageMeter) -> Unsharded:
        """Return the unsharded side, without memory if it is made here."""
        if not self.is_materialized:
            hooked = isinstance(self.shards, SeparateShards) or self._any_hooks()
            self.unsharded = Unsharded(self.spec, self.shards, lanes, meter, hooked=hooked)
            params = self.unsharded.params
            dtypes = self.grad_dtypes(params[0].dtype)
            self.gradients = Gradients(self, params, dtypes, lanes, meter)
            self._requires_grad = None
            self._num_holders = self._count_holders()
        return self.materialized

    def is_read(self, num_nodes: int) -> bool:
        """Return whether others may read the unsharded parameters, which no module shows now.

        Counted are objects that hold the parameters, or tensors in their memory, such as autograd
        nodes that have saved them. ``num_nodes``: how many nodes of parameters the unit holds.
        """
        if self.materialized.borrows:
            return False
        by_nodes = num_nodes * _autograd.num_holders_of_a_node()
        return self._count_holders() != self._num_holders + by_nodes

    def _count_holders(self) -> int:
        params: list[Tensor] = list(self.materialized.params)
        inside = [local_part(param) for param in params if isinstance(param, DTensor)]
        storages = [local_part(param).untyped_storage() for param in params]
        return _memory.num_holders(params + inside) + _memory.num_owners(storages)

    def check(self) -> None:
        """Refuse changes of the sharded parameters that cannot work.

        Raises:
            ExtensionError, UnsupportedError: tensors got all-gather hooks, but only one of the two,
                or in a layout that the hooks do not support.
            ConfigError: gradients may have any dtype, see ``GradDtypes.check``.
        """
        if self.unsharded is not None:
            return
        if self._any_hooks():
            check_extendable(self.spec)
        if self.front is None:
            GradDtypes.check(self.spec, self.sharded_params)

    def _any_hooks(self) -> bool:
        return any(map(gathered_by_itself, self.shards.locals, self.names))

    def grad_dtypes(self, computed: torch.dtype | None = None) -> GradDtypes:
        """Return the dtypes of gradients; ``computed``: the unsharded dtype, if already known."""
        own = self.sharded_params if self.front is None else [self.front.param] * len(self.names)
        return GradDtypes.of(
            self.spec, computed or self.spec.unsharded_dtype(self.shards.dtype), own
        )

    @contextmanager
    def keeping_grad_dtypes(self) -> Iterator[None]:
        """Protect gradients from casts of the parameters in the block, if ``grad_dtype`` was set.

        At the end of the block, the parameters must be in ``sharded_params`` again.
        """
        if self.front is not None:
            yield
            return
        params = self.sharded_params
        now = map(_autograd.explicit_grad_dtype, params)
        self._set_grad_dtypes = [
            dtype or before for dtype, before in zip(now, self._set_grad_dtypes, strict=True)
        ]
        kept = [
            None if dtype is None else param.grad
            for param, dtype in zip(params, self._set_grad_dtypes, strict=True)
        ]
        for param, grad in zip(params, kept, strict=True):
            if grad is not None:
                param.grad = None
        try:
            yield
        finally:
            self._restore_grad_dtypes()
            for param, grad in zip(self.sharded_params, kept, strict=True):
                if grad is not None:
                    _autograd.put_grad(param, grad.to(param.device))

    def _restore_grad_dtypes(self) -> None:
        for param, dtype in zip(self.sharded_params, self._set_grad_dtypes, strict=True):
            _autograd.keep_grad_dtype(dtype, param)

    def change_reduction(self, **changes: Any) -> None:
        """Replace fields of ``ReducePolicy``."""
        self.reduce_policy = replace(self.reduce_policy, **changes)

    def rewire(self, **wires: Any) -> None:
        """Replace wires of ``spec``; only while the bucket is resharded and nothing is pending."""
        self.spec = replace(self.spec, **wires).labelled(self.spec.label)
        if self.front is not None:
            self.front.spec = self.spec
        self.dematerialize()

    def tell_unit(self, name: str) -> None:
        """Label the communication of the bucket with the name of its unit."""
        self.spec.label.text = self.spec.described(name, self.shards.dtype)

    @property
    def materialized(self) -> Unsharded:
        """The unsharded side, which must have been made."""
        assert self.unsharded is not None
        return self.unsharded

    def sync_requires_grad(self) -> None:
        """Freeze and unfreeze the unsharded parameters like the sharded ones, and vice versa."""
        if self.unsharded is None:
            return
        shown = self.keep_requires_grad()
        flags = _autograd.requires_grad(self.sharded_params)
        if flags != shown:
            for unsharded, flag in zip(self.unsharded.params, flags, strict=True):
                if unsharded.requires_grad != flag:
                    unsharded.requires_grad_(flag)
        self._requires_grad = flags

    def keep_requires_grad(self) -> list[bool]:
        """Freeze and unfreeze the sharded parameters as the user did the unsharded ones.

        Returns:
            The flags of the unsharded parameters.
        """
        if self.unsharded is None:
            return []
        last, flags = self._requires_grad, _autograd.requires_grad(self.unsharded.params)
        if last is None or flags == last:
            return flags
        for sharded, flag, old in zip(self.sharded_params, flags, last, strict=True):
            if flag != old:
                sharded.requires_grad_(flag)
        if self.front is not None and len(set(flags)) == 1:
            self.front.param.requires_grad_(flags[0])
        self._requires_grad = flags
        return flags

    def reshard(self, *, to_secondary: bool = False, retained: bool = False) -> None:
        """Free the memory of the unsharded parameters, unless ``keeps_memory`` or ``retained``."""
        if self.unsharded is not None:
            keep = self.keeps_memory or retained
            self.unsharded.free(to_secondary=to_secondary, keep_memory=keep)

    def dematerialize(self) -> None:
        """Forget the unsharded side, except waiting gradients; only while resharded."""
        if self.unsharded is not None and self.keeps_memory:
            self.unsharded.free()
        self.unsharded = self.gradients = None

    def forget_gradients(self) -> None:
        """Forget all gradients that were not fully reduced."""
        self.waiting.clear()
        if self.gradients is not None:
            self.gradients.discard()

    def drop_gradients(self) -> None:
        """Forget all gradients, those in a reduction and on the sharded parameters, too."""
        self.forget_gradients()
        if self.gradients is not None:
            self.gradients.abandon()
        for param in (*self.sharded_params, *self.stepped_params):
            param.grad = None

    def is_current(self) -> bool:
        """Return whether the sharded parameters still show the local tensors of ``shards``."""
        return self.spec.form.all_show(self.sharded_params, self.shards.locals)

    def differs(self) -> bool:
        """Return whether the sharded parameters now have more than one device or dtype."""
        return len(_kinds(map(self.spec.form.local, self.sharded_params))) > 1

    def version(self) -> int:
        """Return a number that grows with each visible write to a sharded or a local tensor.

        A front is another tensor over the same memory, with a separate version counter.
        """
        found = _autograd.versions(self.sharded_params) + _autograd.versions(self.shards.locals)
        return found if self.front is None else found + _autograd.versions([self.front.param])

    def replace(self, index: int, param: nn.Parameter) -> None:
        """Make ``param``, placed like ours, the parameter at ``index``; ``adopt`` it later."""
        kept = _autograd.explicit_grad_dtype(self.sharded_params[index])
        kept = self._set_grad_dtypes[index] = kept or self._set_grad_dtypes[index]
        self.sharded_params[index] = param
        _autograd.keep_grad_dtype(kept, param)

    def conform(self, number: int, unplaced: Collection[int]) -> None:
        """Give the parameter at index ``number`` the device and dtype of those not ``unplaced``.

        Casts of modules do not reach parameters that no module shows.
        """
        placed = (p for n, p in enumerate(self.sharded_params) if n not in unplaced)
        like = next((self.spec.form.local(param) for param in placed), None)
        old = self.sharded_params[number]
        local = self.spec.form.local(old).detach()
        if like is None or (like.device, like.dtype) == (local.device, local.dtype):
            return
        if local.is_meta or like.is_meta:
            local = torch.empty_like(local, device=like.device, dtype=like.dtype)
        local = local.to(like)
        new = nn.Parameter(self.spec.form.wrap(number, local), requires_grad=old.requires_grad)
        self.replace(number, new)

    def adopt(self) -> None:
        """Take the values of the sharded parameters into ``shards``, and make them share memory.

        To be called after ``.to()``, a load or the user replaced our tensors. The bucket must be
        resharded.

        Raises:
            ConfigError: the parameters no longer have one device and dtype.
            ProtocolError: a shape changed, or offloaded parameters are no longer on the CPU.
        """
        found = [self.spec.form.local(param) for param in self.sharded_params]
        locals_now = [local.detach() for local in found]
        for name, local, ours in zip(self.names, locals_now, self.shards.locals, strict=True):
            if local.shape != ours.shape:
                raise ProtocolError(
                    f"parameter {name} was given data of shape {tuple(local.shape)}, expected this "
                    f"rank's piece of it, {tuple(ours.shape)}; write whole values inside of "
                    "unshard_params()"
                )
        kinds = _kinds(locals_now)
        if len(kinds) > 1:
            differing = (
                f"{name} {local.dtype} {local.device}"
                for name, local in zip(self.names, locals_now, strict=True)
            )
            raise ConfigError(
                "parameters that are sharded together now differ in device or dtype: "
                f"{', '.join(differing)}; move, cast or load the whole sharded module, not single "
                "parameters of it"
            )
        ((device, dtype),) = kinds
        check_at_home(self.spec, device, self.names)
        same_kind = (device, dtype) == (self.shards.device, self.shards.dtype)
        old, self.shards = self.shards, self.shards.adopted(locals_now)
        for param, local in zip(self.sharded_params, self.shards.locals, strict=True):
            self.spec.form.repoint(param, local)
        self._show_locals()
        carry_put_on(old, found, self.shards)
        self._restore_grad_dtypes()
        if self.front is not None:
            self.front.lead(self.shard)
        if not (same_kind and self.unsharded is not None and self.unsharded.takes(self.shards)):
            self.dematerialize()


def _kinds(tensors: Iterable[Tensor]) -> set[tuple[torch.device, torch.dtype]]:
    return {(tensor.device, tensor.dtype) for tensor in tensors}

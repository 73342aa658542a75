"""``FullyShardedDataParallel``: a wrapper that shards the parameters of a module."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard._torch import autograd as _autograd
from fullshard._torch import dynamo as _dynamo
from fullshard.comm import HookedCopies, HookedShards, Settled, SingleRank
from fullshard.engine import Bucket, Unit, WirePolicy
from fullshard.errors import AssertedConfigError, AssertedProtocolError, ConfigError, ProtocolError
from fullshard.flat.lending import summon_full_params
from fullshard.flat.meshes import data_mesh_of
from fullshard.flat.optim_state import OptimStateDicts
from fullshard.flat.options import (
    Arguments,
    BackwardPrefetch,
    CPUOffload,
    Given,
    MixedPrecision,
    ShardingStrategy,
    as_cpu_offload,
    as_offload,
    member_of,
)
from fullshard.flat.own import OwnTensors, own_modules
from fullshard.flat.precision import Precision, as_mixed_precision
from fullshard.flat.prepare import (
    as_ignored,
    check_module,
    checked_device,
    warn_of_choice,
    wrap_inside,
)
from fullshard.flat.state import StateDicts
from fullshard.frontend.checks import TOGETHER_IN_A_WRAPPER, check_not_sharded, checked_wire
from fullshard.frontend.contexts import unshard_params
from fullshard.frontend.explain import RESIZE, guard_resize
from fullshard.frontend.fully_shard import CallOptions, Shown, shard_modules
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.meshes import DataMesh
from fullshard.frontend.module import UnshardHandle, unshard_unit
from fullshard.frontend.ownership import collect, unit_of, units_below
from fullshard.frontend.places import FLAT_PARAM, innermost
from fullshard.frontend.sharded import ShardedModule, set_machine_policy, set_unit_policy
from fullshard.layout import Ragged
from fullshard.optim import clip_grad_norm_
from fullshard.schedule import AfterForward, Ahead
from fullshard.schedule import triggers as when
from fullshard.schedule.triggers import NO_TASK
from fullshard.tensors.form import WRAPPED
from fullshard.wrap.units import Ignored


class FullyShardedDataParallel(ShardedModule, Arguments, OptimStateDicts, StateDicts):
    """A wrapper that shards the parameters of a module; the interface is that of PyTorch's FSDP1.

    Each wrapper is a unit: its parameters are gathered together before forward and backward.
    Between steps a rank holds one shard of each unit: its elements of all parameters, end to end.

    Args:
        module: the module to wrap, later ``.module``. The wrapper also has the module's attributes.
        process_group: the ranks to shard over; with a hybrid strategy a pair of groups: the ranks
            that shard one copy, and the ranks that hold the same shard. None: all ranks.
        sharding_strategy: see ``ShardingStrategy``; None: ``FULL_SHARD``. A rank alone replicates.
        cpu_offload: ``CPUOffload(offload_params=True)`` keeps shards and gradients on the CPU.
        auto_wrap_policy: chooses inner modules to wrap as separate units, see ``fullshard.wrap``.
        backward_prefetch: when backward gathers the next unit; None: not ahead of time.
        mixed_precision: dtypes, see ``MixedPrecision``.
        ignored_modules: modules that are not sharded.
        param_init_fn: if any parameter or buffer of the unit is on the meta device, called with
            each module of the unit; None: ``to_empty`` and ``reset_parameters``.
        device_id: the device to compute on; parameters and buffers on the CPU are moved there.
        sync_module_states: broadcast parameters and buffers from the first rank before sharding.
        forward_prefetch: no effect: each forward gathers one unit ahead, in the previous order.
        limit_all_gathers: False: gather ahead without a limit.
        use_orig_params: True: modules show the original Parameter objects over this rank's pieces,
            so that an optimizer built earlier works; False: one flat parameter per unit, whose
            parameters have one dtype and are all frozen or all trainable.
        ignored_states: parameters, or modules, that are not sharded.
        device_mesh: the ranks as a mesh; with a hybrid strategy 2-D, with copies along dim 0.
        wire: the formats of sent parameters and gradients, see ``WirePolicy``; not in PyTorch.

    Raises:
        ConfigError, ArgumentTypeError: for arguments that cannot work, such as a policy for a
            module with a wrapper inside (both are a ``ValueError``).
        AlreadyShardedError: if a parameter of ``module`` belongs to an outer unit already.

    Source: "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.
    """

    def __init__(  # arguments in PyTorch's order, because callers may pass them by position
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Any = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Any = None,
        device_mesh: Any = None,
        *,
        wire: WirePolicy = WirePolicy(),
        _mesh: DataMesh | None = None,
        _is_exempt: bool = False,
    ) -> None:
        super().__init__()
        strategy = sharding_strategy or ShardingStrategy.FULL_SHARD
        strategy = member_of(ShardingStrategy, strategy, "sharding_strategy")
        if backward_prefetch is not None:
            backward_prefetch = member_of(BackwardPrefetch, backward_prefetch, "backward_prefetch")
        device = checked_device(device_id, module)
        ignored = as_ignored(ignored_modules, ignored_states)
        check_module(module, ignored, shown_as_one=not use_orig_params)
        mesh = _mesh or data_mesh_of(
            strategy,
            process_group,
            device_mesh,
            device,
            wraps_children=auto_wrap_policy is not None,
        )
        if _mesh is None:  # else the outer wrapper has told
            warn_of_choice(module, strategy, mesh, device)
        given = Given(
            strategy,
            as_cpu_offload(cpu_offload),
            backward_prefetch,
            mixed_precision or MixedPrecision(),
            device_id,
            sync_module_states,
            forward_prefetch,
            limit_all_gathers,
            use_orig_params,
            checked_wire(wire),
            mesh,
        )
        make = partial(
            FullyShardedDataParallel,
            param_init_fn=param_init_fn,
            ignored_states=list(ignored.modules or ignored.params) or None,
            **vars(given),
        )
        precision = as_mixed_precision(mixed_precision)
        alone = () if mixed_precision is None else precision._module_classes_to_ignore
        wrap_inside(module, auto_wrap_policy, ignored, make, alone, use_orig_params=use_orig_params)
        setattr(self, WRAPPED, module)
        self._given = given
        self._precision = Precision(precision, is_exempt=_is_exempt)
        self._ignored_modules = ignored.modules
        self._ran_as_root = False
        # Now, because shards differ in size between ranks.
        check_not_sharded(collect([self], ignored.params).params, what_to_do=TOGETHER_IN_A_WRAPPER)
        self._fill(OwnTensors(module, ignored), device, param_init_fn)
        self._shard(ignored)

    def _fill(
        self,
        own: OwnTensors,
        device: torch.device | None,
        init: Callable[[nn.Module], None] | None,
    ) -> None:
        """Give all tensors of the unit the memory and the values that they are sharded with."""
        own.materialize(init, self.compute_device)
        if device is not None:
            own.move(device)
        own.straighten()
        if self._given.sync_module_states:
            own.synchronize(self._given.mesh.mesh)

    def _shard(self, ignored: Ignored) -> None:
        """Make a unit of the parameters that are in no inner wrapper."""
        given = self._given
        keeps = given.sharding_strategy.keeps or given.mesh.shard_dim is None
        choices = CallOptions(
            mesh=given.mesh,
            after_forward=AfterForward.KEEP if keeps else AfterForward.AUTO,
            secondary=None,
            policy=self._precision.policy,
            ignored=set(ignored.params),
            ignored_modules=ignored.modules,
            placement_fn=None,
            layout=Ragged(),
            offload=as_offload(given.cpu_offload, self.compute_device),
            shown=Shown.ORIGINALS if given.use_orig_params else Shown.FLAT,
            wire=given.wire,
        )
        self._precision.keep_reduced(shard_modules([self], choices))
        ahead = Ahead.NEVER if given.backward_prefetch is None else given.backward_prefetch.ahead
        budget = None if given.limit_all_gathers else sys.maxsize
        set_machine_policy(self, backward_ahead=ahead, prefetch_budget=budget)

    # the wrapped module

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without activation-checkpoint wrappers around it."""
        return innermost(getattr(self, WRAPPED))

    @property
    def _flat_param(self) -> nn.Parameter | None:
        return self.module._parameters.get(FLAT_PARAM)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapper or, if it has none, of the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            found = getattr(super().__getattr__(WRAPPED), name)
            return guard_resize(found) if name == RESIZE else found

    def __getitem__(self, key: int) -> Any:
        """Return an element of a wrapped container."""
        return getattr(self, WRAPPED)[key]

    @_dynamo.not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, whose parameters are unsharded at this time."""
        unit = self._unit
        if unit.is_lent:  # parameters have their own dtypes
            return getattr(self, WRAPPED)(*args, **kwargs)
        if _autograd.current_task() == NO_TASK:  # else it is recomputed, as in its forward
            self._ran_as_root = engine_of(unit).scheduler.depth == 1
        if self._precision.casts_inputs(is_root=self._ran_as_root, has_params=bool(unit.buckets)):
            args, kwargs = self._precision.cast(args), self._precision.cast(kwargs)
        if self._precision.is_exempt:
            return self._precision.run_exempt(getattr(self, WRAPPED), args, kwargs)
        return getattr(self, WRAPPED)(*args, **kwargs)

    @_dynamo.not_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, and tell the engine when the call ends, even by an exception."""
        unit = self._unit
        if not unit.is_lent and self._precision.options.full_precision_in_eval:
            self._follow_modes()
        if self._precision.options.buffer_dtype is not None:
            self._cast_buffers()
        return super().__call__(*args, **kwargs)

    def _cast_buffers(self) -> None:
        """Cast buffers of all wrappers in an outermost call, else of this one."""
        is_outermost = engine_of(self._unit).scheduler.idle
        cast: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for one in self.fsdp_modules(self) if is_outermost else [self]:
            own = own_modules(getattr(one, WRAPPED), Ignored(one._ignored_modules))
            one._precision.cast_buffers(own, cast, is_lent=one._unit.is_lent)

    def _follow_modes(self) -> None:
        """Switch wrappers in eval to full precision: all in an outermost call, else only this."""
        engine = engine_of(self._unit)
        for one in self.fsdp_modules(self) if engine.scheduler.idle else [self]:
            one._precision.follow(one._unit, engine, training=one.training)

    def extra_repr(self) -> str:
        """Return a description of the unit, for ``print``."""
        return self._unit.describe()

    # units and their parameters

    @property
    @_dynamo.never_compiled
    def _unit(self) -> Unit:
        unit = unit_of(self)
        assert unit is not None
        return unit

    @property
    def _is_root(self) -> bool:
        """Return whether no other wrapper encloses this one; the root's unit is made last."""
        return engine_of(self._unit).units[-1] is self._unit

    def check_is_root(self) -> bool:
        """Return whether no other wrapper encloses this one."""
        return self._is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the wrappers in ``module``, perhaps with itself; once each, outermost first."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [one for one in found if one._is_root] if root_only else found

    summon_full_params = staticmethod(summon_full_params)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Apply ``fn`` to all modules, each while the parameters of its unit are full."""
        for unit in units_below([self]):
            unit.check_not_lent("apply()")
        with unshard_params(self, recurse=False):
            super().apply(fn)
        return self

    # gradients

    def _check_root(self, what: str) -> None:
        if not self._is_root:
            raise ProtocolError(f"{what} should only be called on the root FSDP instance")
        engine_of(self._unit).check_idle(what)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep gradients unsharded in a ``with`` block; a later backward reduces them.

        Raises:
            ProtocolError: if another wrapper encloses this one, or a forward or backward runs.
        """
        self._check_root("no_sync()")
        engine = engine_of(self._unit)
        policies = [engine.policy_of(unit) for unit in engine.units]
        set_unit_policy(self, True, requires_gradient_sync=False)
        if self._given.sharding_strategy.keeps:
            set_unit_policy(self, True, reshard_after_backward=False)
        try:
            yield
        finally:
            for unit, policy in zip(engine.units, policies, strict=True):
                engine.set_policy(unit, policy)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients to a norm of at most ``max_norm``; return the norm before scaling.

        Warns on a rank where no parameter has a gradient.

        Raises:
            ProtocolError: if another wrapper encloses this one, or a forward or backward runs.
        """
        self._check_root("clip_grad_norm_()")
        engine_of(self._unit).reshard_all()  # no_sync() may leave unsharded params, without grads
        params = list(self.parameters())
        if all(param.grad is None for param in params):
            warnings.warn(
                f"clip_grad_norm_() on rank {dist.get_rank()}: no parameter has a gradient, so the "
                "norm of this rank is 0, in torch.float32; call backward() first",
                stacklevel=2,
            )
        return clip_grad_norm_(params, max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, including those that ``no_sync`` accumulated.

        The latter are not in any parameter's ``grad``, so an optimizer's ``zero_grad`` keeps them.
        """
        super().zero_grad(set_to_none)
        for unit in units_below([self]):
            engine_of(unit).trigger(when.Forget(unit.key))

    def register_comm_hook(self, state: Any, hook: Callable[..., object]) -> None:
        """Reduce the gradients of all units by ``hook`` instead of taking the mean over ranks.

        ``hook(state, gradients, own)`` gets a unit's 1-D gradients, in the order of ranks, and must
        write this rank's reduced shard into ``own``. If nothing is sharded, ``hook(state, grads)``
        reduces in place. The engine does not divide by the number of ranks.

        Raises:
            ConfigError: if ``hook`` is not callable, or a strategy is hybrid.
            ProtocolError: if another wrapper encloses this one, or there is a hook already.
        """
        if not self._is_root:
            raise AssertedProtocolError(
                "register_comm_hook can only be called on a root instance, got an inner one"
            )
        reduce_by_hook(units_below([self]), state, hook)

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        return unshard_unit(self._unit, async_op=async_op)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters; within ``summon_full_params`` names lack our prefix."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield self._clean(name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield names and buffers; within ``summon_full_params`` names lack our prefix."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._clean(name), buffer

    def _clean(self, name: str) -> str:
        unit = unit_of(self)
        is_lent = unit is not None and unit.is_lent
        return name.replace(f"{WRAPPED}.", "") if is_lent else name


def reduce_by_hook(units: Sequence[Unit], state: Any, hook: Callable[..., object]) -> None:
    """Reduce the gradients of ``units``, which belong to one engine, by ``hook`` from now on.

    Raises:
        ConfigError: if ``hook`` is not callable, or ``wire`` of a unit says how to reduce.
        AssertedConfigError: if a unit has a hybrid strategy: several copies, each of them sharded.
        AssertedProtocolError: if there is a hook already.
    """
    if not callable(hook):
        raise ConfigError(
            f"register_comm_hook: The communication hook must be callable but got {hook!r}"
        )
    buckets = [bucket for unit in units for bucket in unit.buckets]
    for bucket in buckets:
        if isinstance(bucket.spec.reducing, HookedShards):
            raise AssertedProtocolError(
                "register_comm_hook: communication hook is already registered; there can be one"
            )
        if bucket.spec.wire.reduce is not None:
            raise ConfigError(
                f"register_comm_hook: the unit of {', '.join(bucket.names[:3])} was wrapped with "
                f"wire={bucket.spec.wire}, which decides how gradients travel; leave reduce out "
                "of it, or the hook"
            )
        if bucket.spec.replicas is not None and bucket.spec.comm.world > 1:
            raise AssertedConfigError(
                "register_comm_hook: Communication hook is currently not supported for hybrid "
                f"sharding strategies, such as that of {', '.join(bucket.names[:3])}"
            )
    if units:
        engine_of(units[0]).reset_wires(units)
    for bucket in buckets:
        bucket.rewire(**_wires(bucket, state, hook))


def _wires(bucket: Bucket, state: Any, hook: Callable[..., object]) -> dict[str, Any]:
    spec, numel = bucket.spec, bucket.spec.layout.shard_numel
    wires: dict[str, Any] = {"clean_padding": True}
    if spec.comm.world > 1:
        return wires | {"reducer": HookedShards(spec.reducing, state, hook, numel)}
    replicas = spec.replicas
    return wires | {
        "reducer": HookedCopies(replicas or SingleRank(), state, hook, numel),
        "replicas": None if replicas is None else Settled(replicas),
    }

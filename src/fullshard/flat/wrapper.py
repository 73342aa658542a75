"""``FullyShardedDataParallel``: a module around another one, whose parameters it shards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from fullshard.engine import Offload, Unit
from fullshard.errors import AssertedProtocolError, ProtocolError
from fullshard.flat.arguments import Arguments, Given
from fullshard.flat.children import prepare_inside
from fullshard.flat.comm_hook import reduce_by_hook
from fullshard.flat.lending import summon
from fullshard.flat.meshes import data_mesh_of
from fullshard.flat.optim_state import OptimStateDicts
from fullshard.flat.options import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    member_of,
)
from fullshard.flat.order import follow_order
from fullshard.flat.precision import Precision, as_mixed_precision
from fullshard.flat.prepare import (
    as_offload,
    check_module,
    checked_device,
    ignored_params,
    materialize,
    move,
    straighten,
    synchronize,
)
from fullshard.flat.state import StateDicts
from fullshard.frontend.buckets import Choices, Shown, device_of
from fullshard.frontend.build import shard_modules
from fullshard.frontend.checks import check_not_sharded
from fullshard.frontend.contexts import WRAPPED, unshard_params
from fullshard.frontend.flat_param import FLAT_PARAM, innermost
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.meshes import DataMesh
from fullshard.frontend.module import UnshardHandle, unshard_unit
from fullshard.frontend.ownership import collect, unit_of, units_below
from fullshard.frontend.sharded import ShardedModule
from fullshard.layout import Ragged
from fullshard.optim import clip_grad_norm_
from fullshard.schedule import AfterForward, Ahead
from fullshard.schedule import triggers as when
from fullshard.wrap.units import Ignored


class FullyShardedDataParallel(ShardedModule, Arguments, OptimStateDicts, StateDicts):
    """Shards the parameters of ``module`` and runs it; the interface is PyTorch's FSDP1.

    Between steps a rank has a part of every unit: its own elements of the unit's parameters, laid
    end to end. Each wrapper is a unit, gathered before its forward and backward as a whole.

    Args:
        module: what to wrap; reachable as ``.module``, and for its attributes without it.
        process_group: the ranks; with a hybrid strategy the pair of the ranks that share a copy
            and those that hold the same. None: all ranks.
        sharding_strategy: see ``ShardingStrategy``; None: ``FULL_SHARD``. One rank alone
            replicates.
        cpu_offload: ``CPUOffload(offload_params=True)`` keeps shards and gradients on the CPU.
        auto_wrap_policy: which modules inside become units of their own, see ``fullshard.wrap``.
        backward_prefetch: when the backward of a unit gathers the next; None: it does not.
        mixed_precision: dtypes, see ``MixedPrecision``.
        ignored_modules: modules to leave alone.
        param_init_fn: called with each module that has meta parameters or buffers; None:
            ``to_empty`` and ``reset_parameters``.
        device_id: the device to compute on, and to move what is on the CPU to.
        sync_module_states: give all ranks rank 0's parameters and buffers before sharding.
        forward_prefetch: accepted; forward gathers one unit ahead in the order of the last one.
        limit_all_gathers: False: gather ahead without a limit.
        use_orig_params: True: users see their own Parameter objects, each over this rank's piece
            of it, so that an optimizer built before works; False: one flat parameter for each
            unit.
        ignored_states: parameters, or modules, to leave alone.
        device_mesh: the ranks as a mesh; with a hybrid strategy a 2-D one, of which the first dim
            holds copies.

    Raises:
        ConfigError, ArgumentTypeError: arguments that cannot work (``ValueError`` s).
        AlreadyShardedError: ``module`` holds a unit already, and there is a policy.

    Source: "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.
    """

    def __init__(  # by position too, in PyTorch's order
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
        _mesh: DataMesh | None = None,
        _is_exempt: bool = False,
    ) -> None:
        super().__init__()
        strategy = member_of(
            ShardingStrategy, sharding_strategy or ShardingStrategy.FULL_SHARD, "sharding_strategy"
        )
        ahead = Ahead.NEVER
        if backward_prefetch is not None:
            ahead = member_of(BackwardPrefetch, backward_prefetch, "backward_prefetch").ahead
        device = checked_device(device_id, module)
        params, modules = ignored_params(module, ignored_modules, ignored_states)
        check_module(module, modules, shown_as_one=not use_orig_params)
        mesh = _mesh or data_mesh_of(
            strategy,
            process_group=process_group,
            device_mesh=device_mesh,
            device_type=None if device is None else device.type,
            wraps_children=auto_wrap_policy is not None,
        )
        given = {
            "sharding_strategy": strategy,
            "cpu_offload": cpu_offload,
            "backward_prefetch": backward_prefetch,
            "mixed_precision": mixed_precision,
            "param_init_fn": param_init_fn,
            "device_id": device_id,
            "sync_module_states": sync_module_states,
            "forward_prefetch": forward_prefetch,
            "limit_all_gathers": limit_all_gathers,
            "use_orig_params": use_orig_params,
            "ignored_states": list(modules or params) or None,
            "_mesh": mesh,
        }
        prepare_inside(
            module,
            auto_wrap_policy,
            Ignored.of(modules, params),
            given,
            lambda inner, **options: FullyShardedDataParallel(inner, **{**given, **options}),
        )
        setattr(self, WRAPPED, module)
        self._given = Given.of(mesh, given)
        self._precision = Precision(as_mixed_precision(mixed_precision), is_exempt=_is_exempt)
        offload = as_offload(cpu_offload, device_of(mesh))
        check_not_sharded(collect([self], params))  # ranks have other sizes of what is sharded
        materialize(module, params, modules, init=param_init_fn, device=device_of(mesh))
        if device is not None:
            move(module, params, modules, device)
        straighten(module, params, modules)
        if sync_module_states:
            groups = (mesh.mesh.get_group(dim) for dim in range(mesh.mesh.ndim))
            synchronize(module, params, modules, groups)
        shown = Shown.ORIGINALS if use_orig_params else Shown.FLAT
        self._shard(mesh, params, offload, shown)
        budget = None if limit_all_gathers else sys.maxsize
        self._set_machine(backward_ahead=ahead, prefetch_budget=budget)

    def _shard(
        self,
        mesh: DataMesh,
        ignored: set[nn.Parameter],
        offload: Offload | None,
        shown: Shown,
    ) -> None:
        """Make a unit of what no wrapper inside has."""
        keeps = self._given.strategy.keeps or mesh.shard_dim is None
        choices = Choices(
            mesh=mesh,
            after_forward=AfterForward.KEEP if keeps else AfterForward.AUTO,
            secondary=None,
            policy=self._precision.policy,
            ignored=ignored,
            placement_fn=None,
            layout=Ragged(),
            offload=offload,
            shown=shown,
        )
        self._precision.keep_reduced(shard_modules([self], choices))

    # the module inside

    @property
    def module(self) -> nn.Module:
        """What was wrapped, without wrappers of activation checkpoints around it."""
        return innermost(getattr(self, WRAPPED))

    @property
    def _flat_param(self) -> nn.Parameter | None:
        return self.module._parameters.get(FLAT_PARAM)

    def __getattr__(self, name: str) -> Any:
        """What this module has, or else the one inside."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__(WRAPPED), name)

    def __getitem__(self, key: int) -> Any:
        """An element of a container inside."""
        return getattr(self, WRAPPED)[key]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module inside; its parameters are whole."""
        unit = self._unit
        if self._precision.casts_inputs(is_root=engine_of(unit).scheduler.depth == 1):
            args, kwargs = self._precision.cast(args), self._precision.cast(kwargs)
        if self._precision.is_exempt:
            return self._precision.run_exempt(getattr(self, WRAPPED), args, kwargs)
        return getattr(self, WRAPPED)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; whatever ends that, the engine learns of it."""
        unit = self._unit
        if self.training:
            follow_order(unit)
        if self._precision.options.full_precision_in_eval:
            self._follow_modes()
        self._precision.cast_buffers(self._own_modules())
        return super().__call__(*args, **kwargs)

    def _follow_modes(self) -> None:
        """Let wrappers be in full precision that are in eval: on the way in, all; then each."""
        engine = engine_of(self._unit)
        for one in self.fsdp_modules(self) if engine.scheduler.idle else [self]:
            one._precision.follow(one._unit, engine, training=one.training)

    def _own_modules(self) -> Iterator[nn.Module]:
        """Modules inside that no inner wrapper has."""
        seen: set[nn.Module] = set()

        def visit(module: nn.Module) -> Iterator[nn.Module]:
            for child in module.children():
                if child not in seen and unit_of(child) is None:
                    seen.add(child)
                    yield child
                    yield from visit(child)

        return visit(self)

    def extra_repr(self) -> str:
        """What ``print`` adds."""
        return self._unit.describe()

    # units and their parameters

    @property
    def _unit(self) -> Unit:
        unit = unit_of(self)
        assert unit is not None
        return unit

    @property
    def _is_root(self) -> bool:
        """Whether no other wrapper encloses this one; the last call made the root's unit."""
        return engine_of(self._unit).units[-1] is self._unit

    def check_is_root(self) -> bool:
        """Whether no other wrapper encloses this one."""
        return self._is_root

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrappers in ``module``, itself included, each once, outermost first."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [one for one in found if one._is_root] if root_only else found

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """``fullshard.unshard_params`` by its former name; where nothing is sharded edits stay."""
        return summon(
            module,
            recurse=recurse,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        )

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Apply ``fn`` to all modules, each while the parameters of its unit are whole."""
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
        """Keep gradients whole and unreduced, in all units, until a backward outside of it.

        Raises:
            ProtocolError: another wrapper encloses this one, or a forward or backward is running.
        """
        self._check_root("no_sync()")
        engine = engine_of(self._unit)
        policies = [engine.policy_of(unit) for unit in engine.units]
        self._set(True, requires_gradient_sync=False)
        if self._given.strategy.keeps:
            self._set(True, reshard_after_backward=False)
        try:
            yield
        finally:
            for unit, policy in zip(engine.units, policies, strict=True):
                engine.set_policy(unit, policy)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_norm``; returns the norm before.

        Raises:
            ProtocolError: another wrapper encloses this one, or a forward or backward is running.
        """
        self._check_root("clip_grad_norm_()")
        engine_of(self._unit).reshard_all()  # no_sync() may keep whole ones, without gradients
        return clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; what ``no_sync`` accumulated is dropped as well.

        An optimizer's ``zero_grad`` does not see that, which is no parameter's ``grad`` here.
        """
        super().zero_grad(set_to_none)
        for unit in units_below([self]):
            engine_of(unit).trigger(when.Forget(unit.key))

    def register_comm_hook(self, state: Any, hook: Callable[..., object]) -> None:
        """Let ``hook`` reduce the gradients of all units, instead of the mean over ranks.

        Called as ``hook(state, gradients, own)`` with the gradients of a unit, 1-D, rank after
        rank, of which it writes this rank's part, reduced; where nothing is sharded as
        ``hook(state, gradients)``, which it changes in place. Nothing is divided.

        Raises:
            ConfigError: it cannot be called, or a strategy is hybrid.
            ProtocolError: another wrapper encloses this one, or there is a hook already.
        """
        if not self._is_root:
            raise AssertedProtocolError(
                "register_comm_hook can only be called on a root instance, got an inner one"
            )
        reduce_by_hook(units_below([self]), state, hook)

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        return unshard_unit(self._unit, async_op=async_op)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Names are without our prefix while parameters are lent by ``summon_full_params``."""
        for name, param in super().named_parameters(*args, **kwargs):
            yield self._clean(name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Names are without our prefix while parameters are lent by ``summon_full_params``."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield self._clean(name), buffer

    def _clean(self, name: str) -> str:
        unit = unit_of(self)
        is_lent = unit is not None and unit.loan is not None
        return name.replace(f"{WRAPPED}.", "") if is_lent else name

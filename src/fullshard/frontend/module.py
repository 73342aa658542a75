"""``FSDPModule``: the methods that sharding adds to a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, wraps
from types import MethodType
from typing import Any, Literal, NamedTuple, overload

from torch import Tensor, nn

from fullshard.engine import Bucket, Engine, Partial, Unit
from fullshard.errors import ArgumentTypeError, ConfigError, ProtocolError, UnsupportedError
from fullshard.frontend.controls import CommunicationControls
from fullshard.frontend.explain import check_full_tensors, guarded_methods
from fullshard.frontend.hooks import engine_of, run_as_forward
from fullshard.frontend.ownership import unit_of
from fullshard.frontend.places import places_of
from fullshard.frontend.sharded import (
    chosen_buckets,
    chosen_units,
    set_machine_policy,
    set_unit_policy,
    unit_and_engine,
)
from fullshard.schedule import AfterForward
from fullshard.schedule import triggers as when


class PendingGradient(NamedTuple):
    """The gradient of one parameter after backwards that did not reduce it completely."""

    unreduced: Tensor | None
    """The sum of this rank's own unsharded gradients, in the accumulation dtype."""
    partial: Tensor | None
    """This rank's piece of the gradient reduced over shards, but not yet over replicas."""


def _pending_in(bucket: Bucket) -> Iterator[tuple[nn.Parameter, PendingGradient]]:
    waiting = bucket.waiting
    pending = waiting.pending or [None] * len(bucket.sharded_params)
    partial = _partial_pieces(bucket, waiting.partial)
    for param, unreduced, piece in zip(bucket.sharded_params, pending, partial, strict=True):
        if unreduced is not None or piece is not None:
            yield param, PendingGradient(unreduced, piece)


def _partial_pieces(bucket: Bucket, partial: Partial | None) -> list[Tensor | None]:
    """Return each parameter's piece of ``partial``; None where no rank had a gradient."""
    found: list[Tensor | None] = [None] * len(bucket.sharded_params)
    if partial is None:
        return found
    reduced, row = partial.reduced, partial.row
    present = reduced.present(reduced.flags(row).tolist())
    for index, piece, is_there in zip(reduced.indices, reduced.spec.pieces, present, strict=True):
        if is_there:
            found[index] = row.narrow(0, piece.offset, piece.numel).view(piece.shape)
    return found


class UnshardHandle:
    """A handle that ``unshard(async_op=True)`` returns."""

    def __init__(self, unit: Unit | None = None) -> None:
        """Take the unit that is being gathered."""
        self._unit = unit

    def wait(self) -> None:
        """Make the unsharded parameters usable and show them; further calls do nothing."""
        unit, self._unit = self._unit, None
        if unit is not None:
            engine_of(unit).trigger(when.UserWait(unit.key))


class GradientReductionHandle:
    """A handle that ``finalize_backward(async_op=True)`` returns."""

    def __init__(self, engine: Engine | None = None) -> None:
        """Take the engine whose reductions are under way; None if there is nothing to wait for."""
        self._engine = engine
        self._number = None if engine is None else engine.scheduler.reductions.awaited

    def wait(self) -> None:
        """Put the reduced gradients where the optimizer reads them; further calls do nothing.

        Raises:
            ProtocolError: if ``reset_iter_state`` or a failed backward ended the reductions.
        """
        engine = self._engine
        if engine is None:
            return
        if engine.scheduler.reductions.awaited != self._number:
            raise ProtocolError(
                "this handle of finalize_backward(async_op=True) was invalidated: "
                "reset_iter_state(), or a backward that failed, ended its reductions"
            )
        engine.trigger(when.AwaitReductions())
        self._engine = None


def unshard_unit(unit: Unit, *, async_op: bool) -> UnshardHandle | None:
    """Start to gather ``unit`` and, without ``async_op``, wait for the gather."""
    engine = engine_of(unit)
    unit.check_not_lent("unshard()")
    if engine.scheduler.idle:
        engine.prepare([unit])
    engine.trigger(when.UserUnshard(unit.key))
    handle = UnshardHandle(unit)
    if async_op:
        return handle
    handle.wait()
    return None


class FSDPModule(CommunicationControls):
    """A mixin for the class of every module given to ``fully_shard``.

    The methods are those of ``torch.distributed.fsdp.FSDPModule``, and some more. With ``recurse``,
    a method also applies to the units inside the module.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build the original class, so that slices and ``type(module)(...)`` are not sharded.

        Raises:
            UnsupportedError: if the class is derived from that of a sharded module.
        """
        if cls.__bases__[:1] != (FSDPModule,):
            name = cls.__bases__[0].__name__
            raise _Derived(
                f"{cls.__name__} cannot be built, because it is derived from {name}, the class "
                "that fully_shard gave to a sharded module: derive from the module's original "
                "class, and pass instances to fully_shard"
            )
        original = cls.__bases__[1]
        return original(*args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters, until its forward, its backward or ``reshard`` frees them.

        With ``async_op`` this only starts the gather; the handle or the module's forward waits.

        Raises:
            ProtocolError: if parameters are on the meta device, or lent by ``unshard_params``.
        """
        return unshard_unit(unit_and_engine(self)[0], async_op=async_op)

    def reshard(self) -> None:
        """Free the unsharded parameters, unless a forward or backward is using them.

        Values written into the unsharded parameters are lost. Parameters that were tied to each
        other meanwhile, within the unit, stay tied.
        """
        unit, engine = unit_and_engine(self)
        places_of(unit).note_ties(unit)
        engine.trigger(when.UserReshard(unit.key))

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients; if not, they add up until a backward does.

        On a mesh with replicas this also calls ``set_requires_all_reduce`` with the same value.
        """
        set_unit_policy(
            self,
            recurse,
            requires_gradient_sync=requires_gradient_sync,
            requires_all_reduce=requires_gradient_sync,
        )

    def get_pending_gradients(self) -> dict[nn.Parameter, PendingGradient]:
        """Return the gradients in this module that wait for a backward that reduces.

        The keys are sharded parameters, also of units inside; each ``PendingGradient`` tells how
        far the reduction has come. The tensors are the engine's own: in-place writes take effect.
        Tensor-parallel gradients are this rank's local tensors. No PyTorch counterpart.
        """
        buckets = chosen_buckets(self, recurse=True)
        return {param: grad for bucket in buckets for param, grad in _pending_in(bucket)}

    def clear_pending_gradients(self) -> None:
        """Drop the gradients of ``get_pending_gradients``, which ``zero_grad`` does not clear.

        Raises:
            ProtocolError: during a forward or backward.
        """
        units = chosen_units(self, recurse=True)
        for unit in units:
            engine_of(unit).check_idle("clear_pending_gradients")
        for unit in units:
            engine_of(unit).trigger(when.Forget(unit.key))

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward also reduces gradients over replicas.

        If not, gradients are reduced over the shards only and add up inside the engine, with
        ``grad`` unchanged, until a backward that reduces over both. No effect without replicas.
        """
        set_unit_policy(self, recurse, requires_all_reduce=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward``, even for a root that uses the default.

        Raises:
            ConfigError: if the value is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ConfigError(
                f"set_reshard_after_forward: got {reshard_after_forward!r}, expected a bool"
            )
        after = AfterForward.RESHARD if reshard_after_forward else AfterForward.KEEP
        set_unit_policy(self, recurse, after_forward=after)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward frees unsharded parameters; if not, the next forward reuses them.

        This saves all-gathers between optimizer steps; a forward after a step gathers anyway.
        """
        set_unit_policy(self, recurse, reshard_after_backward=reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether resharding keeps the memory, for stable addresses as CUDA graphs need them.

        Modules still show sharded parameters, and the next use gathers again, into the same memory.
        ``keep=False`` frees the memory; moving or casting the module frees it once.
        """
        for unit in chosen_units(self, recurse):
            engine_of(unit).keep_memory(unit, keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this module's own unit; units inside it are not affected.

        False promises that no backward reads the unit's parameters, as for an embedding, and saves
        the gather; a backward that does read them crashes the process.
        """
        set_unit_policy(self, False, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather the units of ``modules``, in this order, when this module's forward begins.

        This replaces prefetch in the order of the last forward; an empty list restores that.

        Raises:
            ConfigError: if a module is not sharded, or not part of the same sharded model.
        """
        set_unit_policy(
            self, False, forward_prefetch=_keys_of(self, modules, "set_modules_to_forward_prefetch")
        )

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather the units of ``modules``, in this order, when this module's backward begins.

        This replaces prefetch in reverse order of the last forward; an empty list restores that.

        Raises:
            ConfigError: if a module is not sharded, or not part of the same sharded model.
        """
        keys = _keys_of(self, modules, "set_modules_to_backward_prefetch")
        set_unit_policy(self, False, backward_prefetch=keys)

    def extra_repr(self) -> str:
        """Return what ``print`` adds for this module: the unit, its layout and its bytes."""
        own: str = super().extra_repr()
        unit = unit_of(self)
        return ", ".join(part for part in (own, unit and unit.describe()) if part)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the end of a backward also ends the reductions, for the whole tree."""
        set_machine_policy(self, is_last_backward=is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether ``finalize_backward`` ends backwards, whatever ``set_is_last_backward`` set.

        Call this on the root, for schedules in which a separate action reduces gradients.

        Raises:
            ArgumentTypeError: if ``enabled`` is not a bool.
            ProtocolError: if this is not the root, or if a backward began and was not finalized.
        """
        what = f"set_manual_backward_finalization({enabled!r})"
        if not isinstance(enabled, bool):
            raise ArgumentTypeError(f"{what}: expected a bool")
        unit, engine = unit_and_engine(self)
        _check_root(unit, what)
        is_other = enabled != engine.scheduler.policy.manual_finalization
        if is_other and engine.scheduler.reductions.open:
            raise ProtocolError(
                f"{what} would change the mode after a backward began; end that first, by "
                "finalize_backward() and wait() of its handle, by a backward with "
                "set_is_last_backward(True), or by reset_iter_state()"
            )
        set_machine_policy(self, manual_finalization=enabled)

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards of a step: reduce all pending gradients, and reshard.

        Call this on the root after ``set_manual_backward_finalization(True)``. Reductions and
        resharding follow the current settings: to end several backwards at once, switch
        ``set_requires_gradient_sync`` to False before the backwards and to True before this call.
        Gradients that the caller put on unsharded parameters are reduced, too. Before the first
        forward this does nothing.

        With ``async_op`` the last reductions may still run; ``wait`` of the returned handle ends
        them. Call ``wait`` before the next forward.

        Raises:
            ProtocolError: if backwards end automatically, this is not the root, or a forward or
                backward is running. Also if ``wait`` of an earlier handle was not called, or
                gradients would not be reduced over replicas.
        """
        unit, engine = unit_and_engine(self)
        if engine.scheduler.last_use < 0:
            return GradientReductionHandle() if async_op else None
        _check_may_finalize(unit, engine)
        try:
            engine.trigger(when.Finalize(waits=not async_op))
        except BaseException:
            engine.trigger(when.AwaitReductions())  # there is no handle to do so
            raise
        return GradientReductionHandle(engine) if async_op else None

    def set_prefetch_budget(self, nbytes: int | None, *, recurse: bool = True) -> None:
        """Prefetch units while unsharded bytes, without the root's, stay within ``nbytes``.

        None, the default, gathers one unit ahead. The budget is for the whole tree, so ``recurse``
        must be True. No PyTorch counterpart.

        Raises:
            ConfigError: if ``nbytes`` is not a number of bytes, or with ``recurse=False``.
        """
        _check_budget("set_prefetch_budget", nbytes, recurse)
        set_machine_policy(self, prefetch_budget=nbytes)

    def set_reduction_budget(self, nbytes: int | None, *, recurse: bool = True) -> None:
        """Reduce several units at a time while reductions hold at most ``nbytes``.

        A reduction holds a copy of its unit's gradients, in the reduce dtype, until the shards are
        reduced. Before another begins, computation waits for the oldest until there is room; a
        single one may always run. None, the default, ends each reduction before the next begins, as
        PyTorch does, so it can overlap with the backward of one unit. The budget is for the whole
        tree, so ``recurse`` must be True. See also ``set_reduce_scatter_max_input_buffers``.

        Raises:
            ConfigError: if ``nbytes`` is not a number of bytes, or with ``recurse=False``.
        """
        _check_budget("set_reduction_budget", nbytes, recurse)
        set_machine_policy(self, reduction_budget=nbytes)

    def waited_s(self) -> float:
        """Return the seconds that this rank's computation waited for communication, in all units.

        Use the difference of two calls. On a CPU the host waits; the time includes the sums of
        received values, a part of reductions there. On an accelerator the compute stream waits,
        measured from the first call on; waits that the device has not finished are not included,
        so synchronize before, or accept a reading that lags. No PyTorch counterpart.
        """
        return unit_and_engine(self)[1].lanes.waited_s()

    def copied_nbytes(self) -> int:
        """Return the bytes that copies and casts in the whole tree wrote so far on this rank.

        Copies between shards, unsharded parameters and gradients are counted; copies inside of
        collectives are not. Use the difference of two calls. No PyTorch counterpart.
        """
        return unit_and_engine(self)[1].meter.copied_nbytes

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing, as gathers are always asynchronous; callers of PyTorch's method need this."""

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load as any module does, from DTensors with the placements of the parameters.

        A RaggedTensor also copies its part of a full plain tensor, unless ``assign`` is True.

        Raises:
            ConfigError: if other sharded parameters get plain tensors; nothing was changed.
        """
        assign = (args[1] if len(args) > 1 else kwargs.get("assign")) is True
        check_full_tensors(self, state_dict, assign=assign)
        return super().load_state_dict(state_dict, *args, **kwargs)


def _keys_of(own: nn.Module, modules: Sequence[FSDPModule], what: str) -> tuple[int, ...]:
    engine = unit_and_engine(own)[1]
    units = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None:
            raise ConfigError(
                f"{what}: got {type(module).__name__}, expected modules that were given to "
                "fully_shard"
            )
        if unit.engine is not engine:
            raise ConfigError(
                f"{what}: {type(module).__name__} ({unit.name or 'a root'}) is not part of the "
                "same sharded model; call this after fully_shard on the root"
            )
        units.append(unit)
    return tuple(unit.key for unit in units)


def check_ends_by_itself(unit: Unit) -> None:
    """Refuse to put ``unit`` below a new root if the user chose manual finalization.

    Raises:
        ProtocolError: if the backward of ``unit`` ends by ``finalize_backward``.
    """
    if engine_of(unit).scheduler.policy.manual_finalization:
        raise ProtocolError(
            f"fully_shard: set_manual_backward_finalization(True) was called on a module with unit "
            f"{unit.shown_name}, which would not be the root any more; call it after "
            "fully_shard on the root"
        )


def _check_root(unit: Unit, what: str) -> None:
    if unit is not engine_of(unit).units[-1]:
        raise ProtocolError(
            f"{what} was called on unit {unit.shown_name}, expected the root: backward ends "
            "for the whole tree at once"
        )


def _check_may_finalize(unit: Unit, engine: Engine) -> None:
    engine.check_idle("finalize_backward()")
    _check_root(unit, "finalize_backward()")
    if not engine.scheduler.policy.manual_finalization:
        raise ProtocolError(
            "finalize_backward(): backward ends by itself here; call "
            "set_manual_backward_finalization(True) before the forward"
        )
    for state in engine.scheduler.residents.units.values():
        policy = state.policy
        waits = state.partial or (state.pending and policy.requires_gradient_sync)
        if waits and state.replicated and not policy.requires_all_reduce:
            raise ProtocolError(
                f"finalize_backward(): unit {engine.units[state.key].shown_name} does not "
                "reduce over its replicas; call set_requires_all_reduce(True) before, or let "
                "backward end by itself"
            )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.method_name(...)`` unshard the module as its forward does.

    Use this for methods other than ``forward`` that compute, such as ``generate_step`` or
    ``encode``. Modules that are not sharded are left unchanged, as in PyTorch.

    Raises:
        ConfigError: if a sharded module has no such method (also an ``AttributeError``).
    """
    if unit_of(module) is None:
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise _NoMethod(f"{type(module).__name__} has no method {method_name!r}")
    is_bound = isinstance(method, MethodType) and method.__self__ is module
    function: Any = method.__func__ if is_bound else None  # else a static or class method

    @wraps(method)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = method if function is None else MethodType(function, self)  # self may be a copy
        return run_as_forward(self, bound, *args, **kwargs)

    setattr(module, method_name, MethodType(run, module))


def _check_budget(method: str, nbytes: int | None, recurse: bool) -> None:
    """Raise ``ConfigError`` unless ``nbytes`` is a budget, and set for the whole tree."""
    if nbytes is not None and (not isinstance(nbytes, int) or nbytes < 0):
        raise ConfigError(f"{method}: got {nbytes!r}, expected None or a number of bytes")
    if not recurse:
        raise ConfigError(
            f"{method}(recurse=False): units of one tree share their memory; set the budget for "
            "all of them"
        )


class _Derived(UnsupportedError, IndexError):
    """A class that cannot be built, where PyTorch raises an IndexError."""


class _NoMethod(ConfigError, AttributeError):
    """A missing method, where PyTorch raises an AttributeError."""


@cache
def sharded_class(cls: Any) -> type[nn.Module]:
    """Return ``FSDP<Name>``, which is ``cls`` with ``FSDPModule`` mixed in; cached.

    Raises:
        UnsupportedError: ``cls`` refuses a subclass.
    """
    own = {"__module__": cls.__module__, **guarded_methods(cls)}
    try:
        return type(f"FSDP{cls.__name__}", (FSDPModule, cls), own)
    except TypeError as error:
        raise UnsupportedError(
            f"fully_shard: {cls.__qualname__} cannot have a subclass ({error}), which would get "
            "the methods of FSDPModule; shard a module around it, or use FullyShardedDataParallel"
        ) from error

"""``FSDPModule``: what a sharded module can do besides being itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, wraps
from types import MethodType
from typing import Any, Literal, overload

from torch import nn

from fullshard.engine import Unit
from fullshard.errors import ConfigError
from fullshard.frontend.controls import CommunicationControls
from fullshard.frontend.explain import check_full_tensors, guarded_methods
from fullshard.frontend.finalization import (
    GradientReductionHandle,
    check_mode_may_change,
    finalize,
)
from fullshard.frontend.hooks import engine_of, run_as_forward
from fullshard.frontend.ownership import unit_of
from fullshard.frontend.pending import PendingGradient, drop_pending, pending_of
from fullshard.frontend.sharded import check_left, unit_and_engine
from fullshard.schedule import AfterForward
from fullshard.schedule import triggers as when


class UnshardHandle:
    """The handle of ``unshard(async_op=True)``."""

    def wait(self) -> None:
        """Make the unsharded parameters usable and show them; more calls do nothing."""


class _UnshardHandle(UnshardHandle):
    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        unit, self._unit = self._unit, None
        if unit is not None:
            engine_of(unit).trigger(when.UserWait(unit.key))


def unshard_unit(unit: Unit, *, async_op: bool) -> UnshardHandle | None:
    """Start to gather ``unit``, and without ``async_op`` wait for that."""
    engine = engine_of(unit)
    unit.check_not_lent("unshard()")
    if engine.scheduler.idle:
        engine.look_after([unit])
    engine.trigger(when.UserUnshard(unit.key))
    handle = _UnshardHandle(unit)
    if async_op:
        return handle
    handle.wait()
    return None


class FSDPModule(CommunicationControls):
    """Mixed into the class of every module given to ``fully_shard``.

    The methods are those of ``torch.distributed.fsdp.FSDPModule``.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build the original class: slices and ``type(module)(...)`` are not sharded."""
        original = cls.__bases__[1]  # after FSDPModule
        return original(*args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the unit's parameters, until its forward, its backward or ``reshard``.

        With ``async_op`` the gather is only started; wait for it by the handle, or by the
        module's own forward.

        Raises:
            ProtocolError: parameters are on the meta device.
        """
        return unshard_unit(unit_and_engine(self)[0], async_op=async_op)

    def reshard(self) -> None:
        """Free the unsharded parameters, unless a forward or backward is using them.

        What was written into them is lost.
        """
        unit, engine = unit_and_engine(self)
        engine.trigger(when.UserReshard(unit.key))

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients; if not, they add up unsharded until one does.

        On a mesh with replicas this also sets what ``set_requires_all_reduce`` does.
        """
        self._set(
            recurse,
            requires_gradient_sync=requires_gradient_sync,
            requires_all_reduce=requires_gradient_sync,
        )

    def get_pending_gradients(self) -> dict[nn.Parameter, PendingGradient]:
        """Gradients of this module and those inside of it that wait for a backward that reduces.

        By sharded parameter; ``PendingGradient`` says how far each has come. They are the engine's
        own: what is written into them in place counts. Tensor-parallel ones come as this rank's
        local tensors. No PyTorch counterpart.
        """
        return pending_of(self._units(recurse=True))

    def clear_pending_gradients(self) -> None:
        """Drop what ``get_pending_gradients`` shows; ``zero_grad`` does not reach it.

        Raises:
            ProtocolError: in the middle of a forward or a backward.
        """
        drop_pending(self._units(recurse=True))

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over replicas, too.

        If not, they are reduced over the shards, and that adds up out of sight, ``grad`` staying
        as it was, until a backward that reduces over both. Without replicas it has no effect.
        """
        self._set(recurse, requires_all_reduce=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward``, also for a root that had it chosen by default.

        Raises:
            ConfigError: the value is no bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ConfigError(
                f"set_reshard_after_forward: got {reshard_after_forward!r}, expected a bool"
            )
        after = AfterForward.RESHARD if reshard_after_forward else AfterForward.KEEP
        self._set(recurse, after_forward=after)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward frees the unsharded parameters; if not, the next forward finds them.

        Between optimizer steps that saves its all-gather; after a step it gathers anyway.
        """
        self._set(recurse, reshard_after_backward=reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether resharding keeps the memory, so that addresses stay, as CUDA graphs need them.

        Modules show sharded parameters all the same, and what comes next gathers again, into the
        same memory. Give it up by ``keep=False``; moving or casting the module gives it up once.
        """
        for unit in self._units(recurse):
            engine_of(unit).keep_memory(unit, keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers this module's own unit; not those inside of it.

        False promises that no backward reads its parameters, as for an embedding, and saves the
        gather; a backward that does read them kills the process.
        """
        self._set(False, unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather these modules' units when this one's forward begins, in this order.

        Instead of what the order of the last forward says; an empty list goes back to that.

        Raises:
            ConfigError: something that is not sharded, or not together with this module.
        """
        self._set(False, forward_prefetch=self._keys_of(modules, "set_modules_to_forward_prefetch"))

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather these modules' units when this one's backward begins, in this order.

        Instead of what the order of the last forward says; an empty list goes back to that.

        Raises:
            ConfigError: something that is not sharded, or not together with this module.
        """
        keys = self._keys_of(modules, "set_modules_to_backward_prefetch")
        self._set(False, backward_prefetch=keys)

    def _keys_of(self, modules: Sequence[FSDPModule], what: str) -> tuple[int, ...]:
        engine = unit_and_engine(self)[1]
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

    def extra_repr(self) -> str:
        """What ``print`` adds: the unit, its layout and its bytes."""
        own: str = super().extra_repr()  # type: ignore[misc]
        unit = unit_of(self)  # type: ignore[arg-type]
        return ", ".join(part for part in (own, unit and unit.describe()) if part)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the end of a backward ends the reductions; holds for the whole tree."""
        self._set_machine(is_last_backward=is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether backwards end by ``finalize_backward``, whatever ``set_is_last_backward`` said.

        For schedules in which the reduction of gradients is an action of its own. Only on the root.

        Raises:
            ProtocolError: on another module, or a backward has begun that was not finalized.
        """
        check_mode_may_change(unit_and_engine(self)[0], enabled)
        self._set_machine(manual_finalization=enabled)

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """End the backwards of a step: reduce the gradients that are pending, and reshard.

        For ``set_manual_backward_finalization(True)``, on the root. Reductions and resharding go by
        what is set now: before several backwards that are ended together call
        ``set_requires_gradient_sync(False)``, and ``True`` before this. Gradients that the caller
        put on unsharded parameters himself are reduced, too. Before the first forward it does
        nothing.

        With ``async_op`` the last reductions go on; the handle's ``wait`` ends them, which has to
        come before the next forward.

        Raises:
            ProtocolError: backwards end by themselves, the module is not the root, a forward or a
                backward is running, an earlier handle was not waited for, or gradients are not to
                be reduced over replicas.
        """
        return finalize(unit_and_engine(self)[0], async_op=async_op)

    def set_prefetch_budget(self, nbytes: int | None, *, recurse: bool = True) -> None:
        """Gather ahead while unsharded bytes (the root's apart) stay within ``nbytes``.

        None, the default, gathers one unit ahead. Holds for the whole tree, so ``recurse`` has to
        be True. No PyTorch counterpart.

        Raises:
            ConfigError: a negative number, or ``recurse=False``.
        """
        _check_budget("set_prefetch_budget", nbytes, recurse)
        self._set_machine(prefetch_budget=nbytes)

    def set_reduction_budget(self, nbytes: int | None, *, recurse: bool = True) -> None:
        """Reduce several units at a time while what this takes stays within ``nbytes``.

        A reduction holds a copy of its unit's gradients, in the dtype of reduction, until it is
        through with the shards. Before one begins, computation waits for the oldest until there is
        room; one is always let through. None, the default, ends each before the next begins, as
        PyTorch does: it has the backward of one unit to finish in. Holds for the whole tree, so
        ``recurse`` has to be True. PyTorch counts: ``set_reduce_scatter_max_input_buffers``.

        Raises:
            ConfigError: a negative number, or ``recurse=False``.
        """
        _check_budget("set_reduction_budget", nbytes, recurse)
        self._set_machine(reduction_budget=nbytes)

    def waited_s(self) -> float:
        """Seconds that computation of the whole tree has waited for communication on this rank.

        Take the difference of two calls. On CPU the host waits (and adds up what it received,
        which is part of a reduction there); on an accelerator the compute stream does, measured
        from the first call on. What the device has not come to is not in it: synchronize before,
        or take it as a gauge that is late. No PyTorch counterpart.
        """
        return unit_and_engine(self)[1].lanes.waited_s()

    def copied_nbytes(self) -> int:
        """Bytes that the whole tree's copies and casts wrote so far on this rank.

        Counted are those between shards, whole parameters and gradients, beyond what collectives
        do with their input and output. Take the difference of two calls. No PyTorch counterpart.
        """
        return unit_and_engine(self)[1].meter.copied_nbytes

    def reset_iter_state(self) -> None:
        """Give up an iteration that an exception ended: everything sharded, nothing pending.

        Gradients that were reduced already stay; ``optimizer.zero_grad()`` forgets them.

        Raises:
            ProtocolError: a forward or a backward is still running; nothing was changed.
        """
        engine = unit_and_engine(self)[1]
        check_left("reset_iter_state()", engine)
        engine.trigger(when.Reset())

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Nothing to choose, gathers are asynchronous; there are callers of PyTorch's own."""

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of any module, with DTensors that lie as the parameters do.

        A RaggedTensor takes its part of a whole plain tensor, too, unless that is assigned.

        Raises:
            ConfigError: plain tensors for other sharded parameters; nothing was changed.
        """
        module: nn.Module = self  # type: ignore[assignment]
        check_full_tensors(module, state_dict, assign=assign)
        return super().load_state_dict(state_dict, strict, assign)  # type: ignore[misc]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` unshard the module as its forward does.

    For methods that compute besides ``forward``, such as ``generate_step`` or ``encode``. Modules
    that are not sharded are left as they are, as in PyTorch.

    Raises:
        ConfigError: a sharded module has no such method (an ``AttributeError`` too).
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
    """Refuse what is no budget in bytes for a whole tree; raises ``ConfigError``."""
    if nbytes is not None and (not isinstance(nbytes, int) or nbytes < 0):
        raise ConfigError(f"{method}: got {nbytes!r}, expected None or a number of bytes")
    if not recurse:
        raise ConfigError(
            f"{method}(recurse=False): units of one tree share their memory; set the budget for "
            "all of them"
        )


class _NoMethod(ConfigError, AttributeError):
    """PyTorch raises an AttributeError here."""


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """``FSDP<Name>``: ``cls`` with ``FSDPModule`` mixed in; the same class each time."""
    key: Any = cls  # a class that defines __eq__ hashes as a class all the same
    return _sharded_class(key)


@cache
def _sharded_class(cls: Any) -> type[nn.Module]:
    own = {"__module__": cls.__module__, **guarded_methods(cls)}
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), own)

"""The base class of all sharded modules, whichever call sharded them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, cast

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fullshard._torch import autograd as _autograd
from fullshard.engine import Bucket, Engine, Unit, WireErrors, relative_error
from fullshard.errors import ArgumentTypeError, BusyError, ConfigError, NotBuiltError
from fullshard.frontend.contexts import named_sharded
from fullshard.frontend.explain import explain_forward
from fullshard.frontend.hooks import engine_of, forward_interrupted, run_as_forward
from fullshard.frontend.ownership import (
    enlist_copy,
    members_below,
    members_of,
    unit_of,
    units_below,
)
from fullshard.frontend.places import places_of
from fullshard.schedule import triggers as when
from fullshard.schedule.triggers import NO_TASK

AnyModule = TypeVar("AnyModule", bound=nn.Module)

_as_it_is: ContextVar[bool] = ContextVar("fullshard_state_dict_as_it_is", default=False)


@contextmanager
def taken_as_it_is() -> Iterator[None]:
    """Make wrappers with special state dicts save and load ordinary ones during the block."""
    token = _as_it_is.set(True)
    try:
        yield
    finally:
        _as_it_is.reset(token)


def state_dict_as_it_is(module: nn.Module, units: Iterable[Unit]) -> dict[str, Any]:
    """Return ``module.state_dict(keep_vars=True)`` with the sharded parameters themselves."""
    with ExitStack() as stack:
        stack.enter_context(taken_as_it_is())
        for unit in units:
            stack.enter_context(places_of(unit).showing_pieces(unit.buckets))
        # The method of the class: the instance may have one that calls us.
        return type(module).state_dict(module, keep_vars=True)


def is_taken_as_it_is() -> bool:
    """Return whether we are in a ``taken_as_it_is`` block."""
    return _as_it_is.get()


@contextmanager
def _showing_again(module: nn.Module) -> Iterator[None]:
    """End what state dicts inside ``module`` hide, if the block raises: torch skips our hooks."""
    try:
        yield
    except BaseException:
        inside = set(module.modules())
        for unit in units_below([module]):
            if places_of(unit).hidden_by in inside:
                places_of(unit).end_hiding(unit)
        raise


if TYPE_CHECKING:
    _Module = nn.Module
else:
    _Module = object  # the other base of each class that this one is mixed into is a module


class ShardedModule(_Module):
    """A mixin for the class of a module that is a member of a unit."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, and tell the engine about any exception that ends the call."""
        try:
            return super().__call__(*args, **kwargs)
        except Exception as error:  # torch calls our hook
            explain_forward(self, error)
            raise
        except BaseException:
            forward_interrupted(self)
            raise

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the module's class; if it raises, undo our hooks."""
        with _showing_again(self):
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load as the module's class does; if it raises, undo our hooks."""
        with _showing_again(self):
            return super().load_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Self:
        """Apply ``fn`` to the shards; ``to``, ``cuda``, ``float``, ``to_empty`` etc. call this.

        A call on a module around several members of a unit reaches one member after the other.
        While only a part of a unit has been moved, its shards stay as they are. The next forward
        refuses the unit if its parameters still differ in device or dtype.
        """
        recurse = args[0] if args else kwargs.get("recurse", True)
        units = members_below([self])
        for unit in units:
            engine = engine_of(unit)
            engine.check_idle("moving or casting a sharded module")
            engine.end_reductions()
            engine.weights_changed()
            engine.trigger(when.UserReshard(unit.key))
        with ExitStack() as stack:
            for bucket in (bucket for unit in units for bucket in unit.buckets):
                stack.enter_context(bucket.keeping_grad_dtypes())
            super()._apply(fn, *args, **kwargs)  # type: ignore[no-untyped-call]
            for unit, num_members in units.items():
                is_whole = recurse and num_members == unit.num_members
                engine_of(unit).moved(unit, partly=not is_whole)
                engine_of(unit).weights_changed()
        return self

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear gradients as any module does; also those of shards behind unsharded parameters.

        Modules show unsharded parameters between forward and backward, so also after a failed
        backward.
        """
        super().zero_grad(*args, **kwargs)
        unsharded = [unit for unit in units_below([self]) if not places_of(unit).shows_sharded]
        if unsharded:
            with ExitStack() as stack:
                for unit in unsharded:
                    stack.enter_context(places_of(unit).showing_sharded(unit.buckets))
                super().zero_grad(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a sharded copy with new shards and units, for example for a moving average."""
        return copy_sharded(self, memo)

    def __reduce__(self) -> NoReturn:
        raise NotBuiltError(
            f"a sharded {type(self).__name__} cannot be pickled: save its state_dict(), with "
            "torch.distributed.checkpoint for instance"
        )

    def set_skip_tolerance(self, tolerant: bool, *, recurse: bool = True) -> None:
        """Set whether ranks may skip this unit, repeat it or run it in orders of their own.

        For experts, branches that depend on data, layers dropped by each rank for itself. A skip
        counts as zeros: gradients are the mean over all ranks, ``grad`` is None where no rank had
        one. The unit is gathered, freed and reduced with its nearest ancestor that is not
        skippable. All ranks must run that ancestor, forward and backward, and the ancestor's
        ``reshard_after_forward`` applies. While the ancestor runs, its own parameters and those of
        its skippable units are in memory; their gradients are in memory until its backward ends.
        No rank has to agree on anything.

        Call this after ``fully_shard`` on the root, between steps, on all ranks. Units inside of a
        skippable unit may be skipped as well, regardless of their own setting. No PyTorch
        counterpart; see ``docs/skipping.md``.

        Raises:
            ArgumentTypeError: if ``tolerant`` is not a bool.
            BusyError: during a forward or backward, or while ``unshard_params`` lends a unit.
            ConfigError: if a unit is in no other unit, so that there is nothing to run instead.
                Also if a unit is inside of two units, neither of which is inside of the other.
        """
        engine = unit_and_engine(self)[1]
        what, root = f"set_skip_tolerance({tolerant!r})", engine.units[-1]
        if not isinstance(tolerant, bool):
            raise ArgumentTypeError(f"{what}: expected a bool")
        engine.check_idle(what)
        if tolerant and root in chosen_units(self, recurse):
            raise ConfigError(
                f"{what} on unit {root.shown_name}, which is inside of no other unit: ranks "
                "may skip parts of a model, not all of it. Call it on units inside, after "
                "fully_shard on the root"
            )
        if tolerant:
            _check_one_around(engine, what)
        engine.end_reductions()
        engine.weights_changed()
        engine.reshard_all()
        set_unit_policy(self, recurse, skip_tolerant=tolerant)

    def set_gradient_check(self, enabled: bool) -> None:
        """Set whether gradients are checked before they are reduced, also of units inside.

        After the reduction, an infinity or NaN of one rank is on all ranks. The check reads all
        gradients of this rank in each backward, and the host waits for the device. No PyTorch
        counterpart.
        """
        for bucket in chosen_buckets(self, recurse=True):
            if isinstance(bucket.reduce_policy.inspect, Suspects) != enabled:
                bucket.change_reduction(inspect=Suspects() if enabled else None)

    def nonfinite_gradients(self) -> list[str]:
        """Return and clear the non-finite gradients of this rank that ``set_gradient_check`` found.

        Strings "param (unit)", in model order; backward reached the last entry first.
        """
        found = [
            f"{name} (unit {held.unit.shown_name})"
            for name, _, held in named_sharded(self, chosen_units(self, recurse=True))
            if held is not None and held.bucket.names[held.number] in _suspects(held.bucket)
        ]
        for bucket in chosen_buckets(self, recurse=True):
            _suspects(bucket).clear()
        return found

    def reset_iter_state(self) -> None:
        """Abandon an iteration that an exception ended: reshard all, drop pending gradients.

        Gradients that were already reduced stay; ``optimizer.zero_grad()`` clears them.

        Raises:
            ProtocolError: if a forward or backward is still running; nothing was changed.
        """
        engine = unit_and_engine(self)[1]
        check_left("reset_iter_state()", engine)
        engine.trigger(when.Reset())

    def set_wire_check(self, enabled: bool) -> None:
        """Set whether ``wire_errors`` is measured, also of units inside; see ``docs/wire.md``.

        The sending rank then decodes its encoded data and compares it with the values; nothing else
        is sent. No PyTorch counterpart.
        """
        for bucket in chosen_buckets(self, recurse=True):
            bucket.spec.wire_check.enabled = enabled

    def wire_errors(self) -> WireErrors:
        """Return and clear the relative errors of the data that this rank sent since the last call.

        Call this between steps; the host waits for the device.
        """
        for engine in dict.fromkeys(map(engine_of, chosen_units(self, recurse=True))):
            engine.end_reductions()
        checks = [bucket.spec.wire_check for bucket in chosen_buckets(self, recurse=True)]
        found = ([p for one in checks for p in one.take(what)] for what in WireErrors._fields)
        return WireErrors(*map(relative_error, found))


# Functions, not methods: a user's module may have attributes of any name.


def chosen_units(module: nn.Module, recurse: bool) -> list[Unit]:
    """Return the unit of ``module``; with ``recurse`` also all units inside."""
    return units_below([module]) if recurse else [unit_and_engine(module)[0]]


def chosen_buckets(module: nn.Module, recurse: bool) -> list[Bucket]:
    """Return the buckets of ``chosen_units``."""
    return [bucket for unit in chosen_units(module, recurse) for bucket in unit.buckets]


def set_machine_policy(module: nn.Module, **changes: Any) -> None:
    """Change the policy of the whole tree."""
    engine = unit_and_engine(module)[1]
    engine.trigger(when.SetMachinePolicy(replace(engine.scheduler.policy, **changes)))


def set_unit_policy(module: nn.Module, recurse: bool, **changes: Any) -> None:
    """Change the policy of ``chosen_units``."""
    for unit in chosen_units(module, recurse):
        engine = engine_of(unit)
        engine.set_policy(unit, replace(engine.policy_of(unit), **changes))


def unit_and_engine(module: Any) -> tuple[Unit, Engine]:
    """Return the unit that ``module`` is a member of, and the engine that runs the unit.

    Raises:
        ArgumentTypeError: if ``module`` is not a member of a unit.
    """
    unit = unit_of(module)
    if unit is None:
        raise ArgumentTypeError(
            f"{type(module).__name__} is a member of no unit: it is a copy of a sharded module, "
            "or its class was used without fully_shard"
        )
    return unit, engine_of(unit)


def _check_one_around(engine: Engine, what: str) -> None:
    """Refuse units inside of two units that are not nested: either may run without the other."""
    around: dict[Unit, Unit] = {}
    for unit in engine.units:  # from the inside out
        inside = [one for one in units_below(members_of(unit)) if one is not unit]
        for one in inside:
            nearest = around.get(one)
            if nearest is not None and nearest not in inside:
                raise ConfigError(
                    f"{what}: unit {one.name} is inside of two units, {nearest.name} and "
                    f"{unit.shown_name}, neither of which is inside of the other, so ranks "
                    "may skip one and run the other. Give both units to one call of fully_shard, "
                    "as a list, or leave out set_skip_tolerance"
                )
            around[one] = unit


# Code on the stack while a forward runs, and the local variable that holds the module.
_RUNNERS = {ShardedModule.__call__.__code__: "self", run_as_forward.__code__: "module"}


def check_left(what: str, engine: Engine) -> None:
    """Refuse ``what`` while this thread is in a forward or a backward of the model.

    The scheduler cannot tell: an exception, such as one inside our hooks, may have left a forward
    without notice, and ``what`` is the way to recover from that. The interpreter can tell, because
    a forward that still runs is on the stack.

    Raises:
        BusyError: if a forward or backward is running; nothing was changed.
    """
    running = "a backward" if _autograd.current_task() != NO_TASK else None
    for frame, _ in walk_stack(sys._getframe(1)):
        module = frame.f_locals[_RUNNERS[frame.f_code]] if frame.f_code in _RUNNERS else None
        unit = None if module is None else unit_of(module)
        if running is None and unit is not None and unit.engine is engine:
            running = f"the forward of {type(module).__name__}"
    if running is not None:
        raise BusyError(
            f"{what} was called inside of {running}, which is still running and needs what this "
            "would free; call it when the exception has left the forward or the backward"
        )


@dataclass
class Suspects:
    """A collector of the parameters of a bucket whose gradients on this rank are not finite."""

    found: set[str] = field(default_factory=set)

    def __call__(self, names: Sequence[str], grads: Sequence[Tensor | None]) -> None:
        """Look at this rank's ``grads``; the host waits for the device."""
        for name, grad in zip(names, grads, strict=True):
            if grad is not None and grad.is_sparse:
                grad = grad.coalesce().values()
            if grad is not None and not bool(grad.isfinite().all()):
                self.found.add(name)


def _suspects(bucket: Bucket) -> set[str]:
    """Return the names that ``set_gradient_check`` has collected in ``bucket``."""
    inspect = bucket.reduce_policy.inspect
    return inspect.found if isinstance(inspect, Suspects) else set()


_UNDER_WAY = "fullshard: a sharded module is being copied"
"""Key in the memo of a running ``copy.deepcopy``; all other keys of the memo are numbers."""


def copy_sharded(module: AnyModule, memo: dict[Any, Any]) -> AnyModule:
    """Return ``copy.deepcopy(module)``; as for any Parameter, gradients are not copied.

    Raises:
        ConfigError: if a unit has members outside ``module``.
        ProtocolError: during a forward or backward.
    """
    if _UNDER_WAY in memo:  # a sharded module inside the one being copied
        return _copy(module, memo)
    members = members_below([module])
    for unit, num_members in members.items():
        if num_members < unit.num_members:
            raise ConfigError(
                f"deepcopy of {type(module).__name__}: unit {unit.shown_name} has "
                f"{unit.num_members} modules, but {type(module).__name__} contains only "
                f"{num_members}; copy a sharded module that contains all of them"
            )
        engine_of(unit).check_idle("deepcopy of a sharded module")
    units = list(members)
    for unit in units:
        engine_of(unit).reshard(unit)
        engine_of(unit).take_over(unit)
    units.sort(key=lambda unit: unit.key)
    copies = [unit.copy(memo) for unit in units]  # first: modules find new parameters in memo
    memo[_UNDER_WAY] = True
    try:
        new = _copy(module, memo)
        for unit, copied in zip(units, copies, strict=True):
            copied.registration = copy.deepcopy(unit.registration, memo)
            copied.tell_hooks(memo)
    finally:
        del memo[_UNDER_WAY]
    enlist_copy(module.modules(), memo)
    key_of = {unit.key: number for number, unit in enumerate(units)}
    policies = [engine_of(unit).policy_of(unit).renumbered(key_of) for unit in units]
    Engine(copies, policies, engine_of(units[0]).scheduler.policy)
    return new


def _copy(module: AnyModule, memo: dict[Any, Any]) -> AnyModule:
    """Copy ``module`` as ``copy.deepcopy`` copies an unsharded module."""
    new: Any = object.__new__(type(module))
    memo[id(module)] = new
    if is_parametrized(module):  # its class refuses __getstate__ and copies __dict__
        new.__dict__.update(copy.deepcopy(module.__dict__, memo))
    else:
        new.__setstate__(copy.deepcopy(cast("Any", module).__getstate__(), memo))
    return cast("AnyModule", new)

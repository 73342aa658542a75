"""What every sharded module does, by whichever call it became one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn, Self

from torch import Tensor, nn

from fullshard import _torch
from fullshard.engine import Engine, Unit
from fullshard.errors import ArgumentTypeError, BusyError, NotBuiltError
from fullshard.frontend.copying import copy_sharded
from fullshard.frontend.explain import explain_forward
from fullshard.frontend.hooks import engine_of, forward_interrupted, run_as_forward
from fullshard.frontend.ownership import unit_of, units_below
from fullshard.frontend.places import places_of
from fullshard.schedule import triggers as when
from fullshard.schedule.triggers import NO_TASK

_as_it_is: ContextVar[bool] = ContextVar("fullshard_state_dict_as_it_is", default=False)


@contextmanager
def taken_as_it_is() -> Iterator[None]:
    """Within the block wrappers that have state dicts of their own give and take plain ones."""
    token = _as_it_is.set(True)
    try:
        yield
    finally:
        _as_it_is.reset(token)


def state_dict_as_it_is(module: nn.Module, units: Iterable[Unit]) -> dict[str, Any]:
    """``module.state_dict(keep_vars=True)`` with the sharded parameters themselves in it."""
    with ExitStack() as stack:
        stack.enter_context(taken_as_it_is())
        for unit in units:
            stack.enter_context(places_of(unit).showing_pieces(unit.buckets))
        # That of the class: the instance may have one that calls us.
        return type(module).state_dict(module, keep_vars=True)


def is_taken_as_it_is() -> bool:
    """Whether we are in such a block."""
    return _as_it_is.get()


class ShardedModule:
    """Mixed into the class of a module that is a member of a unit."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; whatever ends that, the engine learns of it."""
        module: nn.Module = self  # type: ignore[assignment]
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        except Exception as error:  # torch tells our hook
            explain_forward(module, error)
            raise
        except BaseException:
            forward_interrupted(module)
            raise

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """``to``, ``cuda``, ``float``, ``to_empty`` and the like act on the shards."""
        module: nn.Module = self  # type: ignore[assignment]
        units = units_below([module])
        for unit in units:
            engine = engine_of(unit)
            engine.check_idle("moving or casting a sharded module")
            engine.end_reductions()
            engine.weights_changed()
            engine.trigger(when.UserReshard(unit.key))
        with ExitStack() as stack:
            for bucket in (bucket for unit in units for bucket in unit.buckets):
                stack.enter_context(bucket.keeping_grad_dtypes())
            super()._apply(fn, recurse)  # type: ignore[misc]
            for unit in units:
                engine_of(unit).take_over(unit)
                engine_of(unit).weights_changed()
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of any module; where it shows whole parameters, those of the shards are meant too.

        It does between a forward and its backward, and so after a backward that failed early.
        """
        super().zero_grad(set_to_none)  # type: ignore[misc]
        module: nn.Module = self  # type: ignore[assignment]
        unsharded = [unit for unit in units_below([module]) if not places_of(unit).shows_sharded]
        if unsharded:
            with ExitStack() as stack:
                for unit in unsharded:
                    stack.enter_context(places_of(unit).showing_sharded(unit.buckets))
                super().zero_grad(set_to_none)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A sharded module with shards and units of its own, as for a moving average."""
        module: nn.Module = self  # type: ignore[assignment]
        return copy_sharded(module, memo)  # type: ignore[return-value]

    def __reduce__(self) -> NoReturn:
        raise NotBuiltError(
            f"a sharded {type(self).__name__} cannot be pickled: save its state_dict(), with "
            "torch.distributed.checkpoint for instance"
        )

    def _units(self, recurse: bool) -> list[Unit]:
        module: nn.Module = self  # type: ignore[assignment]
        return units_below([module]) if recurse else [unit_and_engine(self)[0]]

    def _set_machine(self, **changes: Any) -> None:
        """Change what holds for the whole tree."""
        engine = unit_and_engine(self)[1]
        engine.trigger(when.SetMachinePolicy(replace(engine.scheduler.policy, **changes)))

    def _set(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            engine = engine_of(unit)
            engine.set_policy(unit, replace(engine.policy_of(unit), **changes))


def unit_and_engine(module: Any) -> tuple[Unit, Engine]:
    """The unit that ``module`` is a member of, and what runs it.

    Raises:
        ArgumentTypeError: there is none.
    """
    unit = unit_of(module)
    if unit is None:
        raise ArgumentTypeError(
            f"{type(module).__name__} is a member of no unit: it is a copy of a sharded module, "
            "or its class was used without fully_shard"
        )
    return unit, engine_of(unit)


# What is on the stack while a forward runs, and where it has the module.
_RUNNERS = {ShardedModule.__call__.__code__: "self", run_as_forward.__code__: "module"}


def check_left(what: str, engine: Engine) -> None:
    """Refuse ``what`` while this thread is in a forward or a backward of the model.

    The scheduler cannot tell: an exception, such as one in the middle of a hook of ours, may have
    left a forward without its knowing, and ``what`` is how to recover from that. The interpreter
    can, for whoever still runs is on its stack.

    Raises:
        BusyError: nothing was changed.
    """
    running = "a backward" if _torch.current_task() != NO_TASK else None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and running is None:
        module = frame.f_locals[_RUNNERS[frame.f_code]] if frame.f_code in _RUNNERS else None
        unit = None if module is None else unit_of(module)
        if unit is not None and unit.engine is engine:
            running = f"the forward of {type(module).__name__}"
        frame = frame.f_back
    if running is not None:
        raise BusyError(
            f"{what} was called inside of {running}, which is still running and needs what this "
            "would free; call it when the exception has left the forward or the backward"
        )

"""What every sharded module does, by whichever call it became one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NoReturn, Self

from torch import Tensor, nn

from fullshard.engine import Engine, Unit
from fullshard.errors import ArgumentTypeError, NotBuiltError
from fullshard.frontend.copying import copy_sharded
from fullshard.frontend.explain import explain_forward
from fullshard.frontend.hooks import engine_of, forward_interrupted
from fullshard.frontend.ownership import unit_of, units_below
from fullshard.frontend.places import places_of
from fullshard.schedule import triggers as when

__all__ = [
    "ShardedModule",
    "is_taken_as_it_is",
    "state_dict_as_it_is",
    "taken_as_it_is",
    "unit_and_engine",
]

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

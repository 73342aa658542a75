"""Module hooks, through which ``torch.nn`` reports forwards and state dicts to the engine."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from fullshard._torch import dynamo as _dynamo
from fullshard.engine import Engine, MixedPrecisionPolicy, Unit, refuse_gradients
from fullshard.frontend.places import Places, places_of
from fullshard.tensors import find_tensors, map_tensors


def install_forward_hooks(
    unit: Unit, modules: Sequence[nn.Module], policy: MixedPrecisionPolicy
) -> None:
    """Install hooks that report to the engine when a member of ``unit`` runs.

    Our pre-hook comes first, so that all other pre-hooks see unsharded parameters.
    """
    for member, module in enumerate(modules):
        hooks = _ForwardHooks(unit, member, policy)
        module.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(hooks.after, with_kwargs=True, always_call=True)


class _Call(NamedTuple):
    """A call of a member.

    Attributes:
        handled: the exception that was being handled when it began.
        is_lent: whether it runs on lent parameters, and the engine does not know of it.
    """

    handled: BaseException | None
    is_lent: bool


@dataclass
class _ForwardHooks:
    """The two forward hooks of one member."""

    unit: Unit
    member: int
    policy: MixedPrecisionPolicy
    _calls: defaultdict[int, list[_Call]] = field(default_factory=lambda: defaultdict(list))
    """The calls that run, by thread; the innermost is the last."""

    @_dynamo.never_compiled
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Unshard the unit; move the inputs of a root, and cast inputs."""
        engine = engine_of(self.unit)
        places_of(self.unit).end_hiding(self.unit)
        self._calls[get_ident()].append(_Call(sys.exception(), self.unit.is_lent))
        if self.unit.is_lent:
            self.unit.check_shown("a forward")
            if torch.is_grad_enabled():
                refuse_gradients(self.unit, places_of(self.unit).shown())
            return args, kwargs
        if self.unit.device.type != "cpu" and engine.scheduler.idle:
            args, kwargs = map_tensors(self._move, args), map_tensors(self._move, kwargs)
        engine.enter(self.unit, self.member, find_tensors((args, kwargs)))
        dtype = self.policy.param_dtype
        if dtype is not None and self.policy.cast_forward_inputs:
            cast = partial(_cast, dtype)
            return map_tensors(cast, args), map_tensors(cast, kwargs)
        return args, kwargs

    @_dynamo.never_compiled
    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Reshard the unit if it is done, and cast the outputs; also called after exceptions."""
        calls = self._calls[get_ident()]
        call = calls.pop() if calls else None
        if call is None or call.is_lent:
            return None
        failed = sys.exception() is not call.handled
        engine_of(self.unit).exit(self.unit, self.member, find_tensors(output), failed=failed)
        dtype = self.policy.output_dtype
        return None if dtype is None or failed else map_tensors(partial(_cast, dtype), output)

    def _move(self, tensor: Tensor) -> Tensor:
        # Blocking, because a loader may refill a pinned batch as soon as the call returns.
        return tensor.to(self.unit.device)


def forward_interrupted(module: nn.Module) -> None:
    """Report that an exception for which torch calls no hook, such as ^C, left the forward.

    Call this while the exception is being handled.
    """
    _hooks_of(module).after(module, (), {}, None)


def policy_of(module: nn.Module) -> MixedPrecisionPolicy:
    """Return the dtypes with which ``module``, a member of a unit, was sharded."""
    return _hooks_of(module).policy


def run_as_forward(module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``method``, bound to ``module`` (a member of a unit), as if it were the forward."""
    hooks = _hooks_of(module)
    try:
        args, kwargs = hooks.before(module, args, kwargs)
        output = method(*args, **kwargs)
    except BaseException:
        hooks.after(module, args, kwargs, None)
        raise
    cast = hooks.after(module, args, kwargs, output)
    return output if cast is None else cast


def _hooks_of(module: nn.Module) -> _ForwardHooks:
    """Return our hooks, found among the hooks of ``module``."""
    found = (getattr(hook, "__self__", None) for hook in module._forward_hooks.values())
    return next(hooks for hooks in found if isinstance(hooks, _ForwardHooks))


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


@cache
def registrations() -> list[int]:
    """Count the registrations of modules and parameters since the first call; return ``[count]``.

    The count spares a root forward from looking at all modules.
    """
    count = [0]

    def add(*_: object) -> None:
        count[0] += 1

    register_module_module_registration_hook(add)
    register_module_parameter_registration_hook(add)
    return count


def install_state_dict_hooks(unit: Unit, places: Places) -> None:
    """Make state dicts hold sharded parameters, even during a forward.

    The hooks exchange for a moment what the modules show, and loads wait for gathers in flight;
    nothing is moved or freed.
    """
    hooks = _StateDictHooks(unit, places)
    for module in places.modules():
        module.register_state_dict_pre_hook(hooks.before_save)
        # torch sets an attribute on this hook, which a bound method refuses
        module.register_state_dict_post_hook(partial(hooks.after_save))
        module.register_load_state_dict_pre_hook(hooks.before_load)
        module.register_load_state_dict_post_hook(hooks.after_load)


@dataclass(frozen=True)
class _StateDictHooks:
    """The state dict hooks of a unit; calls nest, as its modules may contain each other.

    If a state dict raises, torch skips the remaining hooks, so these hooks keep no count. The call
    that hides the unsharded parameters also shows them again. If it raises, they are shown again by
    ``ShardedModule.state_dict``, ``load_state_dict`` or the unit's next forward.
    """

    unit: Unit
    places: Places

    def before_save(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self.places.hide_unsharded(self.unit, module)

    def after_save(self, module: nn.Module, *_: Any) -> None:
        if self.places.hidden_by is module:
            self.places.end_hiding(self.unit)

    def before_load(self, module: nn.Module, *_: Any) -> None:
        self.unit.check_shown("load_state_dict()")
        self.places.hide_unsharded(self.unit, module)
        self.unit.wait_for_readers()  # before the shards are written
        if not self.unit.is_lent:  # else that is done when the loan ends
            engine_of(self.unit).weights_changed()  # also if the load raises after some writes

    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        if not self.unit.is_lent:
            # Only record: with assign=True other parameters of the unit may not be loaded yet.
            self.places.take_over(self.unit, keeps_ties=True)
        engine_of(self.unit).forget_interrupted(self.unit)
        if self.places.hidden_by is module:
            self.places.end_hiding(self.unit)


def engine_of(unit: Unit) -> Engine:
    """Return the engine that runs ``unit``; every unit of a sharded module has an engine."""
    engine = unit.engine
    assert isinstance(engine, Engine)
    return engine

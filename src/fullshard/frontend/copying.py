"""Deep copies of sharded modules, with new shards, units and engine on the same mesh."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fullshard.engine import Engine, Unit
from fullshard.errors import ConfigError
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.ownership import enlist_copy, members_below

_UNDER_WAY = "fullshard: a sharded module is being copied"
"""Key in the memo of a running ``copy.deepcopy``; all other keys of the memo are numbers."""


def copy_sharded(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """Return ``copy.deepcopy(module)``; as for any Parameter, gradients are not copied.

    Raises:
        ConfigError: if a unit has members outside ``module``.
        ProtocolError: during a forward or backward.
    """
    if _UNDER_WAY in memo:  # a sharded module inside the one being copied
        return _copy(module, memo)
    members = members_below([module])
    for unit, num_members in members.items():
        _check(unit, module, num_members)
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


def _copy(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """Copy ``module`` as ``copy.deepcopy`` copies an unsharded module."""
    new: Any = object.__new__(type(module))
    memo[id(module)] = new
    if is_parametrized(module):  # its class refuses __getstate__ and copies __dict__
        new.__dict__.update(copy.deepcopy(module.__dict__, memo))
        return new  # type: ignore[no-any-return]
    state: Any = module.__getstate__()
    new.__setstate__(copy.deepcopy(state, memo))
    return new  # type: ignore[no-any-return]


def _check(unit: Unit, module: nn.Module, inside: int) -> None:
    if inside < unit.num_members:
        raise ConfigError(
            f"deepcopy of {type(module).__name__}: unit {unit.name or '(root)'} has "
            f"{unit.num_members} modules, but {type(module).__name__} contains only {inside}; copy "
            "a sharded module that contains all of them"
        )

"""Check the arguments of a wrapper and its module; wrap the inner modules of a policy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from fullshard._torch import autograd as _autograd
from fullshard.errors import ArgumentTypeError, ConfigError, ProtocolError, UnsupportedError
from fullshard.flat.options import ShardingStrategy
from fullshard.frontend.meshes import DataMesh
from fullshard.frontend.ownership import unit_of
from fullshard.wrap.units import (
    Ignored,
    check_alike,
    check_tied_together,
    replace_children,
    units_of,
)


def checked_device(device_id: Any, module: nn.Module) -> torch.device | None:
    """Return the device that ``device_id`` names; None if it is None.

    Raises:
        ArgumentTypeError: if ``device_id`` does not name a device.
        ConfigError: if parameters are on another accelerator already.
    """
    if device_id is None:
        return None
    device = _device_named(device_id)
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    there = {p.device for p in module.parameters()} - {torch.device("cpu"), torch.device("meta")}
    if there - {device}:
        raise ConfigError(
            f"FullyShardedDataParallel(device_id={device_id!r}): Inconsistent compute device, "
            f"parameters are on {', '.join(map(str, there))} already"
        )
    return device


def _device_named(device_id: Any) -> torch.device:
    """Return the device; a number means an accelerator or, if there is none, the CPU."""
    if isinstance(device_id, int) and not torch.accelerator.is_available():
        return torch.device("cpu")
    try:
        return torch.device(device_id)
    except (TypeError, RuntimeError) as error:
        raise ArgumentTypeError(
            f"FullyShardedDataParallel(device_id={device_id!r}): expected a device, its name or "
            "the number of an accelerator"
        ) from error


def check_module(module: nn.Module, ignored: Ignored, *, shown_as_one: bool) -> None:
    """Warn of wrapping that has no effect, before anything is changed.

    Raises:
        UnsupportedError: if ``shown_as_one`` and parameters have optimizers that step in backward.
    """
    name = type(module).__name__
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        warnings.warn(
            "FSDP will not all-gather parameters for containers that do not implement forward: "
            f"got {name}; wrap the modules in it, or one that calls them",
            stacklevel=3,
        )
    if module in ignored.modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will "
            f"result in all parameters being ignored: got {name} in ignored_modules",
            stacklevel=3,
        )
    if shown_as_one and any(map(_autograd.steps_in_backward, module.parameters())):
        raise _Overlapped(
            f"FullyShardedDataParallel: parameters of {name} have optimizers that step in backward "
            "(_apply_optimizer_in_backward), which is only supported with use_orig_params=True"
        )


def warn_of_choice(
    module: nn.Module, strategy: ShardingStrategy, mesh: DataMesh, device: torch.device | None
) -> None:
    """Warn of a strategy that becomes another, and of shards that are made on the CPU.

    Args:
        module: that is to be wrapped.
        strategy: the one that was chosen.
        mesh: the ranks.
        device: by ``device_id``; None if that was not given.
    """
    if mesh.shard_dim is None and strategy is not ShardingStrategy.NO_SHARD:
        warnings.warn(
            f"FullyShardedDataParallel: one rank holds all of {type(module).__name__}, so "
            f"{strategy.name} becomes NO_SHARD: nothing is sharded",
            stacklevel=3,
        )
    first = next(chain(module.parameters(), module.buffers()), None)
    on_cpu = first is not None and first.device.type == "cpu"
    if on_cpu and device is None and mesh.mesh.device_type != "cpu":
        warnings.warn(
            f"FullyShardedDataParallel: {type(module).__name__} is on the CPU, so it is prepared "
            f"there, which is slower than on {mesh.mesh.device_type}; give device_id= to move it "
            "before",
            stacklevel=3,
        )


class _Overlapped(UnsupportedError, ProtocolError):
    """A ``RuntimeError`` as well, because PyTorch raises one here."""


def as_ignored(modules: Any = None, states: Any = None) -> Ignored:
    """Return what to ignore, by ``ignored_modules`` or ``ignored_states``.

    Raises:
        ConfigError, ArgumentTypeError: if both arguments are given, or the values do not fit.
    """
    if modules is not None and states is not None:
        raise ConfigError(
            "FullyShardedDataParallel: Cannot pass both ignored_modules and ignored_states; put "
            "the modules into ignored_states"
        )
    given = _listed(modules if states is None else states)
    kinds = (nn.Parameter, nn.Module)
    if states is not None and not any(all(isinstance(g, k) for g in given) for k in kinds):
        raise ConfigError(
            "FullyShardedDataParallel(ignored_states=...): expected all nn.Parameter or all "
            f"nn.Module list elements, got {', '.join(sorted({type(g).__name__ for g in given}))}"
        )
    if states is not None and given and isinstance(given[0], nn.Parameter):
        return Ignored.of(params=given)
    for module in given:
        if not isinstance(module, nn.Module):
            raise ConfigError(
                "FullyShardedDataParallel(ignored_modules=...): expects nn.Module list elements, "
                f"got {type(module).__name__}"
            )
        if unit_of(module) is not None:
            raise ConfigError(
                f"FullyShardedDataParallel: ignored module {type(module).__name__} is wrapped "
                "already; a module cannot be both"
            )
    return Ignored.of(given)


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    if not isinstance(given, Iterable):
        raise ArgumentTypeError(
            "FullyShardedDataParallel: ignored modules or states must be an iterable, got "
            f"{given!r}"
        )
    return list(given)


def wrap_inside(
    module: nn.Module,
    policy: Any,
    ignored: Ignored,
    make: Callable[..., nn.Module],
    single: Sequence[type[nn.Module]],
    *,
    use_orig_params: bool,
) -> None:
    """Replace inner modules that ``policy`` chooses with ``make(inner, **options)``.

    Modules of the classes ``single`` are chosen too, with options that exempt them from mixed
    precision. Without a policy only check the unit of ``module``.

    Raises:
        ConfigError: without ``use_orig_params``, if a unit has both frozen and trainable
            parameters, or several dtypes; with a policy, if there are units inside already, or two
            units would share a parameter.
    """
    inside = {name: one for name, one in module.named_modules() if unit_of(one) is not None}
    if policy is None:
        if not use_orig_params:
            apart = Ignored.of([*ignored.modules, *inside.values()], ignored.params)
            check_alike(module, [], apart)
        return
    if inside:
        raise ConfigError(
            "FullyShardedDataParallel(auto_wrap_policy=...): expected modules that do not already "
            f"have FSDP applied, found it on {', '.join([*inside][:5])}"
        )
    units = units_of(
        module,
        policy,
        ignored,
        single_classes=single,
        single_options={"mixed_precision": None, "_is_exempt": True},
    )
    check_tied_together(module, units, ignored)
    if not use_orig_params:
        check_alike(module, units, ignored)
    alone = {type(unit.module).__name__ for unit in units if isinstance(unit.module, tuple(single))}
    if alone:
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified: modules of class "
            f"{', '.join(sorted(alone))} compute in their own dtype. These modules will be wrapped "
            "as separate FSDP units; MixedPrecision(_module_classes_to_ignore=()) leaves them to "
            "the policy",
            stacklevel=4,
        )
    replace_children(module, units, lambda unit: make(unit.module, **unit.options))

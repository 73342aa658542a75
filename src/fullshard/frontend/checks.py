"""Checks of the arguments of ``fully_shard``, made before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from fullshard.comm import played_by
from fullshard.engine import MixedPrecisionPolicy, Offload, WirePolicy
from fullshard.errors import AlreadyShardedError, ArgumentTypeError, ConfigError, UnsupportedError
from fullshard.frontend.explain import name_of, names_of
from fullshard.frontend.ownership import PlacedParam, owner_of, place_of_twin, twin_of, unit_of
from fullshard.layout import LayoutStrategy, PerParameter
from fullshard.schedule import AfterForward


def as_modules(module: Any) -> list[nn.Module]:
    """Check the modules of a call; return those that are not inside another one."""
    given = list(module) if isinstance(module, (list, tuple)) else [module]
    if not given:
        raise ConfigError("fully_shard: got an empty list, expected at least one module")
    for one in given:
        if not isinstance(one, nn.Module):
            raise ArgumentTypeError(
                f"fully_shard: got {type(one).__name__}, expected an nn.Module, or a list or "
                "tuple of them"
            )
        _check_module(one)
    inner = {child for one in given for child in one.modules() if child is not one}
    return [one for one in dict.fromkeys(given) if one not in inner]


def has_forward(module: nn.Module) -> bool:
    """Return whether ``module`` or its class defines ``forward``."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _check_module(module: nn.Module) -> None:
    name = type(module).__name__
    if unit_of(module) is not None:
        raise AlreadyShardedError(
            f"fully_shard was applied to this {name} before; apply it once to each module"
        )
    # Other modules may have methods that users register as forward methods later.
    if not has_forward(module) and isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ConfigError(
            f"fully_shard: {name} has no forward of its own, so nothing would tell when to gather "
            "it; shard the modules in it, one by one or as a list"
        )
    for inner in module.modules():
        _check_kind(module, inner)


def _check_kind(module: nn.Module, inner: nn.Module) -> None:
    name = type(inner).__name__
    if type(inner) is nn.MultiheadAttention and unit_of(inner.out_proj) is not None:
        raise ConfigError(
            f"fully_shard: out_proj of {name} was given to fully_shard by itself, but {name} reads "
            "its weight without calling it; leave that call out"
        )
    where = "" if inner is module else f" (inside {type(module).__name__})"
    if isinstance(inner, torch.jit.ScriptModule):
        raise UnsupportedError(f"fully_shard: {name}{where} is a ScriptModule; shard eager modules")
    if isinstance(inner, DistributedDataParallel):
        raise UnsupportedError(
            f"fully_shard: {name}{where} synchronises its gradients already; shard the module "
            "inside of it instead"
        )
    if any(cls.__module__.startswith("torch.distributed.fsdp") for cls in type(inner).__mro__):
        raise UnsupportedError(f"fully_shard: {name}{where} is sharded by torch's FSDP already")


def checked_after_forward(value: Any, num_shards: int) -> tuple[AfterForward, int | None]:
    """Return ``reshard_after_forward`` for the scheduler, and the size of secondary groups."""
    if value is None:
        return AfterForward.AUTO, None
    if isinstance(value, bool):
        return AfterForward.RESHARD if value else AfterForward.KEEP, None
    if not isinstance(value, int):
        raise ConfigError(
            f"fully_shard(reshard_after_forward={value!r}): expected None, a bool or an int, got "
            f"{type(value).__name__}"
        )
    if value < 1 or num_shards % value:
        raise ConfigError(
            f"fully_shard(reshard_after_forward={value}): expected a number of ranks that divides "
            f"the {num_shards} over which parameters are sharded"
        )
    if value == num_shards:
        return AfterForward.RESHARD, None
    if value == 1:
        return AfterForward.KEEP, None
    return AfterForward.SECONDARY, value


def checked_policy(policy: Any) -> MixedPrecisionPolicy:
    """Check ``policy``, any object with the right fields, and return it in our class."""
    fields = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    missing = [name for name in fields if not hasattr(policy, name)]
    if missing:
        raise ArgumentTypeError(
            f"fully_shard(mp_policy=...): got {type(policy).__name__} without "
            f"{', '.join(missing)}; expected a MixedPrecisionPolicy"
        )
    for name in fields[:3]:
        dtype = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(
                f"MixedPrecisionPolicy({name}={dtype!r}): expected None or a floating-point "
                "torch.dtype"
            )
    override = getattr(policy, "param_dtype_override_fn", None)  # PyTorch has this field since 2.15
    if override is not None and not callable(override):
        raise ArgumentTypeError(
            f"MixedPrecisionPolicy(param_dtype_override_fn={override!r}): expected None or a "
            "function of a parameter"
        )
    return MixedPrecisionPolicy(
        *(getattr(policy, name) for name in fields),
        param_dtype_override_fn=cache(override) if override else None,  # planned more than once
    )


def checked_wire(wire: Any) -> WirePolicy:
    """Check ``wire``, and return it."""
    if not isinstance(wire, WirePolicy):
        raise ArgumentTypeError(
            f"wire={wire!r}: got {type(wire).__name__}, expected a fullshard.WirePolicy, such as "
            'WirePolicy(gather="int8", reduce="bf16")'
        )
    return wire


def checked_offload(policy: Any, device_type: str) -> Offload | None:
    """Return the offload options for shards on ``device_type``; None if nothing is offloaded.

    ``policy`` may be None, as in PyTorch: no offload.
    """
    if policy is None:
        return None
    known = {cls.__name__ for cls in type(policy).__mro__}
    if "CPUOffloadPolicy" in known:
        pinned = policy.pin_memory
        if not isinstance(pinned, bool):
            raise ConfigError(f"CPUOffloadPolicy(pin_memory={pinned!r}): expected a bool")
        return None if played_by(device_type) == "cpu" else Offload(pinned)
    if "OffloadPolicy" in known:
        return None
    raise ArgumentTypeError(
        f"fully_shard(offload_policy=...): got {policy!r}, expected None, OffloadPolicy() or "
        "CPUOffloadPolicy()"
    )


def checked_ignored(params: Any) -> set[nn.Parameter]:
    """Check the parameters to ignore, and return them as a set."""
    ignored = set(params or ())
    for param in ignored:
        if not isinstance(param, nn.Parameter):
            raise ArgumentTypeError(
                f"fully_shard(ignored_params=...): got {param!r} in it, expected nn.Parameters"
            )
    return ignored


def checked_layout(layout: Any) -> LayoutStrategy:
    """Check that ``layout`` is a layout, and return it."""
    if not callable(getattr(layout, "build", None)) or isinstance(layout, type):
        hint = f"{layout.__name__}()" if isinstance(layout, type) else "PerParameter() or Ragged()"
        raise ArgumentTypeError(
            f"fully_shard(layout={layout!r}): expected a layout, such as {hint}"
        )
    return cast("LayoutStrategy", layout)


_TOGETHER = (
    "give both modules to one call, as a list, or pass the parameter in ignored_params of that "
    "earlier call, so that this one shards it for both"
)
TOGETHER_IN_A_WRAPPER = (
    "leave both modules to one FullyShardedDataParallel around them, or pass the parameter in "
    "ignored_states of the inner one, so that the outer one shards it for both"
)


def check_not_sharded(params: Iterable[PlacedParam], *, what_to_do: str = _TOGETHER) -> None:
    """Refuse parameters that another unit owns, or that are tied to a parameter of another unit.

    ``what_to_do`` is the advice for tied ones.
    """
    for owned in params:
        param, name = owned.param, owned.name
        place, owner = next(
            ((place, owner) for place in owned.places if (owner := owner_of(place))), (None, None)
        )
        if place is not None and owner is not None:
            several = names_of(place)
            shared = f", or because its module stands in several places ({', '.join(several)})"
            raise AlreadyShardedError(
                f"fully_shard: parameter {name} belongs to unit {owner.shown_name} already, "
                f"because a parent was sharded before its child{shared if several[1:] else ''}; "
                "shard bottom-up, children first"
                + (", and a module of several places once" if several[1:] else "")
            )
        twin = twin_of(param)
        if twin is not None:
            there = place_of_twin(param)
            raise ConfigError(
                f"fully_shard: parameter {name_of(owned.places[0])} is tied to "
                f"{twin[0] if there is None else name_of(there)}, which was sharded before; tied "
                f"parameters must be in one unit: {what_to_do}"
            )


def check_params(params: Sequence[PlacedParam], layout: LayoutStrategy) -> None:
    """Refuse parameters that cannot be sharded."""
    check_not_sharded(params)
    for owned in params:
        param, name = owned.param, owned.name
        if is_lazy(param):
            raise UnsupportedError(
                f"fully_shard: parameter {name} is lazy and has no shape yet; run a forward "
                "before sharding"
            )
        if param.dim() == 0 and isinstance(layout, PerParameter):
            raise ConfigError(
                f"fully_shard: parameter {name} is a scalar, which has no dim to cut; give it "
                "shape (1,), pass it in ignored_params, or use layout=Ragged()"
            )
        if not param.is_contiguous():
            raise UnsupportedError(
                f"fully_shard: parameter {name} is not contiguous (shape {tuple(param.shape)}, "
                f"stride {param.stride()}); make it contiguous first"
            )

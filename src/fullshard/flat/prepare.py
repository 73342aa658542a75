"""Prepare a module for wrapping: check it, fill meta parameters, move and broadcast values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fullshard.comm import broadcast_together, is_dry, played_by
from fullshard.engine import Offload
from fullshard.errors import ArgumentTypeError, ConfigError, ProtocolError, UnsupportedError
from fullshard.frontend.ownership import unit_of
from fullshard.tensors import local_part


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


def check_module(module: nn.Module, ignored: set[nn.Module], *, shown_as_one: bool) -> None:
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
    if module in ignored:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will "
            f"result in all parameters being ignored: got {name} in ignored_modules",
            stacklevel=3,
        )
    if shown_as_one and any(hasattr(p, "_in_backward_optimizers") for p in module.parameters()):
        raise _Overlapped(
            f"FullyShardedDataParallel: parameters of {name} have optimizers that step in backward "
            "(_apply_optimizer_in_backward), which is only supported with use_orig_params=True"
        )


class _Overlapped(UnsupportedError, ProtocolError):
    """A ``RuntimeError`` as well, because PyTorch raises one here."""


def as_offload(cpu_offload: Any, device: torch.device) -> Offload | None:
    """Return the engine's form of the user's choice; None without offload, as always on the CPU.

    Raises:
        ArgumentTypeError: if ``cpu_offload`` is not a ``CPUOffload``.
    """
    if cpu_offload is None:
        return None
    if not isinstance(getattr(cpu_offload, "offload_params", None), bool):
        raise ArgumentTypeError(
            f"FullyShardedDataParallel(cpu_offload={cpu_offload!r}): expected a CPUOffload"
        )
    on_host = cpu_offload.offload_params and played_by(device.type) != "cpu"
    return Offload(pinned=True) if on_host else None


def ignored_params(
    root: nn.Module, modules: Any = None, states: Any = None
) -> tuple[set[nn.Parameter], set[nn.Module]]:
    """Return the parameters to ignore, and the modules to ignore with everything in them.

    Raises:
        ConfigError, ArgumentTypeError: if both arguments are given, or the values do not fit.
    """
    if modules is not None and states is not None:
        raise ConfigError(
            "FullyShardedDataParallel: Cannot pass both ignored_modules and ignored_states; put "
            "the modules into ignored_states"
        )
    given = _listed(modules if states is None else states)
    if states is not None and not _all_alike(given):
        raise ConfigError(
            "FullyShardedDataParallel(ignored_states=...): expected all nn.Parameter or all "
            f"nn.Module list elements, got {', '.join(sorted({type(g).__name__ for g in given}))}"
        )
    if states is not None and given and isinstance(given[0], nn.Parameter):
        return set(given), set()
    found: set[nn.Module] = set()
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
        found.update(module.modules())
    return {p for module in found for p in module.parameters(recurse=False)}, found


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    if not isinstance(given, Iterable):
        raise ArgumentTypeError(
            "FullyShardedDataParallel: ignored modules or states must be an iterable, got "
            f"{given!r}"
        )
    return list(given)


def _all_alike(given: list[Any]) -> bool:
    return any(all(isinstance(one, kind) for one in given) for kind in (nn.Parameter, nn.Module))


def _own(module: nn.Module, ignored: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield ``module`` and the modules in it, without inner units and ignored modules."""
    seen: set[nn.Module] = set()

    def visit(inner: nn.Module) -> Iterator[nn.Module]:
        if inner in seen or inner in ignored or unit_of(inner) is not None:
            return
        seen.add(inner)
        yield inner
        for child in inner.children():
            yield from visit(child)

    return visit(module)


def _states(module: nn.Module, ignored: set[nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's direct parameters and buffers, except ignored parameters."""
    named = chain(
        module.named_parameters(recurse=False, remove_duplicate=False),
        module.named_buffers(recurse=False, remove_duplicate=False),
    )
    return ((name, tensor) for name, tensor in named if tensor not in ignored)


def materialize(
    module: nn.Module,
    ignored: set[nn.Parameter],
    ignored_modules: set[nn.Module],
    *,
    init: Callable[[nn.Module], None] | None,
    device: torch.device,
) -> None:
    """Give memory and values to all modules if any parameter or buffer is on the meta device.

    A dry run needs neither.
    Call ``init`` on every module; else ``to_empty`` and ``reset_parameters`` on owners of tensors.

    Raises:
        ArgumentTypeError: if ``init`` is not callable.
        ConfigError: there is no ``init``, and a module that needs it has no ``reset_parameters``;
            nothing was changed.
    """
    if init is not None and not callable(init):
        raise ArgumentTypeError(
            f"FullyShardedDataParallel(param_init_fn=...): expected it to be callable, got {init!r}"
        )
    own = list(_own(module, ignored_modules))
    if is_dry() or not any(t.is_meta for m in own for _, t in _states(m, ignored)):
        return
    owners = [one for one in own if any(True for _ in _states(one, ignored))]
    without = {type(one).__name__ for one in owners if not hasattr(one, "reset_parameters")}
    if init is None and without:
        raise ConfigError(
            f"FullyShardedDataParallel: the module has parameters on the meta device, and "
            f"{', '.join(sorted(without))} has no reset_parameters() to give them values: pass "
            "param_init_fn, or use fully_shard() and load_weights()"
        )
    with torch.no_grad():
        for inner in owners if init is None else own:
            if init is not None:
                init(inner)
            else:
                inner.to_empty(device=device, recurse=False)
                inner.reset_parameters()  # type: ignore[operator]


def move(
    module: nn.Module,
    ignored: set[nn.Parameter],
    ignored_modules: set[nn.Module],
    device: torch.device,
) -> None:
    """Move parameters and buffers to ``device``; meta tensors and lazy parameters stay."""
    for inner in _own(module, ignored_modules):
        for name, tensor in _states(inner, ignored):
            if tensor.device == device or tensor.is_meta:
                continue
            if isinstance(tensor, nn.Parameter):
                if not is_lazy(tensor):
                    tensor.data = tensor.data.to(device)
            else:
                inner._buffers[name] = tensor.to(device)


def straighten(
    module: nn.Module, ignored: set[nn.Parameter], ignored_modules: set[nn.Module]
) -> None:
    """Make contiguous the parameters with another dense memory format, such as channels_last.

    Shards, gradients and state dicts have a single order of elements. Values do not change, and
    kernels that prefer the other format convert the weights themselves.
    """
    turned = []
    for inner in _own(module, ignored_modules):
        for name, tensor in _states(inner, ignored):
            if isinstance(tensor, nn.Parameter) and not is_lazy(tensor) and _is_turned(tensor):
                tensor.data = tensor.data.contiguous()
                turned.append(f"{type(inner).__name__}.{name}")
    if turned:
        warnings.warn(
            f"FullyShardedDataParallel: parameters with another memory format than the contiguous "
            f"one are made contiguous: {', '.join(turned)}",
            stacklevel=3,
        )


def _is_turned(param: nn.Parameter) -> bool:
    # ``empty_like`` keeps strides only if they are dense.
    return not param.is_contiguous() and torch.empty_like(param).stride() == param.stride()


def synchronize(
    module: nn.Module,
    ignored: set[nn.Parameter],
    ignored_modules: set[nn.Module],
    groups: Iterable[dist.ProcessGroup],
) -> None:
    """Overwrite parameters and buffers with those of the first rank, group by group."""
    tensors = {
        id(tensor): local_part(tensor.detach())
        for inner in _own(module, ignored_modules)
        for _, tensor in _states(inner, ignored)
    }
    for group in groups:
        broadcast_together(list(tensors.values()), group)

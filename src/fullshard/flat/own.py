"""The parameters and buffers that one wrapper prepares: memory, device, memory format, values."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from fullshard.comm import broadcast_together, is_dry
from fullshard.errors import ArgumentTypeError, ConfigError
from fullshard.frontend.ownership import set_buffer, unit_of
from fullshard.tensors import local_part
from fullshard.wrap.units import Ignored, Without


def own_modules(module: nn.Module, ignored: Ignored = Ignored()) -> Iterator[nn.Module]:
    """Yield ``module`` and the modules in it, without inner units and ignored modules."""
    memo = Without(lambda one: one in ignored.modules or unit_of(one) is not None)
    return (inner for _, inner in module.named_modules(memo))


class OwnTensors:
    """The parameters and buffers in a module that are in no inner unit and are not ignored."""

    def __init__(self, module: nn.Module, ignored: Ignored) -> None:
        self._module = module
        self._ignored = ignored

    @property
    def _modules(self) -> list[nn.Module]:
        return list(own_modules(self._module, self._ignored))

    def _of(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield a module's direct parameters and buffers, except ignored parameters."""
        named = chain(
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
        )
        return ((name, tensor) for name, tensor in named if tensor not in self._ignored.params)

    def _all(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        return ((m, name, tensor) for m in self._modules for name, tensor in self._of(m))

    def materialize(self, init: Callable[[nn.Module], None] | None, device: torch.device) -> None:
        """Give memory and values to all modules if any parameter or buffer is on the meta device.

        Call ``init`` on every module; else ``to_empty`` and ``reset_parameters`` on owners of
        tensors. A dry run needs neither.

        Raises:
            ArgumentTypeError: if ``init`` is not callable.
            ConfigError: there is no ``init``, and a module that needs it has no
                ``reset_parameters``; nothing was changed.
        """
        if init is not None and not callable(init):
            raise ArgumentTypeError(
                "FullyShardedDataParallel(param_init_fn=...): expected it to be callable, got "
                f"{init!r}"
            )
        if is_dry() or not any(tensor.is_meta for _, _, tensor in self._all()):
            return
        modules = self._modules
        owners = [one for one in modules if any(True for _ in self._of(one))]
        without = {type(one).__name__ for one in owners if not hasattr(one, "reset_parameters")}
        if init is None and without:
            raise ConfigError(
                f"FullyShardedDataParallel: the module has parameters on the meta device, and "
                f"{', '.join(sorted(without))} has no reset_parameters() to give them values: pass "
                "param_init_fn, or use fully_shard() and load_weights()"
            )
        tied: dict[int, tuple[Tensor, list[tuple[nn.Module, str]]]] = {}
        for holder, name, tensor in self._all():
            tied.setdefault(id(tensor), (tensor, []))[1].append((holder, name))
        with torch.no_grad():
            for inner in owners if init is None else modules:
                if init is not None:
                    init(inner)
                else:
                    inner.to_empty(device=device, recurse=False)
                    inner.reset_parameters()  # type: ignore[operator]
        # Each place of a tied parameter has a new one now: the last, as its values were set last.
        for tensor, (*others, (last, its)) in tied.values():
            for holder, name in others if isinstance(tensor, nn.Parameter) else ():
                setattr(holder, name, last._parameters[its])

    def move(self, device: torch.device) -> None:
        """Move parameters and buffers to ``device``; meta tensors and lazy parameters stay."""
        for module, name, tensor in self._all():
            if tensor.device == device or tensor.is_meta:
                continue
            if isinstance(tensor, nn.Parameter):
                if not is_lazy(tensor):
                    tensor.data = tensor.data.to(device)
            else:
                set_buffer(module, name, tensor.to(device))

    def straighten(self) -> None:
        """Make contiguous the parameters with another dense memory format, such as channels_last.

        Shards, gradients and state dicts have a single order of elements. Values do not change,
        and kernels that prefer the other format convert the weights themselves.
        """
        turned = []
        for module, name, tensor in self._all():
            if isinstance(tensor, nn.Parameter) and not is_lazy(tensor) and _is_turned(tensor):
                tensor.data = tensor.data.contiguous()
                turned.append(f"{type(module).__name__}.{name}")
        if turned:
            warnings.warn(
                "FullyShardedDataParallel: parameters with another memory format than the "
                f"contiguous one are made contiguous: {', '.join(turned)}",
                stacklevel=4,
            )

    def synchronize(self, mesh: DeviceMesh) -> None:
        """Overwrite all values with those of the first rank, along one dim of the mesh each."""
        tensors = {id(tensor): local_part(tensor.detach()) for _, _, tensor in self._all()}
        for dim in range(mesh.ndim):
            broadcast_together(list(tensors.values()), mesh.get_group(dim))


def _is_turned(param: nn.Parameter) -> bool:
    # ``empty_like`` keeps strides only if they are dense.
    return not param.is_contiguous() and torch.empty_like(param).stride() == param.stride()

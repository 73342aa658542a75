"""``ShardedGradScaler``: loss scaling for sharded gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from fullshard._torch import dtensor as _dtensor
from fullshard.comm import all_reduce
from fullshard.errors import (
    ArgumentTypeError,
    AssertedConfigError,
    AssertedProtocolError,
    ProtocolError,
)
from fullshard.optim.clip import coalesced
from fullshard.tensors import local_part


class ShardedGradScaler(GradScaler):
    """A ``torch.amp.GradScaler`` whose ranks skip a step together.

    If the gradients of one rank hold an infinity or NaN, all ranks of the process group skip the
    step, even ranks without gradients. This takes one all-reduce per ``unscale_`` or ``step``, so
    all ranks must make the same calls in the same order. Gradients may be any mix of plain tensors,
    DTensors and RaggedTensors, on any meshes and devices, in fp16 or sparse too.

    The usage is that of ``torch.amp.GradScaler``, with any optimizer::

        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    """

    def __init__(  # arguments may be positional, in PyTorch's order
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Create a scaler.

        Args:
            device: type of the devices; without CUDA, "cuda" means the CPU.
            init_scale: the initial scale.
            backoff_factor: factor for the scale after a skipped step.
            growth_factor: factor for the scale after ``growth_interval`` steps in a row.
            growth_interval: number of steps in a row before the scale grows.
            enabled: if False, losses are not scaled and no step is skipped.
            process_group: the ranks that skip together; it must include all ranks over which
                parameters are sharded, replicated or parallelized otherwise. None means all ranks,
                or only this process if there is no default process group.

        Raises:
            AssertedConfigError: ``growth_factor`` is at most 1, or ``backoff_factor`` at least 1.
        """
        if enabled and not (growth_factor > 1.0 and backoff_factor < 1.0):
            raise AssertedConfigError(
                f"ShardedGradScaler(growth_factor={growth_factor}, backoff_factor="
                f"{backoff_factor}): expected one above 1 and one below"
            )
        super().__init__(
            "cpu" if device == "cuda" and not torch.cuda.is_available() else device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self.process_group = process_group

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs`` times the scale, each tensor in its own dtype.

        Args:
            outputs: a tensor or a possibly nested iterable of tensors; lists and tuples keep their
                type, other iterables become iterators.

        Raises:
            ArgumentTypeError: ``outputs`` holds something that is neither a tensor nor iterable.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return super().scale(outputs).to(outputs.dtype)
        if not isinstance(outputs, Iterable) or isinstance(outputs, (str, bytes, Mapping)):
            raise ArgumentTypeError(
                f"ShardedGradScaler.scale: got {type(outputs).__name__}, expected a tensor or an "
                "iterable of tensors"
            )
        scaled = map(self.scale, outputs)
        if isinstance(outputs, (list, tuple)):
            cls = type(outputs)
            return getattr(cls, "_make", cls)(scaled)  # a named tuple is not built from an iterable
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of ``optimizer`` by the scale, and agree whether all are finite.

        Raises:
            ProtocolError: called twice without ``update`` in between, or after ``step``.
            AssertedProtocolError: ``scale`` has not been called yet.
        """
        if self._enabled:
            self._check_scaled("unscale_")
            stage = self._stage_of(optimizer)
            if stage is not OptState.READY:
                before = "unscale_" if stage is OptState.UNSCALED else "step"
                raise ProtocolError(
                    f"ShardedGradScaler.unscale_: called after {before}() for this optimizer; "
                    "call update() in between"
                )
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call ``optimizer.step(*args, **kwargs)`` on unscaled gradients if all are finite.

        Raises:
            ProtocolError: called twice without ``update`` in between, or with a closure.
            AssertedProtocolError: ``scale`` has not been called yet.
        """
        if self._enabled:
            self._check_scaled("step")
            if "closure" in kwargs or any(map(callable, args)):
                raise ProtocolError(
                    "ShardedGradScaler.step: got a closure, which would compute gradients that "
                    "nobody unscales; compute them before"
                )
            if self._stage_of(optimizer) is OptState.STEPPED:
                raise ProtocolError(
                    "ShardedGradScaler.step: called twice for this optimizer; call update() in "
                    "between"
                )
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Grow the scale or back it off; call this at the end of an iteration.

        Args:
            new_scale: a scale to set instead.

        Raises:
            AssertedProtocolError: no gradients were checked since the last ``update``.
            AssertedConfigError: ``new_scale`` is a tensor of several elements.
        """
        if self._enabled:
            self._check_scaled("update")
            states = self._per_optimizer_states.values()
            if new_scale is None and not any(state["found_inf_per_device"] for state in states):
                raise AssertedProtocolError(
                    "ShardedGradScaler.update: no gradients were looked at since the last "
                    "update(); call step() or unscale_() first"
                )
            if isinstance(new_scale, Tensor):
                if new_scale.numel() != 1:
                    raise AssertedConfigError(
                        f"ShardedGradScaler.update: new_scale has shape {tuple(new_scale.shape)}, "
                        "expected one element"
                    )
                new_scale = new_scale.detach().to(self._device).reshape(())
            elif new_scale is not None:
                new_scale = float(new_scale)
        super().update(new_scale)

    def _check_scaled(self, name: str) -> None:
        if self._scale is None:
            raise AssertedProtocolError(
                f"ShardedGradScaler.{name}: nothing was scaled yet; call scale(loss).backward() "
                "first"
            )

    def _stage_of(self, optimizer: Optimizer) -> OptState:
        state = self._per_optimizer_states.get(id(optimizer))
        return OptState.READY if state is None else state["stage"]

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, Tensor]:
        """Unscale and check the gradients; GradScaler also calls this for fused optimizers.

        The result has exactly one entry on every rank, also on a rank without gradients:
        ``found_inf``, on the device of the scale.
        """
        with torch.no_grad():
            for (device, _), grads in _by_kind(optimizer).items():
                found = found_inf.to(device)  # no copy if already there
                torch._amp_foreach_non_finite_check_and_unscale_(
                    coalesced(grads), found, inv_scale.to(device)
                )
                found_inf.copy_(found)
            ranks = dist.group.WORLD if self.process_group is None else self.process_group
            if ranks is not None:
                all_reduce(found_inf, ranks, is_max=True)
        return {found_inf.device: found_inf}


def _by_kind(optimizer: Optimizer) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Return this rank's gradient memory by device and dtype: each entry is work for one kernel."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    found = defaultdict(list)
    for values in map(_values, params):
        if values is not None and values.numel():
            found[values.device, values.dtype].append(values)
    return found


def _values(param: Tensor) -> Tensor | None:
    """Return the memory of this rank's part of the gradient, viewed as real numbers."""
    grad = param.grad
    if grad is None:
        return None
    if grad.is_sparse:
        if not grad.is_coalesced():
            # Sum duplicate indices in fp32 at least: an overflow in the sum could go unnoticed.
            wide = torch.promote_types(grad.dtype, torch.float32)
            param.grad = grad = grad.to(wide).coalesce().to(grad.dtype)
        return grad._values()
    local = _dtensor.waited(local_part(grad))
    return torch.view_as_real(local) if local.is_complex() else local

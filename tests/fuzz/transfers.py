"""What steps do to parameters and state dicts of both models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fullshard import checkpoint
from tests.fuzz.compare import compare_tensors

__all__ = ["change", "compare_and_change", "through_full", "through_sharded"]

Pair = tuple[nn.Module, torch.optim.Optimizer]


def compare_and_change(
    name: str, param: nn.Parameter, expected: nn.Parameter, with_grads: bool
) -> None:
    """Compare what is lent, then change it."""
    compare_tensors(f"lent {name}", param, expected)
    if with_grads:
        compare_tensors(f"lent gradient of {name}", param.grad, expected.grad)
    change(param, with_grads)


@torch.no_grad()
def change(param: nn.Parameter, with_grads: bool) -> None:
    """Change the values, and perhaps the gradient, in place."""
    param.mul_(-0.8)
    if with_grads and param.grad is not None:
        param.grad.mul_(0.5)


def through_full(old: Pair, new: Pair, *, optimizer: bool, cpu: bool, broadcast: bool) -> None:
    """Whole tensors."""
    how: dict[str, Any] = {"rank0_only": broadcast, "cpu": cpu}
    state = checkpoint.full_state_dict(old[0], **how)
    checkpoint.load_full_state_dict(new[0], state, broadcast_from_rank0=broadcast)
    if optimizer:
        state = checkpoint.full_optim_state_dict(*old, **how)
        checkpoint.load_full_optim_state_dict(*new, state, broadcast_from_rank0=broadcast)


def through_sharded(old: Pair, new: Pair, *, optimizer: bool) -> None:
    """What each rank holds."""
    checkpoint.load_sharded_state_dict(new[0], checkpoint.sharded_state_dict(old[0]))
    if optimizer:
        state = checkpoint.sharded_optim_state_dict(*old)
        checkpoint.load_sharded_optim_state_dict(*new, state)

"""Changes of parameters, and transfers of state between models."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard import checkpoint
from fullshard.errors import ConfigError
from tests.fuzz.compare import Differs, compare_tensors

Pair = tuple[nn.Module, torch.optim.Optimizer]


def compare_and_change(
    name: str, param: nn.Parameter, expected: nn.Parameter, with_grads: bool
) -> None:
    """Compare a parameter in ``unshard_params`` with the reference, then change it."""
    compare_tensors(f"lent {name}", param, expected)
    if with_grads:
        compare_tensors(f"lent gradient of {name}", param.grad, expected.grad)
    change(param, with_grads)


@torch.no_grad()
def change(param: nn.Parameter, with_grads: bool) -> None:
    """Change a parameter in place, and its gradient too if ``with_grads``."""
    param.mul_(-0.8)
    if with_grads and param.grad is not None:
        param.grad.mul_(0.5)


def through_full(old: Pair, new: Pair, *, optimizer: bool, cpu: bool, broadcast: bool) -> None:
    """Transfer the state through full state dicts."""
    how: dict[str, Any] = {"rank0_only": broadcast, "cpu": cpu}
    state = checkpoint.full_state_dict(old[0], **how)
    checkpoint.load_full_state_dict(new[0], state, broadcast_from_rank0=broadcast)
    if optimizer:
        state = checkpoint.full_optim_state_dict(*old, **how)
        checkpoint.load_full_optim_state_dict(*new, state, broadcast_from_rank0=broadcast)


def through_sharded(old: Pair, new: Pair, *, optimizer: bool) -> None:
    """Transfer the state through sharded state dicts."""
    checkpoint.load_sharded_state_dict(new[0], checkpoint.sharded_state_dict(old[0]))
    if optimizer:
        state = checkpoint.sharded_optim_state_dict(*old)
        checkpoint.load_sharded_optim_state_dict(*new, state)


def through_files(old: Pair, new: Pair, *, mode: str, differing: str, optimizer: bool) -> bool:
    """Save a model with a plain module, and load both; return False if the save was refused.

    Args:
        old: the model and optimizer to save.
        new: the model and optimizer to load into.
        mode: of the save.
        differing: the tensor of the plain module that differs on the last rank, or "".
        optimizer: whether the optimizer's state is saved too.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    beside, loaded = _Plain(1.0), _Plain(0.0)
    with torch.no_grad():
        if differing and rank == size - 1:
            getattr(beside, differing).view(-1)[-1] += 1e-12
    folders = [tempfile.mkdtemp(prefix="fullshard-fuzz-") if rank == 0 else None]
    dist.broadcast_object_list(folders)
    root = Path(str(folders[0]))
    try:
        said = ""
        pair = _both(old[0], beside), old[1] if optimizer else None
        try:
            checkpoint.save(root / "step-1", *pair, step=1, mode=mode).wait()
        except ConfigError as error:
            said = str(error)
        is_refused = differing in ("weight", "bias") and size > 1
        if is_refused:
            expected = f"model/beside.{differing} on ranks 0 and {size - 1}. If they are"
            if expected not in said or checkpoint.latest(root) is not None:
                raise Differs(f"a save of replicas that differ: {said!r}")
            return False
        if said:
            raise Differs(f"the save was refused: {said}")
        checkpoint.load(root / "step-1", _both(new[0], loaded), new[1] if optimizer else None)
        for name, value in beside.state_dict().items():
            if differing != name:
                compare_tensors(f"beside {name}", loaded.state_dict()[name], value)
        return True
    finally:
        dist.barrier()
        if rank == 0:
            shutil.rmtree(root)


class _Plain(nn.Module):
    """An unsharded module; its buffer may differ by rank, its parameters may not."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3, 5), value, dtype=torch.float64))
        self.bias = nn.Parameter(torch.full((), value, dtype=torch.float64), requires_grad=False)
        self.register_buffer("seen", torch.full((2,), value, dtype=torch.float64))


def _both(model: nn.Module, beside: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"twin": model, "beside": beside})

"""Optimizers that need full matrices, or whose state changes form at each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard.layout.region import full_region
from fullshard.optim.owned.assign import Ranks, placement_of
from fullshard.tensors import local_part, shown_like


class Whitening(Optimizer):
    """A small Shampoo: factors for rows and columns, and a Python number as count."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                own, grad = (
                    self.state[param],
                    param.grad.reshape(len(param) if param.dim() else 1, -1),
                )
                if not own:
                    own["count"] = 0
                    own["moment"] = torch.zeros_like(param)
                    own["left"] = torch.eye(grad.shape[0], dtype=grad.dtype)
                    own["right"] = torch.eye(grad.shape[1], dtype=grad.dtype)
                own["count"] += 1
                own["left"] += grad @ grad.T
                own["right"] += grad.T @ grad
                update = torch.linalg.solve(own["left"], grad)
                update = torch.linalg.solve(own["right"], update, left=False)
                own["moment"].mul_(group["momentum"]).add_(update.view_as(param))
                param.mul_(1 - 0.01 * group["lr"])
                param.add_(own["moment"], alpha=-group["lr"] / own["count"] ** 0.5)


CLASSES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "muon": (torch.optim.Muon, {"lr": 0.05}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "whitening": (Whitening, {}),
}


def give(model: nn.Module, grads: dict[str, Tensor]) -> None:
    """Set gradients that are equal to the unsharded model's to the bit."""
    for name, param in model.named_parameters():
        whole = grads.get(name.replace("_fsdp_wrapped_module.", ""))
        param.grad = None if whole is None else part(param, whole)


def part(param: Tensor, whole: Tensor) -> Tensor:
    placed, mesh = placement_of(param, "") or (None, None)
    if placed is None:
        return whole.clone()
    ranks = Ranks(mesh)
    local = torch.empty(local_part(param).shape, dtype=whole.dtype)
    region = ranks.region(placed, ranks.own)
    for one in region.overlaps(full_region(placed.shape)):
        mine = local.view(-1).as_strided(one.sizes, one.strides, one.offset)
        mine.copy_(whole.contiguous().as_strided(one.sizes, one.other_strides, one.other_offset))
    return shown_like(param, local)


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n.replace("_fsdp_wrapped_module.", ""), p) for n, p in model.named_parameters()]


def same_params(model: nn.Module, net: nn.Module) -> None:
    for (name, param), (_, expected) in zip(named(model), net.named_parameters(), strict=True):
        assert torch.equal(local_part(param), local_part(part(param, expected.detach()))), name


class Restless(Optimizer):
    """An optimizer with new state each step: tensors, a kept gradient, numbers, None, counts."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                own = self.state[param]
                own["mean"] = own.get("mean", 0) + param.grad + 0.1 * own.get("last_grad", 0)
                own["last_grad"] = param.grad
                own["count"] = own.get("count", 0) + 1
                own["rate"] = torch.tensor(1.0 / own["count"])
                own["nothing"] = None
                if own["count"] == 3:
                    own["late"] = param * 2
                if own["count"] == 4:
                    del own["late"]
                param.sub_(own["mean"] * own["rate"], alpha=group["lr"])
                group["calls"] = max(group["calls"], own["count"])

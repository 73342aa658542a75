"""The optimizers of a dry run: AdamW, and one in place of ``Muon``, on local tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.optim import Muon
from fullshard.optim.muon import MUON, choose
from fullshard.tensors import local_part


class LocalOptimizer:
    """PyTorch's optimizers on the local tensors of parameters, with the same memory as on DTensors.

    Given lists of DTensors, PyTorch's dispatch takes time quadratic in their number.

    Args:
        parts: parameters, each list with a function that makes its optimizer from groups.
    """

    def __init__(
        self,
        *parts: tuple[Iterable[nn.Parameter], Callable[..., torch.optim.Optimizer]],
    ) -> None:
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._inner: list[torch.optim.Optimizer] = []
        for params, make in parts:
            pairs = [(p, nn.Parameter(local_part(p.detach()), p.requires_grad)) for p in params]
            self._pairs += pairs
            # A group may be empty, a list of parameters may not.
            self._inner.append(make([{"params": [local for _, local in pairs]}]))

    @property
    def state(self) -> dict[Tensor, Any]:
        """The state of the local tensors."""
        return {tensor: found for one in self._inner for tensor, found in one.state.items()}

    def step(self) -> None:
        """Step the local tensors with the gradients of the parameters."""
        for param, local in self._pairs:
            local.grad = None if param.grad is None else local_part(param.grad)
        for one in self._inner:
            one.step()
            one.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradients of the parameters."""
        for param, _ in self._pairs:
            param.grad = None


def adamw(params: Iterable[nn.Parameter], *, foreach: bool) -> LocalOptimizer:
    """Return the default optimizer of a dry run."""
    return LocalOptimizer((params, partial(torch.optim.AdamW, foreach=foreach)))


def is_muon(optimizer: Any) -> bool:
    """Return whether ``optimizer`` is ``Muon``, or ``functools.partial`` of it."""
    return (optimizer.func if isinstance(optimizer, partial) else optimizer) is Muon


def muon(model: nn.Module, optimizer: Any, *, foreach: bool) -> LocalOptimizer:
    """Return an optimizer with the average memory of ``Muon``: SGD with momentum for matrices.

    In training, each owner has the momenta of whole matrices, some owners a little more than
    others. The temporary memory of a step is not planned: whole matrices in bf16, and the buffers
    of the exchange. The rule in ``optimizer``, see ``is_muon``, divides the parameters.
    """
    rule = optimizer.keywords.get("rule") if isinstance(optimizer, partial) else None
    chosen = [(p, one.algorithm) for p, one in choose(model, rule) if p.requires_grad]
    return LocalOptimizer(
        ((p for p, algorithm in chosen if algorithm == MUON),
         partial(torch.optim.SGD, momentum=0.95, foreach=foreach)),
        ((p for p, algorithm in chosen if algorithm != MUON),
         partial(torch.optim.AdamW, foreach=foreach)),
    )  # fmt: skip

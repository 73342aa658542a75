"""The default optimizer of a dry run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.tensors import local_part


class PlainAdamW:
    """AdamW on the local tensors of parameters, with the same memory as AdamW on DTensors.

    Given lists of DTensors, PyTorch's dispatch takes time quadratic in their number.
    """

    def __init__(self, params: Iterable[nn.Parameter], *, foreach: bool) -> None:
        self._params = list(params)
        self._parts = [
            nn.Parameter(local_part(param.detach()), param.requires_grad) for param in self._params
        ]
        groups = [{"params": self._parts}]  # a group may be empty, a list of parameters may not
        self._inner = torch.optim.AdamW(groups, foreach=foreach)

    @property
    def state(self) -> dict[Tensor, Any]:
        """The state of the local tensors."""
        return self._inner.state

    def step(self) -> None:
        """Step the local tensors with the gradients of the parameters."""
        for param, part in zip(self._params, self._parts, strict=True):
            part.grad = None if param.grad is None else local_part(param.grad)
        self._inner.step()
        self._inner.zero_grad()

    def zero_grad(self) -> None:
        """Forget the gradients of the parameters."""
        for param in self._params:
            param.grad = None

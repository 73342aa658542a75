"""``Muon`` in a dry run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.optim import Muon
from fullshard.optim.muon import MUON, choose
from fullshard.plan.adamw import PlainAdamW
from fullshard.tensors import local_part


def is_muon(optimizer: Any) -> bool:
    """Return whether ``optimizer`` is ``Muon``, or ``functools.partial`` of it."""
    return (optimizer.func if isinstance(optimizer, partial) else optimizer) is Muon


class PlainMuon:
    """The average memory of ``Muon``: one momentum for each local element of a matrix.

    In training, each owner has the momenta of whole matrices, some owners a little more than
    others. The temporary memory of a step is not planned: whole matrices in bf16, and the buffers
    of the exchange.
    """

    def __init__(self, model: nn.Module, optimizer: Any, *, foreach: bool) -> None:
        """Divide the parameters of ``model`` by the rule in ``optimizer``, see ``is_muon``."""
        rule = optimizer.keywords.get("rule") if isinstance(optimizer, partial) else None
        chosen = [(p, one.algorithm) for p, one in choose(model, rule) if p.requires_grad]
        self._matrices = [param for param, algorithm in chosen if algorithm == MUON]
        self._others = PlainAdamW((p for p, one in chosen if one != MUON), foreach=foreach)
        self._parts = [nn.Parameter(local_part(param.detach())) for param in self._matrices]
        groups = [{"params": self._parts}]
        self._inner = torch.optim.SGD(groups, momentum=0.95, foreach=foreach)

    @property
    def state(self) -> Mapping[Tensor, Any]:
        """The state of the local tensors."""
        return {**self._inner.state, **self._others.state}

    def step(self) -> None:
        """Step the local tensors with the gradients of the parameters."""
        for param, part in zip(self._matrices, self._parts, strict=True):
            part.grad = None if param.grad is None else local_part(param.grad)
        self._inner.step()
        self._inner.zero_grad()
        self._others.step()

    def zero_grad(self) -> None:
        """Forget the gradients of the parameters."""
        for param in self._matrices:
            param.grad = None
        self._others.zero_grad()

"""The unsharded model of a case, trained on the batches of all ranks together."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.case import Case, Sharding
from tests.fuzz.draw import owners_of
from tests.fuzz.modules import VOCAB, Block, Planned, blocks_of, build, invoke
from tests.fuzz.sharding import make_optimizer

ROWS = 2
"""Number of rows in each rank's batch."""

Batch = tuple[Tensor, Tensor, Tensor]
"""Input, token ids, and the weights of the outputs in the loss."""


def batch_of(case: Case, number: int) -> Batch:
    """Return the batches of all ranks as one."""
    generator = torch.Generator().manual_seed(7919 * case.seed + number)
    shape = (ROWS * case.world, case.model.width)
    x = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
    ids = torch.randint(0, VOCAB, shape[:1], generator=generator)
    weights = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    if any(node.checkpoint == "reentrant" for node in case.model.nodes):
        x.requires_grad_()  # a reentrant checkpoint gives no gradients otherwise
    return x, ids, weights


def loss_of(output: Tensor, weights: Tensor) -> Tensor:
    """Return a mean over rows, so that the mean over ranks is that of the whole batch."""
    return (torch.tanh(output) * weights).sum(1).mean()


def forward_of(model: nn.Module, batches: list[Batch]) -> tuple[list[Tensor], Tensor]:
    """Run a forward for each batch; return the outputs, and the sum of their losses."""
    outputs = [invoke(model, x, ids) for x, ids, _ in batches]
    losses = [loss_of(o, w) for o, (_, _, w) in zip(outputs, batches, strict=True)]
    return outputs, torch.stack(losses).sum()


def backward_of(total: Tensor, backwards: int) -> None:
    """Run backward ``backwards`` times, unless everything is frozen."""
    for number in range(backwards if total.requires_grad else 0):
        total.backward(retain_graph=number + 1 < backwards)


class Reference:
    """The unsharded model, its optimizer, and the gradients that the sharded model must have."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = build(case.model, seed=case.seed)
        self.optimizer = self.new_optimizer()
        self.pending: dict[nn.Parameter, Tensor] = {}
        """Gradients that wait for a later backward to reduce them."""
        self.owner: dict[nn.Parameter, int] = {}
        """The number of the unit that owns each parameter."""
        self.sync: list[bool] = []
        self.all_reduce: list[bool] = []
        self.sharded_as(case.sharding)

    def new_optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer without state, with the learning rates of the case."""
        return make_optimizer(self.model.named_parameters(), self.case.optimizer, plain=True)

    def sharded_as(self, sharding: Sharding) -> None:
        """Adopt the units of a new sharded model, and forget all gradients."""
        owners, blocks = owners_of(self.case.model, sharding.units), blocks_of(self.model)
        self.owner = {}
        for unit in range(len(sharding.units)):
            for number, block in blocks.items():
                if owners[number] == unit:
                    for name, param in block.named_parameters():
                        if not name.startswith("inner."):
                            self.owner.setdefault(param, unit)
        self.sync = [True] * len(sharding.units)
        self.all_reduce = [True] * len(sharding.units)
        self.has_replicas = len(sharding.mesh) == 2 and sharding.mesh[0] > 1
        self.is_flat = sharding.face == "flat"
        self.forget_gradients()

    def train(self, batches: list[Batch], *, backwards: int) -> list[Tensor]:
        """Run forwards, then backward of the sum of their losses; return the outputs."""
        outputs, total = forward_of(self.model, batches)
        with self.aside() if total.requires_grad else nullcontext():
            backward_of(total, backwards)
        return outputs

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Add gradients of the block to ``grad`` or ``pending``; if a module raises, drop them."""
        params = list(self.model.parameters())
        before = [param.grad for param in params]
        for param in params:
            param.grad = None
        try:
            yield
        except Planned:
            for param, grad in zip(params, before, strict=True):
                param.grad = grad
            raise
        for param, grad in zip(params, before, strict=True):
            fresh, param.grad = param.grad, grad
            self._add(param, fresh)
        if self.is_flat:
            self._fill()

    def _add(self, param: nn.Parameter, fresh: Tensor | None) -> None:
        unit = self.owner[param]
        waiting = self.pending.pop(param, None)
        total = _sum(waiting, fresh)
        if total is None:
            return
        if self.sync[unit] and (self.all_reduce[unit] or not self.has_replicas):
            param.grad = _sum(param.grad, total)
        else:
            self.pending[param] = total

    def _fill(self) -> None:
        """Fill missing gradients with zeros where the flat parameter has a gradient."""
        have = {self.owner[p] for p in self.owner if p.grad is not None}
        for param, unit in self.owner.items():
            if unit in have and param.grad is None and param.requires_grad:
                param.grad = torch.zeros_like(param)

    def forget_gradients(self) -> None:
        """Drop all gradients, including those that wait."""
        self.pending.clear()
        self.model.zero_grad()

    def blocks(self) -> dict[int, Block]:
        """Return the blocks by number."""
        return blocks_of(self.model)

    def state(self) -> dict[str, Any]:
        """Return a copy of the state dict."""
        return copy.deepcopy(self.model.state_dict())


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other

"""Autograd test cases: each has a model, its units, and the forwards and backwards of a step.

After each step, the case's own steps and a final usual step, the gradients and parameters equal
those of the unsharded model. The unsharded model trains on the batches of all ranks together.
Between steps, the engine holds no unsharded parameters and no pending work.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import fullshard
from fullshard.engine import Engine
from fullshard.frontend.ownership import unit_of
from tests.ranks.models import fill, heard, noise

__all__ = [
    "DIM",
    "Block",
    "Case",
    "Skips",
    "Tower",
    "check_rest",
    "compare",
    "engine_of",
    "loss_of",
    "worlds_and_policies",
]

# Running every world with every policy takes twice as long and covers nothing new.
worlds_and_policies = pytest.mark.parametrize(
    ("world", "reshard"), [(2, None), (2, False), (3, True)]
)

DIM = 6
ROWS = 2  # batch rows on each rank


class Block(nn.Module):
    """A residual block with odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM + 1)
        self.down = nn.Linear(DIM + 1, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """A stack of blocks and a head whose parameters belong to the root unit."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or (Block(), Block(), Block()))
        self.head = nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skips(Tower):
    """A tower that skips some of its blocks."""

    skipped: Any = ()

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i not in self.skipped:
                x = block(x)
        return self.head(x)


def loss_of(y: Tensor) -> Tensor:
    """Return a mean over the batch, so that the mean over ranks equals the whole batch's loss."""
    return y.sin().flatten(1).sum(1).mean()


class Case:
    """The base class of all cases; the defaults make a usual training step of a tower."""

    num_steps = 2
    num_warnings = 0
    """Expected number of warnings from the logger "fullshard" on the sharded model."""
    hides = False
    """True: backwards that autograd hooks miss keep memory in use until the weights change."""
    keeps = False
    """True: units stay unsharded between steps."""
    limit = 1e-12
    """Largest allowed difference of an element, relative to the largest element (at least 1)."""
    dtype = torch.float64

    def __init__(self, rank: int = 0, world: int = 1, num_shares: int = 1) -> None:
        self.rank = rank
        """Index of the first share of the batch that ``step`` gets."""
        self.world = world
        """Number of shares in the whole batch."""
        self.num_shares = num_shares
        """Number of shares that ``step`` gets: 1 on a rank, all of them for the unsharded model."""

    def model(self) -> nn.Module:
        return Tower()

    def units(self, model: Any) -> list[Any]:
        """Return the modules to pass to ``fully_shard``, inner ones first."""
        return [*model.blocks, model]

    def shard(self, model: nn.Module, reshard: bool | None) -> None:
        """Shard in ragged layout on three ranks, else per parameter, to cover both layouts."""
        layout = fullshard.Ragged() if self.world == 3 else fullshard.PerParameter()
        for unit in self.units(model):
            fullshard.fully_shard(unit, reshard_after_forward=reshard, layout=layout)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(self, model: Any, x: Tensor, number: int) -> None:
        """Run the forwards and backwards of one step."""
        loss_of(model(x)).backward()

    def good(self, model: Any, x: Tensor) -> None:
        """Run the usual step that ends every case."""
        loss_of(model(x)).backward()

    def check(self, model: Any) -> None:
        """Check the sharded model at the end."""


def compare(kind: type[Case], reshard: bool | None = None) -> None:
    """Train the unsharded model on the whole batch and the sharded one on a share; compare them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    case = kind(0, world, world)
    expected = train(case, fill(case.model().to(case.dtype)))
    case = kind(rank, world, 1)
    model = fill(case.model().to(case.dtype))
    case.shard(model, reshard)
    with heard(logging.WARNING) as warned:
        found = train(case, model)
    for (what, want), (_, got) in zip(expected, found, strict=True):
        assert_same(what, want, got, case.limit)
    assert len(warned) == case.num_warnings, warned
    case.check(model)


def train(case: Case, model: nn.Module) -> list[tuple[str, dict[str, Tensor | None]]]:
    """Return gradients and parameters after each step: this rank's part in a sharded model."""
    optimizer = case.optimizer(model)
    seen: list[tuple[str, dict[str, Tensor | None]]] = []
    for number in range(case.num_steps + 1):
        x = noise(ROWS * case.world, DIM, seed=number, dtype=case.dtype)
        x = x[ROWS * case.rank :][: ROWS * case.num_shares]
        if number < case.num_steps:
            case.step(model, x, number)
        else:
            case.good(model, x)
        if isinstance(model, fullshard.FSDPModule) and not case.keeps:
            check_rest(model, hides=case.hides)
        seen.append((f"gradients of step {number}", gradients(model, optimizer)))
        optimizer.step()
        optimizer.zero_grad()
        if not case.keeps:
            params: dict[str, Tensor | None] = {
                name: param.detach().clone() for name, param in model.named_parameters()
            }
            seen.append((f"parameters after step {number}", params))
    if isinstance(model, fullshard.FSDPModule) and case.hides:
        with torch.no_grad():
            model.eval()(x)
        check_rest(model)
    return seen


def gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor | None]:
    """Return the gradients that the optimizer sees; check that all ranks have the same ones."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if isinstance(model, fullshard.FSDPModule) and dist.get_world_size() > 1:
        here = torch.tensor([float(param.grad is not None) for param in params])
        everywhere = here.clone()
        dist.all_reduce(everywhere)
        assert torch.equal(everywhere, here * dist.get_world_size()), "ranks differ in gradients"
    grads = ((str(i), param.grad) for i, param in enumerate(params))
    return {name: None if grad is None else grad.detach().clone() for name, grad in grads}


def piece_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of ``whole`` on this rank when ``whole`` is sharded like ``like``."""
    if not isinstance(like, DTensor):
        return whole
    if isinstance(like, fullshard.RaggedTensor):
        return whole.flatten()[like.interval.start : like.interval.stop]
    ((shard,), mesh) = like.placements, like.device_mesh
    assert isinstance(shard, Shard)
    chunks = whole.chunk(mesh.size(), shard.dim)
    rank = mesh.get_local_rank()
    return chunks[rank] if rank < len(chunks) else whole.narrow(shard.dim, 0, 0)


def assert_same(
    what: str, want: dict[str, Tensor | None], got: dict[str, Tensor | None], limit: float
) -> None:
    assert want.keys() == got.keys(), what
    assert {n for n in want if want[n] is None} == {n for n in got if got[n] is None}, what
    for name, tensor in want.items():
        other = got[name]
        if tensor is not None and other is not None:
            scale = max(1.0, tensor.abs().max().item())
            local = other.to_local() if isinstance(other, DTensor) else other
            difference = piece_of(tensor, other) - local
            worst = difference.abs().max().item() if difference.numel() else 0.0
            assert worst <= limit * scale, f"{what}: {name} differs by {worst}"


def engine_of(module: nn.Module) -> Engine:
    """Return the engine of a sharded module."""
    unit = unit_of(module)
    assert unit is not None and unit.engine is not None
    return unit.engine


def check_rest(model: nn.Module, *, hides: bool = False) -> None:
    """Check that no work is pending and, unless ``hides`` is set, that nothing is unsharded."""
    engine = engine_of(model)
    assert engine.scheduler.idle
    assert not len(engine.scheduler.reductions)
    assert not engine.backward.tasks
    holds = {u.name: engine.scheduler.residents.units[u.key].holds for u in engine.units}
    assert not any(holds.values()), holds
    if not hides:
        assert not any(engine.meter.held_nbytes.values()), engine.meter.held_nbytes
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), f"{name} is shown unsharded"
    for unit in engine.units:
        for whole in unit.unsharded_params():
            assert whole.grad is None, unit.name

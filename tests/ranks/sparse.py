"""A model of which each rank runs different parts, and the unsharded model for comparison."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import FullyShardedDataParallel, fully_shard
from tests.ranks.models import fill, noise

__all__ = ["Case", "Parts", "Sparse", "apart", "difference", "draw", "shard", "train"]

Parts = Sequence[Sequence[int]]
"""The experts that run, in order, for each block; a block without experts may be skipped."""

DIM, NUM_BLOCKS, NUM_EXPERTS = 5, 2, 3


class Expert(nn.Module):
    """Two layers; the second may be its own unit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, width)
        self.down = nn.Linear(width, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, DIM)
        self.experts = nn.ModuleList(Expert(3 + i) for i in range(NUM_EXPERTS))

    def forward(
        self, x: Tensor, which: Sequence[int], wrap: Callable[..., Any] | None = None
    ) -> Tensor:
        x = torch.tanh(self.gate(x))
        for i in which:
            x = x + (self.experts[i](x) if wrap is None else wrap(self.experts[i], x))
        return x


class Sparse(nn.Module):
    """Blocks of experts; with ``drops``, blocks that run no expert are skipped."""

    def __init__(self, *, drops: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(DIM, 3)
        self.drops = drops
        self.around_blocks: Callable[..., Any] | None = None
        self.around_experts: Callable[..., Any] | None = None

    def forward(self, x: Tensor, parts: Parts) -> Tensor:
        x = x * self.scale
        for block, which in zip(self.blocks, parts, strict=True):
            if which or not self.drops:
                run = block if self.around_blocks is None else partial(self.around_blocks, block)
                x = run(x, which, self.around_experts)
        return self.head(x)


@dataclass(frozen=True)
class Case:
    """How a model is sharded, and the parts that ranks may skip."""

    shape: tuple[int, ...] = ()
    """Shape of the mesh, replicas first; empty: all ranks on one dim."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of ``fully_shard`` or ``FullyShardedDataParallel``."""
    flat: bool = False
    skips: str = "experts"
    """Parts that ranks may skip: "nothing", "experts", "blocks" (whole), or "nested" (both)."""
    inner: bool = False
    """True: ``down`` of each expert is its own unit."""
    checkpoints: str = ""
    """Checkpointed parts: "", "blocks" or "experts"; a final "!" means reentrant."""
    accumulate: int = 1
    frozen: tuple[str, ...] = ()
    """Substrings of the names of frozen parameters."""
    dtype: torch.dtype = torch.float64

    def model(self) -> Sparse:
        model = fill(Sparse(drops=self.skips in ("blocks", "nested")).to(self.dtype))
        for name, param in model.named_parameters():
            param.requires_grad_(not any(part in name for part in self.frozen))
        wrap = partial(checkpoint, use_reentrant=self.checkpoints.endswith("!"))
        model.around_blocks = wrap if "blocks" in self.checkpoints else None
        model.around_experts = wrap if "experts" in self.checkpoints else None
        return model


def shard(model: Sparse, case: Case) -> Any:
    """Shard ``model`` into units for blocks and experts, some of which ranks may skip."""
    options = dict(case.options)
    if case.shape:
        names = ("copies", "shards")[-len(case.shape) :]
        mesh = init_device_mesh("cpu", case.shape, mesh_dim_names=names)
        options["device_mesh" if case.flat else "mesh"] = mesh

    def unit(module: Any) -> Any:
        return (
            FullyShardedDataParallel(module, **options)
            if case.flat
            else fully_shard(module, **options)
        )

    for b, block in enumerate(model.blocks):
        for e, expert in enumerate(block.experts):
            if case.inner:
                expert.down = unit(expert.down)
            block.experts[e] = unit(expert)
        model.blocks[b] = unit(block)
    sharded = unit(model)
    for block in model.blocks:
        if case.skips in ("blocks", "nested"):
            block.set_skip_tolerance(True, recurse=False)
        for expert in block.experts if case.skips in ("experts", "nested") else ():
            expert.set_skip_tolerance(True)
    return sharded


def draw(seed: int, world: int, steps: int, case: Case) -> list[list[list[Parts]]]:
    """Draw the parts that run by step, microbatch and rank; all ranks draw the same."""
    chance = random.Random(seed)

    def block(rank: int) -> list[int]:
        count = chance.choice([0, 0, 1, 1, 2, 3, 4])
        return [chance.randrange(NUM_EXPERTS) for _ in range(count)]

    return [
        [
            [[block(rank) for _ in range(NUM_BLOCKS)] for rank in range(world)]
            for _ in range(case.accumulate)
        ]
        for _ in range(steps)
    ]


def loss_of(model: nn.Module, rank: int, number: int, parts: Parts, dtype: torch.dtype) -> Tensor:
    """Return the loss of a rank's batch; an expert listed twice contributes twice."""
    out: Tensor = model(noise(2, DIM, seed=10 * number + rank, dtype=dtype), parts)
    return out.square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(program: list[list[list[Parts]]], case: Case) -> float:
    """Return how far the sharded model ends from an unsharded one on the batches of all ranks."""
    world, rank = dist.get_world_size(), dist.get_rank()
    plain = case.model()
    model = shard(copy.deepcopy(plain), case)
    optimizers = optimizer_of(plain), optimizer_of(model)
    worst = 0.0
    for step, microbatches in enumerate(program):
        for i, everyone in enumerate(microbatches):
            number = step * len(microbatches) + i
            if not case.flat:
                model.set_requires_gradient_sync(i == len(microbatches) - 1)
            for other, parts in enumerate(everyone):
                (loss_of(plain, other, number, parts, case.dtype) / world).backward()
            if case.flat and i < len(microbatches) - 1:
                with model.no_sync():
                    loss_of(model, rank, number, everyone[rank], case.dtype).backward()
            else:
                loss_of(model, rank, number, everyone[rank], case.dtype).backward()
        worst = max(worst, difference(model, plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return max(worst, difference(model, plain))


def difference(model: nn.Module, plain: nn.Module) -> float:
    """Return the largest difference of parameters and gradients; infinite if one is missing."""
    with fullshard.unshard_params(model, with_grads=True, writeback=False):
        pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
        return max(max(apart(a, b), apart(a.grad, b.grad)) for a, b in pairs)


def apart(a: Tensor | None, b: Tensor | None) -> float:
    """Return the largest difference between two tensors; infinite if only one is None."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return (a.detach() - b.detach()).abs().max().item()

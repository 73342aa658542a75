"""The cost of letting ranks skip experts: step times on two gloo ranks of one thread each.

Blocks of experts, each expert a unit in a block that is a unit. Without tolerance all ranks have to
run all experts in one order, as in FSDP2; with it each may run those that its tokens need. A figure
is a share of FSDP2's step with all experts; all contenders take their steps in turn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fullshard
from bench.compare import in_turns, medians, on_ranks, seconds_of
from bench.machine import table

WORLD, WARM_UP, ROUNDS = 2, 3, 12
DIM, BLOCKS, EXPERTS, TOKENS = 256, 4, 4, 256
FSDP2 = "torch FSDP2, all experts"
STRICT, TOLERANT = "all experts", "tolerant, all experts"
SOME, REDUCED_AHEAD = "tolerant, one expert a rank", "the same, reductions in a budget"
AIMED_AT = 1.1  # of the step without tolerance


class Block(nn.Module):
    """A gate, and the experts that ``which`` names."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, DIM)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor, which: Sequence[int]) -> Tensor:
        """``[tokens, DIM]`` in and out."""
        x = x + torch.tanh(self.gate(x))
        for i in which:
            x = x + self.experts[i](x)
        return x


class Sparse(nn.Module):
    """Blocks of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, which: Sequence[int]) -> Tensor:
        """``[tokens, DIM]`` in and out."""
        for block in self.blocks:
            x = block(x, which)
        return self.head(x)


def sharded(
    model: Any, shard: Callable[..., Any], *, budget: int | None = None, **set_to: bool
) -> Any:
    """Shard experts, blocks and root; ``tolerant`` says whether ranks may skip experts."""
    for block in model.blocks:
        for expert in block.experts:
            shard(expert)
        shard(block)
    shard(model)
    for expert in (e for block in model.blocks for e in block.experts if set_to):
        expert.set_skip_tolerance(set_to["tolerant"])
    if budget is not None:
        model.set_reduction_budget(budget)
    return model


class Contender(NamedTuple):
    """A way to shard a model, and whether a rank runs one expert instead of all."""

    shard: Callable[[Any], Any]
    one: bool = False


_OURS = partial(sharded, shard=fullshard.fully_shard)
CONTENDERS = {
    FSDP2: Contender(partial(sharded, shard=torch_fully_shard)),
    STRICT: Contender(_OURS),
    TOLERANT: Contender(partial(_OURS, tolerant=True)),
    SOME: Contender(partial(_OURS, tolerant=True), one=True),
    REDUCED_AHEAD: Contender(partial(_OURS, tolerant=True, budget=1 << 30), one=True),
}


def work() -> dict[str, float]:
    """Return the median seconds of every contender's steps on this rank."""
    torch.manual_seed(0)
    base, x, rank = Sparse(), torch.randn(TOKENS, DIM), dist.get_rank()

    def step_of(contender: Contender) -> Callable[[], None]:
        model = contender.shard(copy.deepcopy(base))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        numbers = count(rank)

        def step() -> None:
            number = next(numbers)
            which = [number % EXPERTS] if contender.one else range(EXPERTS)
            model(x, which).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    steps = {name: partial(seconds_of, step_of(one)) for name, one in CONTENDERS.items()}
    return medians(in_turns(steps, warm_up=WARM_UP, rounds=ROUNDS, samples=3))


def figures() -> dict[str, float]:
    """By contender: a step, as a share of FSDP2's.

    Raises:
        Loaded: the machine was not idle.
    """
    seconds = on_ranks(work, WORLD)[0]
    return {name: taken / seconds[FSDP2] for name, taken in seconds.items()}


def report(found: dict[str, float]) -> int:
    """Print the table; 1 if tolerance costs more than is aimed at."""
    print(f"step time as a share of torch {torch.__version__} FSDP2's, {WORLD} ranks\n")
    print(table(["experts", "share"], [[name, f"{share:.2f}"] for name, share in found.items()]))
    ratio = found[TOLERANT] / found[STRICT]
    print(f"\ntolerance costs {ratio:.2f} of the step without (aimed at: {AIMED_AT})")
    return int(ratio > AIMED_AT)

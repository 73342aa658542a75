"""Step time on two gloo ranks of one thread each, against PyTorch's own.

All contenders live in one pair of processes and take their steps in turn, so that whatever the
machine does to one it does to all; a figure is a ratio of medians. The processor time of a rank is
told as well, as a share of the same step time: with a core for each rank no step can be shorter.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from bench.compare import in_turns, medians, on_ranks, verdict
from bench.contenders import CONTENDERS, FLAT, FSDP1, FSDP2, PER_PARAMETER, RAGGED, Contender
from bench.machine import grid
from bench.models import GPT, SHAPES, Shape

Shares: TypeAlias = dict[str, dict[str, float]]
"""By model and contender: a time as a share of FSDP2's step."""

WORLD = 2
WARM_UP, ROUNDS = 4, 20
BOUNDS = {
    RAGGED: {"deep": 0.55, "wide": 0.58, "many tiny": 0.33},
    PER_PARAMETER: {"deep": 0.75, "wide": 0.80, "many tiny": 0.55},
}
"""Largest shares of FSDP2's step that are aimed at."""
FLAT_BOUND = 0.65
"""Largest share of FSDP1's step that the flat face aims at."""


class Seconds(NamedTuple):
    """The seconds of one training step."""

    step: float
    processor: float
    """Of all threads of the process."""


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> Seconds:
    """Take one training step."""
    start, busy = time.perf_counter(), time.process_time()
    model(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    return Seconds(time.perf_counter() - start, time.process_time() - busy)


def steps_of(contenders: dict[str, Contender], shape: Shape) -> dict[str, partial[Seconds]]:
    """Return a step of each contender, all from the same weights and on the same batch."""
    torch.manual_seed(0)
    base = GPT(shape)
    tokens = torch.randint(shape.vocab, (shape.batch, shape.length + 1))
    return {
        name: partial(one_step, *one.make(copy.deepcopy(base)), tokens)
        for name, one in contenders.items()
    }


def everyone() -> dict[str, Contender]:
    """Return all contenders as they are."""
    return CONTENDERS


def work(who: Callable[[], dict[str, Contender]]) -> dict[str, dict[str, Seconds]]:
    """Return medians of every contender's steps on this rank, by model."""
    contenders = who()
    return {
        name: medians(
            in_turns(steps_of(contenders, shape), warm_up=WARM_UP, rounds=ROUNDS, samples=4)
        )
        for name, shape in SHAPES.items()
    }


def figures() -> dict[str, Shares]:
    """By kind of time: shares of FSDP2's step.

    Raises:
        Loaded: the machine was not idle.
    """
    return measured(everyone)


def measured(who: Callable[[], dict[str, Contender]]) -> dict[str, Shares]:
    """Let those that ``who`` returns on each rank train, FSDP2 among them; see ``figures``."""
    found = on_ranks(work, WORLD, who)[0]
    return {
        kind: {
            shape: {name: taken[i] / seconds[FSDP2].step for name, taken in seconds.items()}
            for shape, seconds in found.items()
        }
        for i, kind in enumerate(Seconds._fields)
    }


def report(found: dict[str, Shares]) -> int:
    """Print the tables; how many bounds were missed."""
    for kind, by_shape in found.items():
        print(f"{kind} time as a share of torch {torch.__version__} FSDP2's step, {WORLD} ranks\n")
        print(grid("model", by_shape), end="\n\n")
    steps = found["step"]
    missed = [
        f"{name}, {shape}: {steps[shape][name]:.2f} (bound {bound})"
        for name, bounds in BOUNDS.items()
        for shape, bound in bounds.items()
        if steps[shape][name] > bound
    ]
    flat = {shape: shares[FLAT] / shares[FSDP1] for shape, shares in steps.items()}
    told = ", ".join(f"{shape} {share:.2f}" for shape, share in flat.items())
    print(f"{FLAT}, as a share of {FSDP1}'s step: {told}")
    missed += [
        f"{FLAT}, {shape}: {share:.2f} of {FSDP1} (bound {FLAT_BOUND})"
        for shape, share in flat.items()
        if share > FLAT_BOUND
    ]
    return verdict(missed)

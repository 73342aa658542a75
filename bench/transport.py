"""Gloo's own collectives against shared memory: why ``comm`` uses it within a host."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.compare import in_turns, medians, on_ranks, seconds_of
from bench.machine import grid, idle
from fullshard.comm import Pending
from fullshard.comm.c10d import C10d, Transport

NATIVE, SHARED = "native", "shared"
SIZES = (1_000, 30_000, 300_000, 1_000_000, 7_000_000)
WORLDS = (2, 4, 8, 16)
NUM_SMALL = 1_000
"""Elements of each rank's shard where the number of ranks grows."""


def cases_of(part: Tensor, whole: Tensor, **how: Any) -> dict[tuple[str, str], Callable[[], float]]:
    """Return collectives of one tensor, by kind and by transport: gloo or shared memory."""
    cases = {}
    for name, transport in ((NATIVE, Transport.NATIVE), (SHARED, Transport.SHARED)):
        wire = C10d(dist.group.WORLD, "cpu", transport)
        gather, reduce = gather_by(wire), wire.reduce_scatter_mean
        cases["gather", name] = partial(seconds_of, partial(run, gather, whole, part), **how)
        cases["reduce", name] = partial(seconds_of, partial(run, reduce, part, whole), **how)
    return cases


def by_size() -> dict[str, dict[str, float]]:
    """Return on this rank, by size, shared memory's share of gloo's time."""
    world, found = dist.get_world_size(), {}
    for numel in SIZES:
        cases = cases_of(torch.ones(numel // world), torch.ones(numel // world * world))
        taken = medians(in_turns(cases, rounds=25 if numel > 100_000 else 80))
        found[f"{4 * numel / 1e6:.3f} MB"] = {
            f"{kind}, {SHARED}": taken[kind, SHARED] / taken[kind, NATIVE]
            for kind in ("gather", "reduce")
        }
    return found


def of_many() -> dict[str, float]:
    """Return the microseconds of processor time of small collectives on this rank."""
    part, whole = torch.ones(NUM_SMALL), torch.ones(NUM_SMALL * dist.get_world_size())
    cases = cases_of(part, whole, clock=time.process_time, repeats=50)
    taken = medians(in_turns(cases, rounds=8))
    return {", ".join(case): 1e6 * seconds for case, seconds in taken.items()}


def gather_by(wire: C10d) -> Callable[[Tensor, Tensor], Pending]:
    """An all-gather of one tensor."""
    return lambda output, source: wire.all_gather([output], [source])


def run(start: Callable[[Tensor, Tensor], Pending], output: Tensor, source: Tensor) -> None:
    """One collective, from start to end."""
    start(output, source).wait()


def figures() -> dict[str, dict[str, Any]]:
    """By world: gloo's share by size, and processor time by collective.

    ``sizes``: by world, unsharded bytes, collective and transport: its time as a share of gloo's
    own. ``ranks``: by world and collective, microseconds of processor time of rank 0.

    Raises:
        Loaded: the machine was not idle.
    """
    with idle():
        return {
            "sizes": {str(world): on_ranks(by_size, world)[0] for world in (2, 4)},
            "ranks": {str(world): on_ranks(of_many, world)[0] for world in WORLDS},
        }


def report(found: dict[str, dict[str, Any]]) -> int:
    """Print the tables; nothing is promised."""
    print("time as a share of that of gloo's own collectives\n")
    for world, by_size in found["sizes"].items():
        print(grid(f"{world} ranks, unsharded fp32", by_size), end="\n\n")
    print(f"µs of processor time of a rank, {4 * NUM_SMALL / 1000:.0f} kB a rank\n")
    print(grid("ranks", found["ranks"], digits=0), end="\n\n")
    return 0

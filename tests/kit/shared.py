"""Collectives in shared memory, in any order."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.comm import C10d
from tests.ranks.models import noise


def world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def gathered(numel: int) -> Tensor:
    return torch.cat([noise(numel, seed=rank) for rank in range(dist.get_world_size())])


def gather(wire: C10d, numel: int = 1000) -> Callable[[], bool]:
    """Start a gather; return a function that waits and returns True if the result is right."""
    output = torch.full((wire.world * numel,), torch.nan, dtype=torch.float64)
    pending = wire.all_gather([output], [noise(numel, seed=wire.rank)])

    def finish() -> bool:
        pending.wait()
        return torch.equal(output, gathered(numel))

    return finish


def permissions_at(address: int) -> list[str]:
    """Return the permissions of this process's mapping of an address."""
    with open("/proc/self/maps") as file:
        ranges = (line.split(maxsplit=2)[:2] for line in file)
        bounds = ((own.split("-"), how) for own, how in ranges)
        return [how for (low, high), how in bounds if int(low, 16) <= address < int(high, 16)]


def any_order_of_all_kinds(seed: int) -> float:
    """Start collectives, wait for some in an order that differs by rank; return the worst error."""
    same, own = random.Random(seed), random.Random(100 * seed + dist.get_rank())
    wire, worst = C10d(world_group(), "cpu"), 0.0
    in_flight: list[Callable[[], float]] = []
    for number in range(200):
        numel = same.choice([1, 7, 500, 20_001])
        in_flight.append(same.choice([start_gather, start_reduce, start_mean])(wire, number, numel))
        while len(in_flight) > own.choice([2, 4, 30]):
            finish = in_flight.pop(own.randrange(len(in_flight)))
            if own.random() < 0.8:  # some are never waited for
                worst = max(worst, finish())
    return max(worst, *(finish() for finish in in_flight))


def parts(wire: C10d, number: int, numel: int) -> Tensor:
    return torch.stack([noise(numel, seed=7 * number + rank) for rank in range(wire.world)])


def start_gather(wire: C10d, number: int, numel: int) -> Callable[[], float]:
    everyone = parts(wire, number, numel)
    output, source = torch.empty(wire.world * numel, dtype=torch.float64), everyone[wire.rank]
    pending = wire.all_gather([output], [source.clone()])
    return lambda: (pending.wait(), (output - everyone.view(-1)).abs().max().item())[1]


def start_reduce(wire: C10d, number: int, numel: int) -> Callable[[], float]:
    everyone = parts(wire, number, wire.world * numel)
    output, source = torch.empty(numel, dtype=torch.float64), everyone[wire.rank].clone()
    pending = wire.reduce_scatter_mean(output, source)
    mean = everyone.mean(0).view(wire.world, -1)[wire.rank]
    return lambda: (pending.wait(), (output - mean).abs().max().item())[1]


def start_mean(wire: C10d, number: int, numel: int) -> Callable[[], float]:
    everyone = parts(wire, number, numel)
    values = everyone[wire.rank].clone()
    pending = wire.all_reduce_mean(values)
    return lambda: (pending.wait(), (values - everyone.mean(0)).abs().max().item())[1]

"""Collectives: both transports give the same results, with several in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fullshard.comm import C10d, collectives_of, collectives_of_twin
from fullshard.comm.c10d import Transport
from tests.kit.communication import NUMELS, part
from tests.ranks.models import noise
from tests.ranks.pool import RankPool, every_world, on_ranks


def wire(transport: Transport) -> C10d:
    group = dist.group.WORLD
    assert group is not None
    return C10d(group, "cpu", transport)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("transport", list(Transport))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_gather(world: int, transport: Transport, dtype: torch.dtype) -> None:
    wires, world = wire(transport), dist.get_world_size()
    started = []
    for numel in NUMELS:
        output = torch.full((world * numel,), torch.nan, dtype=dtype)
        source = part(numel, dist.get_rank(), dtype)
        started.append((wires.all_gather([output], [source]), output, numel, source))
    for pending, *_ in reversed(started):
        pending.wait()
    found = all(
        torch.equal(output, torch.cat([part(numel, r, dtype) for r in range(world)]))
        for _, output, numel, _ in started
    )
    assert found


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("transport", list(Transport))
def test_all_gathers_together(world: int, transport: Transport) -> None:
    """One call gathers several tensors in place."""
    wires, world, rank = wire(transport), dist.get_world_size(), dist.get_rank()
    outputs = [torch.full((world * numel,), torch.nan) for numel in NUMELS]
    own = [output.view(world, -1)[rank] for output in outputs]
    for place, numel in zip(own, NUMELS, strict=True):
        place.copy_(part(numel, rank, torch.float32))
    wires.all_gather(outputs, own).wait()
    found = all(
        torch.equal(output, torch.cat([part(numel, r, torch.float32) for r in range(world)]))
        for output, numel in zip(outputs, NUMELS, strict=True)
    )
    assert found


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("transport", list(Transport))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_reduce_scatter(world: int, transport: Transport, dtype: torch.dtype, wide: bool) -> None:
    allowed = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 8e-3}[dtype]
    wires, rank, world = wire(transport), dist.get_rank(), dist.get_world_size()
    started, worst = [], 0.0
    for numel in NUMELS[1:]:
        source = part(world * numel, rank, dtype)
        output = torch.full((numel,), torch.nan, dtype=torch.float64 if wide else dtype)
        started.append((wires.reduce_scatter_mean(output, source), output, numel))
    for pending, output, numel in started:
        pending.wait()
        everyone = torch.stack([part(world * numel, r, dtype).double() for r in range(world)])
        mean = everyone.mean(0).view(world, numel)[rank]
        worst = max(worst, (output.double() - mean).abs().max().item())
    assert worst <= allowed


def all_reduce(transport: Transport, dtype: torch.dtype) -> tuple[float, list[Tensor]]:
    wires, rank, world = wire(transport), dist.get_rank(), dist.get_world_size()
    started, worst = [], 0.0
    for numel in NUMELS[1:]:
        values = part(numel, rank, dtype)
        started.append((wires.all_reduce_mean(values), values))
    for pending, values in started:
        pending.wait()
        everyone = torch.stack([part(values.numel(), r, dtype).double() for r in range(world)])
        worst = max(worst, (values.double() - everyone.mean(0)).abs().max().item())
    return worst, [values for _, values in started]


@every_world
@pytest.mark.parametrize("transport", list(Transport))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_reduce_has_the_same_bits_on_all_ranks(
    pool: RankPool, world: int, transport: Transport, dtype: torch.dtype
) -> None:
    allowed = {torch.float64: 1e-15, torch.float32: 3e-7, torch.bfloat16: 1.6e-2}[dtype]
    results = pool.run(world, all_reduce, transport, dtype)
    assert max(worst for worst, _ in results) <= allowed
    for _, values in results[1:]:
        assert all(map(torch.equal, values, results[0][1]))


def of_one_stage() -> tuple[list[int], bool]:
    """Gather in a group of ranks 0 and 1 while the default group is bound to a device."""
    world = dist.group.WORLD
    assert world is not None
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    device = torch.device("cuda", 0)
    split: list[Any] = []
    original = dist.distributed_c10d._get_split_source
    dist.distributed_c10d._get_split_source = lambda *args: split.append(args)
    world.bound_device_id = device
    try:
        heard = torch.zeros(2)
        if dist.get_rank() < 2:
            twin = collectives_of_twin(collectives_of(mesh, 1), "cpu")
            twin.all_gather([heard], [torch.full((1,), dist.get_rank() + 1.0)]).wait()
        is_bound = world.bound_device_id == device
    finally:
        world.bound_device_id = None
        dist.distributed_c10d._get_split_source = original
    assert not split, "the default group's communicator would be split, by all its ranks"
    return heard.int().tolist(), is_bound


def test_a_group_is_made_by_its_own_ranks(pool: RankPool) -> None:
    alone = ([0, 0], True)
    assert pool.run(4, of_one_stage) == [([1, 2], True), ([1, 2], True), alone, alone]


@on_ranks(2)
@pytest.mark.parametrize("transport", list(Transport))
def test_complex_numbers_travel(transport: Transport) -> None:
    """Complex numbers are gathered, reduce-scattered and all-reduced."""
    wires, rank, world = wire(transport), dist.get_rank(), dist.get_world_size()
    parts = [torch.complex(noise(6 * world, seed=r), noise(6 * world, seed=-r)) for r in range(9)]
    parts = parts[:world]
    gathered = torch.empty(6 * world * world, dtype=parts[0].dtype)
    wires.all_gather([gathered], [parts[rank]]).wait()
    part = torch.empty(6, dtype=parts[0].dtype)
    wires.reduce_scatter_mean(part, parts[rank].clone()).wait()
    whole = parts[rank].clone()
    wires.all_reduce_mean(whole).wait()
    mean = torch.stack(parts).mean(0)
    found = [
        torch.equal(gathered, torch.cat(parts)),
        torch.allclose(part, mean.view(world, 6)[rank]),
        torch.allclose(whole, mean),
    ]
    assert found == [True] * 3


@on_ranks(2)
def test_means_in_fp16_do_not_overflow() -> None:
    """Means fit in fp16 where the sum of two numbers does not."""
    wires = wire(Transport.NATIVE)
    values, part = torch.full((16,), 40_000.0, dtype=torch.float16), torch.empty(8).half()
    wires.reduce_scatter_mean(part, values.clone()).wait()
    wires.all_reduce_mean(values).wait()
    assert {*values.tolist(), *part.tolist()} == {40_000.0}

"""Shards on the host. The device is the CPU too, so ``a_bus`` simulates the copies between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, PerParameter, Ragged, fully_shard
from fullshard.engine import Offload
from fullshard.engine import spec as bucket_spec
from fullshard.engine.spec import Outbound
from fullshard.engine.unit import Unit
from fullshard.frontend.ownership import units_below
from fullshard.optim import ShardedOptimizer, clip_grad_norm_
from fullshard.tensors import local_part
from tests.kit.offload import a_bus
from tests.ranks.models import fill, full_parameters
from tests.ranks.net import Net, apart, batch, make, optimizer_of, shard, step
from tests.ranks.pool import on_ranks

LAYOUTS = {"per-parameter": PerParameter(), "ragged": Ragged()}


def same_training(train: Callable[[nn.Module], None], pinned: bool, **options: Any) -> None:
    """Check that training with and without offload gives equal bits."""
    here = shard(make(), **options)
    train(here)
    with a_bus(pinned) as crossings:
        there = shard(make(), **options)
        assert all(bucket.spec.offload for unit in units_of(there) for bucket in unit.buckets)
        train(there)
    assert {way for way, _, _ in crossings} == {"to device", "to host"}
    ours, theirs = full_parameters(there), full_parameters(here)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def units_of(model: nn.Module) -> list[Unit]:
    return units_below([model])


def steps(model: nn.Module) -> None:
    optimizer = optimizer_of(model)
    for number in range(3):
        step(model, optimizer, number)


def accumulating(model: Any) -> None:
    """Train with accumulation, clipping, and writes to parameters while they are gathered."""
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for number in range(2):
        model(batch(number)).square().mean().backward()
        model(batch(number + 1)).square().mean().backward()
        model.set_requires_gradient_sync(False)
        model(batch(number + 2)).square().mean().backward()
        model.set_requires_gradient_sync(True)
        model(batch(number + 3)).square().mean().backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        sharded = list(model.parameters())
        model.unshard()
        with torch.no_grad():
            for param in sharded:
                local_part(param).mul_(1.01)
        model.reshard()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("pinned", [True, False])
def test_trains_as_without(pinned: bool) -> None:
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for train in (steps, accumulating):
        for layout in LAYOUTS.values():
            for policy in (MixedPrecisionPolicy(), low):
                same_training(train, pinned, layout=layout, mp_policy=policy)
    same_training(steps, pinned, reshard_after_forward=False)


@on_ranks(4)
def test_with_replicas_and_secondary_shards() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    for layout in LAYOUTS.values():
        same_training(steps, True, mesh=mesh, layout=layout)
    flat = init_device_mesh("cpu", (4,))
    same_training(steps, True, mesh=flat, reshard_after_forward=2)


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_copy_a_bucket_each_way(layout: str) -> None:
    """A unit takes one copy to the device and one back, in the dtype that it is cast to first."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with a_bus() as crossings:
        model: Any = fully_shard(Net(), mp_policy=policy, layout=LAYOUTS[layout])
        ((bucket,),) = [unit.buckets for unit in units_of(model)]
        numel = bucket.spec.layout.shard_numel
        model.unshard()
        copied = model.copied_nbytes()
        assert copied >= numel * torch.bfloat16.itemsize  # includes the cast on the host
        model(batch(dtype=torch.bfloat16)).sum().backward()
        assert crossings[0] == ("to device", torch.bfloat16, numel)
        (home,) = crossings[1:]  # the root gathers once
        assert home[:2] == ("to host", torch.bfloat16)
        assert numel < home[2] <= numel + 16  # and the presence flags
    assert bucket.shards.dtype is torch.float32
    for param in model.parameters():
        assert param.grad is not None and param.grad.dtype is torch.float32


@on_ranks(2)
def test_a_shard_in_parts_comes_in_one_copy() -> None:
    """A shard takes one copy, even if only some of its parameters are gathered in place."""
    with a_bus() as crossings:
        model = fill(nn.Linear(600, 500).double())
        expected = model.weight.detach().clone()
        fully_shard(model)
        with torch.no_grad():
            model(torch.ones(1, 600, dtype=torch.float64))
        (unit,) = units_of(model)
        assert len(unit.buckets[0].materialized._gather._slices) == 2  # type: ignore[union-attr]
        assert [way for way, _, _ in crossings] == ["to device"]
        assert torch.equal(model.weight.full_tensor(), expected)  # type: ignore[attr-defined]
        model.unshard()  # type: ignore[operator]
        assert torch.equal(model.weight, expected)


class Event:
    """An event that logs when the host waits for it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def synchronize(self) -> None:
        self.log.append("wait")


def test_the_host_waits_before_it_writes_again() -> None:
    """The host waits for a pinned copy before it overwrites the buffer that the copy reads."""
    log: list[str] = []

    class Lanes:
        def mark(self) -> Event:
            log.append("copy")
            return Event(log)

    target, shard_ = torch.zeros(4), torch.arange(4.0)
    unpinned = partial(torch.zeros, dtype=torch.float32)
    with patch.object(bucket_spec, "host_tensor", lambda numel, dtype, pinned: unpinned(numel)):
        outbound = Outbound(Offload(pinned=True), target, Lanes())  # type: ignore[arg-type]
        outbound.send(shard_)
        shard_.mul_(2)
        outbound.send(shard_)
    assert log == ["copy", "wait", "copy"]
    assert outbound._host is not None and outbound._host.data_ptr() != shard_.data_ptr()
    assert torch.equal(target, shard_)


@on_ranks(2)
def test_nothing_to_do_on_a_cpu() -> None:
    """Offload changes nothing on a CPU, where PyTorch 2.13 refuses pinned memory."""
    theirs = torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=True)
    for policy in (CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False), theirs):
        model = shard(make(), offload_policy=policy)
        assert not any(b.spec.offload for unit in units_of(model) for b in unit.buckets)


@on_ranks(2)
def test_meta_and_state_dicts() -> None:
    """An offloaded model is sharded on meta, given memory and loaded from a state dict."""
    with a_bus(), torch.device("meta"):
        model: Any = shard(Net().double())
    other = shard(make())
    with a_bus():
        model.to_empty(device="cpu")
        model.load_state_dict(other.state_dict())
        assert apart(model, other) == 0.0
        assert torch.equal(model(batch()), other(batch()))

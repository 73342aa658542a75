"""Kernel launches and host waits that a step would cause on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import fullshard
from bench.contenders import FSDP2, PER_PARAMETER, RAGGED
from bench.launches import CONTENDERS, as_on_a_gpu, counted
from fullshard.device.streams import Lanes
from fullshard.tensors import local_part
from tests.ranks.models import Experts, fill, shard_units
from tests.ranks.pool import RankPool, on_ranks


def kernels_of(layer: str, world: int) -> dict[str, int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        own, _ = counted(layer, lambda model: model.to_empty(device="cpu").bfloat16())
        counts = {name: counted(layer, CONTENDERS[name]) for name in (FSDP2, PER_PARAMETER, RAGGED)}
    finally:
        dist.destroy_process_group()
    assert not any(passes.syncs - own.syncs for passes, _ in counts.values())
    return {name: passes.kernels - own.kernels for name, (passes, _) in counts.items()}


@pytest.mark.parametrize("world", [8, 32])
@pytest.mark.parametrize("layer", ["small", "small experts"])
def test_a_layer_takes_no_more_kernels_than_in_fsdp2(
    pool: RankPool, layer: str, world: int
) -> None:
    """A layer launches no more kernels than with FSDP2, even if half the ranks lack experts."""
    (found,) = pool.run(1, kernels_of, layer, world, process_group=False, timeout_s=300)
    assert found[PER_PARAMETER] <= found[FSDP2] <= 7
    assert found[RAGGED] <= found[FSDP2] / (2 if world == 8 else 1)


class Odd(nn.Module):
    """Parameters of even, uneven, short and empty shapes, some with transposed gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.params = nn.ParameterList(
            nn.Parameter(torch.empty(shape))
            for shape in [(8, 3), (12, 4), (5, 3), (13,), (1, 6), (24,), (0, 4), (7, 12), (16, 2)]
        )

    def forward(self, x: Tensor, used: int) -> Tensor:
        terms = [(p.float() * (x + i)).sin().sum() for i, p in enumerate(self.params)]
        scale = self.params[3]  # its gradient comes in fp32 and since PyTorch 2.15 stays fp32
        row = (x + torch.arange(13.0)).to(scale.dtype)
        terms[3] = F.rms_norm(row, (13,), scale).float().cos().sum()
        square = self.params[1].float()
        return torch.stack(terms[:used]).sum() + (square.T @ square).cos().sum()


def grads_of(
    layout: Any, dtypes: Any, used: int, on_gpu: bool, shard_dim: int
) -> list[list[float] | None]:
    """Return the gradients after three steps; ranks use different numbers of parameters."""

    def placement(param: nn.Parameter) -> Any:
        return torch.distributed.tensor.Shard(shard_dim if param.dim() > shard_dim else 0)

    with as_on_a_gpu() if on_gpu else nullcontext():
        model = fill(Odd())
        options: dict[str, Any] = {"layout": layout}
        if isinstance(layout, fullshard.PerParameter):
            options["shard_placement_fn"] = placement
        fullshard.fully_shard(model, mp_policy=fullshard.MixedPrecisionPolicy(*dtypes), **options)
        for step in range(3):
            model(torch.tensor(dist.get_rank() + step), used if dist.get_rank() else 9).backward()
    return [
        None if param.grad is None else local_part(param.grad).flatten().tolist()
        for param in model.parameters()
    ]


BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@on_ranks(2, 3, 4, timeout_s=120)
@pytest.mark.parametrize("layout", ["per-parameter", "other dim", "ragged"])
def test_copies_for_a_device_are_exact(layout: str) -> None:
    """Copies made as for a device give exactly the same gradients."""
    chosen = fullshard.Ragged() if layout == "ragged" else fullshard.PerParameter()
    found = []
    for dtypes in ((BF16, FP32), (FP32, FP32), (BF16, FP64)):
        for used in (9, 4):
            case = (chosen, dtypes, used)
            dim = int(layout == "other dim")
            if grads_of(*case, False, dim) != grads_of(*case, True, dim):
                found.append(f"{dtypes}, {used} used")
    assert found == []


@contextmanager
def reads() -> Iterator[list[int]]:
    """Record the number of rows in each read of flags."""
    seen: list[int] = []
    original = Lanes.read

    def read(lanes: Lanes, values: Any) -> Any:
        seen.append(len(values))
        return original(lanes, values)

    with mock.patch.object(Lanes, "read", read):
        yield seen


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, which: int, num_units: int = 3) -> Tensor:
        x = torch.ones(2, 6, dtype=torch.float64)
        for unit in self.units[:num_units]:
            x = unit(x, which)
        return x.sum()


def chain(**options: Any) -> Any:
    model: Any = fill(Chain().double())
    shard_units(model, model.units, **options)
    return model


def has_grads(model: nn.Module) -> list[bool]:
    return [param.grad is not None for param in model.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("case", ["frozen", "idle here", "idle everywhere"])
def test_presence_is_read_once_a_step_and_not_for_what_is_frozen(case: str) -> None:
    """Presence flags are read once a step, and not at all for frozen parameters."""
    at_once, there = {
        "frozen": ([], [True, True, False, False]),
        "idle here": ([3], [True] * 4),
        "idle everywhere": ([3], [True, True, False, False]),
    }[case]
    model = chain()
    for unit in model.units if case == "frozen" else ():
        unit.experts[1].requires_grad_(False)
    with reads() as seen:
        for _ in range(3):
            seen.clear()
            model.zero_grad()
            model(dist.get_rank() % 2 if case == "idle here" else 0).backward()
    found = has_grads(model)
    assert seen == at_once
    assert found == there * 3


@on_ranks(4)
@pytest.mark.parametrize("both", [True, False])
def test_partial_gradients_that_are_all_there_are_not_asked_for(both: bool) -> None:
    """Partial gradients that all ranks have need no read of flags in the last pass."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = chain(mesh=mesh)
    model.set_requires_all_reduce(False)
    model(0).backward()
    if both:
        model(1).backward()
    model.set_requires_all_reduce(True)
    with reads() as seen:
        for which in (0, 1):
            model.set_requires_all_reduce(which == 1)
            model(which, 2).backward()
    found = has_grads(model)
    assert seen == ([] if both else [1])
    assert found == [True] * 10 + [both] * 2


@on_ranks(2)
def test_gradients_that_were_asked_for_add_up() -> None:
    """Gradients accumulate over three backwards, though rank 1 alone uses the second expert."""
    sharded, whole = chain(), fill(Chain().double())
    with reads() as seen:
        for step in range(3):
            sharded(dist.get_rank() * (step % 2)).backward()
            for rank in range(2):
                (whole(rank * (step % 2)) / 2).backward()
    apart = [
        (param.grad.full_tensor() - other.grad).abs().max().item()
        for param, other in zip(sharded.parameters(), whole.parameters(), strict=True)
    ]
    assert seen == [3, 3, 3]
    assert max(apart) < 1e-12


def hooks_and_clipping() -> list[str]:
    """Return the parameter of each hook call by the end of backward."""
    model = chain()
    called = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    model(dist.get_rank()).backward()
    return sorted(called)


def test_hooks_hear_of_gradients_that_were_asked_for(pool: RankPool) -> None:
    expected = sorted(name for name, _ in Chain().named_parameters())
    assert pool.run(2, hooks_and_clipping) == [expected] * 2

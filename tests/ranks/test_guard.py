"""Steps with a value that is not finite, which all ranks skip together."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fullshard
from fullshard import FullyShardedDataParallel
from fullshard.errors import ArgumentTypeError, ConfigError, NonFiniteError
from fullshard.optim import ShardedGradScaler, ShardedOptimizer, StepGuard, clip_grad_norm_
from tests.kit.flat import wrap
from tests.ranks.models import Counted, heard
from tests.ranks.net import Net, batch, make, shard
from tests.ranks.pool import RankPool, on_ranks

FACES = ["per-parameter", "ragged", "offload", "flat", "originals", "tensor-parallel", "replicas"]


def sharded(face: str) -> Any:
    model = make()
    world = dist.get_world_size()
    if face == "ragged":
        return shard(model, layout=fullshard.Ragged())
    if face == "offload":
        return shard(model, offload_policy=fullshard.CPUOffloadPolicy(pin_memory=False))
    if face in ("flat", "originals"):
        return wrap(model, use_orig_params=face == "originals")
    if face == "tensor-parallel":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"plain.0": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh["tp"], plan)
        return shard(model, mesh=mesh["dp"])
    if face == "replicas":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "shards"))
        return shard(model, mesh=mesh)
    return shard(model)


def inner(model: Any) -> Net:
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    values = [local(param) for param in model.parameters()]
    for _, state in sorted(optimizer.state_dict()["state"].items()):
        values += [local(value) for value in state.values() if isinstance(value, Tensor)]
    return values


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def loss_of(model: nn.Module, number: int, bad: float | None = None) -> Tensor:
    """Return a loss; multiply it by ``bad``, if given, so that all gradients become bad too."""
    loss = model(batch(number)).square().mean()
    return loss if bad is None else loss * bad


class _Spoil(torch.autograd.Function):
    """The identity function, whose backward returns NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * math.nan


def skips(face: str, bad_rank: int) -> dict[str, Any]:
    model = sharded(face)
    optimizer: torch.optim.Optimizer
    if face == "ragged":
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = StepGuard(model, optimizer, max_norm=0.1)
    found: dict[str, Any] = {"stepped": []}

    def step(bad: float | None, *, number: int) -> None:
        loss = loss_of(model, number, bad if dist.get_rank() == bad_rank else None)
        loss.backward()
        found["stepped"].append(guard.step(loss))
        if found["stepped"][-1]:
            optimizer.zero_grad()

    with heard() as told:
        step(None, number=0)
        before = state_of(model, optimizer)
        step(math.nan, number=1)
        step(math.inf, number=2)
        found["unchanged"] = same(before, state_of(model, optimizer))
        found["dropped"] = all(param.grad is None for param in model.parameters())
        step(None, number=3)
        found["changed"] = not same(before, state_of(model, optimizer))
        handle = inner(model).plain.register_forward_hook(
            lambda module, args, out: _Spoil.apply(out) if dist.get_rank() == bad_rank else out
        )
        step(None, number=4)
        step(None, number=5)
        handle.remove()
        step(None, number=6)
    return found | {"told": told, "counts": (guard.skipped, guard.in_a_row)}


@pytest.mark.parametrize("face", FACES)
def test_all_ranks_skip_and_are_told_why(pool: RankPool, face: str) -> None:
    world = 4 if face in ("tensor-parallel", "replicas") else 2
    results = pool.run(world, skips, face, 1)
    for result in results:
        assert result["stepped"] == [True, False, False, True, False, False, True]
        assert result["unchanged"] and result["dropped"] and result["changed"]
        assert result["counts"] == (4, 0)
    first, second, third, fourth = results[0]["told"]
    assert all(result["told"] == [] for result in results[1:])
    assert "number 1: the loss of rank(s) 1 is not finite; the gradients of" in first
    assert "computed" not in first
    assert "number 2: the loss of rank(s) 1 is not finite" in second
    assert "rank 1 computed" in second
    assert face == "tensor-parallel" or "rank 0 computed" not in second  # ranks share outputs
    assert "head" in second.rpartition("the last is")[2]  # backward begins there
    assert "loss" not in third
    if face != "flat":
        assert "the last is" in third and "plain.0" in third
    assert "computed" not in third  # the bad values are older than the last step
    assert "rank 1 computed" in fourth
    assert "plain.0" in fourth.rpartition("the last is")[2]
    assert "unit (root)" in fourth


@on_ranks(2)
@pytest.mark.parametrize("face", ["per-parameter", "flat"])
def test_finite_steps_are_those_of_clipping(face: str) -> None:
    guarded, clipped = sharded(face), sharded(face)
    ends = []
    for model in (guarded, clipped):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        guard = StepGuard(model, optimizer, max_norm=0.05)
        norms = []
        for number in range(3):
            loss = loss_of(model, number + 10 * dist.get_rank())
            loss.backward()
            if model is guarded:
                guard.step(loss if number else None)
                norms.append(guard.norm)
            else:
                norms.append(clip_grad_norm_(model.parameters(), 0.05))
                optimizer.step()
            optimizer.zero_grad()
        ends.append([*state_of(model, optimizer), *norms])
    assert same(*ends)


def gives_up(max_skipped: int) -> tuple[list[bool], str, bool]:
    model = sharded("per-parameter")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = StepGuard(model, optimizer, max_skipped=max_skipped)
    before, stepped = state_of(model, optimizer), []
    with heard():
        for number in range(max_skipped + 1):
            loss = loss_of(model, number, math.nan if dist.get_rank() == 0 else None)
            loss.backward()
            try:
                stepped.append(guard.step(loss))
            except NonFiniteError as error:
                return stepped, str(error), same(before, state_of(model, optimizer))
    return stepped, "", False


@pytest.mark.parametrize("max_skipped", [0, 2])
def test_too_many_in_a_row_are_an_error_on_all_ranks(pool: RankPool, max_skipped: int) -> None:
    for stepped, message, unchanged in pool.run(2, gives_up, max_skipped):
        assert stepped == [False] * max_skipped
        assert "the loss of rank(s) 0 is not finite" in message
        assert f"number {max_skipped + 1} in a row" in message
        assert unchanged


@on_ranks(2)
def test_goes_with_a_grad_scaler() -> None:
    model = sharded("per-parameter")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = StepGuard(model, optimizer)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=100)
    stepped, scales = [], []
    with heard():
        for number in range(3):
            loss = loss_of(model, number)
            overflows = number == 1 and dist.get_rank() == 1
            (scaler.scale(loss) * (math.inf if overflows else 1)).backward()
            scaler.unscale_(optimizer)
            stepped.append(guard.step(loss))
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
    plain = make()
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in (0, 2):
        loss_of(plain, number).backward()
        other.step()
        other.zero_grad()
    with fullshard.unshard_params(model):
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        near = all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in pairs)
    result = stepped, scales, near
    assert result == ([True, False, True], [1024.0, 512.0, 512.0], True)


def only_these_ranks() -> list[bool]:
    """Of two jobs of two ranks each, one skips a step and the other does not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("job", "shards"))
    job = mesh["shards"]
    model = shard(make(), mesh=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = StepGuard(model, optimizer, process_group=job.get_group())
    with heard() as told:
        loss = loss_of(model, 0, math.nan if dist.get_rank() == 3 else None)
        loss.backward()
        stepped = guard.step(loss)
    return [stepped, len(told) == (dist.get_rank() == 2), "rank(s) 3" in "".join(told)]


def test_ranks_of_a_group_skip_together(pool: RankPool) -> None:
    results = pool.run(4, only_these_ranks)
    assert [result[0] for result in results] == [True, True, False, False]
    assert all(result[1] for result in results)
    assert [result[2] for result in results] == [False, False, True, False]


@on_ranks(2)
def test_a_step_takes_one_collective_beside_the_norm() -> None:
    model = sharded("per-parameter")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = StepGuard(model, optimizer)
    counts = []
    for _ in range(2):
        loss = loss_of(model, 0)
        loss.backward()
        with Counted() as counted:
            guard.step(loss)
        counts.append(counted.total)
    assert counts == [2, 2]


def test_refuses_bad_limits() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ArgumentTypeError, match="expected an int"):
        StepGuard(model, optimizer, max_skipped=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected 0 or more"):
        StepGuard(model, optimizer, max_skipped=-1)


def test_without_ranks() -> None:
    model = copy.deepcopy(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = StepGuard(model, optimizer)
    with heard() as told:
        loss = loss_of(model, 0, math.nan)
        loss.backward()
        assert not guard.step(loss)
        loss = loss_of(model, 0)
        loss.backward()
        assert guard.step(loss)
    assert guard.skipped == 1
    assert "rank(s) 0" in told[0]

"""Tests of ShardedOptimizer, repeated with state in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW
from torch.optim.optimizer import Optimizer

from fullshard import PerParameter, Ragged, checkpoint, fully_shard
from fullshard.optim import ShardedGradScaler, ShardedOptimizer, StepGuard, clip_grad_norm_
from fullshard.optim import host as hosting
from fullshard.optim.flat.stream import Stream
from tests.kit import (
    checkpoint_async,
    optimizer_mesh,
    optimizer_resume,
    sharded_optimizer,
    sharded_optimizer_state,
)
from tests.kit.flat import wrap
from tests.kit.sharded_optimizer import OPTIMIZERS, both_layouts, trains
from tests.ranks.models import full_parameters
from tests.ranks.net import batch, make, shard
from tests.ranks.pool import RankPool


@contextmanager
def by_default(fraction: float) -> Iterator[None]:
    """Set the default ``host_fraction`` in the block; check that state was streamed."""
    fetched: list[Any] = []
    defaults: Any = ShardedOptimizer.__init__.__kwdefaults__
    fetch = Stream._fetch

    def noted(self: Stream, runs: Any) -> None:
        fetched.extend(runs)
        fetch(self, runs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(defaults, "host_fraction", fraction)
        patch.setattr(Stream, "_fetch", noted)
        yield
    assert fetched


def hosted(fraction: float, job: Callable[..., Any], *args: Any) -> Any:
    with by_default(fraction):
        return job(*args)


# Equal to the class itself: groups, schedules, late and frozen parameters, clipping


KINDS = [kind for kind in OPTIMIZERS if kind != "sgd"]  # SGD has no state


@both_layouts
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_like_the_optimizer_itself(
    pool: RankPool, layout: str, kind: str, foreach: bool
) -> None:
    fraction = 0.5 if foreach else 1.0
    args = (trains, layout, kind, torch.float64, {"foreach": foreach})
    assert set(pool.run(2, hosted, fraction, *args)) == {0.0}


@both_layouts
@pytest.mark.parametrize("kind", ["momentum", "adam", "amsgrad", "adagrad"])
def test_fused_steps_differ_by_rounding_only(pool: RankPool, layout: str, kind: str) -> None:
    args = (trains, layout, kind, torch.float64, {"fused": True})
    assert max(pool.run(2, hosted, 1.0, *args)) <= 1e-15


@both_layouts
def test_parameters_in_bf16(pool: RankPool, layout: str) -> None:
    args = (trains, layout, "adamw", torch.bfloat16, {"foreach": False})
    assert set(pool.run(2, hosted, 0.5, *args)) == {0.0}


JOBS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "state dicts": (sharded_optimizer_state.exchanges, ("ragged", "adamw")),
    "state made early": (sharded_optimizer_state.exchanges, ("per_parameter", "adagrad")),
    "parts": (sharded_optimizer_state.loads_a_part, ("per_parameter",)),
    "two of one": (sharded_optimizer_state.is_independent, ("ragged",)),
    "edits": (sharded_optimizer_state.edits, ("ragged",)),
    "older": (sharded_optimizer_state.older, ()),
    "refusals": (sharded_optimizer_state.refuses_whole_state, ()),
    "files of torch": (sharded_optimizer_state.through_files, ("ragged", "momentum")),
    "whole": (sharded_optimizer_state.as_whole_tensors, ("per_parameter",)),
    "hooks": (sharded_optimizer_state.calls_hooks, ()),
    "a closure": (sharded_optimizer_state.uses_a_closure, ()),
    "a scaler": (sharded_optimizer_state.scales, ("ragged", False)),
    "a scaler, fused": (sharded_optimizer_state.scales, ("per_parameter", True)),
    "copies": (sharded_optimizer_state.is_copied, ()),
    "meta": (sharded_optimizer.built_on_meta, ("ragged", "adagrad")),
    "accumulation": (sharded_optimizer.accumulates, ("ragged",)),
}


@pytest.mark.parametrize("name", list(JOBS))
def test_what_users_see_stays(pool: RankPool, name: str) -> None:
    job, args = JOBS[name]
    pool.run(2, hosted, 1.0, job, *args)


@pytest.mark.parametrize("kind", ["adamw", "adagrad"])
def test_any_mesh(pool: RankPool, kind: str) -> None:
    pool.run(4, hosted, 0.5, optimizer_mesh.steps_alike, kind)
    pool.run(4, hosted, 0.5, optimizer_mesh.exchanges_state, kind)


# Checkpoints


FACES = [
    ("element", "flat"),
    ("per_parameter", "int"),
    ("originals", "no_shard"),
]


@pytest.mark.parametrize(("face", "other"), FACES)
def test_state_goes_to_other_faces_and_back(pool: RankPool, face: str, other: str) -> None:
    """State goes to other interfaces and back, through full and sharded state dicts."""
    job = optimizer_resume.resumes
    for failed in pool.run(2, hosted, 1.0, job, face, other, timeout_s=240):
        assert failed == []


@pytest.mark.parametrize("budget", [None, 0])
def test_an_asynchronous_save_copies_beside_the_training(
    pool: RankPool, tmp_path: Path, budget: int | None
) -> None:
    job = checkpoint_async.steps_wait
    waits = pool.run(2, hosted, 1.0, job, tmp_path / "saved", "sharded", budget, timeout_s=240)
    assert waits == [budget == 0] * 2


def optimizer_of(model: Any, fraction: float) -> Optimizer:
    return ShardedOptimizer(model.parameters(), AdamW, lr=0.01, host_fraction=fraction)


def train(model: Any, optimizer: Optimizer, first: int, num: int = 2) -> None:
    for number in range(first, first + num):
        model(batch(number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def saves(path: Path, mode: str) -> list[Tensor]:
    """Save after two steps, train two more; return the final parameters."""
    model = shard(make(), layout=Ragged())
    optimizer = optimizer_of(model, 1.0)
    train(model, optimizer, 0)
    saved = checkpoint.save(path, model, optimizer, step=2, mode=mode)
    train(model, optimizer, 2)
    saved.wait()
    return list(full_parameters(model).values())


def loads(path: Path, fraction: float, expected: list[Tensor]) -> float:
    model = shard(make(), layout=PerParameter())
    optimizer = optimizer_of(model, fraction)
    checkpoint.load(path, model, optimizer)
    train(model, optimizer, 2)
    found = full_parameters(model).values()
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_checkpoints_go_to_another_world(pool: RankPool, tmp_path: Path, mode: str) -> None:
    path = tmp_path / "saved"
    expected = pool.run(2, saves, path, mode)[0]
    for world, fraction in ((3, 0.5), (2, 1.0), (4, 0.0)):
        assert max(pool.run(world, loads, path, fraction, expected)) < 1e-12


# Interfaces and replicas, with clipping, scaling and guards


def sharded(face: str) -> Any:
    if face == "replicas":
        return shard(
            make(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
        )
    return wrap(make(), use_orig_params=face == "originals")


def same_as_without(face: str) -> float:
    ends = []
    for fraction in (0.0, 0.5, 1.0):
        model = sharded(face)
        optimizer = optimizer_of(model, fraction)
        scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_interval=2)
        guard = StepGuard(model, optimizer, max_norm=0.1)
        for number in range(6):
            for part in range(2):
                scaler.scale(model(batch(number + part)).square().mean()).backward()
            if number == 2:
                for param in model.parameters():
                    if param.grad is not None:
                        param.grad.mul_(torch.inf)
            scaler.unscale_(optimizer)
            if number == 4:
                guard.step()
            else:
                clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append(checkpoint.full_state_dict(model, rank0_only=False))
    pairs = [(ends[0][name], end[name]) for end in ends[1:] for name in ends[0]]
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("face", ["replicas", "originals", "flat"])
def test_faces_and_replicas(pool: RankPool, face: str) -> None:
    assert set(pool.run(4, same_as_without, face)) == {0.0}


def chosen(layout: PerParameter | Ragged) -> list[bool]:
    """Return for each parameter whether its state lives on the host."""
    model = nn.Sequential(*(nn.Linear(8, 8 if at else 16) for at in range(4)))
    for layer in model:
        fully_shard(layer, layout=layout)
    its = hosting.hosted([{"params": list(model.parameters())}], [0.3])
    return [id(param) in its for param in model.parameters()]


@pytest.mark.parametrize("layout", [PerParameter(), Ragged()], ids=repr)
def test_ranks_with_equal_shards_choose_alike(
    pool: RankPool, layout: PerParameter | Ragged
) -> None:
    """Ranks with equal shards choose the same layers: two of the three small ones."""
    found = pool.run(2, chosen, layout)
    assert [any(of) for of in zip(*found, strict=True)] == [False] * 2 + [True] * 4 + [False] * 2

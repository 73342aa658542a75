"""Block-quantised state equals the unsharded run's bit for bit, wherever shards are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fullshard import Ragged, checkpoint, fully_shard
from fullshard.comm.shared import Shared
from fullshard.errors import UnsupportedError
from fullshard.optim import OwnedOptimizer, ShardedOptimizer, clip_grad_norm_
from tests.kit.block_states import EAGER, give_grads, owned, same_state, sharded
from tests.kit.owned import give, named, same_params
from tests.ranks.block_states import CodedMomentum, Net, kind_of, kinds
from tests.ranks.models import full_parameters, noise, refusal
from tests.ranks.pool import RankPool

FACES = [
    (1, "blocks"),
    (2, "per_parameter"),
    (2, "flat"),
    (3, "blocks"),
    (3, "ragged"),
    (4, "hsdp"),
]


@EAGER
def steps_alike(kind: str, face: str, in_blocks: bool) -> int:
    """Step the sharded and the unsharded model; return the bytes that this rank sent."""
    cls, kwargs, block = kind_of(kind)
    net, model = Net(), sharded(Net(), face, block)
    reference, optimizer = cls(net.parameters(), **kwargs), owned(model, kind, in_blocks=in_blocks)
    sent, exchange = [], Shared.all_to_all

    def count(way: Shared, group: Any, into: Tensor, given: Tensor, *more: Any) -> Any:
        sent.append(given.nbytes)
        return exchange(way, group, into, given, *more)

    for step in range(3):
        give_grads(step, net, model)
        reference.step()
        with mock.patch.object(Shared, "all_to_all", count):
            optimizer.step()
        same_params(model, net)
    same_state(model, optimizer, net, reference)
    assert any("codes" in key or "map" in key for key in optimizer.state[dict(named(model))["w2"]])
    return sum(sent)


@pytest.mark.parametrize(("world", "face"), FACES)
@kinds()
def test_steps_like_the_class_itself(pool: RankPool, kind: str, world: int, face: str) -> None:
    sent = pool.run(world, steps_alike, kind, face, True)
    if face == "blocks":
        assert sent == [0] * world
    else:
        assert face == "ragged" or sum(sent) > 0


@kinds()
def test_parameters_may_be_whole(pool: RankPool, kind: str) -> None:
    pool.run(2, steps_alike, kind, "per_parameter", False)


class Large(nn.Module):
    """Parameters larger than ``probe.LARGE``, the size to which small pieces are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Parameter(noise(300, 256, dtype=torch.float32))
        self.rest = nn.Parameter(noise(257, 259, dtype=torch.float32))


@EAGER
def large_steps_alike(kind: str) -> None:
    cls, kwargs, _ = kind_of(kind)
    net, model = Large(), fully_shard(Large())
    reference, optimizer = cls(net.parameters(), **kwargs), owned(model, kind)
    for step in range(2):
        grads = {n: noise(*p.shape, seed=step).float() for n, p in net.named_parameters()}
        give(net, grads)
        give(model, grads)
        reference.step()
        optimizer.step()
        same_params(model, net)
    same_state(model, optimizer, net, reference)
    assert len(optimizer.owners_of(model.even)) == len(optimizer.owners_of(model.rest)) == 3


@kinds("torchao AdamW8bit", "torchao AdamWFp8")
def test_size_is_that_of_the_whole(pool: RankPool, kind: str) -> None:
    pool.run(3, large_steps_alike, kind)


# State


@EAGER
def saves(folder: str, kind: str, face: str, dtype: torch.dtype = torch.float32) -> None:
    cls, kwargs, block = kind_of(kind)
    net, model = Net(dtype), sharded(Net(dtype), face, block)
    reference, optimizer = cls(net.parameters(), **kwargs), owned(model, kind)
    for step in range(2):
        give_grads(step, net, model)
        reference.step()
        optimizer.step()
    checkpoint.save(f"{folder}/one", model, optimizer, step=2)


@EAGER
def goes_on(
    folder: str, kind: str, face: str, how: str, dtype: torch.dtype = torch.float32
) -> None:
    cls, kwargs, block = kind_of(kind)
    net, model = Net(dtype), sharded(Net(dtype), face, block)
    reference, optimizer = cls(net.parameters(), **kwargs), owned(model, kind)
    for step in range(2):
        give_grads(step, net)
        reference.step()
    if how == "file":
        checkpoint.load(f"{folder}/one", model, optimizer)
    else:  # the state of the quantised class itself
        state = {n: reference.state[p] for n, p in net.named_parameters() if p in reference.state}
        group = reference.state_dict()["param_groups"][0]
        groups = [{**group, "params": [name for name, _ in net.named_parameters()]}]
        checkpoint.load_full_state_dict(model, net.state_dict())
        whole = {"state": state, "param_groups": groups}
        checkpoint.load_full_optim_state_dict(model, optimizer, whole)
    same_state(model, optimizer, net, reference)
    part = checkpoint.sharded_optim_state_dict(model, optimizer)
    fresh = owned(model, kind)
    checkpoint.load_sharded_optim_state_dict(model, fresh, part)
    for step in range(2, 4):
        give_grads(step, net, model)
        reference.step()
        fresh.step()
        same_params(model, net)
    same_state(model, fresh, net, reference)


@pytest.mark.parametrize(
    "there_and_here",
    [
        ((4, "hsdp"), (3, "blocks")),
        ((2, "per_parameter"), (1, "ragged")),
        ((1, "flat"), (2, "blocks")),
    ],
    ids=str,
)
@kinds("torchao AdamWFp8")
def test_resumes_on_another_world(
    pool: RankPool, tmp_path: Path, there_and_here: Any, kind: str
) -> None:
    (world, face), (other_world, other_face) = there_and_here
    pool.run(world, saves, str(tmp_path), kind, face)
    pool.run(other_world, goes_on, str(tmp_path), kind, other_face, "file")


@kinds("torchao AdamW4bit")
def test_scales_of_fp32_beside_bf16_are_kept(pool: RankPool, tmp_path: Path, kind: str) -> None:
    pool.run(2, saves, str(tmp_path), kind, "per_parameter", torch.bfloat16)
    pool.run(3, goes_on, str(tmp_path), kind, "blocks", "file", torch.bfloat16)


@kinds()
def test_takes_the_state_of_the_class(pool: RankPool, kind: str) -> None:
    pool.run(2, goes_on, "", kind, "blocks", "class")


# Training


def learn(model: Any, optimizer: Optimizer, index: int, count: int) -> dict[str, Tensor]:
    """Train on share ``index`` of ``count`` with microbatches, clipping and a frozen weight."""
    for step in range(4):
        model.get_parameter("w0").requires_grad_(step != 2)
        for micro in range(2):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == 1)
            x = noise(12, 96, seed=2 * step + micro).chunk(count)[index]
            model(x).square().mean().div(2).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


def learns_alike(face: str) -> float:
    net, model = Net(torch.float64), sharded(Net(torch.float64), face, 16)
    expected = learn(net, CodedMomentum(net.parameters()), 0, 1)
    optimizer = OwnedOptimizer(model.parameters(), CodedMomentum, blocks=16)
    found = learn(model, optimizer, dist.get_rank(), dist.get_world_size())
    pairs = zip(found.values(), expected.values(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


@pytest.mark.parametrize(("world", "face"), [(2, "per_parameter"), (3, "blocks"), (4, "hsdp")])
def test_trains_like_the_unsharded_model(pool: RankPool, world: int, face: str) -> None:
    assert max(pool.run(world, learns_alike, face)) <= 1e-12


# Refusals


@EAGER
def refusals(kind: str) -> list[str]:
    cls, kwargs, block = kind_of(kind)
    model = fully_shard(Net(), layout=Ragged(block))
    return [
        refusal(UnsupportedError, make)
        for make in (
            lambda: ShardedOptimizer(model.parameters(), cls, **kwargs),
            lambda: OwnedOptimizer(model.parameters(), cls, blocks=block // 2 + 4, **kwargs),
        )
    ]


@pytest.mark.parametrize("world", [1, 2])
@kinds()
def test_other_cuts_are_refused(pool: RankPool, kind: str, world: int) -> None:
    for joined, wrong in pool.run(world, refusals, kind):
        assert "Use OwnedOptimizer" in joined
        assert "Give a multiple of the elements that it quantises together" in wrong


def test_random_numbers_are_refused_unless_the_user_accepts_them() -> None:
    params = list(Net(torch.bfloat16).parameters())
    for blocks in (None, 16):
        with pytest.raises(UnsupportedError, match=r"random numbers.*independent=True"):
            OwnedOptimizer(params, CodedMomentum, drawn=True, blocks=blocks)
        OwnedOptimizer(params, CodedMomentum, drawn=True, blocks=blocks, independent=True)
        OwnedOptimizer(list(Net().parameters()), CodedMomentum, drawn=True, blocks=blocks)
    with pytest.raises(UnsupportedError, match="CodedMomentum"):
        ShardedOptimizer(params, CodedMomentum, drawn=True)

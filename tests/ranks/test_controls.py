"""The methods of a sharded module, and their visible effects."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import (
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
    unshard_params,
)
from fullshard.errors import ProtocolError
from fullshard.frontend.ownership import unit_of
from fullshard.schedule import Op, Transcript
from fullshard.tensors import local_part
from fullshard.wrap import ModuleWrapPolicy
from tests.ranks.models import Fuse, Trouble, full_parameters
from tests.ranks.net import Net, apart, batch, make, optimizer_of, shard, step, train_both
from tests.ranks.pool import on_ranks

EXACT = 1e-12


def shards_of(model: nn.Module) -> list[bool]:
    return [isinstance(p, DTensor) for p in model.parameters(recurse=False)]


@on_ranks(1)
def test_settings_of_blocks_hold_for_the_tree() -> None:
    model: Any = make()
    for block in model.blocks:
        fully_shard(block)
    first, second = model.blocks
    first.set_prefetch_budget(300)
    second.set_reduction_budget(200)
    second.set_is_last_backward(False)
    fully_shard(model)
    policy = unit_of(model).engine.scheduler.policy
    assert (policy.prefetch_budget, policy.reduction_budget) == (300, 200)
    assert not policy.is_last_backward


@on_ranks(1, 2, 3)
def test_a_forward_waits_for_what_was_started() -> None:
    plain = make()
    model = shard(copy.deepcopy(plain))
    engine = unit_of(model).engine
    engine.recorder = transcript = Transcript()
    handles = [block.unshard(async_op=True) for block in model.blocks]
    difference = (model(batch()) - plain(batch())).abs().max().item()
    for handle in handles:
        handle.wait()
    gathers = [action for action in transcript.actions() if action.op is Op.UNSHARD]
    gathers = len(gathers)
    assert difference <= EXACT
    assert gathers == 3  # once for each unit


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("how", ["load", "loan"])
def test_what_is_written_during_a_gather_is_shown_by_wait(how: str) -> None:
    """Values written during a gather are the ones that wait and the next forward show."""
    model, other = shard(make()), shard(make())
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    wanted = full_parameters(other)
    handle: Any = model.blocks[1].unshard(async_op=True)
    if how == "loan":
        with unshard_params(model), torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(wanted[name])
    else:
        model.load_state_dict(other.state_dict())
    handle.wait()
    shown = {f"blocks.1.{name}": param for name, param in model.blocks[1].named_parameters()}
    off = max((param - wanted[name]).abs().max().item() for name, param in shown.items())
    assert (off, (model(batch()) - other(batch())).abs().max().item()) == (0.0, 0.0)


@on_ranks(1, 2, 3)
def test_a_late_wait_does_not_bring_parameters_back() -> None:
    """A handle waited for after a reshard, and a handle never waited for, unshard nothing."""
    model = shard(make())
    block: Any = model.blocks[1]
    handle = block.unshard(async_op=True)
    block.reshard()
    handle.wait()
    shown = shards_of(block)
    block.unshard(async_op=True)
    step(model, optimizer_of(model))
    assert [shown == [True, True], shards_of(block) == [True, True]] == [True, True]


@on_ranks(1, 2, 3)
def test_a_unit_without_parameters_has_all_methods() -> None:
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(6, 6)), nn.Tanh()))
    assert unit_of(model).buckets == ()
    assert model.unshard() is None
    handle = model.unshard(async_op=True)
    handle.wait()
    model.reshard()
    assert shards_of(model[0]) == [True, True]
    alone = fully_shard(nn.Tanh())
    alone.unshard()
    alone(torch.ones(2))
    alone.reshard()


def fail(*_: object) -> None:
    raise Trouble


def break_forward(model: Net) -> None:
    with pytest.raises(Trouble):
        handle = model.plain[0].register_forward_hook(fail)
        try:
            model(batch(9))
        finally:
            handle.remove()


def break_backward(model: Net) -> None:
    out = model(batch(9))
    handle = model.blocks[0].register_full_backward_pre_hook(fail)
    out = model(batch(9))
    with pytest.raises(Trouble):
        out.sum().backward()
    handle.remove()


@on_ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("kind", "reset"),
    [
        ("forward", "root"),
        ("forward", "child"),
        ("forward", "none"),
        ("backward", "root"),
        ("backward", "none"),
        ("pending", "root"),
        ("pending", "child"),
    ],
)
def test_after_trouble_the_next_steps_are_right(kind: str, reset: str) -> None:
    plain = make()
    model = shard(copy.deepcopy(plain))
    optimizers = [optimizer_of(plain), optimizer_of(model)]
    for number in range(3):
        if kind == "forward":
            break_forward(model)
        elif kind == "backward":
            break_backward(model)
        else:
            model.set_requires_gradient_sync(False)
            model(batch(9)).sum().backward()
            model.set_requires_gradient_sync(True)
        if reset != "none":
            (model if reset == "root" else model.blocks[0]).reset_iter_state()
            assert all(isinstance(p, DTensor) for p in model.parameters())
        optimizers[1].zero_grad()
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            step(one, optimizer, number)
    assert apart(model, plain) <= EXACT


@on_ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward", "root"])
def test_a_reset_inside_of_what_runs_is_refused(where: str) -> None:
    """A refused reset leaves the running step and the next ones unchanged."""
    plain = make()
    model: Any = shard(copy.deepcopy(plain))
    optimizers = [optimizer_of(plain), optimizer_of(model)]
    messages: list[str] = []

    def reset(*_: object) -> None:
        with pytest.raises(ProtocolError, match="still running") as caught:
            model.reset_iter_state()
        messages.append(str(caught.value))

    for number in range(2):
        if where == "forward":
            handle = model.plain[0].register_forward_hook(reset)
        elif where == "backward":
            handle = model.plain[0].register_full_backward_pre_hook(reset)
        else:
            handle = model.register_forward_pre_hook(reset)
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            step(one, optimizer, number)
        handle.remove()
        assert len(messages) == number + 1
    assert apart(model, plain) <= EXACT
    model.reset_iter_state()
    running = {"forward": "the forward of", "backward": "a backward", "root": "the forward of"}
    assert running[where] in messages[0]


@on_ranks(2)
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("face", ["per parameter", "FULL_SHARD", "SHARD_GRAD_OP"])
def test_zero_grad_of_a_module_drops_what_the_optimizer_sees(
    face: str, original: bool, to_none: bool
) -> None:
    """After a backward that failed before it reached a unit, ``zero_grad`` drops all gradients."""
    model: Any = make()
    if face == "per parameter":
        shard(model)
    else:
        model = FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[face],
            use_orig_params=original,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )
    optimizer = optimizer_of(model)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    model(batch(1)).sum().backward()
    assert any(param.grad is not None for param in params)
    loss = Fuse.apply(model(batch(1)), Trouble).sum()
    with pytest.raises(Trouble):
        loss.backward()
    model.zero_grad(set_to_none=to_none)
    for param in params:
        assert param.grad is None if to_none else not local_part(param.grad).any()
    model(batch(2)).sum().backward()
    first = [None if p.grad is None else local_part(p.grad).clone() for p in params]
    model.zero_grad()
    model(batch(2)).sum().backward()
    for param, grad in zip(params, first, strict=True):
        assert (param.grad is None) == (grad is None)
        assert grad is None or torch.equal(local_part(param.grad), grad)


@on_ranks(1, 2, 3)
def test_policies_may_change_between_steps() -> None:
    def script(model: nn.Module) -> None:
        optimizer = optimizer_of(model)
        for number in range(8):
            if isinstance(model, FSDPModule):
                model.set_reshard_after_forward(number % 2 == 0, recurse=number % 3 == 0)
                model.set_reshard_after_backward(number % 4 < 2)
                model.set_is_last_backward(number % 5 != 6)
                model.set_prefetch_budget([None, 0, 300, 10**9][number % 4])
            step(model, optimizer, number)
        if isinstance(model, FSDPModule):
            for module in (model, *model.blocks):
                module.reshard()

    assert train_both(script) <= EXACT


@on_ranks(2)
def test_a_profile_shows_what_the_engine_does_for_which_unit() -> None:
    model = shard(make())
    step(model, optimizer_of(model))
    with torch.profiler.profile(acc_events=True) as prof:
        step(model, optimizer_of(model), 1)
    names = [event.name for event in prof.events() if event.name.startswith("fullshard::")]
    names = sorted(set(names))
    for unit in ("(root)", "blocks.0", "blocks.1"):
        for act in ("unshard", "wait", "reshard", "reduce_scatter", "finish_reduce"):
            assert f"fullshard::{act} {unit}" in names

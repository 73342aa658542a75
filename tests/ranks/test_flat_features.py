"""Features of the flat interface: communication hooks, order, failures, copies, formats."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn

import fullshard as ours
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import iter_full_params
from fullshard.frontend.sharded import unit_and_engine
from fullshard.schedule import Transcript
from tests.kit.flat_differential import (
    BF16,
    EXACT,
    Stack,
    batch,
    clean,
    full_values,
    make,
    optimizer_of,
    quiet,
    train,
    wrap,
)
from tests.ranks.models import fill, noise
from tests.ranks.pool import RankPool, on_ranks

FP64 = torch.float64
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {clean(name): value.clone() for name, value in iter_full_params(model)}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


# register_comm_hook


def hooked(strategy: str, original: bool, kind: str) -> tuple[float, int, float]:
    """Return the distance to no hook, the elements that the hook saw, the distance to PyTorch's."""
    seen = []

    def mean(state: Any, grads: Tensor, own: Tensor | None = None) -> None:
        seen.append(grads.numel())
        grads = grads.div_(dist.get_world_size())
        if own is None:
            dist.all_reduce(grads, group=state)
        else:
            dist.reduce_scatter_tensor(own, grads, group=state)

    def rounded(state: Any, grads: Tensor, own: Tensor | None = None) -> None:
        few = grads.to(BF16)
        out = few if own is None else own.to(BF16)
        mean(state, few, None if own is None else out)
        (grads if own is None else own).copy_(out)

    def exchanged(state: Any, grads: Tensor, own: Tensor | None = None) -> None:
        """Replace the tensors' data instead of writing into them, as PyTorch's fp16 hook does."""
        wide = grads.double()
        out = wide if own is None else own.double()
        mean(state, wide, None if own is None else out)
        (grads if own is None else own).data = out.to(grads.dtype)

    hook = {"mean": mean, "rounded": rounded, "exchanged": exchanged}[kind]
    results = []
    for kit, has_hook in ((ours, True), (ours, False), (theirs, True)):
        model = wrap(
            kit,
            make(torch.float32),
            "nested",
            sharding_strategy=kit.ShardingStrategy[strategy],
            use_orig_params=original,
        )
        if has_hook:
            model.register_comm_hook(dist.group.WORLD, hook)
        train(model, ("s", "ns"), torch.float32)
        results.append(full_values(kit, model))
    return apart(results[0], results[1]), sum(seen), apart(results[0], results[2])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hook_reduces_gradients(pool: RankPool, strategy: str) -> None:
    for original, kind in ((True, "mean"), (False, "mean"), (True, "exchanged")):
        for to_mean, seen, to_torch in pool.run(2, hooked, strategy, original, kind):
            assert to_mean < 1e-6 and to_torch < 1e-6 and seen
    for to_mean, _, to_torch in pool.run(2, hooked, strategy, True, "rounded"):
        assert 0 < to_mean < 2e-2 and to_torch < 2e-2


@on_ranks(1)
def test_a_hook_on_one_rank_sees_the_gradients_alone() -> None:
    model = FSDP(nn.Linear(3, 3), use_orig_params=False)
    seen: list[int] = []
    model.register_comm_hook(None, lambda state, grads: seen.append(grads.numel()))
    model(torch.ones(1, 3)).sum().backward()
    assert seen == [12]


@on_ranks(2)
def test_a_hook_leaves_unused_parameters_without_gradients() -> None:
    """A parameter that no rank used has no gradient, even if the hook writes zeros for it."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model.forward = lambda x: model["a"](x)  # type: ignore[method-assign]
    wrapped = FSDP(model, use_orig_params=True)
    wrapped.register_comm_hook(None, lambda state, grads, own: own.copy_(grads[: len(own)]))
    wrapped(torch.ones(1, 2)).sum().backward()
    assert [p.grad is None for p in wrapped.parameters()] == [False, False, True, True]


@on_ranks(2)
def test_optimizers_that_step_in_backward() -> None:
    """PyTorch's ``_apply_optimizer_in_backward`` works."""
    with quiet():
        from torch.distributed.optim import _apply_optimizer_in_backward
    results = []
    for overlaps in (True, False):
        model = wrap(ours, make(FP64), "nested", use_orig_params=True)
        if overlaps:
            _apply_optimizer_in_backward(
                torch.optim.SGD, list(model.parameters()), {"lr": 0.1, "momentum": 0.9}
            )
            for number in range(3):
                model(batch(number, FP64)).float().square().mean().backward()
            assert all(param.grad is None for param in model.parameters())
        else:
            train(model, ("s", "s", "s"), FP64)
        results.append(values_of(model))
    plain = make(FP64)
    _apply_optimizer_in_backward(torch.optim.SGD, list(plain.parameters()), {"lr": 0.1})
    with pytest.raises(RuntimeError, match="use_orig_params=True"):
        FSDP(plain)
    assert apart(*results) < EXACT


# failures


class Failing(Stack):
    failing = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.failing == "forward":
            self.blocks[0](x)
            raise KeyError("forward")
        out = super().forward(x)
        if self.failing == "backward":
            out.register_hook(_fail)
        return out


def _fail(_: Tensor) -> None:
    raise KeyError("backward")


def goes_on(original: bool) -> float:
    """Fail in a forward and a backward, then train; return the distance to a run without that."""
    results = []
    for fails in (True, False):
        model = fill(Failing().to(FP64), scale=0.4)
        wrapped = wrap(ours, model, "nested", use_orig_params=original)
        optimizer = optimizer_of(wrapped)
        for where in ("forward", "backward") if fails else ():
            model.failing = where
            with pytest.raises(KeyError):
                wrapped(batch(7, FP64)).sum().backward()
            model.failing = ""
            with FSDP.summon_full_params(wrapped):
                pass
            wrapped.zero_grad()
        train(wrapped, ("s", "ns"), FP64, optimizer)
        results.append(values_of(wrapped))
    return apart(*results)


def copies(original: bool) -> tuple[float, float]:
    """Train a deep copy, then the original; return the distances before and after."""
    model = wrap(ours, make(FP64), "nested", use_orig_params=original)
    train(model, ("s",), FP64)
    before = values_of(model)
    other = copy.deepcopy(model)
    same = apart(before, values_of(other))
    train(other, ("s", "ns"), FP64)
    train(model, ("s", "ns"), FP64)
    with pytest.raises(NotImplementedError, match="state_dict"):
        torch.save(model, os.devnull)
    return same, apart(values_of(model), values_of(other))


def test_goes_on_after_exceptions_and_copies(pool: RankPool) -> None:
    for original in (True, False):
        assert max(pool.run(2, goes_on, original)) == 0.0
        assert pool.run(2, copies, original) == [(0.0, 0.0)] * 2


# gathering ahead in backward


def ahead(prefetch: Any) -> tuple[list[str], dict[str, Tensor]]:
    """Return the actions in a backward of two blocks, and the values after it."""
    model = wrap(ours, Stack().double(), "nested", use_orig_params=True, backward_prefetch=prefetch)
    engine = unit_and_engine(model)[1]
    optimizer = optimizer_of(model)
    for number in range(2):
        loss = model(batch(number, FP64)).square().mean()
        engine.recorder = transcript = Transcript()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    by_key = {str(unit.key): unit.name.rpartition(".")[2] for unit in engine.units}
    told = [str(action).split() for action in transcript.actions() if action.unit is not None]
    return (
        [f"{op} {by_key[key]}" for op, key in told if op != "finish_reduce"],
        values_of(model),
    )


def test_backward_gathers_ahead_when_it_is_told(pool: RankPool) -> None:
    middles = {
        ours.BackwardPrefetch.BACKWARD_PRE: ["unshard 0", "reshard 1", "reduce_scatter 1"],
        theirs.BackwardPrefetch.BACKWARD_POST: ["reshard 1", "unshard 0", "reduce_scatter 1"],
        None: ["reshard 1", "reduce_scatter 1", "unshard 0"],
    }
    known = None
    for prefetch, middle in middles.items():
        for order, values in pool.run(2, ahead, prefetch):
            assert order == ["unshard 1", "wait 1", *middle, "wait 0", *order[6:]]
            known = known or values
            assert apart(known, values) == 0.0


# memory formats


def convolved(original: bool) -> tuple[list[str], float]:
    """Return the warnings, and the distance to PyTorch's values."""
    results = []
    for kit in (theirs, ours):
        plain = fill(nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 2)).double())
        plain[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = kit.FullyShardedDataParallel(  # type: ignore[attr-defined]
                plain, device_id=torch.device("cpu"), use_orig_params=original
            )
        optimizer = optimizer_of(model)
        for number in range(2):
            images = noise(2, 3, 6, 6, seed=number + 5 * dist.get_rank(), dtype=FP64)
            model(images).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(full_values(kit, model))
    return [str(one.message) for one in caught], apart(*results)


def test_another_memory_format_trains_alike(pool: RankPool) -> None:
    for original in (True, False):
        for told, distance in pool.run(2, convolved, original):
            assert distance < EXACT
            assert len(told) == 1 and "Conv2d.weight" in told[0]


class OneOfTwo(nn.Module):
    """The forward uses the first layer only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@on_ranks(1, 2)
def test_a_gradient_set_by_the_user_is_added_to_and_kept(world: int) -> None:
    """Also in the part of a layer that backward does not reach, and around a loan."""
    plain = fill(OneOfTwo())
    model = FSDP(copy.deepcopy(plain), use_orig_params=False)
    (flat,) = model.parameters()
    flat.grad = torch.ones_like(flat)
    inputs = noise(2, 4, dtype=torch.float32)
    plain(inputs).sum().backward()
    for step in range(4):  # a loan, another one, backward, two more
        is_reached = step >= 2
        if step == 2:
            model(inputs).sum().backward()
        with FSDP.summon_full_params(model, with_grads=True):
            for name, param in plain.named_parameters():
                grad = model.get_parameter(name).grad
                added = param.grad if is_reached and param.grad is not None else 0
                assert torch.allclose(grad, torch.ones_like(param) + added), name

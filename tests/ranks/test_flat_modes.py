"""The flat interface in eval mode, and parameters replaced between forward and backward."""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard as ours
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision
from tests.kit.flat_differential import (
    BF16,
    EXACT,
    batch,
    full_values,
    make,
    optimizer_of,
    quiet,
    wrap,
)
from tests.ranks.models import fill, noise
from tests.ranks.pool import RankPool, on_ranks

FP32, FP64 = torch.float32, torch.float64
VARIABLE = "FSDP_USE_FULL_PREC_IN_EVAL"
LOW = {"param_dtype": BF16, "reduce_dtype": BF16, "buffer_dtype": BF16}


# full precision in eval


def shows(model: Any) -> tuple[Tensor, torch.dtype]:
    """Return the output of an evaluation, and the dtype of the buffer after it."""
    model.eval()
    with torch.no_grad():
        out = model(noise(3, 6, dtype=FP32))
    dtype = next(iter(model.buffers())).dtype
    model.train()
    return out, dtype


def evaluated(original: bool, by: str, evaluates: bool) -> dict[str, Tensor]:
    """Train with evaluations in between; return the final values."""
    asked = {"full_precision_in_eval": True} if by == "option" else {}
    options = MixedPrecision(**LOW, _module_classes_to_ignore=[nn.LayerNorm], **asked)
    with mock.patch.dict(os.environ, {VARIABLE: "1"} if by == "variable" else {}):
        model = wrap(ours, make(FP32), "nested", mixed_precision=options, use_orig_params=original)
    assert model.mixed_precision is options
    optimizer = optimizer_of(model)
    for number in range(3):
        out = model(batch(number, FP32))
        assert out.dtype == BF16 and next(iter(model.buffers())).dtype == BF16
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluates:
            plain = make(FP32)
            plain.load_state_dict(model.state_dict())
            plain.shift = plain.shift.to(BF16).float()  # the bits that the first cast lost
            (out, dtype), (same, _) = shows(model), shows(plain)
            assert out.dtype == dtype == FP32
            assert torch.equal(out, same)
    return full_values(ours, model)


@pytest.mark.parametrize("original", [True, False])
def test_evaluates_in_full_precision(pool: RankPool, original: bool) -> None:
    """Evaluations in full precision are exact and leave the training unchanged."""
    without = pool.run(2, evaluated, original, "option", False)
    for by in ("option", "variable"):
        for one, other in zip(pool.run(2, evaluated, original, by, True), without, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in other)


@on_ranks(2)
def test_modes_that_cannot_be_are_told() -> None:
    """A backward after an evaluation raises, as does full precision of an inner unit alone."""
    full = MixedPrecision(BF16, full_precision_in_eval=True)
    model = wrap(ours, make(FP32), "nested", mixed_precision=full)
    loss = model(batch(0, FP32)).sum()
    shows(model)
    with pytest.raises(ours.errors.ProtocolError, match="Call backward\\(\\) before"):
        loss.backward()
    model(batch(0, FP32)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())

    inner = nn.Sequential(FSDP(nn.Linear(6, 6), mixed_precision=full), nn.Linear(6, 6))
    model = FSDP(inner, mixed_precision=MixedPrecision(BF16)).eval()
    with pytest.raises(ours.errors.ProtocolError, match="outermost wrapper"):
        model(batch(0, FP32))


# parameters exchanged between forward and backward


def exchanged(strategy: str, original: bool, how: str) -> float:
    """Replace a parameter before backward, which is refused; return the distance to no attempt."""
    results = []
    for tries in (True, False):
        plain = make(FP64)
        model = wrap(
            ours,
            plain,
            "nested",
            sharding_strategy=ours.ShardingStrategy[strategy],
            use_orig_params=original,
        )
        optimizer = optimizer_of(model)
        for number in range(2):
            if tries:
                loss = model(batch(7, FP64)).square().mean()
                if how == "data":
                    plain.head.weight.data = torch.zeros(6, 6, dtype=FP64)
                else:
                    plain.head.weight = nn.Parameter(torch.zeros(6, 6, dtype=FP64))
                with pytest.raises(AssertionError, match=r"head\.weight") as error:
                    loss.backward()
                assert isinstance(error.value, ours.errors.ProtocolError)
                optimizer.zero_grad()
            model(batch(number, FP64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(full_values(ours, model))
    return max((results[0][n] - results[1][n]).abs().max().item() for n in results[1])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_exchanged_parameters_are_refused(pool: RankPool, world: int) -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        for original in (True, False):
            for how in ("data", "object"):
                assert max(pool.run(world, exchanged, strategy, original, how)) == 0


class Clamped(nn.Linear):
    """A linear layer that clamps its weights through ``.data``, as some quantizers do."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(-0.2, 0.2)
        return super().forward(x)


class ClampedApart(nn.Linear):
    """The same layer without changes of the parameter; its gradient is the clamped weights'."""

    def forward(self, x: Tensor) -> Tensor:
        change = (self.weight.clamp(-0.2, 0.2) - self.weight).detach()
        return nn.functional.linear(x, self.weight + change, self.bias)


def clamped(original: bool) -> float:
    model = nn.Sequential(Clamped(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(FP64)
    plain = nn.Sequential(ClampedApart(6, 5), nn.Tanh(), nn.Linear(5, 2)).to(FP64)
    fill(model, scale=0.4)
    plain.load_state_dict(copy.deepcopy(model.state_dict()))
    with quiet():
        model[0] = FSDP(model[0], use_orig_params=original)
        wrapped = FSDP(model, use_orig_params=original)
    x = noise(4, 6, dtype=FP64)
    worst = 0.0
    optimizers = [optimizer_of(wrapped), optimizer_of(plain)]
    for _ in range(4):
        losses = [one(x).square().sum() for one in (wrapped, plain)]
        worst = max(worst, (losses[0] - losses[1]).abs().item())
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return worst


def test_data_given_in_forward_lasts_as_long_as_it(pool: RankPool) -> None:
    """Data set in a forward lasts for that forward; the next one uses the optimizer's values."""
    for original in (True, False):
        assert max(pool.run(2, clamped, original)) < EXACT


def clipped_beside_no_sync(original: bool) -> list[float]:
    """Return the norms before and after clipping gradients of a backward before ``no_sync``."""
    strategy = ours.ShardingStrategy.SHARD_GRAD_OP
    model = wrap(ours, make(FP64), "nested", sharding_strategy=strategy, use_orig_params=original)
    model(batch(0, FP64)).square().mean().backward()
    with model.no_sync():
        model(batch(1, FP64)).square().mean().backward()
    return [model.clip_grad_norm_(1e-3).item() for _ in range(2)]


def test_gradients_are_clipped_while_no_sync_keeps_parameters_whole(pool: RankPool) -> None:
    for original in (True, False):
        for before, after in pool.run(2, clipped_beside_no_sync, original):
            assert before > 0.01
            assert after == pytest.approx(1e-3)


@on_ranks(2)
@pytest.mark.parametrize("original", [True, False])
def test_edited_shards_are_seen_where_no_sync_kept_parameters_whole(original: bool) -> None:
    """After ``no_sync`` kept parameters unsharded, a forward uses the edited shards."""
    strategy = ours.ShardingStrategy.SHARD_GRAD_OP
    model = wrap(ours, make(FP64), "nested", sharding_strategy=strategy, use_orig_params=original)
    shards = list(model.parameters())
    with model.no_sync():
        model(batch(0, FP64)).square().mean().backward()
    old = make(FP64)
    new = copy.deepcopy(old)
    with torch.no_grad():
        for param in (*shards, *new.parameters()):
            param.mul_(0.5)
    found = model(batch(1, FP64))
    new_out, old_out = new(batch(1, FP64)), old(batch(1, FP64))
    from_new, from_old = (found - new_out).abs().max().item(), (found - old_out).abs().max().item()
    assert from_new < EXACT < from_old


# inputs and buffers of inner wrappers


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        self.seen.append(scale.dtype)
        return self.lin(x.to(self.lin.weight.dtype)) * scale


class Recomputed(nn.Module):
    def __init__(self, kit: Any, use_reentrant: bool) -> None:
        super().__init__()
        low = kit.MixedPrecision(BF16)
        self.layer = kit.FullyShardedDataParallel(
            fill(Layer()), mixed_precision=low, device_id=torch.device("cpu")
        )
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.full((6,), 1.0009765625)  # not a number in bf16
        return checkpoint(self.layer, x, scale, use_reentrant=self.use_reentrant)


@on_ranks(2)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_wrapper_casts_as_in_forward(use_reentrant: bool) -> None:
    grads = []
    for kit in (ours, theirs):
        inner = Recomputed(kit, use_reentrant)
        model = kit.FullyShardedDataParallel(
            inner, mixed_precision=kit.MixedPrecision(BF16), device_id=torch.device("cpu")
        )
        x = noise(3, 6, dtype=FP32).requires_grad_()
        model(x).float().square().sum().backward()
        assert inner.layer.module.seen == [FP32] * 2
        grads.append(x.grad)
    assert torch.equal(*grads)


class Shares(nn.Module):
    """Two modules with one buffer, and a module to be ignored with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.rope = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)
        mask = torch.full((3,), 1.0009765625)
        for module in (self.one, self.two):
            module.register_buffer("mask", mask)
        self.rope.register_buffer("freq", torch.ones(2))
        self.again = self.one

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x.to(self.one.weight.dtype)))


@on_ranks(2)
def test_buffers_stay_shared_and_those_of_ignored_modules_stay() -> None:
    for kit in (ours, theirs):
        plain = Shares()
        model = kit.FullyShardedDataParallel(
            plain,
            ignored_modules=[plain.rope],
            mixed_precision=kit.MixedPrecision(BF16, buffer_dtype=BF16),
            device_id=torch.device("cpu"),
        )
        model(torch.ones(2, 4))
        assert plain.one.mask is plain.two.mask and plain.one.mask.dtype == BF16
        assert plain.rope.freq.dtype == FP32


@on_ranks(2)
def test_buffers_of_two_wrappers_stay_shared() -> None:
    for kit in (ours, theirs):
        plain = Shares()
        mixed = kit.MixedPrecision(BF16, buffer_dtype=BF16, cast_forward_inputs=True)
        options = {"mixed_precision": mixed, "device_id": torch.device("cpu")}
        one = plain.one = kit.FullyShardedDataParallel(plain.one, **options)
        two = plain.two = kit.FullyShardedDataParallel(plain.two, **options)
        plain.again = one
        kit.FullyShardedDataParallel(plain, **options)(torch.ones(2, 4))
        assert one.module.mask is two.module.mask and one.module.mask.dtype == BF16


@on_ranks(2)
def test_state_dicts_have_buffers_in_their_dtype_under_all_names() -> None:
    model = FSDP(Shares(), mixed_precision=MixedPrecision(BF16, buffer_dtype=BF16))
    model(torch.ones(2, 4))
    state = model.state_dict()
    assert {state[f"{name}.mask"].dtype for name in ("one", "two", "again")} == {FP32}


@on_ranks(2)
def test_a_wrapper_that_is_called_alone_casts_as_a_root() -> None:
    inner = FSDP(fill(Layer()), mixed_precision=MixedPrecision(BF16))
    FSDP(nn.Sequential(inner), mixed_precision=MixedPrecision(BF16))
    inner(torch.ones(2, 6), torch.ones(6)).sum().backward()
    assert inner.module.seen == [BF16]

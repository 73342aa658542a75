"""``grad_dtype`` set by users: when, how long it lasts, and readers of such gradients."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import fully_shard, unshard_params
from fullshard.errors import ConfigError
from fullshard.optim import ShardedOptimizer, clip_grad_norm_
from tests.kit.grad_dtype import (
    BF16,
    FP32,
    FP64,
    GradDtypes,
    backward,
    follows,
    layouts,
    make,
    ours,
    seen,
    share,
)
from tests.ranks.pool import on_ranks


@on_ranks(2)
@follows
def test_any_dtype_needs_one_to_reduce_in() -> None:
    model = make(FP32, {"inner.bias": None})
    before = type(model), dict(model.named_parameters())
    with pytest.raises(ConfigError, match="parameter bias has grad_dtype=None") as at_once:
        fully_shard(model.inner)
    assert (type(model), dict(model.named_parameters())) == before
    late = ours(make(), "per_parameter")
    late.head.weight.grad_dtype = None
    with pytest.raises(ConfigError, match=r"head\.weight has grad_dtype=None") as later:
        backward(late, 0)
    late.head.weight.grad_dtype = FP64
    backward(late, 0)
    assert late.head.weight.grad.dtype is FP64
    messages = str(at_once.value), str(later.value)
    assert all("reduce_dtype" in message for message in messages)


@on_ranks(2)
@layouts
def test_grad_dtype_may_be_set_on_sharded_parameters(layout: str) -> None:
    """``grad_dtype`` may be set before the first forward and after it."""
    model = ours(make(), layout)
    model.head.weight.grad_dtype = BF16
    backward(model, 0)
    model.zero_grad()
    model.inner.weight.grad_dtype = BF16
    backward(model, 0)
    found = [
        model.head.weight.grad.dtype,
        model.inner.weight.grad.dtype,
        model.head.bias.grad.dtype,
    ]
    assert found == [BF16, BF16, FP32]


@on_ranks(2)
@follows
@layouts
def test_grad_dtype_survives_casts_loads_and_copies(layout: str) -> None:
    """Casts, copies, loads and moves of parameters keep their ``grad_dtype``."""
    model = ours(make(FP32, {"head.weight": FP64, "inner.bias": FP64}), layout)
    backward(model, 0)
    before = seen(model)
    assert before["head.weight"][1].dtype is FP64 and before["head.bias"][1].dtype is FP32
    model.bfloat16()
    after = seen(model)
    for name in ("head.weight", "inner.bias"):
        assert after[name][0] is FP64 and torch.equal(after[name][1], before[name][1])
    assert after["head.bias"][0] is BF16 and after["head.bias"][1].dtype is BF16
    model.zero_grad()
    backward(model, 1)
    assert model.head.weight.grad.dtype is FP64 and model.head.bias.grad.dtype is BF16

    clone = copy.deepcopy(model)
    assert (clone.head.weight.grad_dtype, clone.head.bias.grad_dtype) == (FP64, BF16)

    model.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert (model.head.weight.grad_dtype, model.head.bias.grad_dtype) == (FP64, BF16)
    backward(model, 2)
    assert model.head.weight.grad.dtype is FP64 and model.head.bias.grad.dtype is BF16

    with torch.device("meta"):
        empty = make(FP32, {"head.weight": BF16})
    ours(empty, layout).to_empty(device="cpu")
    for param in empty.parameters():
        nn.init.zeros_(param)
    backward(empty, 0)
    assert (empty.head.weight.grad.dtype, empty.head.bias.grad.dtype) == (BF16, FP32)


@on_ranks(2)
@layouts
def test_gradients_of_another_dtype_are_clipped_stepped_and_lent(layout: str) -> None:
    """Clipping, optimizers and loans of full parameters take gradients of another dtype."""
    grad_dtypes: GradDtypes = {"head.weight": BF16, "inner.weight": BF16}
    models = [ours(make(FP32, grad_dtypes), layout) for _ in range(2)]
    for model in models:
        for name, dtype in grad_dtypes.items():
            model.get_parameter(name).grad_dtype = dtype
        backward(model, 0)
    plain = [p.grad.full_tensor().float() for p in models[0].parameters() if p.grad is not None]
    expected = torch.cat([grad.flatten() for grad in plain]).norm()
    norm = clip_grad_norm_(models[0].parameters(), 1e-3)
    torch.testing.assert_close(norm, expected, rtol=1e-2, atol=0)
    clip_grad_norm_(models[1].parameters(), 1e-3)

    with unshard_params(models[0], with_grads=True):
        grad = models[0].head.weight.grad
        assert grad.dtype is BF16 and grad.shape == (3, 6)
        grad.mul_(2)
    with unshard_params(models[1], with_grads=True):
        models[1].head.weight.grad.mul_(2)
    assert models[0].head.weight.grad.dtype is BF16

    optimizers = [
        ShardedOptimizer(models[0].parameters(), torch.optim.SGD, lr=0.1),
        torch.optim.SGD(models[1].parameters(), lr=0.1, foreach=False),
    ]
    for optimizer in optimizers:
        optimizer.step()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_the_flat_face_takes_parameters_with_a_grad_dtype(use_orig_params: bool) -> None:
    """One flat parameter ignores ``grad_dtype``, as in FSDP1; original parameters keep it."""
    models = [make(FP32, {"head.weight": BF16}) for _ in range(2)]
    for model in models:
        model.frozen.requires_grad_(True)
    flat = fullshard.FullyShardedDataParallel(models[0], use_orig_params=use_orig_params)
    for model in (flat, models[1]):
        model(share(0)).square().mean().backward()
    for param in models[1].parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
    with flat.summon_full_params(flat, with_grads=True):
        pairs = zip(flat.parameters(), models[1].parameters(), strict=True)
        for mine, plain in pairs:
            if plain.grad is not None:
                torch.testing.assert_close(
                    mine.grad.float(), plain.grad.float(), rtol=1e-2, atol=1e-4
                )
    dtypes = {name: p.grad.dtype for name, p in flat.named_parameters() if p.grad is not None}
    narrow = {name for name, dtype in dtypes.items() if dtype is BF16}
    assert len(narrow) == use_orig_params and all(name.endswith("head.weight") for name in narrow)

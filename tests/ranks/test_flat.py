"""The flat interface, ``FullyShardedDataParallel``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy, iter_full_params
from tests.kit.flat import clean, wrap
from tests.ranks.net import batch, make
from tests.ranks.pool import on_ranks

originals = pytest.mark.parametrize("original", [True, False], ids=["originals", "flat"])
EXACT = 1e-12


def apart(model: nn.Module, plain: nn.Module) -> float:
    theirs = dict(plain.named_parameters())
    ours = {clean(name): full for name, full in iter_full_params(model)}
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)


@on_ranks(1, 2, 3)
@originals
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_trains_as_the_unsharded_model(original: bool, strategy: str) -> None:
    plain = make()
    model = wrap(
        copy.deepcopy(plain),
        use_orig_params=original,
        sharding_strategy=ShardingStrategy[strategy],
    )
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, model)]
    for number in range(3):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            for micro in range(2):
                one(batch(number + micro)).square().mean().backward()
            if number == 1 and one is model:
                with model.no_sync():
                    model(batch(9)).sum().backward()
                model(batch(10)).sum().backward()
            elif number == 1:
                (one(batch(9)).sum() + one(batch(10)).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                one(batch(number))
    assert torch.allclose(model(batch()), plain(batch()), rtol=0, atol=EXACT)
    assert apart(model, plain) < EXACT


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_zero_grad_frees_gradients(use_orig_params: bool) -> None:
    """``zero_grad`` frees the memory of gradients, also after a loan of full gradients."""
    model = FSDP(nn.Linear(256, 256), use_orig_params=use_orig_params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    freed = []
    for lends in (False, True):
        model(torch.ones(2, 256)).sum().backward()
        if lends:
            with FSDP.summon_full_params(model, with_grads=True):
                pass
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        memory = {StorageWeakRef(grad.untyped_storage()) for grad in grads}
        del grads
        optimizer.step()
        optimizer.zero_grad()
        freed.append(all(storage.expired() for storage in memory))
    assert freed == [True, True]

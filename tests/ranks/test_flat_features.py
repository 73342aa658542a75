"""What the flat face does besides training: hooks, order, precision, failures, refusals."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard as ours
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision, ShardingStrategy, errors, iter_full_params
from fullshard.wrap import ModuleWrapPolicy, always_wrap_policy
from tests.ranks.models import fill, noise
from tests.ranks.pool import RankPool
from tests.ranks.test_flat_differential import (
    BF16,
    EXACT,
    Block,
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

FP64 = torch.float64
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {clean(name): value.clone() for name, value in iter_full_params(model)}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


# register_comm_hook


def hooked(strategy: str, original: bool, kind: str) -> tuple[float, int, float]:
    """Distance to the model without a hook; elements that the hook saw; distance to PyTorch's."""
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

    results = []
    for kit, has_hook in ((ours, True), (ours, False), (theirs, True)):
        model = wrap(
            kit,
            make(torch.float32),
            "nested",
            sharding_strategy=kit.ShardingStrategy[strategy],
            use_orig_params=original,
        )
        if has_hook and kind == "mean":
            model.register_comm_hook(dist.group.WORLD, mean)
        elif has_hook:
            model.register_comm_hook(dist.group.WORLD, rounded)
        train(model, ("s", "ns"), torch.float32)
        results.append(full_values(kit, model))
    return apart(results[0], results[1]), sum(seen), apart(results[0], results[2])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hook_reduces_gradients(pool: RankPool, strategy: str) -> None:
    for original in (True, False):
        for to_mean, seen, to_torch in pool.run(2, hooked, strategy, original, "mean"):
            assert to_mean < 1e-6 and to_torch < 1e-6 and seen
    for to_mean, _, to_torch in pool.run(2, hooked, strategy, True, "rounded"):
        assert 0 < to_mean < 2e-2 and to_torch < 2e-2


def hook_on_one_rank() -> list[int]:
    model = FSDP(nn.Linear(3, 3), use_orig_params=False)
    seen: list[int] = []
    model.register_comm_hook(None, lambda state, grads: seen.append(grads.numel()))
    model(torch.ones(1, 3)).sum().backward()
    return seen


def test_a_hook_on_one_rank_sees_the_gradients_alone(pool: RankPool) -> None:
    assert pool.run(1, hook_on_one_rank) == [[12]]


def hook_and_unused() -> list[bool]:
    """Parameters that no rank used have no gradient, though the hook writes zeros for them."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model.forward = lambda x: model["a"](x)  # type: ignore[method-assign]
    wrapped = FSDP(model, use_orig_params=True)
    wrapped.register_comm_hook(None, lambda state, grads, own: own.copy_(grads[: len(own)]))
    wrapped(torch.ones(1, 2)).sum().backward()
    return [p.grad is None for p in wrapped.parameters()]


def test_a_hook_leaves_unused_parameters_without_gradients(pool: RankPool) -> None:
    assert pool.run(2, hook_and_unused) == [[False, False, True, True]] * 2


# refusals: what PyTorch raises, ours is an instance of


def _hook_twice() -> None:
    model = FSDP(Block())
    model.register_comm_hook(None, print)
    model.register_comm_hook(None, print)


def _hook_inside() -> None:
    model = wrap(ours, Stack(), "nested")
    model.blocks[0].register_comm_hook(None, print)


def _tied_across() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


def _tied_by_hand() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0] = FSDP(model[0])
    model[1] = FSDP(model[1])


def _strided() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.ones(8, 4)[::2])
    FSDP(model)


def _twice_wrapped() -> None:
    FSDP(wrap(ours, Stack(), "nested"), auto_wrap_policy=always_wrap_policy)


def _inner(what: str) -> None:
    model = wrap(ours, Stack(), "nested")
    model.check_is_root()
    if what == "no_sync":
        with model.blocks[0].no_sync():
            pass
    else:
        model.blocks[0].clip_grad_norm_(1.0)


def _in_summon(what: Callable[[Any], object]) -> None:
    model = wrap(ours, Stack(), "nested", use_orig_params=True)
    with FSDP.summon_full_params(model):
        what(model)


def _mixed_frozen() -> None:
    model = nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    FSDP(model, use_orig_params=False)


def _summon_in_forward() -> None:
    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with FSDP.summon_full_params(self):
                return super().forward(x)

    FSDP(Inner(3, 3))(torch.ones(1, 3))


REFUSALS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "group and mesh": (
        lambda: FSDP(
            Block(), process_group=dist.group.WORLD, device_mesh=init_device_mesh("cpu", (2,))
        ),
        ValueError,
        "process_group and device_mesh",
    ),
    "hybrid without groups": (
        lambda: FSDP(Block(), sharding_strategy=ShardingStrategy.HYBRID_SHARD),
        ValueError,
        "requires explicit specification of process group",
    ),
    "hybrid with one group": (
        lambda: FSDP(
            Block(),
            process_group=dist.group.WORLD,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        ),
        ValueError,
        "Expected process_group to be passed in",
    ),
    "hybrid on a 1-D mesh": (
        lambda: FSDP(
            Block(),
            device_mesh=init_device_mesh("cpu", (2,)),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        ),
        ValueError,
        "1 dims, expected 2",
    ),
    "ignored module that is none": (
        lambda: FSDP(Block(), ignored_modules=[1]),
        ValueError,
        "expects nn.Module list elements",
    ),
    "ignored modules not in a list": (
        lambda: FSDP(Block(), ignored_modules=1),
        TypeError,
        "iterable",
    ),
    "ignored states of two kinds": (
        lambda: FSDP(Block(), ignored_states=[Block(), nn.Parameter(torch.ones(1))]),
        ValueError,
        "all nn.Parameter or all nn.Module",
    ),
    "both kinds of ignoring": (
        lambda: FSDP(Block(), ignored_states=[Block()], ignored_modules=[Block()]),
        ValueError,
        "Cannot pass both",
    ),
    "init that is no function": (
        lambda: FSDP(Block(), param_init_fn=3),  # type: ignore[arg-type]
        ValueError,
        "to be callable",
    ),
    "a policy over units": (_twice_wrapped, ValueError, "not already have FSDP applied"),
    "tied over units": (_tied_across, ValueError, "tied"),
    "tied over units by hand": (_tied_by_hand, ValueError, "tied"),
    "gaps in memory": (_strided, NotImplementedError, "not contiguous"),
    "frozen and trainable in one": (_mixed_frozen, ValueError, "frozen"),
    "hook that is no function": (
        lambda: FSDP(Block()).register_comm_hook(None, 3),  # type: ignore[arg-type]
        ValueError,
        "must be callable",
    ),
    "two hooks": (_hook_twice, AssertionError, "already registered"),
    "hook of an inner unit": (_hook_inside, AssertionError, "root"),
    "no_sync of an inner unit": (lambda: _inner("no_sync"), RuntimeError, "root"),
    "clipping an inner unit": (lambda: _inner("clip"), RuntimeError, "root"),
    "a forward inside of summon": (
        lambda: _in_summon(lambda model: model(torch.ones(1, 6))),
        RuntimeError,
        "lends the full parameters",
    ),
    "apply inside of summon": (
        lambda: _in_summon(lambda model: model.apply(print)),
        RuntimeError,
        "lends the full parameters",
    ),
    "summon inside of a forward": (_summon_in_forward, RuntimeError, "in the middle of a forward"),
    "unknown strategy": (
        lambda: FSDP(Block(), sharding_strategy="FULL"),  # type: ignore[arg-type]
        ValueError,
        "expected a ShardingStrategy",
    ),
    "unknown precision": (
        lambda: FSDP(Block(), mixed_precision=BF16),  # type: ignore[arg-type]
        TypeError,
        "expected a MixedPrecision",
    ),
}


def refused() -> dict[str, str]:
    """What was not refused as it should be."""
    wrong = {}
    for name, (act, kind, words) in REFUSALS.items():
        try:
            with quiet():
                act()
            wrong[name] = "nothing was raised"
        except errors.FullshardError as error:
            if not isinstance(error, kind) or words not in str(error):
                wrong[name] = f"{type(error).__mro__}: {error}"
    return wrong


def test_what_cannot_work_is_refused(pool: RankPool) -> None:
    assert pool.run(2, refused) == [{}, {}]


def replaced() -> bool:
    """Raised on every rank, also where the piece is empty."""
    model = FSDP(nn.Linear(5, 5), use_orig_params=True)
    model.module.weight = nn.Parameter(torch.ones(6, 6))
    with (
        pytest.raises(RuntimeError, match="Cannot writeback"),
        FSDP.summon_full_params(model),
    ):
        pass
    return True


def test_a_whole_parameter_is_no_piece(pool: RankPool) -> None:
    assert all(pool.run(2, replaced))


def warned() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        FSDP(nn.ModuleList([nn.Linear(2, 2)]))
        module = nn.Linear(2, 2)
        FSDP(module, ignored_modules=[module])
        FSDP(
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            mixed_precision=MixedPrecision(BF16),
        )
    return [str(one.message) for one in caught]


def test_warns_of_what_is_of_no_use(pool: RankPool) -> None:
    for container, ignored, exempt in pool.run(2, warned):
        assert "ModuleList" in container and "all parameters being ignored" in ignored
        assert "BatchNorm1d" in exempt


def overlapped() -> float:
    """PyTorch's own way to let optimizers step in backward."""
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
    return apart(*results)


def test_optimizers_that_step_in_backward(pool: RankPool) -> None:
    assert max(pool.run(2, overlapped)) < EXACT


def hook_of_hybrid() -> bool:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    model = FSDP(Block(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    with pytest.raises(AssertionError, match="hybrid"):
        model.register_comm_hook(None, print)
    return True


def test_a_hook_is_refused_on_copies_that_are_shared(pool: RankPool) -> None:
    assert all(pool.run(4, hook_of_hybrid))


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
    """After an exception in a forward or a backward everything works as before."""
    results = []
    for fails in (True, False):
        model = Failing().to(FP64)
        fill(model, scale=0.4)
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
    """A deep copy trains on its own, the original does not move."""
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


# order


class Swapped(Stack):
    swaps = False

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.blocks) if self.swaps else self.blocks:
            x = block(x)
        return x


def order(when: str) -> list[str]:
    told = []
    with (
        mock.patch.object(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        plain = Swapped()
        model = wrap(ours, plain, "nested", use_orig_params=True)
        if when == "first":
            plain.swaps = dist.get_rank() == 1
            with pytest.raises(RuntimeError, match="differs across ranks") as error:
                model(noise(1, 6, dtype=torch.float32))
            return [str(error.value)]
        for _ in range(2):
            model(noise(1, 6, dtype=torch.float32)).sum().backward()
        model.eval()
        plain.swaps = True
        model(noise(1, 6, dtype=torch.float32))
        model.train()
        told.append(str(len(caught)))
        for _ in range(2):
            model(noise(1, 6, dtype=torch.float32)).sum().backward()
        return told + [str(one.message) for one in caught]


def test_order_is_checked_by_name(pool: RankPool) -> None:
    for (message,) in pool.run(2, order, "first"):
        assert "blocks.0" in message and "blocks.1" in message and "rank 1" in message
    for before, *told in pool.run(2, order, "later"):
        assert before == "0"
        assert len(told) == 2 and "blocks.1" in told[0] and "differs" in told[0]

"""Optimizer steps that are refused before any weight changes, and steps that only look refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.engine import steps
from fullshard.errors import ConfigError, FullshardError, TornStepError, UnsupportedError
from fullshard.optim import ShardedOptimizer
from tests.kit.torn_steps import adamw, compute, equals, fail, muon, owned, sharded, trained
from tests.kit.watch import tower
from tests.ranks.models import Trouble, full_parameters
from tests.ranks.pool import RankPool, on_ranks

Make = Callable[[Any], torch.optim.Optimizer]


def first_with_state(optimizer: torch.optim.Optimizer, key: str) -> dict[str, Any]:
    return next(own for own in optimizer.state.values() if key in own)


def whole_state(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Set state that a ``ShardedOptimizer`` refuses; return a function that repairs it."""
    own = first_with_state(optimizer, "exp_avg")
    kept = own["exp_avg"]
    own["exp_avg"] = kept.full_tensor()

    def mend() -> None:
        own["exp_avg"] = kept

    return mend


def sparse_gradient(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Give a plain matrix a gradient that an ``OwnedOptimizer`` refuses; return its repair."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    plain = next(param for param in params if type(param) is nn.Parameter)
    plain.grad = torch.zeros_like(plain).to_sparse()

    def mend() -> None:
        plain.grad = None

    return mend


def late(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


def nothing(_: Any) -> Callable[[], None]:
    """Change nothing: Adafactor refuses all sharded parameters."""
    return lambda: None


def with_plain_matrix() -> Any:
    model: Any = tower("fully_shard", "rows")
    model.plain = nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
    warnings.filterwarnings("ignore", "parameters plain of FSDPTower were added")
    return model


@on_ranks(2)
@pytest.mark.parametrize(
    ("make", "spoil", "error"),
    [
        (late, nothing, FullshardError),
        (sharded, whole_state, ConfigError),
        (owned, sparse_gradient, UnsupportedError),
        (muon, sparse_gradient, UnsupportedError),
    ],
)
def test_a_refused_step_has_left_nothing(
    make: Make, spoil: Callable[[Any], Callable[[], None]], error: type[Exception]
) -> None:
    """A refused step changes no weight and ends no step of other ranks, and training continues."""
    model = with_plain_matrix()
    optimizer = make(model)
    if make is not late:
        trained(model, optimizer, (0,))
    before = full_parameters(model)
    compute(model, optimizer, 1)
    mend = spoil(optimizer)
    for _ in range(2):
        with pytest.raises(error):
            optimizer.step()
        assert not steps._begun
    equals(full_parameters(model), before)
    mend()
    if make is late:
        trained(model, adamw(model), (1,))
        return
    optimizer.step()
    trained(model, optimizer, (2,))
    found = full_parameters(model)
    model = with_plain_matrix()
    trained(model, make(model), (0, 1, 2))
    equals(found, full_parameters(model))


def told_next(model: Any, optimizer: torch.optim.Optimizer) -> str:
    """Return the error that all ranks raise in the next forward; check that the one after runs."""
    with pytest.raises(TornStepError) as caught:
        compute(model, optimizer, 7)
    trained(model, optimizer, (8,))
    return str(caught.value)


def in_the_second_part() -> str:
    """Refuse AdamW's parameters after Muon has stepped the matrices."""
    model: Any = tower("fully_shard", "rows")
    optimizer = muon(model)
    trained(model, optimizer, (0,))
    compute(model, optimizer, 1)
    mend = whole_state(optimizer)
    before = full_parameters(model)
    with pytest.raises(ConfigError):
        optimizer.step()
    after = full_parameters(model)
    assert any(not torch.equal(after[name], before[name]) for name in before)
    mend()
    return told_next(model, optimizer)


def in_preparation() -> str:
    """Fail on one rank as it prepares its step: not a refusal, as the other ranks have stepped."""
    model: Any = tower("fully_shard", "rows")
    optimizer = sharded(model)
    compute(model, optimizer, 0)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:

            def trouble(*_: Any) -> None:
                raise Trouble("out of memory, say")

            patch.setattr(ShardedOptimizer, "_prepare", trouble)
            with pytest.raises(Trouble):
                optimizer.step()
        else:
            optimizer.step()
    return told_next(model, optimizer)


def after_a_refusal() -> str:
    """Fail in a step after a refused step, which must not hide the failure."""
    model: Any = tower("fully_shard", "rows")
    optimizer = sharded(model)
    trained(model, optimizer, (0,))
    compute(model, optimizer, 1)
    mend = whole_state(optimizer)
    with pytest.raises(ConfigError):
        optimizer.step()
    mend()
    if dist.get_rank() == 1:
        with pytest.raises(Trouble):
            fail(optimizer, after=False)
    else:
        optimizer.step()
    return told_next(model, optimizer)


def in_a_closure(make: Make) -> str:
    """Fail on one rank in a closure, after its backward: the other ranks step."""
    model: Any = tower("fully_shard", "rows")
    optimizer = make(model)

    def closure() -> Tensor:
        compute(model, optimizer, 0)
        if dist.get_rank() == 1:
            raise Trouble("no")
        return torch.zeros(())

    try:
        optimizer.step(closure)  # type: ignore[call-overload]
    except Trouble:
        assert dist.get_rank() == 1
    return told_next(model, optimizer)


class Twice(torch.optim.AdamW):
    """An optimizer that calls the step of its base class, which has hooks, and then fails."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.fails:
            raise Trouble("no")


def after_the_step_within() -> str:
    model: Any = tower("fully_shard", "rows")
    adamw(model)  # from now on, AdamW's steps have hooks
    optimizer = Twice(model.parameters())
    trained(model, optimizer, (0,))
    assert not steps._begun
    compute(model, optimizer, 1)
    optimizer.fails = dist.get_rank() == 1
    try:
        optimizer.step()
    except Trouble:
        assert dist.get_rank() == 1
    optimizer.fails = False
    return told_next(model, optimizer)


@pytest.mark.parametrize(
    ("job", "args", "name", "ranks"),
    [
        (in_the_second_part, (), "Muon", (0, 1)),
        (in_preparation, (), "ShardedOptimizer", (1,)),
        (after_a_refusal, (), "ShardedOptimizer", (1,)),
        (in_a_closure, (adamw,), "AdamW", (1,)),
        (in_a_closure, (sharded,), "ShardedOptimizer", (1,)),
        (after_the_step_within, (), "Twice", (1,)),
    ],
)
def test_what_may_have_stepped_something_is_told(
    pool: RankPool, job: Callable[..., str], args: tuple[Any, ...], name: str, ranks: tuple[int]
) -> None:
    (said,) = set(pool.run(2, job, *args))
    named = [r for r in (0, 1) if f"rank {r} failed: an exception, in the step of {name}" in said]
    assert named and set(named) <= set(ranks), said

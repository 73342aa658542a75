"""Parameters that are tied, exchanged, untied or replaced after sharding."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import (
    FSDPModule,
    FullyShardedDataParallel,
    Ragged,
    checkpoint,
    errors,
    fully_shard,
    unshard_params,
)
from fullshard.checkpoint import full_state_dict
from fullshard.optim import OwnedOptimizer, ShardedOptimizer, clip_grad_norm_
from tests.ranks.models import fill, ids
from tests.ranks.pool import RankPool, on_ranks

EXACT = 1e-12


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.block = nn.Linear(6, 6)
        self.left = nn.Linear(6, 6, bias=False)
        self.right = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 7, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.block(self.embed(tokens)))
        return self.head(self.right(torch.sigmoid(self.left(x))))


def make() -> Words:
    return fill(Words().double())  # type: ignore[return-value]


def per_parameter(model: nn.Module, apart: bool) -> nn.Module:
    return _sharded(model, apart)


def ragged(model: nn.Module, apart: bool) -> nn.Module:
    return _sharded(model, apart, layout=Ragged())


def originals(model: nn.Module, apart: bool) -> nn.Module:
    assert not apart
    model.block = FullyShardedDataParallel(model.block, device_id="cpu", use_orig_params=True)
    return FullyShardedDataParallel(model, device_id="cpu", use_orig_params=True)


def _sharded(model: nn.Module, apart: bool, **options: Any) -> nn.Module:
    fully_shard(model.block, **options)
    if apart:
        fully_shard(model.head, **options)
    return fully_shard(model, **options)


FACES: dict[str, Callable[[nn.Module, bool], nn.Module]] = {
    "per_parameter": per_parameter,
    "ragged": ragged,
    "originals": originals,
}


def inner(model: nn.Module) -> Any:
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def loss_of(model: nn.Module, number: int) -> Tensor:
    return model(ids(3, 4, vocab=7, seed=number)).square().mean()


def tie(model: nn.Module) -> None:
    inner(model).head.weight = inner(model).embed.weight


def exchange(model: nn.Module) -> None:
    left, right = inner(model).left, inner(model).right
    left.weight, right.weight = right.weight, left.weight


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adam": lambda params: torch.optim.AdamW(params, lr=0.05),
    "sharded": lambda params: ShardedOptimizer(params, torch.optim.AdamW, lr=0.05),
    "owned": lambda params: OwnedOptimizer(
        params, torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True
    ),
}
PLAIN: dict[str, Callable[..., Any]] = {
    "adam": OPTIMIZERS["adam"],
    "sharded": OPTIMIZERS["adam"],
    "owned": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
}


def train(
    model: nn.Module,
    optimizers: dict[str, Callable[..., Any]],
    kind: str,
    change: Callable[[nn.Module], None],
    when: int,
) -> list[float]:
    """Train with two passes a step, the first without sync, and clipping; return the losses.

    The optimizer is made before a change in the first step, and again after a later change.
    """
    losses = []
    optimizer = optimizers[kind](model.parameters())
    for number in range(5):
        if number == when:
            change(model)
            if when:
                optimizer = optimizers[kind](model.parameters())
        for last in (False, True):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(last)
            loss = loss_of(model, number + 10 * last)
            loss.backward()
        losses.append(loss.item())
        if isinstance(model, FullyShardedDataParallel):
            model.clip_grad_norm_(0.5)
        else:
            clip = nn.utils.clip_grad_norm_ if kind == "adam" else clip_grad_norm_
            clip(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def worst(change: Callable[[nn.Module], None], face: str, apart: bool) -> dict[str, float]:
    found = {}
    for kind in OPTIMIZERS:
        for when in (0, 2):
            plain = make()
            model = FACES[face](copy.deepcopy(plain), apart)
            ours = train(model, OPTIMIZERS, kind, change, when)
            theirs = train(plain, PLAIN, kind, change, when)
            distance = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            found[f"{kind} at {when}"] = distance
    return found


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("change", [tie, exchange])
def test_a_tie_within_a_unit_trains_as_in_the_plain_model(
    pool: RankPool, change: Callable[[nn.Module], None], face: str
) -> None:
    for found in pool.run(2, worst, change, face, False):
        assert max(found.values()) <= EXACT, found


def test_a_tie_across_units_trains_as_in_the_plain_model(pool: RankPool) -> None:
    for found in pool.run(2, worst, tie, "per_parameter", True):
        assert max(found.values()) <= EXACT, found


@on_ranks(2)
def test_a_tie_across_units_that_cut_otherwise_is_refused() -> None:
    """A tie across units whose layouts shard the parameters differently is refused."""
    plain = make()
    model = ragged(copy.deepcopy(plain), apart=True)
    own = model.head.weight
    tie(model)
    with pytest.raises(errors.ConfigError) as caught:
        loss_of(model, 0)
    model.head.weight = own
    assert abs(loss_of(model, 1) - loss_of(plain, 1)).item() <= EXACT
    message = str(caught.value)
    assert "weight of FSDPLinear in unit head was replaced" in message
    assert "that of unit (root)" in message


@on_ranks(2)
@pytest.mark.parametrize("face", ["per_parameter", "ragged"])
def test_a_tie_of_unsharded_parameters_stays(face: str) -> None:
    plain = make()
    model = FACES[face](copy.deepcopy(plain), False)
    model.unshard()
    for one in (plain, model):
        tie(one)
    model.reshard()
    for one in (plain, model):
        train(one, PLAIN, "adam", lambda _: None, 9)
    assert abs(loss_of(model, 3) - loss_of(plain, 3)).item() <= EXACT


def _once_more(model: nn.Module, number: int) -> None:
    loss_of(model, number).backward()
    model.zero_grad()


MEANWHILE: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "zero_grad": lambda model, optimizer: model.zero_grad(),
    "state_dict": lambda model, optimizer: model.state_dict(),
    "load_state_dict": lambda model, optimizer: model.load_state_dict(model.state_dict()),
    "parameters": lambda model, optimizer: list(model.parameters()),
    "optimizer step": lambda model, optimizer: optimizer.step(),
    "reshard": lambda model, optimizer: model.reshard(),  # type: ignore[operator]
    "unshard": lambda model, optimizer: model.unshard(),  # type: ignore[operator]
    "forward": lambda model, optimizer: loss_of(model, 5),
    "backward": lambda model, optimizer: _once_more(model, 5),
    "full parameters": lambda model, optimizer: full_state_dict(model, rank0_only=False),
}
"""Calls that may follow a tie of parameters that stay unsharded after backward."""


@on_ranks(2)
@pytest.mark.parametrize("meanwhile", MEANWHILE)
@pytest.mark.parametrize("face", ["per_parameter", "ragged"])
def test_a_tie_of_parameters_that_stay_unsharded_is_not_undone(face: str, meanwhile: str) -> None:
    found = {}
    for change in (tie, exchange):
        plain = make()
        model = FACES[face](copy.deepcopy(plain), False)
        model.set_reshard_after_backward(False)  # type: ignore[operator]
        for one in (plain, model):
            optimizer = PLAIN["adam"](one.parameters())
            loss_of(one, 1).backward()
            change(one)
            if one is model or meanwhile == "optimizer step":
                MEANWHILE[meanwhile](one, optimizer)
            one.zero_grad()
        model.set_reshard_after_backward(True)  # type: ignore[operator]
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for one in (plain, model):
            train(one, PLAIN, "adam", lambda _: None, 9)
        found[change.__name__] = abs(loss_of(model, 3) - loss_of(plain, 3)).item()
    assert max(found.values()) <= EXACT, found


def flat(model: nn.Module, apart: bool) -> nn.Module:
    model.block = FullyShardedDataParallel(model.block, device_id="cpu")
    return FullyShardedDataParallel(model, device_id="cpu")


@on_ranks(2)
@pytest.mark.parametrize("face", [*FACES, "flat"])
def test_a_tie_inside_a_loan_stays(face: str) -> None:
    found = {}
    for change in (tie, exchange):
        plain = make()
        model = (FACES | {"flat": flat})[face](copy.deepcopy(plain), False)
        for one in (plain, model):
            with unshard_params(one) if one is model else torch.no_grad():
                change(one)
                with torch.no_grad():
                    inner(one).head.weight.mul_(0.5)
            train(one, PLAIN, "adam", lambda _: None, 9)
        found[change.__name__] = abs(loss_of(model, 3) - loss_of(plain, 3)).item()
    assert max(found.values()) <= EXACT, found


def refused_in_a_loan() -> list[str]:
    """Tie across units, then on rank 0 alone; check that values stay; return the errors."""
    said = []
    for apart, options in ((True, {}), (False, {"rank0_only": True})):
        plain = make()
        model = per_parameter(copy.deepcopy(plain), apart)
        try:
            with unshard_params(model, **options):
                if not options or torch.distributed.get_rank() == 0:
                    tie(model)
                    with torch.no_grad():
                        model.embed.weight.zero_()
        except errors.ConfigError as error:
            said.append(str(error))
        else:
            said.append("")
        assert abs(loss_of(model, 1) - loss_of(plain, 1)).item() <= EXACT
    return said


def test_a_tie_inside_a_loan_that_cannot_stay_is_refused(pool: RankPool) -> None:
    (across, alone), (across_there, _) = pool.run(2, refused_in_a_loan)
    for message in (across, across_there):
        assert "weight of FSDPLinear in unit head was tied" in message
        assert "unit (root)" in message
    assert "head.weight" in alone
    assert "rank0_only" in alone


@on_ranks(2)
def test_a_change_of_one_place_of_a_tied_parameter_is_refused() -> None:
    """A change of one place of a tied parameter is refused in the next forward."""
    said = []
    plain = make()
    tie(plain)
    model = per_parameter(copy.deepcopy(plain), False)
    old = model.head.weight
    for new in (nn.Parameter(old.detach().clone()), None):
        model.head.weight = new
        try:
            loss_of(model, 0)
        except errors.ConfigError as error:
            said.append(str(error))
        model.head.weight = old
        assert abs(loss_of(model, 1) - loss_of(plain, 1)).item() <= EXACT
        model.reshard()
    own, nothing = said
    for name in ("weight of Linear", "weight of Embedding", "unit (root)"):
        assert name in own
    assert "by nothing" in nothing


@on_ranks(2)
def test_parameters_of_a_flat_wrapper_are_not_replaced_in_silence() -> None:
    said = []
    for new in ("other", "parameter"):
        model = flat(make(), False)
        head = model.module.head
        try:
            head.weight = (
                model.module.embed.weight if new == "other" else nn.Parameter(torch.zeros(7, 6))
            )
            loss_of(model, 0)
        except (errors.ConfigError, TypeError) as error:
            said.append(str(error))
    other, parameter = said
    assert "weight" in other
    assert "weight of Linear in unit (root) was replaced" in parameter


@on_ranks(2)
@pytest.mark.parametrize("face", FACES)
def test_a_tied_model_is_copied_saved_and_cast(face: str, tmp_path: Path) -> None:
    """A model with a late tie can be copied, cast, saved and loaded."""
    found = {}
    plain = make()
    model = FACES[face](copy.deepcopy(plain), False)
    for one in (plain, model):
        tie(one)
        train(one, PLAIN, "adam", lambda _: None, 9)
    twin = copy.deepcopy(model)
    found["copy"] = abs(loss_of(twin, 1) - loss_of(plain, 1)).item()
    assert inner(twin).head.weight is inner(twin).embed.weight
    full = checkpoint.full_state_dict(model, rank0_only=False)
    expected = plain.state_dict()
    assert full.keys() == expected.keys()
    found["full"] = max((full[n] - expected[n]).abs().max().item() for n in expected)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loss_of(model, 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.save(str(tmp_path / "saved"), step=1, model=model, optimizer=optimizer)
    before = loss_of(model, 3).item()
    fresh = FACES[face](make(), False)
    tie(fresh)
    checkpoint.load(
        str(tmp_path / "saved"), model=fresh, optimizer=torch.optim.AdamW(fresh.parameters())
    )
    found["loaded"] = abs(loss_of(fresh, 3).item() - before)
    for one in (plain, twin):
        one.float()
    found["cast"] = abs(loss_of(twin, 1).item() - loss_of(plain, 1).item()) * 1e-6
    assert max(found.values()) <= EXACT, found


@on_ranks(2)
@pytest.mark.parametrize("face", [*FACES, "flat"])
def test_parameters_that_are_added_later_are_told_of_once(face: str) -> None:
    """Parameters added after sharding cause one warning in the next forward."""

    def add_a_module(model: Any) -> None:
        model.block.adapter = nn.Linear(6, 6).double()

    def swap(model: Any) -> None:
        model.left = nn.Linear(6, 6, bias=False).double()

    def add_a_parameter(model: Any) -> None:
        model.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def wrap(model: Any) -> None:
        model.right = nn.Sequential(model.right)

    def remove(model: Any) -> None:
        model.left = nn.Identity()

    def shard_the_new_one(model: Any) -> None:
        model.left = fully_shard(nn.Linear(6, 6, bias=False).double())

    changes = [add_a_module, swap, add_a_parameter, wrap, remove]
    if face != "flat":
        changes.append(shard_the_new_one)
    found = []
    for change in changes:
        model = (FACES | {"flat": flat})[face](make(), False)
        said: list[str] = []
        for number in range(3):
            if number == 1:
                change(inner(model))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss_of(model, number).backward()
            said += [str(one.message) for one in caught if "was sharded" in str(one.message)]
        found.append(said)
    module, swapped, param, *others = found
    assert len(module) == len(swapped) == len(param) == 1
    assert "bias of Linear, weight of Linear were added below unit " in module[0]
    assert "weight of Linear were added" in swapped[0]
    assert "scale of" in param[0]
    assert others == [[]] * len(others)

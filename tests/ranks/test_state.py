"""State dicts: contents, loads, and both in the middle of training."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor

from fullshard import fully_shard
from tests.ranks.models import full_parameters
from tests.ranks.net import Net, apart, batch, make, optimizer_of, shard, step, train_both
from tests.ranks.pool import RankPool, on_ranks

worlds = pytest.mark.parametrize("world", [1, 2, 3])
EXACT = 1e-12


@on_ranks(1, 2, 3)
def test_a_state_dict_holds_dtensors_that_follow_training() -> None:
    plain = make()
    model = shard(copy.deepcopy(plain))
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, param in model.named_parameters():
        assert isinstance(state[name], DTensor)
        assert state[name].shape == plain.get_parameter(name).shape
        assert state[name].to_local().data_ptr() == param.to_local().data_ptr()
    step(model, optimizer_of(model))
    assert all(torch.equal(state[n], p) for n, p in model.named_parameters())


def trained_state() -> tuple[dict[str, Tensor], Net]:
    """Return a state dict with other values, and the unsharded model that has these values."""
    other = shard(make(seed_scale=0.2))
    plain = make(seed_scale=0.2)
    state = {name: value.detach().clone() for name, value in other.state_dict().items()}
    return state, plain


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("gradients", [False, True], ids=["parameters", "gradients"])
def test_what_it_holds_can_be_copied_and_saved(gradients: bool) -> None:
    """``copy.deepcopy`` and ``torch.save`` work, as scripts for one process use them."""
    model = shard(make())
    model(batch()).sum().backward()
    state: dict[str, Any] = model.state_dict()
    if gradients:
        state = {name: param.grad for name, param in model.named_parameters()}
    copied = copy.deepcopy(state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    found = all(
        torch.equal(one[name].full_tensor(), value.full_tensor())
        for name, value in state.items()
        for one in (copied, loaded)
    )
    assert found


KEEPERS = ("nothing", "reshard_false", "reshard_after_backward_false", "unshard")


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_load_between_steps_is_seen_by_the_next_forward(keeper: str, assign: bool) -> None:
    state, plain = trained_state()
    model = shard(make(), reshard_after_forward=False if keeper == "reshard_false" else None)
    if keeper == "reshard_after_backward_false":
        model.set_reshard_after_backward(False)
    references, optimizer = list(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    if keeper == "unshard":
        model.unshard()
        model.blocks[0].unshard(async_op=True)
    model.load_state_dict(state, assign=assign)
    for module in (model, *model.blocks) if assign else ():
        module.reshard()  # so that an optimizer can be built
    if assign:
        references = list(model.parameters())
        optimizer = torch.optim.SGD(references, lr=0.1)
    step(model, optimizer, 1)
    step(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1)
    for module in (model, *model.blocks):
        module.reshard()
    assert all(a is b for a, b in zip(references, model.parameters(), strict=True))
    assert apart(model, plain) <= EXACT


@on_ranks(1, 2, 3)
def test_an_assigning_load_over_unsharded_parameters_counts() -> None:
    state, plain = trained_state()
    model = shard(make())
    model.unshard()
    model.load_state_dict(state, assign=True)
    with torch.no_grad():
        assert (model(batch()) - plain(batch())).abs().max() <= EXACT


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("assign", [False, True])
def test_a_part_can_be_loaded(assign: bool) -> None:
    state, _ = trained_state()
    part = {name: value for name, value in state.items() if name.startswith(("head", "blocks.1"))}
    model = shard(make())
    before = full_parameters(model)
    report = model.load_state_dict(part, strict=False, assign=assign)
    assert set(report.missing_keys) == before.keys() - part.keys()
    model(batch()).sum().backward()
    after, wanted = full_parameters(model), trained_state()[1].state_dict()
    assert all(torch.equal(after[n], wanted[n] if n in part else before[n]) for n in after)


def look_during_forward(where: str, reshard: bool | None, load: bool) -> float:
    """Take a state dict of ``where`` in a hook on the first layer of ``plain``."""
    seen: list[dict[str, Any]] = []

    def script(model: nn.Module) -> None:
        target = model.get_submodule(where)

        def hook(*_: object) -> None:
            state = target.state_dict()
            seen.append(state)
            if load:
                target.load_state_dict(state)

        model.plain[0].register_forward_pre_hook(hook)
        optimizer = optimizer_of(model)
        for number in range(3):
            step(model, optimizer, number)

    difference = train_both(script, reshard_after_forward=reshard)
    assert len(seen) == 6
    assert all(isinstance(value, DTensor) for state in seen[3:] for value in state.values())
    return difference


@worlds
@pytest.mark.parametrize("where", ["", "plain", "plain.0", "head", "blocks", "blocks.0"])
@pytest.mark.parametrize("reshard", [None, False])
def test_a_state_dict_taken_in_the_middle_of_a_forward_disturbs_nothing(
    pool: RankPool, world: int, where: str, reshard: bool | None
) -> None:
    assert max(pool.run(world, look_during_forward, where, reshard, load=False)) <= EXACT


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("where", ["plain"])  # elsewhere, autograd has saved weights for backward
def test_a_load_of_the_same_values_in_the_middle_of_a_forward_disturbs_nothing(
    pool: RankPool, world: int, where: str
) -> None:
    assert max(pool.run(world, look_during_forward, where, None, load=True)) <= EXACT


@on_ranks(2)
def test_a_manual_unshard_outlives_a_state_dict() -> None:
    model = shard(make())
    model.unshard()
    model.state_dict()
    found = [n for n, p in model.named_parameters() if n[:6] != "blocks" and isinstance(p, DTensor)]
    assert found == []


# Functions of torch.distributed.checkpoint


def train_some(steps: int) -> tuple[Net, torch.optim.Optimizer]:
    model = shard(make())
    optimizer = optimizer_of(model)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def full_state() -> float:
    """Load the full state dict of one model into another; return how far they are after a step."""
    options = dcp_state.StateDictOptions(full_state_dict=True)
    model, optimizer = train_some(2)
    whole, moments = dcp_state.get_state_dict(model, optimizer, options=options)
    expected = full_parameters(model)
    assert all(
        type(value) is Tensor and torch.equal(value, expected[n]) for n, value in whole.items()
    )
    moments = copy.deepcopy(moments)  # otherwise both optimizers count steps in the same tensors
    fresh, its_optimizer = train_some(0)
    dcp_state.set_state_dict(
        fresh, its_optimizer, model_state_dict=whole, optim_state_dict=moments, options=options
    )
    step(model, optimizer, 7)
    step(fresh, its_optimizer, 7)
    return apart(fresh, model)


@pytest.mark.parametrize("world", [2, 3])
def test_full_state_dicts_leave_and_enter(pool: RankPool, world: int) -> None:
    assert max(pool.run(world, full_state)) == 0.0


@on_ranks(2)
def test_an_optimizer_state_dict_can_be_taken_after_an_evaluation() -> None:
    model, optimizer = train_some(1)
    with torch.no_grad():
        model(batch())
    found = len(dcp_state.get_optimizer_state_dict(model, optimizer)["state"])
    assert found == len(list(make().parameters()))


def plain_into_sharded() -> bool:
    model = shard(make())
    for assign in (False, True):
        try:
            model.load_state_dict(make(seed_scale=0.2).state_dict(), assign=assign)
        except (RuntimeError, ValueError) as error:
            assert "scale" in str(error) or "blocks.0" in str(error)
        else:
            return False
    state, plain = trained_state()
    model.load_state_dict(state, assign=True)
    return apart(model, plain) == 0.0


def test_plain_tensors_are_refused_and_a_right_load_repairs(pool: RankPool) -> None:
    assert pool.run(2, plain_into_sharded) == [True, True]


# State dicts that raise


class Moody(nn.Linear):
    """A layer whose state dict and load raise while ``is_ill``."""

    is_ill = False

    def get_extra_state(self) -> int:
        if self.is_ill:
            raise RuntimeError("ill")
        return 1

    def set_extra_state(self, state: int) -> None:
        self.get_extra_state()


def moody(on_wrapper: bool) -> tuple[nn.Module, Moody]:
    """Return a sharded module, and the other layer: inside it, or the module itself."""
    inner = Moody(4, 4).double()
    model = nn.Sequential(inner, nn.Linear(4, 4).double())
    return fully_shard(inner if on_wrapper else model), inner


@on_ranks(2)
@pytest.mark.parametrize("via", ["root", "inner", "load"])
@pytest.mark.parametrize("is_sharded_itself", [False, True], ids=["inside", "itself"])
def test_state_dicts_are_sharded_after_one_that_raised(is_sharded_itself: bool, via: str) -> None:
    model, inner = moody(is_sharded_itself)
    saved = model.state_dict()
    raising = {"root": model.state_dict, "inner": inner.state_dict}.get(
        via, lambda: model.load_state_dict(saved)
    )
    model.unshard()
    inner.is_ill = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ill"):
            raising()
    shown = [] if via == "inner" else list(model.parameters())
    found = ["a shard is shown" for param in shown if isinstance(param, DTensor)]
    inner.is_ill = False
    for module in (inner, model):
        values = [value for value in module.state_dict().values() if isinstance(value, Tensor)]
        found += ["a whole tensor" for value in values if not isinstance(value, DTensor)]
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    model.unshard()
    values = [value for value in model.state_dict().values() if isinstance(value, Tensor)]
    found += ["later a whole tensor" for value in values if not isinstance(value, DTensor)]
    assert found == []


@on_ranks(2)
def test_a_forward_sees_what_a_load_wrote_before_it_raised() -> None:
    """A forward uses the loaded weight after a load that raised, not the unsharded copy."""
    model, inner = moody(on_wrapper=False)
    model.set_reshard_after_backward(False)
    ones = torch.ones(2, 4, dtype=torch.float64)
    model(ones).sum().backward()
    loaded = {
        name: value.detach().clone().zero_() if isinstance(value, Tensor) else value
        for name, value in model.state_dict().items()
    }
    inner.is_ill = True
    with pytest.raises(RuntimeError, match="ill"):
        nn.ModuleList([model]).load_state_dict({f"0.{n}": v for n, v in loaded.items()})
    inner.is_ill = False
    seen: list[float] = []
    inner.register_forward_hook(lambda *given: seen.append(given[2].abs().max().item()))
    model(ones).sum().backward()
    assert seen[0] == 0.0

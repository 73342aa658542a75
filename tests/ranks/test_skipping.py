"""Ranks skip, repeat and reorder units with ``set_skip_tolerance``."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fullshard
from fullshard import fully_shard
from fullshard.errors import ArgumentTypeError, BusyError, ConfigError, ProtocolError
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.ownership import unit_of
from fullshard.schedule import Op, Transcript
from tests.ranks.models import Trouble, noise, shard_units
from tests.ranks.pool import RankPool, on_ranks
from tests.ranks.sparse import DIM, Case, Sparse, apart, difference, draw, loss_of, shard, train

EXACT = 1e-12

CASES: dict[str, tuple[int, Case]] = {
    "offload": (3, Case(options={"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)})),
    "flat, originals": (3, Case(flat=True, options={"use_orig_params": True}, accumulate=2)),
    "replicas": (4, Case(shape=(2, 2), accumulate=2)),
    "smaller group": (4, Case(options={"reshard_after_forward": 2})),
}
"""Numbers of ranks, and cases that ``random_cases`` rarely or never draws."""


@pytest.mark.parametrize("name", CASES)
def test_equals_the_unsharded_model(pool: RankPool, name: str) -> None:
    world, case = CASES[name]
    for result in pool.run(world, train, draw(world, world, 3, case), case):
        assert result < EXACT


def test_equals_it_in_mixed_precision(pool: RankPool) -> None:
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    case = Case(options={"mp_policy": policy})
    for result in pool.run(2, train, draw(5, 2, 2, case), case):
        assert 0 < result < 1e-5


def test_without_tolerance_it_is_an_error(pool: RankPool) -> None:
    """Skipped units are an error without tolerance, so the other tests show its effect."""
    case = Case(skips="nothing")
    with pytest.raises(Exception, match=r"ProtocolError|LostRankError"):
        pool.run(2, train, [[[[[0], [1]], [[1], [0]]]]], case)


def random_cases(seed: int, count: int, world: int) -> list[tuple[int, Case]]:
    """Return seeds of programs, and cases with random options."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        flat = chance.random() < 0.3
        reshard = chance.choice([None, True, False, 2] if world == 4 else [None, True, False])
        layout = chance.choice([fullshard.PerParameter(), fullshard.Ragged()])
        case = Case(
            shape=(2, 2) if world == 4 and reshard != 2 and chance.random() < 0.4 else (),
            flat=flat,
            options={} if flat else {"reshard_after_forward": reshard, "layout": layout},
            skips=chance.choice(["experts", "blocks", "nested"]),
            inner=chance.random() < 0.3,
            checkpoints=chance.choice(["", "", "blocks", "blocks!", "experts", "experts!"]),
            accumulate=chance.choice([1, 1, 2, 3]),
            frozen=chance.choice([(), (), ("up.bias", "gate.weight"), ("experts.1",)]),
        )
        if case.flat and case.frozen:
            case = replace(case, options={"use_orig_params": True})
        if case.flat and case.shape:
            strategy = fullshard.ShardingStrategy.HYBRID_SHARD
            case = replace(case, options={**case.options, "sharding_strategy": strategy})
        found.append((seed * 1000 + number, case))
    return found


def test_random_skips_repeats_and_orders(pool: RankPool) -> None:
    for world in (2, 3, 4):
        for number, case in random_cases(100 + world, 60, world):
            program = draw(number, world, 4, case)
            for result in pool.run(world, train, program, case):
                assert result < EXACT, (number, case)


# Single situations; ranks do different things in these functions.


def make(case: Case | None = None) -> tuple[Sparse, Any]:
    case = case or Case()
    plain = case.model()
    return plain, shard(copy.deepcopy(plain), case)


def run(model: nn.Module, parts: list[list[int]], rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return loss_of(model, rank, 0, parts, torch.float64)


def mean(plain: nn.Module, everyone: list[list[list[int]]]) -> None:
    """Give ``plain`` the mean of the gradients of all ranks."""
    for rank, parts in enumerate(everyone):
        (run(plain, parts, rank) / len(everyone)).backward()


def mine(everyone: list[list[list[int]]]) -> list[list[int]]:
    return everyone[dist.get_rank()]


SOME = [[[0, 1], []], [[1, 0, 1], []]]
"""The experts that two ranks run in two blocks; no rank runs expert 2, or any in block 1."""


@on_ranks(2)
def test_grad_is_none_only_where_no_rank_ran() -> None:
    plain, model = make()
    run(model, mine(SOME)).backward()
    mean(plain, SOME)
    absent = [
        all(param.grad is None for param in expert.parameters())
        for block in model.blocks
        for expert in block.experts
    ]
    far = difference(model, plain)
    assert absent == [False, False, True, True, True, True]
    assert far < EXACT


@on_ranks(2)
def test_what_is_run_outside_of_the_loss_changes_nothing() -> None:
    """An expert that is run without gradients, or with an unused output, changes no gradient."""
    plain, model = make()

    def watch(block: Any, args: Any, out: Tensor) -> None:
        if dist.get_rank() == 0:
            block.experts[2](args[0])
        with torch.no_grad():
            block.experts[dist.get_rank()](args[0])

    model.blocks[0].register_forward_hook(watch)
    # Our hook ends the block before that hook runs, unless the order of hooks is changed.
    hooks = model.blocks[0]._forward_hooks
    hooks.move_to_end(next(reversed(hooks)), last=False)
    run(model, mine(SOME)).backward()
    mean(plain, SOME)
    assert difference(model, plain) < EXACT


class Boxed:
    """A container in which no output tensor is found."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


@on_ranks(2)
def test_a_block_whose_output_is_hidden() -> None:
    """A block may return its output in a container, and one rank may run an additional expert."""
    plain, model = make()
    for one in (plain, model):
        first, second = one.blocks
        after = next(reversed(first._forward_hooks)) if first._forward_hooks else None
        first.register_forward_hook(lambda _m, _args, out: Boxed(out))
        if after is not None:  # before our hook, which looks for outputs
            first._forward_hooks.move_to_end(after)
        second.register_forward_pre_hook(lambda _m, args: (args[0].value, *args[1:]), prepend=True)
    far = 0.0
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    for _ in range(2):
        run(model, mine(SOME)).backward()
        mean(plain, SOME)
        far = max(far, difference(model, plain))
        for optimizer in optimizers:
            optimizer.step()
    assert far < EXACT


@on_ranks(2)
def test_runs_without_gradients_too() -> None:
    plain, model = make()
    plain.eval()
    model.eval()
    with torch.no_grad():
        far = apart(run(model, mine(SOME)), run(plain, mine(SOME)))
    with torch.inference_mode():
        far = max(far, apart(run(model, mine(SOME)), run(plain, mine(SOME))))
    run(model.train(), mine(SOME)).backward()
    mean(plain.train(), SOME)
    assert max(far, difference(model, plain)) < EXACT


@on_ranks(2)
def test_a_graph_that_is_retained() -> None:
    plain, model = make()
    loss = run(model, mine(SOME))
    loss.backward(retain_graph=True)
    loss.backward()
    mean(plain, SOME)
    mean(plain, SOME)
    assert difference(model, plain) < EXACT


@on_ranks(2)
def test_autograd_grad() -> None:
    """``autograd.grad`` for the input of the model works, also before a backward."""
    plain, model = make()
    far = []
    for one in (plain, model):
        x = noise(2, DIM, seed=3).requires_grad_()
        far.append(torch.autograd.grad(one(x, mine(SOME)).sum(), x)[0])
    run(model, mine(SOME)).backward()
    mean(plain, SOME)
    assert max(apart(*far), difference(model, plain)) < EXACT


def after_exceptions(where: str) -> float:
    """Fail on each rank in a different expert, in forward or backward, and train on."""
    plain, model = make()
    armed = True

    def fail(*_: Any) -> None:
        if armed:
            raise Trouble

    expert = model.blocks[0].experts[dist.get_rank()]
    if where == "forward":
        expert.down.register_forward_hook(fail)
    else:
        expert.down.register_full_backward_hook(fail)
    for _ in range(2):
        try:
            run(model, mine(SOME)).backward()
        except Trouble:
            pass
        else:
            return float("inf")
    armed = False
    if where == "backward":  # reduced gradients stay, as after any backward that fails
        model.zero_grad()
    run(model, mine(SOME)).backward()
    mean(plain, SOME)
    return difference(model, plain)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_goes_on_after_exceptions(pool: RankPool, where: str) -> None:
    assert max(pool.run(2, after_exceptions, where)) < EXACT


@on_ranks(2)
def test_tied_parameters() -> None:
    """A weight of two experts may belong to the root, which no rank skips."""
    plain = Case().model()
    for block in plain.blocks:
        block.experts[1].up.weight = plain.blocks[0].experts[1].up.weight
    model: Any = copy.deepcopy(plain)
    weight = model.blocks[0].experts[1].up.weight
    for block in model.blocks:
        for expert in block.experts:
            fully_shard(expert, ignored_params={weight})
    fully_shard(model)
    for block in model.blocks:
        for expert in block.experts:
            expert.set_skip_tolerance(True)
    everyone = [[[0], [1, 1]], [[1], [2]]]
    run(model, mine(everyone)).backward()
    mean(plain, everyone)
    assert difference(model, plain) < EXACT


SETTINGS = ["budget", "told", "unshard", "kept after backward", "not last", "finalized"]


@on_ranks(2)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_neighbours(setting: str) -> None:
    plain, model = make()
    experts = [expert for block in model.blocks for expert in block.experts]
    if setting == "budget":
        model.set_prefetch_budget(2000)
        model.set_reduction_budget(4000)
    elif setting == "told":
        model.blocks[0].set_modules_to_forward_prefetch([experts[4], model.blocks[1]])
        model.blocks[1].set_modules_to_backward_prefetch([experts[0]])
        experts[0].set_modules_to_forward_prefetch([experts[5]])
    elif setting == "unshard":
        experts[1].unshard()
        model.blocks[1].unshard(async_op=True)
    elif setting == "kept after backward":
        model.set_reshard_after_backward(False)
    elif setting == "not last":
        model.set_is_last_backward(False)
    elif setting == "finalized":
        model.set_manual_backward_finalization(True)
    far = 0.0
    programs = draw(8, 2, 3, Case())
    for number, (everyone,) in enumerate(programs):
        last = number == len(programs) - 1
        if last and setting == "not last":
            model.set_is_last_backward(True)
        run(model, mine(everyone)).backward()
        mean(plain, everyone)
        if setting == "finalized":
            model.finalize_backward()
        if last or setting != "not last":
            far = max(far, difference(model, plain))
    assert far < EXACT


def message_of(call: Callable[[], object], *kinds: type[Exception]) -> str:
    try:
        call()
    except kinds as error:
        return str(error)
    return "nothing was raised"


def in_detail() -> float:
    """Train with a check of the order of units, which applies to units that are always used."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        case = Case(flat=True)
        return train(draw(11, 2, 3, case), case)
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_the_check_of_the_order_leaves_out_what_has_none(pool: RankPool) -> None:
    assert max(pool.run(2, in_detail)) < EXACT


@on_ranks(2)
@pytest.mark.parametrize("flat", [False, True])
def test_refusals(flat: bool) -> None:
    plain, model = make(Case(flat=flat))
    blocks = model.module.blocks if flat else model.blocks
    block = blocks[0].module if flat else blocks[0]
    expert, x = block.experts[0], noise(2, DIM)
    told: dict[str, str] = {}

    def in_the_middle(*_: Any) -> None:
        call = lambda: expert.set_skip_tolerance(False)  # noqa: E731
        told["busy"] = message_of(call, BusyError)

    handle = block.gate.register_forward_hook(in_the_middle)
    run(model, mine(SOME)).backward()
    handle.remove()
    told["root"] = message_of(lambda: model.set_skip_tolerance(True), ConfigError)
    told["type"] = message_of(lambda: expert.set_skip_tolerance(1), ArgumentTypeError)
    told["outside"] = message_of(lambda: expert(x), ProtocolError)
    mean(plain, SOME)
    told["goes on"] = str(difference(model, plain) < EXACT)
    for block in blocks:
        block.set_skip_tolerance(False)
    told["by itself"] = str(apart(expert(x), plain.blocks[0].experts[0](x)) < EXACT)
    model.set_skip_tolerance(False)
    assert "middle of a forward" in told["busy"]
    assert "inside of no other unit" in told["root"]
    assert "expected a bool" in told["type"]
    assert "outside of the forward of" in told["outside"]
    assert told["goes on"] == told["by itself"] == "True"


class TwoParents(nn.Module):
    """Two modules that both contain a block; one of them may contain the other."""

    def __init__(self, *, nested: bool) -> None:
        super().__init__()
        block = nn.Linear(DIM, DIM)
        self.one = nn.Sequential(nn.Linear(DIM, DIM), block)
        self.two = nn.Sequential(nn.Linear(DIM, DIM), self.one if nested else block)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


def tolerated_in_two_parents(nested: bool) -> str:
    model = TwoParents(nested=nested)
    shard_units(model, (model.one[1], model.one, model.two))
    try:
        model.one[1].set_skip_tolerance(True)
    except ConfigError as error:
        model(torch.ones(2, DIM)).sum().backward()  # works as before
        return str(error)
    model(torch.ones(2, DIM)).sum().backward()
    return ""


def test_a_unit_in_two_others_is_refused_by_name(pool: RankPool) -> None:
    for told in pool.run(2, tolerated_in_two_parents, False):
        assert "unit one.1 is inside of two units, one and two" in told
    assert pool.run(2, tolerated_in_two_parents, True) == ["", ""]


@on_ranks(2)
def test_may_change_between_steps() -> None:
    plain, model = make()
    far = 0.0
    for tolerant in (False, True, False, True):
        for block in model.blocks:
            for expert in block.experts:
                expert.set_skip_tolerance(tolerant)
        everyone = SOME if tolerant else [[[0, 1], [2]]] * 2
        run(model, mine(everyone)).backward()
        mean(plain, everyone)
        far = max(far, difference(model, plain))
    assert far < EXACT


@on_ranks(2)
def test_copies_and_writes() -> None:
    """Deep copies keep the tolerance, and full parameters can be changed."""
    plain, model = make()
    run(model, mine(SOME)).backward()
    twin = copy.deepcopy(model)
    for one in (plain, twin):
        with fullshard.unshard_params(one) if one is twin else torch.no_grad(), torch.no_grad():
            for param in one.blocks[0].experts[0].parameters():
                param.mul_(0.5)
    run(twin, mine(SOME)).backward()
    mean(plain, SOME)
    assert difference(twin, plain) < EXACT


def collectives() -> list[str]:
    """Return the collectives of a second step."""
    _, model = make()
    run(model, [[0, 1], [1]]).backward()
    unit = unit_of(model)
    assert unit is not None
    engine_of(unit).recorder = recorder = Transcript()
    run(model, mine(SOME)).backward()
    wire = (Op.UNSHARD, Op.REDUCE_SCATTER)
    return [str(action) for action in recorder.actions() if action.op in wire]


def test_each_unit_is_gathered_twice_and_reduced_once_whatever_ranks_run(pool: RankPool) -> None:
    first, second = pool.run(2, collectives)
    assert first == second
    for unit in range(9):
        assert first.count(f"unshard {unit}") == (1 if unit == 8 else 2)
        assert first.count(f"reduce_scatter {unit}") == 1

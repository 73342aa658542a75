"""``unshard_params`` and ``iter_full_params``: refusals, and state that stays unchanged."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fullshard
from fullshard import checkpoint, errors, iter_full_params, unshard_params
from fullshard.device import BufferKind
from fullshard.frontend.ownership import unit_of, units_below
from fullshard.schedule import Residency
from tests.kit.extensions import Halves, wrapped
from tests.kit.unshard_params import full, refuses, sharded_net, state_of, usable
from tests.ranks import zoo
from tests.ranks.models import OddModel, Trouble, fill, full_parameters, shard_units
from tests.ranks.net import Net, batch, make, shard, step
from tests.ranks.pool import RankPool, on_ranks

LAYOUTS = [fullshard.PerParameter(), fullshard.Ragged("row"), fullshard.Ragged()]


# Refusals.


def inside_the_block() -> None:
    """Check that calls that read or move a unit are refused, and that it works afterwards."""
    plain = make()
    model: Any = shard(copy.deepcopy(plain))
    block: Any = model.blocks[0]
    other: Any = shard(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with unshard_params(model):
        refuses(model, model.unshard, "leave the with block first")
        refuses(model, model.half, "leave the with block first")
        refuses(model, lambda: copy.deepcopy(model), "leave the with block first")
        refuses(model, lambda: fullshard.fully_shard(nn.Sequential(model)), "leave the with block")
        refuses(model, lambda: unshard_params(block).__enter__(), "leave the with block first")
        refuses(model, lambda: iter_full_params(model.plain), "leave the with block first")
        refuses(model, model.set_separate_reduce_scatter_group, "leave the with block first")
        with unshard_params(other):  # another model
            assert not isinstance(other.scale, DTensor)
        model.reshard()  # nothing to reshard
        assert not isinstance(model.scale, DTensor)
    assert optimizer.param_groups[0]["params"][0] is model.scale
    with unshard_params(block), unshard_params(model, recurse=False), torch.no_grad():
        assert torch.equal(model(batch()), plain(batch()))
    usable(model, plain)
    usable(other, make())


class Calls(nn.Module):
    """A module that calls a function in its forward or its backward."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self.call = [call]
        self.in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_backward:
            self.call[0]()
        elif x.requires_grad:
            x.register_hook(lambda grad: self.call[0]())
        return x * 1


def inside_a_step() -> None:
    plain = make()
    model: Any = copy.deepcopy(plain)
    caller = Calls(lambda: unshard_params(model).__enter__())
    model.plain.append(caller)
    shard(model)
    for in_backward, root in itertools.product((False, True), (True, False)):
        caller.in_backward = in_backward
        target = model if root else model.blocks[0]
        caller.call[0] = unshard_params(target).__enter__
        with pytest.raises(errors.ProtocolError, match="in the middle of a forward or a backward"):
            model(batch()).sum().backward()
        caller.call[0] = lambda: None
        model.zero_grad()
        usable(model, plain)
    loss = model(batch()).sum()
    with (
        unshard_params(model.blocks[1]),
        pytest.raises(errors.ProtocolError, match="a backward while unshard_params"),
    ):
        loss.backward()
    model.zero_grad()
    model.reset_iter_state()
    usable(model, plain)


def wrong_arguments() -> None:
    model: Any = shard(make())

    def entering(module: Any, **options: Any) -> Callable[[], Any]:
        return lambda: unshard_params(module, **options).__enter__()

    refuses(model, entering(model, on_error="ignore"), '"keep" or "discard"')
    refuses(model, entering(model, writeback=1), "expected a bool")
    refuses(model, entering(model, check=True, rank0_only=True), "Leave check out")
    refuses(model, entering(model, check=True, writeback=False), "Leave check out")
    refuses(model, entering({model}), "got set, expected a module")
    refuses(model, lambda: iter_full_params(None), "got NoneType, expected a module")  # type: ignore[arg-type]
    refuses(model, entering(model.blocks, recurse=False), "pass one of these")
    with torch.device("meta"):
        empty: Any = shard(Net())
    refuses(empty, entering(empty), "on the meta device: scale")
    refuses(empty, lambda: iter_full_params(empty), "on the meta device: scale")


def test_what_is_impossible_raises_and_leaves_the_units_usable(pool: RankPool) -> None:
    pool.run(2, inside_the_block)
    pool.run(2, inside_a_step)
    pool.run(2, wrong_arguments)


# Exceptions.


def left_by_an_exception(rank0_only: bool) -> None:
    for layout, on_error in itertools.product(LAYOUTS, ("keep", "discard")):
        plain = make()
        model: Any = shard(copy.deepcopy(plain), layout=layout)
        before = state_of(model)
        first = dist.get_rank() == 0
        with (
            pytest.raises(Trouble),
            unshard_params(model, rank0_only=rank0_only, on_error=on_error),  # type: ignore[arg-type]
            torch.no_grad(),
        ):
            if first or not rank0_only:
                model.scale.mul_(2)
                model.blocks[1].bias.zero_()
            raise Trouble
        if on_error == "keep":
            with torch.no_grad():
                plain.scale.mul_(2)
                plain.blocks[1].bias.zero_()
        assert state_of(model) == before
        usable(model, plain)


def left_by_rank_0_alone() -> None:
    """Raise on rank 0 only: rank 0 decides about the edits, and the other ranks do not wait."""
    for on_error in ("keep", "discard"):
        plain = make()
        model: Any = shard(copy.deepcopy(plain))
        try:
            with unshard_params(model, rank0_only=True, on_error=on_error), torch.no_grad():  # type: ignore[arg-type]
                if dist.get_rank() == 0:
                    model.scale.mul_(2)
                    raise Trouble
        except Trouble:
            assert dist.get_rank() == 0
        if on_error == "keep":
            with torch.no_grad():
                plain.scale.mul_(2)
        usable(model, plain)


def test_an_exception_restores_everything_and_edits_are_kept_as_told(pool: RankPool) -> None:
    pool.run(2, left_by_an_exception, False)
    pool.run(2, left_by_an_exception, True)
    pool.run(3, left_by_rank_0_alone)


def checked(mesh: str) -> None:
    model = sharded_net(mesh, "per_param")
    before = full_parameters(model)
    last = dist.get_rank() == dist.get_world_size() - 1
    group = dist.get_rank() % 2 if mesh == "2d" else 1  # ranks with the same tensor-parallel part
    with unshard_params(model, check=True, with_grads=True), torch.no_grad():
        model.gain.mul_(2)
    assert torch.equal(full(model.gain), before["gain"] * 2)
    for what in ("value", "gradient", "absent"):
        said = "edits of another tensor-parallel rank"
        said = "ranks wrote different values to gain;" if group == 1 else said
        with (
            pytest.raises(errors.ProtocolError, match=said),
            unshard_params(model, check=True, with_grads=True),
            torch.no_grad(),
        ):
            model.blocks[0].norm.bias.add_(1)
            if what == "gradient":
                model.gain.grad = torch.full_like(model.gain, float(last))
            elif what == "absent":
                model.gain.grad = torch.ones_like(model.gain) if last else None
            else:
                model.gain[-1] += 0.5 * last
        assert model.gain.grad is None
    assert torch.equal(full(model.gain), before["gain"] * 2)
    name = "blocks.0.norm.bias"
    assert torch.equal(full(model.get_parameter(name)), before[name])


def one_rank_leaves() -> None:
    model = shard(make())
    first = dist.get_rank() == 0
    with (
        pytest.raises(Trouble if first else errors.ProtocolError),
        unshard_params(model, check=True, on_error="discard"),
        torch.no_grad(),
    ):
        model.scale.add_(1)
        if first:
            raise Trouble
    usable(model, make())


def test_ranks_that_edit_differently_are_detected_when_asked(pool: RankPool) -> None:
    pool.run(3, checked, "1d")
    pool.run(4, checked, "hsdp")
    pool.run(4, checked, "2d")
    pool.run(2, one_rank_leaves)


# Residencies.


def keeps_what_was_unsharded() -> None:
    for write in (False, True):
        plain = make()
        model: Any = shard(copy.deepcopy(plain))
        block = model.blocks[0]
        block.unshard()
        shown = block.weight
        with unshard_params(model, writeback=write), torch.no_grad():
            assert block.weight is not shown
            block.weight.mul_(2)
        assert block.weight is shown and isinstance(model.scale, DTensor)
        if write:
            with torch.no_grad():
                plain.blocks[0].weight.mul_(2)
        assert torch.equal(block.weight, plain.blocks[0].weight)  # gathered again
        block.reshard()
        usable(model, plain)
        model.set_reshard_after_backward(False)  # modules keep showing unsharded parameters
        for one in (model, plain):
            step(one, torch.optim.SGD(one.parameters(), lr=0.1))
        with unshard_params(model), torch.no_grad():
            model.scale.mul_(2)
            assert not isinstance(model.scale, DTensor)
        with torch.no_grad():
            plain.scale.mul_(2)
            assert (model(batch()) - plain(batch())).abs().max() < 1e-12


def between_forward_and_backward() -> None:
    """Edit weights between forward and backward: units stay held; backward uses the old weights."""
    plain = make()
    model: Any = shard(copy.deepcopy(plain), reshard_after_forward=False)
    one, other = model(batch()).square().sum(), plain(batch()).square().sum()
    unit: Any = unit_of(model)
    state = unit.engine.scheduler.residents.units[unit.key]
    assert state.residency is Residency.UNSHARDED
    with unshard_params(model, with_grads=True), torch.no_grad():
        assert torch.equal(model.scale, plain.scale) and model.scale.grad is None
        if dist.get_world_size() > 1:  # on one rank, the parameters borrow the shards
            model.scale.mul_(3)
    assert state.residency is Residency.UNSHARDED
    one.backward()
    other.backward()
    with torch.no_grad():
        plain.scale.mul_(3 if dist.get_world_size() > 1 else 1)
    model.reshard()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (full(mine.grad) - theirs.grad).abs().max() < 1e-12
    model.zero_grad()
    plain.zero_grad()
    usable(model, plain)


def test_units_stay_as_they_were(pool: RankPool) -> None:
    for world in (1, 3):
        pool.run(world, keeps_what_was_unsharded)
        pool.run(world, between_forward_and_backward)


# Units that are gathered.


@on_ranks(2)
def test_a_part_lends_its_unit_and_nothing_is_silently_left_sharded() -> None:
    """A module inside a unit gathers the unit; FSDP1 silently does nothing there.

    With ``recurse=False``, FSDP1 also does nothing on a module that is not a unit.
    """
    plain = make()
    model: Any = shard(copy.deepcopy(plain))
    block, part = model.blocks[0], model.plain

    def lent(module: Any, **options: Any) -> set[str]:
        with unshard_params(module, **options), torch.no_grad():
            found = {n for n, p in model.named_parameters() if not isinstance(p, DTensor)}
            for name in found:
                model.get_parameter(name).add_(0)
        assert not any(not isinstance(p, DTensor) for p in model.parameters())
        return found

    inner = {f"blocks.{i}.{name}" for i in range(2) for name in ("weight", "bias")}
    root = {name for name, _ in plain.named_parameters()} - inner
    assert lent(model) == inner | root
    assert lent(model, recurse=False) == root
    assert lent(block) == lent(block, recurse=False) == {"blocks.0.weight", "blocks.0.bias"}
    assert lent(model.blocks) == inner
    # A module inside a unit gathers all parameters of the unit, with or without ``recurse``.
    assert lent(part) == lent(part[0], recurse=False) == lent(model.head, recurse=False) == root
    # Modules without sharded parameters have full parameters already.
    assert lent(part[1]) == lent(nn.Linear(2, 2)) == lent(nn.Linear(2, 2), recurse=False) == set()
    # A plain module around sharded modules with one engine each.
    around = nn.ModuleDict({"one": model, "two": shard(make()), "plain": nn.Linear(2, 3)})
    with unshard_params(around):
        assert not any(isinstance(param, DTensor) for param in around.parameters())
    usable(model, plain)
    both = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 3)])
    expected = full_parameters(fill(both))
    fullshard.fully_shard(list(both))  # type: ignore[arg-type]
    with unshard_params(both[1], recurse=False), torch.no_grad():
        assert all(torch.equal(p, expected[n]) for n, p in both.named_parameters())
        both[0].weight.zero_()
    assert not full(both[0].weight).any() and torch.equal(
        full(both[1].weight), expected["1.weight"]
    )


# Hard cases.


def mixed_odd(world_is_one: bool, layout: Any) -> None:
    for make_model in (
        lambda: fill(OddModel().double()),
        lambda: zoo_model("several dtypes"),
        lambda: zoo_model("empty"),
        lambda: zoo_model("tied"),
        lambda: zoo_model("lstm"),
    ):
        plain = make_model()
        model: Any = copy.deepcopy(plain)
        policy = fullshard.MixedPrecisionPolicy(None if world_is_one else torch.bfloat16)
        fullshard.fully_shard(model, layout=layout, mp_policy=policy)
        streamed = dict(iter_full_params(model))
        assert list(streamed) == [name for name, _ in plain.named_parameters()]
        with unshard_params(model), torch.no_grad():
            for (name, param), other in zip(
                model.named_parameters(), plain.named_parameters(), strict=True
            ):
                assert name == other[0] and type(param) is nn.Parameter
                assert param.dtype == other[1].dtype == streamed[name].dtype
                assert param.requires_grad == other[1].requires_grad
                assert torch.equal(param, other[1]) and torch.equal(streamed[name], other[1])
                assert len(pickled(param)) < 2 * len(pickled(other[1])) + 2000
                for one in (param, other[1]):
                    one.copy_(one.logical_not() if one.dtype is torch.bool else one + 1)
        for (name, value), other in zip(iter_full_params(model), plain.parameters(), strict=True):
            assert torch.equal(value, other), name
            value.zero_()  # the caller owns the value
        for (name, value), other in zip(iter_full_params(model), plain.parameters(), strict=True):
            assert torch.equal(value, other), name


def pickled(param: Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(param, file)
    return file.getvalue()


def zoo_model(kind: str) -> nn.Module:
    if kind == "several dtypes":
        torch.manual_seed(0)
        return zoo.SeveralDtypes()
    model: nn.Module = {
        "empty": zoo.WithEmpty,
        "tied": zoo.Tied,
        "lstm": lambda: zoo.Recurrent(nn.LSTM),
    }[kind]()
    return fill(model)


@pytest.mark.parametrize("world", [1, 3])
def test_hard_cases(pool: RankPool, world: int) -> None:
    """Tied, frozen, empty and uneven parameters, several dtypes, and borrowed shards work."""
    for layout in (fullshard.PerParameter(), fullshard.Ragged()):
        pool.run(world, mixed_odd, world == 1, layout)


@on_ranks(3)
def test_offloaded_shards_and_tensors_of_other_classes() -> None:
    """Offloaded shards, and shards of a tensor subclass, are gathered as plain tensors."""
    offload = {"offload_policy": fullshard.CPUOffloadPolicy(pin_memory=False)}
    for options, source in (({}, wrapped(Halves)), (offload, make())):
        plain = make()
        model: Any = shard(source, **options)
        with unshard_params(model, rank0_only=True), torch.no_grad():
            if dist.get_rank() == 0:
                for (name, param), other in zip(
                    model.named_parameters(), plain.parameters(), strict=True
                ):
                    assert type(param) is nn.Parameter and torch.equal(param, other), name
                    param.mul_(2)
        for (name, value), other in zip(iter_full_params(model), plain.parameters(), strict=True):
            assert type(value) is Tensor and torch.equal(value, 2 * other), name
        checkpoint.load_full_state_dict(model, plain.state_dict())
        for (name, value), other in zip(iter_full_params(model), plain.parameters(), strict=True):
            assert torch.equal(value, other), name
        with torch.no_grad():
            assert (model(batch()) - plain(batch())).abs().max() < 1e-12


def columns() -> None:
    plain = fill(nn.Sequential(nn.Linear(7, 5), nn.Linear(2, 3)))
    model: Any = copy.deepcopy(plain)
    fullshard.fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    for name, value in iter_full_params(model):
        assert torch.equal(value, plain.get_parameter(name))
    with unshard_params(model), torch.no_grad():
        for name, param in model.named_parameters():
            assert torch.equal(param, plain.get_parameter(name))
            param.mul_(2)
    assert all(
        torch.equal(full(p), 2 * plain.get_parameter(n)) for n, p in model.named_parameters()
    )


def what_is_done_to_lent_parameters() -> None:
    plain = make()
    model: Any = shard(copy.deepcopy(plain))
    with unshard_params(model, with_grads=True):
        kept = model.head.weight
        model.scale.data = model.scale.data * 2
        model.head.bias = nn.Parameter(torch.full((5,), 7.0))  # another dtype, the same shape
        model.blocks[0].bias.requires_grad_(False)
        model.blocks[1].weight.grad = torch.ones(6, 6, dtype=torch.float64)
    with torch.no_grad():
        plain.scale.mul_(2)
        plain.head.bias.fill_(7.0)
    assert torch.equal(kept, plain.head.weight)  # has its own memory
    assert not model.blocks[0].bias.requires_grad and model.blocks[1].bias.requires_grad
    assert torch.equal(full(model.blocks[1].weight.grad), torch.ones(6, 6))
    model.zero_grad()
    model.blocks[0].bias.requires_grad_(True)
    usable(model, plain)
    weight = model.head.weight
    for change in (lambda data: data.t(), lambda data: torch.cat([data, data])):
        for rank0_only in (False, True):
            before = full_parameters(model)
            with (
                pytest.raises(errors.ConfigError, match=r"parameter head\.weight was replaced")
                if not rank0_only or dist.get_rank() == 0
                else nullcontext(),
                unshard_params(model, rank0_only=rank0_only),
            ):
                if isinstance(model.head.weight, nn.Parameter) and model.head.weight is not weight:
                    model.head.weight.data = change(model.head.weight.data)
            after = full_parameters(model)
            assert all(torch.equal(after[name], value) for name, value in before.items())
    for replace in (lambda: nn.Parameter(torch.ones(4)), lambda: None):
        before = state_of(model)
        with (
            pytest.raises(errors.ConfigError, match=r"parameter head\.bias was replaced"),
            unshard_params(model),
            torch.no_grad(),
        ):
            model.scale.mul_(2)
            model.blocks[0].bias.mul_(2)
            model.head.bias = replace()
        with unshard_params(model, writeback=False):
            model.head.bias = replace()
        assert state_of(model) == before
    with unshard_params(model, writeback=False):
        del model.head.weight
        model.head.weight = torch.zeros(5, 7)  # not a parameter: it would hide ours
    with torch.no_grad():
        plain.scale.copy_(full(model.scale))
    usable(model, plain)


def test_shard_1_and_what_is_done_to_lent_parameters(pool: RankPool) -> None:
    pool.run(3, columns)
    pool.run(2, what_is_done_to_lent_parameters)


@on_ranks(3)
def test_gradients_that_some_ranks_lack() -> None:
    """A gradient that some ranks lack is zero there; it is None if no rank has one."""
    for layout in LAYOUTS:
        model: Any = fill(nn.Linear(4, 6, dtype=torch.float64))
        fullshard.fully_shard(model, layout=layout)
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        expected = full(model.weight.grad)
        rows = model.weight.to_local().numel()
        model.bias.grad = None
        if dist.get_rank() == 1:
            model.weight.grad = None
        with unshard_params(model, with_grads=True):
            assert model.bias.grad is None
            grad = model.weight.grad
            assert torch.equal(grad[0], expected[0])
            assert grad.count_nonzero() <= expected.numel() - (rows if dist.get_rank() == 1 else 0)
        with unshard_params(model, with_grads=True, rank0_only=True):
            if dist.get_rank() == 0:
                model.weight.grad = None
        assert model.weight.grad is None


@on_ranks(4)
def test_frozen_dtensors_stay_frozen_and_tied_ones_stay_one_object() -> None:
    """Frozen DTensors stay frozen, and tied ones tied; FSDP1 changes both."""
    for layout in ("per_param", "element"):
        model = sharded_net("2d", layout)
        with unshard_params(model, with_grads=True):
            frozen = model.blocks[1].up.weight
            assert isinstance(frozen, DTensor) and not frozen.requires_grad
            assert model.blocks[0].up.weight.requires_grad
            assert model.embed.weight is model.head.weight
            assert isinstance(model.embed.weight, DTensor)
            assert model.embed.weight.device_mesh.mesh_dim_names == ("tp",)
            assert not isinstance(model.gain, DTensor)
            new = torch.full(model.head.weight.shape, 3.0, dtype=torch.float64)
            mesh, placements = model.head.weight.device_mesh, model.head.weight.placements
            model.head.weight.data.copy_(distribute_tensor(new, mesh, placements))
        assert model.embed.weight is model.head.weight
        assert torch.equal(full(model.embed.weight), new)
        assert not model.blocks[1].up.weight.requires_grad


# One parameter after the other.


def streamed(mesh: str) -> None:
    for layout in ("per_param", "row", "element"):
        model = sharded_net(mesh, layout)
        expected = full_parameters(model)
        got = dict(iter_full_params(model))
        assert list(got) == list(expected)
        assert all(torch.equal(got[name], expected[name]) for name in expected)
        assert not any(isinstance(value, DTensor) for value in got.values())
        first = dict(iter_full_params(model, rank0_only=True))
        assert list(first) == (list(expected) if dist.get_rank() == 0 else [])
        assert all(torch.equal(first[name], expected[name]) for name in first)
        some = dict(iter_full_params(model.blocks[1].up))
        assert list(some) == ["weight", "bias"]


@pytest.mark.parametrize(("mesh", "world"), [("1d", 3), ("hsdp", 4), ("copies", 2), ("2d", 4)])
def test_full_parameters_one_after_the_other(pool: RankPool, mesh: str, world: int) -> None:
    pool.run(world, streamed, mesh)


@on_ranks(2)
def test_names_and_what_is_not_sharded() -> None:
    """Ignored parameters, unsharded units and a checkpoint wrapper's prefix are handled."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = make()
    model: Any = copy.deepcopy(plain)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    fullshard.fully_shard(model.blocks[1])
    fullshard.fully_shard(model, ignored_params={model.head.weight})
    model.unshard()
    got = dict(iter_full_params(model, rank0_only=True))
    assert list(got) == ([n for n, _ in plain.named_parameters()] if dist.get_rank() == 0 else [])
    assert all(torch.equal(value, plain.get_parameter(name)) for name, value in got.items())
    assert torch.is_grad_enabled()
    for _ in iter_full_params(model):
        assert torch.is_grad_enabled()


def peaks(layout: Any, flags: dict[str, bool]) -> tuple[int, int, int]:
    """Return peak bytes of streaming and of ``unshard_params``, and the largest unit's bytes."""
    model = fill(
        nn.Sequential(*(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)) for _ in range(20)))
    )
    shard_units(model, model, layout=layout)
    meter: Any = unit_of(model).engine.meter  # type: ignore[union-attr]
    for _ in iter_full_params(model, rank0_only=True):
        pass
    streaming = meter.peak_nbytes[BufferKind.FULL]
    meter.reset_peak()
    with unshard_params(model, **flags):
        pass
    assert meter.held_nbytes[BufferKind.FULL] == 0
    return (
        streaming,
        meter.peak_nbytes[BufferKind.FULL],
        max(u.nbytes for u in units_below([model])),
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_at_most_one_unit_is_on_the_device(pool: RankPool, layout: Any) -> None:
    """One unit is on the device while streaming, or two copies of it with ``offload_to_cpu``."""
    flags = {"rank0_only": True, "offload_to_cpu": True}
    for streaming, offloading, unit in pool.run(2, peaks, layout, flags):
        assert 0 < streaming <= unit
        assert 0 < offloading <= 2 * unit  # a unit and the copy's source
    for _, lending, unit in pool.run(2, peaks, layout, {}):
        assert lending >= 20 * unit * 0.9


def moved_between_ranks() -> None:
    """A tensor-parallel parameter is left placed otherwise: its local part is another."""
    model = sharded_net("2d", "per_param")
    before = full_parameters(model)
    with (
        pytest.raises(errors.ConfigError, match=r"up\.weight was replaced .* placed as"),
        unshard_params(model),
        torch.no_grad(),
    ):
        up = model.blocks[0].up
        assert isinstance(up.weight, DTensor)
        up.weight = nn.Parameter(up.weight.redistribute(placements=[Replicate()]))
    assert all(torch.equal(value, before[n]) for n, value in full_parameters(model).items())


def test_parameters_placed_otherwise_are_not_written_back(pool: RankPool) -> None:
    pool.run(4, moved_between_ranks)


@on_ranks(2)
def test_a_flat_parameter_is_frozen_as_a_whole() -> None:
    model: Any = fullshard.FullyShardedDataParallel(make())
    with unshard_params(model):
        for param in model.parameters():
            param.requires_grad_(False)
    model(batch())
    assert not any(param.requires_grad for param in model.parameters())
    with unshard_params(model):
        for param in model.parameters():
            param.requires_grad_(True)
    model(batch()).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    with (
        pytest.raises(errors.ConfigError, match="were frozen or unfrozen"),
        unshard_params(model),
    ):
        next(iter(model.parameters())).requires_grad_(False)
    assert all(param.requires_grad for param in model.parameters())


def one_rank_discards() -> None:
    """An exception on one rank keeps all ranks of a grid from writing."""
    model = sharded_net("2d", "per_param")
    before = full_parameters(model)
    first = dist.get_rank() == 0
    with (
        pytest.raises(Trouble if first else errors.ProtocolError),
        unshard_params(model, check=True, on_error="discard"),
        torch.no_grad(),
    ):
        for param in model.parameters():
            param.mul_(2)
        if first:
            raise Trouble
    assert all(torch.equal(value, before[n]) for n, value in full_parameters(model).items())


def test_an_exception_on_one_rank_reaches_tensor_parallel_ranks(pool: RankPool) -> None:
    pool.run(4, one_rank_discards)

"""OwnedOptimizer steps as its class does on the unsharded model."""

from __future__ import annotations

import copy
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import Ragged, ShardingStrategy, checkpoint, fully_shard, watch
from fullshard.comm.fault_domain import fault_domain
from fullshard.comm.shared import Shared
from fullshard.errors import ConfigError, PeerError, UnsupportedError
from fullshard.optim import OwnedOptimizer, ShardedGradScaler
from fullshard.tensors import local_part
from tests.kit.owned import CLASSES, give, named, same_params
from tests.ranks.models import fill, full_parameters, heard, noise, refusal
from tests.ranks.pool import RankPool, on_ranks


class Net(nn.Module):
    """Matrices, some with fewer rows than ranks; some parameters never have gradients."""

    def __init__(self, *, vectors: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, bias=vectors)
        self.frozen = nn.Linear(10, 10, bias=False).requires_grad_(False)
        self.experts = nn.Parameter(torch.zeros(3, 10, 5))
        self.unused = nn.Linear(3, 2, bias=False)
        self.last = nn.Linear(5, 2, bias=vectors)
        self.gain = nn.Parameter(torch.ones(1)) if vectors else 1.0
        fill(self.double())

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        return self.last(torch.einsum("bi,eij->bj", y, self.experts)) * self.gain


def blocks(name: str, shape: tuple[int, ...]) -> Any:
    """Return the blocks of a parameter: one for each expert, or queries, keys and values."""
    return {"experts": "each", "first.weight": (4, 3, 3)}.get(name)


def sharded(net: nn.Module, face: str) -> nn.Module:
    world = dist.get_world_size()
    if face == "flat":
        return FSDP(net, use_orig_params=True)
    mesh = init_device_mesh("cpu", (world,))
    if face == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    layout = {"ragged": Ragged(), "tensor": Ragged("tensor")}.get(face)
    options = {} if layout is None else {"layout": layout}
    fully_shard(net.last, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    return net


def grads_of(step: int, net: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a step; in step 1, ``last`` has none."""
    return {
        name: noise(*param.shape, seed=10 * step + number)
        for number, (name, param) in enumerate(net.named_parameters())
        if param.requires_grad and "unused" not in name and not ("last" in name and step == 1)
    }


def split(net: nn.Module, cut: Any) -> tuple[list[tuple[str, nn.Parameter]], Any]:
    """Return the parameters of the unsharded model, those with blocks split into one per block."""
    params, back = [], []
    for name, param in net.named_parameters():
        rule = cut(name, tuple(param.shape)) if cut else None
        if rule is None:
            params.append((name, param))
            continue
        data = param.detach()
        views = data.unbind() if rule == "each" else data.split(list(rule))
        params += [(f"{name}.{at}", nn.Parameter(view)) for at, view in enumerate(views)]
        back.append((name, rule))
    return params, back


class Reference:
    """The class itself in one process on the unsharded model."""

    def __init__(self, kind: str, *, vectors: bool, cut: Any = None) -> None:
        self.net = Net(vectors=vectors)
        self.params, self.back = split(self.net, cut)
        cls, kwargs = CLASSES[kind]
        self.optimizer = cls([param for _, param in self.params], **kwargs)

    def step(self, grads: dict[str, Tensor]) -> None:
        all_grads = dict(grads)
        for name, rule in self.back:
            whole = all_grads.pop(name, None)
            if whole is not None:
                views = whole.unbind() if rule == "each" else whole.split(list(rule))
                all_grads |= {f"{name}.{at}": view.clone() for at, view in enumerate(views)}
        for name, param in self.params:
            param.grad = all_grads.get(name)
        self.optimizer.step()


def owned(kind: str, face: str, cut: Any) -> tuple[nn.Module, OwnedOptimizer]:
    """Return a sharded model and its optimizer; blocks are sent in small rounds."""
    cls, kwargs = CLASSES[kind]
    more = {"round_nbytes": 300} if cut else {}
    model = sharded(Net(vectors=kind != "muon"), face)
    return model, OwnedOptimizer(named(model), cls, blocks=cut, **more, **kwargs)


def cut_of(kind: str, with_blocks: bool) -> Any:
    return blocks if with_blocks or kind == "muon" else None  # Muon takes matrices only


def steps_alike(kind: str, face: str) -> None:
    cut = cut_of(kind, with_blocks=False)
    reference = Reference(kind, vectors=kind != "muon", cut=cut)
    model, optimizer = owned(kind, face, cut)
    for step in range(4):
        grads = grads_of(step, reference.net)
        if step == 2:
            for one in (optimizer, reference.optimizer):
                one.param_groups[0]["lr"] *= 0.5
        reference.step(grads)
        give(model, grads)
        optimizer.step()
        same_params(model, reference.net)


FACES = [
    (world, face)
    for world in (1, 2, 3, 4)
    for face in ("per_parameter", "ragged", "tensor", "flat", "hsdp")
    if face != "hsdp" or world == 4
]


@pytest.mark.parametrize(("world", "face"), FACES)
@pytest.mark.parametrize("kind", list(CLASSES))
def test_steps_like_the_class_itself(pool: RankPool, kind: str, world: int, face: str) -> None:
    pool.run(world, steps_alike, kind, face)


# State


def train_some(optimizer: Any, reference: Reference, model: nn.Module, first: int) -> None:
    for step in range(first, first + 3):
        grads = grads_of(step, reference.net)
        reference.step(grads)
        give(model, grads)
        optimizer.step()
        same_params(model, reference.net)


def saves(folder: str, kind: str, face: str, with_blocks: bool) -> None:
    cut = cut_of(kind, with_blocks)
    reference = Reference(kind, vectors=kind != "muon", cut=cut)
    model, optimizer = owned(kind, face, cut)
    train_some(optimizer, reference, model, 0)
    checkpoint.save(f"{folder}/one", model, optimizer, step=3)
    if cut is not None:
        return
    full = checkpoint.full_optim_state_dict(model, optimizer, rank0_only=False)
    plain_net = Net()
    plain = CLASSES[kind][0](plain_net.parameters(), **CLASSES[kind][1])
    checkpoint.load_full_optim_state_dict(plain_net, plain, full)
    assert len(plain.state) == len(full["state"])
    number_of = {name: n for n, (name, _) in enumerate(reference.net.named_parameters())}
    expected = reference.optimizer.state_dict()["state"]
    assert {number_of[name] for name in full["state"]} == expected.keys()
    for name, kept in full["state"].items():
        for key, value in expected[number_of[name]].items():
            value = value if isinstance(value, Tensor) else torch.tensor(value)
            assert torch.equal(kept[key], value), (name, key)


def goes_on(folder: str, kind: str, face: str, with_blocks: bool) -> None:
    cut = cut_of(kind, with_blocks)
    reference = Reference(kind, vectors=kind != "muon", cut=cut)
    for step in range(3):
        reference.step(grads_of(step, reference.net))
    model, optimizer = owned(kind, face, cut)
    checkpoint.load(f"{folder}/one", model, optimizer)
    train_some(optimizer, reference, model, 3)
    if cut is not None:
        return
    names = [name for name, _ in reference.net.named_parameters()]
    its = copy.deepcopy(reference.optimizer.state_dict())
    full = {
        "state": {names[number]: kept for number, kept in its["state"].items()},
        "param_groups": [{**its["param_groups"][0], "params": names}],
    }
    cls, kwargs = CLASSES[kind]
    fresh = OwnedOptimizer(named(model), cls, **kwargs)
    checkpoint.load_full_optim_state_dict(model, fresh, full)
    train_some(fresh, reference, model, 6)


@pytest.mark.parametrize(
    ("kind", "with_blocks"),
    [("muon", True), ("adafactor", False), ("whitening", False), ("whitening", True)],
)
@pytest.mark.parametrize(
    "there_and_here",
    [
        ((4, "hsdp"), (2, "ragged")),
        ((2, "per_parameter"), (3, "flat")),
        ((3, "flat"), (1, "ragged")),
    ],
    ids=str,
)
def test_resumes_on_another_world(
    pool: RankPool, tmp_path: Path, there_and_here: Any, kind: str, with_blocks: bool
) -> None:
    (world, face), (other_world, other_face) = there_and_here
    pool.run(world, saves, str(tmp_path), kind, face, with_blocks)
    pool.run(other_world, goes_on, str(tmp_path), kind, other_face, with_blocks)


# Communication


def exchanges(face: str, round_nbytes: int) -> tuple[int, int]:
    """Return the number of exchanges in a step, and the bytes that this rank sends in them."""
    model = sharded(Net(), face)
    optimizer = OwnedOptimizer(
        named(model), CLASSES["whitening"][0], blocks=blocks, round_nbytes=round_nbytes
    )
    grads = grads_of(0, Net())
    give(model, grads)
    optimizer.step()
    counted: list[int] = []
    exchange = Shared.all_to_all

    def count(way: Shared, group: Any, into: Tensor, sent: Tensor, *more: Any) -> Any:
        counted.append(sent.nbytes)
        return exchange(way, group, into, sent, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shared, "all_to_all", count)
        optimizer.step()
    return len(counted), sum(counted)


def test_a_step_is_two_exchanges(pool: RankPool) -> None:
    for face in ("per_parameter", "ragged", "flat"):
        assert {count for count, _ in pool.run(2, exchanges, face, 1 << 20)} == {2}
    numbers = {count for count, _ in pool.run(4, exchanges, "hsdp", 400)}
    assert len(numbers) == 1
    assert 2 < numbers.pop() <= 12


def stays() -> tuple[int, int]:
    """Return the number of exchanges and the sum of the owners, with one matrix on each rank."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False).double() for _ in range(2)))
    fully_shard(model, layout=Ragged("tensor"))
    optimizer = OwnedOptimizer(model.parameters(), CLASSES["whitening"][0])
    sent: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shared, "all_to_all", lambda *_, **__: sent.append(1))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    (first,), (second,) = (optimizer.owners_of(param) for param in model.parameters())
    return len(sent), first + second


def test_nothing_travels_where_the_layout_keeps_matrices_whole(pool: RankPool) -> None:
    assert pool.run(2, stays) == [(0, 1), (0, 1)]
    assert pool.run(1, exchanges, "per_parameter", 1 << 20) == [(0, 0)]


# Refusals and warnings


class Coupled(torch.optim.SGD):
    """SGD that divides by the norm of all gradients together."""

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = torch.stack([p.grad.norm() for p in params]).norm() if params else 1.0
        with torch.no_grad():
            for param in params:
                param.sub_(param.grad / total)


class CoupledByLarge(Coupled):
    """SGD that divides by the joint norm once a gradient is large."""

    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        is_large = any(param.grad.norm() > 1e4 for param in params)
        return super().step() if is_large else torch.optim.SGD.step(self)


def refused(face: str, cls: type[Optimizer], more: dict[str, Any]) -> str:
    model = FSDP(nn.Linear(4, 4)) if face == "one flat" else sharded(Net(), face)
    return refusal((ConfigError, UnsupportedError), OwnedOptimizer, named(model), cls, **more)


@pytest.mark.parametrize(
    ("face", "cls", "more", "words"),
    [
        ("ragged", torch.optim.LBFGS, {}, "LBFGS"),
        ("ragged", torch.optim.SparseAdam, {}, "SparseAdam"),
        ("ragged", Coupled, {"lr": 0.1}, "stepped elsewhere"),
        ("ragged", CoupledByLarge, {"lr": 0.1}, "stepped elsewhere"),
        ("ragged", torch.optim.Muon, {"lr": 0.1}, "parameter 'experts'"),
        ("one flat", torch.optim.Adafactor, {}, "use_orig_params=True"),
        ("ragged", torch.optim.Adafactor, {"blocks": lambda *_: (1, 1)}, "add up"),
    ],
    ids=["lbfgs", "sparse", "coupled", "coupled by large", "muon", "flat", "blocks"],
)
def test_refuses_with_one_error(face: str, cls: Any, more: Any, words: str, pool: RankPool) -> None:
    if "blocks" in more:
        more = {"blocks": wrong_blocks}
    first, second = pool.run(2, refused, face, cls, more)
    assert first == second
    assert words in first


def wrong_blocks(name: str, shape: tuple[int, ...]) -> Any:
    return (1, 1) if name == "experts" else None


@on_ranks(2)
def test_work_of_every_rank_is_told_once() -> None:
    model = Net()
    with heard(logging.WARNING) as said:
        optimizer = OwnedOptimizer(named(model), torch.optim.Adafactor)
        for step in range(2):
            give(model, grads_of(step, model))
            optimizer.step()
    assert len(said) == 1
    assert "plain tensors" in said[0]


@on_ranks(2)
def test_replicas_share_the_work() -> None:
    """Each replica has all parameters, and steps only its share of them."""
    reference = Reference("whitening", vectors=True)
    model = FSDP(Net(), use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)
    optimizer = OwnedOptimizer(named(model), CLASSES["whitening"][0])
    train_some(optimizer, reference, model, 0)
    owners = {owner for _, param in named(model) for owner in optimizer.owners_of(param)}
    assert owners == {0, 1}


def train_some_of(optimizer: Any, reference: Reference, model: nn.Module, skip: str) -> None:
    for step in range(3):
        grads = {name: grad for name, grad in grads_of(step, reference.net).items() if name != skip}
        reference.step(grads)
        give(model, grads)
        optimizer.step()


@on_ranks(2)
def test_state_may_be_edited_and_groups_added() -> None:
    """The optimizer follows state that is edited or cleared, and groups that are added."""
    reference = Reference("whitening", vectors=True)
    model = sharded(Net(), "ragged")
    params = named(model)
    optimizer = OwnedOptimizer(params[:-1], CLASSES["whitening"][0])
    train_some_of(optimizer, reference, model, skip=params[-1][0])
    optimizer.add_param_group({"params": params[-1:]})
    train_some(optimizer, reference, model, 3)
    weight = dict(params)["first.weight"]
    its = reference.net.get_parameter("first.weight")
    with torch.no_grad():
        local_part(optimizer.state[weight]["moment"]).fill_(0.25)
        reference.optimizer.state[its]["moment"].fill_(0.25)
    train_some(optimizer, reference, model, 6)
    optimizer.state[weight].clear()
    reference.optimizer.state[its].clear()
    train_some(optimizer, reference, model, 9)


# Classes with unusual state or steps


class Late(Optimizer):
    """An optimizer that makes its state in the third step, and counts steps in its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                own = self.state[param]
                if group["count"] >= 3:
                    mean = own.setdefault("mean", torch.zeros(1, dtype=param.dtype))
                    mean.copy_(param.grad.mean() + mean / 2)
                    param.sub_(mean)
                param.add_(param.grad / param.grad.norm(), alpha=-group["lr"] / group["count"])


@on_ranks(2)
def test_state_may_come_late_and_groups_may_count() -> None:
    net = Net()
    reference = Late(net.parameters())
    model = sharded(Net(), "per_parameter")
    optimizer = OwnedOptimizer(named(model), Late, round_nbytes=1)
    for step in range(5):
        grads = grads_of(step, net)
        give(net, grads)
        give(model, grads)
        reference.step()
        optimizer.step()
        same_params(model, net)
        assert optimizer.param_groups[0]["count"] == reference.param_groups[0]["count"]
        assert len(optimizer.state) == len(reference.state if step > 1 else {})
    full = checkpoint.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    for name, param in net.named_parameters():
        if name in full:
            assert torch.equal(full[name]["mean"], reference.state[param]["mean"])
    assert len(full) == len(reference.state) > 0


@on_ranks(2)
@pytest.mark.parametrize("face", ["per_parameter", "ragged"])
def test_parameters_may_be_on_meta_at_first(face: str) -> None:
    """The optimizer may be built on meta, and torch's state dict functions see its state."""
    reference = Reference("whitening", vectors=True)
    with torch.device("meta"):
        model = sharded(Net(), face)
    optimizer = OwnedOptimizer(named(model), CLASSES["whitening"][0])
    assert optimizer.owners_of(next(model.parameters()))
    model.to_empty(device="cpu")
    checkpoint.load_full_state_dict(model, reference.net.state_dict())
    train_some(optimizer, reference, model, 0)
    its = get_optimizer_state_dict(model, optimizer)["state"]
    full = checkpoint.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    assert full.keys() == its.keys() - {"unused.weight"}  # PyTorch takes a step to make state
    for name, kept in full.items():
        for key, value in kept.items():
            assert torch.equal(its[name][key].full_tensor(), value)


@on_ranks(2)
def test_scaled_gradients_are_unscaled_and_skipped() -> None:
    nets = [Net(), Net()]
    model = sharded(nets[1], "ragged")
    cls, kwargs = CLASSES["adafactor"]
    steps = [cls(nets[0].parameters(), **kwargs), OwnedOptimizer(model.parameters(), cls, **kwargs)]
    scaler = ShardedGradScaler(device="cpu", init_scale=64.0)
    for step in range(3):
        inputs = noise(4, 6, seed=step)
        for net, optimizer in zip(nets, steps, strict=True):
            loss = net(inputs).square().mean()
            if net is nets[0] and step != 1:
                loss.backward()
                optimizer.step()
            elif net is not nets[0]:
                scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    pairs = zip(full_parameters(model).values(), nets[0].parameters(), strict=True)
    assert max((one - other).abs().max().item() for one, other in pairs) <= 1e-12


class Failing(torch.optim.SGD):
    """SGD that raises while ``fails`` is set."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if Failing.fails:
            raise ValueError("this rank fails")
        return super().step(closure)


def fails_alone() -> str:
    model = sharded(Net(), "ragged")
    optimizer = OwnedOptimizer(named(model), Failing, lr=0.1, round_nbytes=1)
    said = ""
    for step in range(2):
        give(model, grads_of(step, Net()))
        Failing.fails = step == 1 and optimizer.owners_of(dict(named(model))["experts"]) == [
            dist.get_rank()
        ]
        try:
            optimizer.step()
        except ValueError as error:
            said = str(error)
    dist.barrier()  # both ranks are alive
    return said


def test_a_class_that_fails_on_one_rank_lets_no_other_wait(pool: RankPool) -> None:
    assert sorted(pool.run(2, fails_alone)) == ["", "this rank fails"]


def fails_before_the_exchange() -> str:
    model = sharded(Net(), "ragged")
    optimizer = OwnedOptimizer(named(model), torch.optim.SGD, lr=0.1)
    give(model, grads_of(0, Net()))
    optimizer.step()
    give(model, grads_of(1, Net()))
    said, era = "", fault_domain().era
    if dist.get_rank() == 1:
        until_s = time.monotonic() + 30
        # The other rank may not have begun the exchange yet.
        while fault_domain().era is era and time.monotonic() < until_s:
            watch.report_failure(ValueError("before its step"))
    else:
        said = refusal(PeerError, optimizer.step)
    optimizer.step()  # the group works as before
    net = Net()
    for name, param in net.named_parameters():
        for step in range(2):
            param.data.sub_(grads_of(step, net).get(name, torch.zeros(())), alpha=0.1)
    found = full_parameters(model)
    for name, param in net.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-12, atol=1e-12)
    return said


def test_who_waits_in_an_exchange_is_told_who_failed(pool: RankPool) -> None:
    said, _ = pool.run(2, fails_before_the_exchange)
    assert said.startswith("rank 1 failed: ValueError: before its step"), said
    assert re.search(r"rank 0 has waited [\d.]+ s for the exchange", said), said


@on_ranks(2)
def test_state_that_the_class_does_not_make_is_refused_on_all_ranks() -> None:
    """All ranks refuse the state, not only the owners, and load nothing."""
    model = sharded(Net(), "ragged")
    optimizer = OwnedOptimizer(named(model), torch.optim.Adafactor, lr=0.05)
    give(model, grads_of(0, Net()))
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    odd = copy.deepcopy(before)
    odd["param_groups"][0]["lr"] = 7.0
    odd["state"][0] = {"left.0": torch.ones(4, 4)}
    with pytest.raises(ConfigError, match=r"left\.0"):
        optimizer.load_state_dict(odd)
    assert optimizer.param_groups[0]["lr"] == 0.05
    for number, own in optimizer.state_dict()["state"].items():
        for key, value in own.items():
            torch.testing.assert_close(value, before["state"][number][key], rtol=0, atol=0)

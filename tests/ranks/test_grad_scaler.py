"""``ShardedGradScaler``: all ranks skip a step together, whichever rank has the infinity."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler
from torch.distributed.tensor import DTensor, Partial

import fullshard
from fullshard.errors import FullshardError
from fullshard.optim import ShardedGradScaler, ShardedOptimizer
from fullshard.tensors import local_part
from tests.kit.flat import clean, wrap
from tests.ranks.models import Counted, full_parameters, noise
from tests.ranks.net import batch, make, shard
from tests.ranks.pool import RankPool, on_ranks
from tests.ranks.ragged import CASES, SHAPES, param_of, placed

EXACT = 1e-12
STEPS = 6
# In each of these steps, a different rank has an infinity or NaN.
BAD = {1: float("inf"), 2: float("nan"), 5: float("-inf")}


def spoil(model: nn.Module, number: int, apart: int) -> None:
    """Put the bad value of this step into the gradients of one rank.

    Ranks that are multiples of ``apart`` ranks away get the value too. A rank without gradients is
    not chosen.
    """
    if number not in BAD:
        return
    grads = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    held = [grad for grad in grads if grad.numel()]
    holders = [bool(held)] * dist.get_world_size()
    dist.all_gather_object(holders, bool(held))
    ranks = [rank for rank, holds in enumerate(holders) if holds]
    if (dist.get_rank() - ranks[number % len(ranks)]) % apart == 0:
        held[-1].view(-1)[-1] = BAD[number]


def sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def sharded_adam(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return ShardedOptimizer(params, torch.optim.AdamW, lr=1e-2)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    *,
    by_hand: bool = False,
    apart: int | None = None,
) -> list[float]:
    """Train; return the scale after each step."""
    scales = []
    for number in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(batch(number)).square().mean()).backward()
        spoil(model, number, apart or dist.get_world_size())
        if by_hand:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def train_plain(make_optimizer: Any) -> dict[str, Tensor]:
    """Train an unsharded model without the bad steps; return its parameters."""
    model = make()
    optimizer = make_optimizer(model.parameters())
    for number in range(STEPS):
        optimizer.zero_grad()
        model(batch(number)).square().mean().backward()
        if number not in BAD:
            optimizer.step()
    return full_parameters(model)


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max((got[name] - want[name]).abs().max().item() for name in want)


def torch_scaler(device: str = "cpu", **options: Any) -> TorchShardedGradScaler:
    """Return PyTorch's scaler; its default group is the one that existed at its import."""
    return TorchShardedGradScaler(device, process_group=dist.group.WORLD, **options)


OPTIONS: dict[str, Any] = {"init_scale": 64.0, "growth_interval": 2}
SCALES = [64.0, 32.0, 16.0, 16.0, 32.0, 16.0]


def torch_fsdp(use_orig_params: bool) -> tuple[dict[str, Tensor], list[float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make()
        blocks = [FullyShardedDataParallel(block, device_id=torch.device("cpu"),
                                           use_orig_params=use_orig_params)
                  for block in model.blocks]  # fmt: skip
        model.blocks = nn.ModuleList(blocks)
        whole = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
        scales = train(whole, sgd(whole.parameters()), torch_scaler(**OPTIONS))
        return {name: value.clone() for name, value in whole.state_dict().items()}, scales


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2, 3)
def test_scales_and_parameters_are_those_of_torchs_fsdp(use_orig_params: bool) -> None:
    their_params, their_scales = torch_fsdp(use_orig_params)
    assert their_scales == SCALES
    assert difference(their_params, train_plain(sgd)) <= EXACT
    model = shard(make())
    assert train(model, sgd(model.parameters()), ShardedGradScaler(**OPTIONS)) == SCALES
    assert difference(full_parameters(model), their_params) <= EXACT
    for make_optimizer in (sgd, sharded_adam):
        flat = wrap(make(), use_orig_params=use_orig_params)
        optimizer = make_optimizer(flat.parameters())
        assert train(flat, optimizer, ShardedGradScaler(**OPTIONS)) == SCALES
        got = {clean(name): value.clone() for name, value in fullshard.iter_full_params(flat)}
        assert difference(got, train_plain(make_optimizer)) <= EXACT


@pytest.mark.parametrize("scaler_cls", [ShardedGradScaler, GradScaler])
@on_ranks(2, 4)
def test_every_layout_mesh_and_optimizer(world: int, scaler_cls: type[GradScaler]) -> None:
    """Our scaler and PyTorch's plain one work with every layout, mesh and optimizer."""
    world = dist.get_world_size()
    options: list[dict[str, Any]] = [{}, {"layout": fullshard.Ragged()}]
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        options += [{"mesh": mesh, **one} for one in options]
    # PyTorch's scaler relies on equal gradients on replicas; ours does not.
    apart = 2 if scaler_cls is GradScaler and world == 4 else world
    for make_optimizer, by_hand in ((sgd, True), (sharded_adam, False)):
        want = train_plain(make_optimizer)
        for one in options:
            model = shard(make(), **one)
            optimizer = make_optimizer(model.parameters())
            scaler = scaler_cls("cpu", **OPTIONS)
            assert train(model, optimizer, scaler, by_hand=by_hand, apart=apart) == SCALES
            assert difference(full_parameters(model), want) <= EXACT


def all_kinds(bad_rank: int | None) -> None:
    """Unscale gradients on all meshes, plain and sparse ones, with one all-reduce."""
    rank = dist.get_rank()
    values, params = [], []
    meshes = {case.mesh_shape: case.mesh() for case in CASES.values()}
    for seed, case in enumerate(CASES.values()):
        for shape in SHAPES:
            value = noise(*shape, seed=seed)
            grad = placed(value * 64, meshes[case.mesh_shape], case.placements, seed)
            values.append(value)
            params.append(param_of(torch.zeros_like(grad), grad))
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
    for seed, dtype in enumerate(dtypes):
        value = noise(4, 3, seed=seed).to(dtype)
        values.append(value)
        params.append(param_of(torch.zeros_like(value), value * 64))
    mesh = init_device_mesh("cpu", (4,))
    sum_of = DTensor.from_local(noise(3, 2) * 64, mesh, [Partial()])  # as in tensor parallelism
    values.append(noise(3, 2) * 4)
    params.append(param_of(torch.zeros_like(sum_of), sum_of))
    if rank == bad_rank:
        local_part(params[7].grad).fill_(float("inf"))
        params[-3].grad[0] = float("nan")
    before = [full(param.detach()) for param in params]
    scaler = ShardedGradScaler(init_scale=64.0)
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler.scale(torch.ones(()))
    with Counted() as counted:
        scaler.unscale_(optimizer)
    assert counted.total == (dist.get_world_size() > 1)
    if bad_rank is None:
        for param, value in zip(params, values, strict=True):
            assert torch.equal(full(param.grad), value)
    stepped = [False]
    optimizer.step = lambda: stepped.append(True)  # type: ignore[method-assign, assignment, return-value]
    scaler.step(optimizer)
    scaler.update()
    assert stepped[-1] == (bad_rank is None)
    assert scaler.get_scale() == (64.0 if bad_rank is None else 32.0)
    assert all(torch.equal(full(p.detach()), b) for p, b in zip(params, before, strict=True))


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_gradients_of_all_kinds_together(pool: RankPool) -> None:
    for bad_rank in (None, 0, 3):
        pool.run(4, all_kinds, bad_rank)


def one_step(
    scaler: Any, params: list[nn.Parameter], cls: Any = torch.optim.SGD, **kw: Any
) -> bool:
    """Step with a scaler; return whether the parameters changed."""
    before = [param.detach().clone() for param in params]
    optimizer = cls(params, lr=1.0, **kw)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    return not all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def some_without() -> list[bool]:
    """Return whether steps were made with gradients on rank 1 only, good and bad ones."""
    found = []
    for bad in (False, True):
        param = nn.Parameter(torch.ones(3))
        if dist.get_rank() == 1:
            param.grad = torch.full((3,), float("inf") if bad else 2.0)
        scaler = ShardedGradScaler(init_scale=8.0)
        found.append(one_step(scaler, [param]))
        assert scaler.get_scale() == (4.0 if bad else 8.0)
    return found


def test_ranks_without_gradients_take_part(pool: RankPool) -> None:
    assert pool.run(3, some_without) == [[False, False], [True, False], [False, False]]


def fused(scaler_cls: Any, num_bad: int) -> tuple[bool, float]:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.full((3,), 2.0)
    if dist.get_rank() < num_bad:
        param.grad[1] = float("inf")
    scaler = scaler_cls("cpu", init_scale=8.0)
    return one_step(scaler, [param], torch.optim.Adam, fused=True), scaler.get_scale()


def test_fused_optimizers_skip_together_too(pool: RankPool) -> None:
    """All ranks skip a fused optimizer's step together.

    With the scaler of PyTorch's FSDP, only the rank with the infinity skips. Fused optimizers skip
    only for a found-inf of exactly 1, and a sum over ranks may exceed 1.
    """
    for num_bad in (1, 2, 3):
        assert pool.run(3, fused, ShardedGradScaler, num_bad) == [(False, 4.0)] * 3
    assert pool.run(3, fused, torch_scaler, 1) == [(False, 4.0)] + [(True, 8.0)] * 2


def pairs() -> bool:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.full((3,), float("inf") if dist.get_rank() == 3 else 1.0)
    return one_step(ShardedGradScaler(process_group=groups[dist.get_rank() // 2]), [param])


def test_only_ranks_of_the_group_skip(pool: RankPool) -> None:
    assert pool.run(4, pairs) == [True, True, False, False]


@on_ranks(2)
def test_each_optimizer_skips_for_itself() -> None:
    model = shard(make())
    parts = [list(model.blocks.parameters()), [model.scale, *model.head.parameters()]]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    scaler = ShardedGradScaler(init_scale=8.0)
    before = full_parameters(model)
    scaler.scale(model(batch()).square().mean()).backward()
    local_part(model.head.weight.grad).fill_(float("nan"))
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    after = full_parameters(model)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name in after if name.startswith("blocks.")}
    assert scaler.get_scale() == 4.0


# behaviour on one rank


@on_ranks(1)
def test_sparse_gradients_are_added_up_first() -> None:
    for dtype, size, is_bad in (
        (torch.float16, 40000.0, True),  # the sum of two overflows
        (torch.float16, 20000.0, False),
        (torch.float32, 2e38, True),
        (torch.float64, 4e4, False),
    ):
        param = nn.Parameter(torch.zeros(3, 2, dtype=dtype))
        values = torch.full((3, 2), size, dtype=dtype)
        with torch.sparse.check_sparse_tensor_invariants():
            param.grad = torch.sparse_coo_tensor(torch.tensor([[0, 2, 0]]), values, (3, 2))
        scaler = ShardedGradScaler(init_scale=16.0)
        scaler.scale(torch.ones(()))
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler.unscale_(optimizer)
        assert param.grad.is_coalesced() and param.grad.dtype == dtype
        if not is_bad:
            want = torch.tensor([[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]], dtype=dtype) * size / 16
            assert torch.equal(param.grad.to_dense(), want)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (8.0 if is_bad else 16.0)


class Losses(NamedTuple):
    main: Tensor
    others: list[Tensor]


@on_ranks(1)
def test_outputs_keep_dtype_and_form() -> None:
    ours, torchs = ShardedGradScaler(init_scale=2.0), torch_scaler(init_scale=2.0)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for value in (torch.ones((), dtype=dtype), torch.ones(3, dtype=dtype)):
            got, want = ours.scale(value), torchs.scale(value)
            assert got.dtype == want.dtype == dtype and torch.equal(got, want)
            nested = [value, (value, [value]), iter([value, value])]
            got, want = ours.scale(nested), torchs.scale(copy.copy(nested[:2]))
            assert [type(one) for one in got] == [Tensor, tuple, map]
            assert torch.equal(got[0], want[0]) and torch.equal(got[1][1][0], want[1][1][0])
            assert got[1][0].dtype == dtype and len(list(got[2])) == 2
    losses = ours.scale(Losses(torch.ones(2), [torch.ones(())]))
    assert type(losses) is Losses and losses.others[0] == 2.0
    off = ShardedGradScaler(enabled=False)
    assert off.scale(losses) is losses and off.get_scale() == 1.0 and off.state_dict() == {}


def model_and_scaler(cls: Any, scaled: bool = True) -> tuple[torch.optim.Optimizer, Any]:
    model = nn.Linear(2, 2)
    scaler = cls("cpu")
    if scaled:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    return torch.optim.SGD(model.parameters(), lr=0.1), scaler


def in_order(*names: str, scaled: bool = True) -> Callable[[Any], None]:
    """Return a function that calls methods of a scaler one after the other."""

    def call(cls: Any) -> None:
        optimizer, scaler = model_and_scaler(cls, scaled)
        for name in names:
            getattr(scaler, name)(*([] if name == "update" else [optimizer]))

    return call


def closure(cls: Any) -> None:
    optimizer, scaler = model_and_scaler(cls)
    scaler.step(optimizer, closure=lambda: None)


MISTAKES: dict[str, tuple[Any, type[Exception]]] = {
    "twice": (in_order("unscale_", "unscale_"), RuntimeError),
    "late": (in_order("step", "unscale_"), RuntimeError),
    "two_steps": (in_order("step", "step"), RuntimeError),
    "closure": (closure, RuntimeError),
    "nothing_looked_at": (in_order("update"), AssertionError),
    "looked_at_long_ago": (in_order("step", "update", "update"), AssertionError),
    **{
        name: (in_order(name, scaled=False), AssertionError)
        for name in ("unscale_", "step", "update")
    },
    "number": (lambda cls: cls("cpu").scale(3.0), ValueError),
    "numbers": (lambda cls: cls("cpu").scale([torch.ones(2), 3.0]), ValueError),
    "growth": (lambda cls: cls("cpu", growth_factor=1.0), AssertionError),
    "backoff": (lambda cls: cls("cpu", backoff_factor=1.0), AssertionError),
    "new_scale": (lambda cls: model_and_scaler(cls)[1].update(torch.ones(2)), AssertionError),
}


@on_ranks(1)
def test_mistakes_are_those_of_torch_and_ours() -> None:
    for name, (make_it, kind) in MISTAKES.items():
        with pytest.raises(kind):
            make_it(torch_scaler)
        with pytest.raises(FullshardError) as raised:
            make_it(ShardedGradScaler)
        assert isinstance(raised.value, kind), name
    optimizer, scaler = model_and_scaler(ShardedGradScaler)
    with pytest.raises(RuntimeError, match="closure"):
        scaler.step(optimizer, lambda: None)  # PyTorch would call it with scaled gradients
    for wrong in ("loss", {"loss": torch.ones(2)}):
        with pytest.raises(TypeError, match="expected a tensor"):
            scaler.scale(wrong)


@on_ranks(1, process_group=False)
def test_alone_on_the_cpu() -> None:
    """The scaler works without a process group, on a machine without the default device."""
    assert not dist.is_initialized()
    scaler = ShardedGradScaler(init_scale=8.0)
    assert scaler.is_enabled()
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.full((2,), float("inf"))
    assert not one_step(scaler, [param]) and scaler.get_scale() == 4.0
    param.grad = torch.full((2,), 4.0)
    assert one_step(scaler, [param]) and param.tolist() == [0.0, 0.0]
    other = GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    for same in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert type(same) is ShardedGradScaler and same.state_dict() == scaler.state_dict()
    for value in (2.0, 3, torch.tensor([5.0]), torch.tensor(7.0, dtype=torch.float64)):
        scaler.update(value)
        assert scaler.get_scale() == float(value)


@on_ranks(2)
def test_gradients_in_fp16() -> None:
    """A model in fp16: tiny gradients do not underflow, and fp16 gradients are unscaled."""
    plain = make().to(torch.float32)
    model = shard(copy.deepcopy(plain).to(torch.float16))
    scaler = ShardedGradScaler(init_scale=2.0**10)
    tiny = 2.0**-20
    loss = model(batch(0, torch.float16)).float().square().mean() * tiny
    scaler.scale(loss).backward()
    plain(batch(0, torch.float32)).square().mean().backward()
    for name, param in model.named_parameters():
        got = param.grad.full_tensor().float() * 2.0**10
        assert torch.allclose(got, plain.get_parameter(name).grad, rtol=0.05, atol=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**10

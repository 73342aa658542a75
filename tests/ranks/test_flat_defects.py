"""Defects of PyTorch's FSDP1, by number, which the flat interface does not have."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fullshard as ours
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy, iter_full_params
from fullshard.errors import ProtocolError
from tests.kit.flat_differential import (
    EXACT,
    batch,
    clean,
    full_values,
    make,
    optimizer_of,
    quiet,
    wrap,
)
from tests.ranks.models import fill, noise
from tests.ranks.pool import RankPool, on_ranks

FP64 = torch.float64
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def stale(strategy: str, original: bool) -> float:
    model = wrap(
        ours,
        make(FP64),
        "nested",
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=original,
    )
    plain = make(FP64)
    worst = 0.0
    x = noise(4, 6, seed=3, dtype=FP64)
    optimizers = [optimizer_of(model), optimizer_of(plain)]
    for _ in range(2):
        for one in (model, plain):
            one(x).sum().backward()
            with torch.no_grad():
                one(x)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            worst = max(worst, (model(x) - plain(x)).abs().max().item())
            for param in (*model.parameters(), *plain.parameters()):
                param.mul_(0.5)
            worst = max(worst, (model(x) - plain(x)).abs().max().item())
            for param in (*model.parameters(), *plain.parameters()):
                param.data = param.data * 3
            worst = max(worst, (model(x) - plain(x)).abs().max().item())
    return worst


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_defect_1_weights_are_never_stale(pool: RankPool, strategy: str) -> None:
    for original in (True, False):
        assert max(pool.run(2, stale, strategy, original)) < EXACT


def grid(shape: tuple[int, int], kind: str) -> DeviceMesh:
    """Return a mesh of all ranks: dims with or without names, groups made here or given."""
    names = ("copies", "shards") if kind == "named" else None
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if kind != "from groups":
        return mesh
    groups = mesh.get_all_groups()
    return DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=("a", "b"))


def copies_stay_equal(shape: tuple[int, int], kind: str, original: bool) -> float:
    model = wrap(
        ours,
        make(FP64),
        "nested",
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=grid(shape, kind),
        use_orig_params=original,
    )
    plain = make(FP64)
    optimizers = [optimizer_of(model), optimizer_of(plain)]
    model(batch(0, FP64)).sum().backward()
    for rank in range(dist.get_world_size()):
        x = noise(4, 6, seed=900 + rank, dtype=FP64)
        (plain(x).sum() / dist.get_world_size()).backward()
    for optimizer in optimizers:
        optimizer.step()
    return distance(model, plain)


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("kind", ["named", "nameless", "from groups"])
@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (3, 1), (1, 1)])
def test_defect_2_copies_that_nothing_shares_are_reduced(
    pool: RankPool, shape: tuple[int, int], kind: str, original: bool
) -> None:
    world = shape[0] * shape[1]
    assert max(pool.run(world, copies_stay_equal, shape, kind, original)) < EXACT


class Wide(nn.Module):
    """A model with tensor-parallel and plain layers, a frozen bias and a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.again = nn.Linear(6, 8)
        self.plain = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return self.plain(x) + self.again(x).sum(-1, keepdim=True)


def wide() -> Wide:
    model = fill(Wide().to(FP64), scale=0.4)
    model.down.bias.requires_grad_(False)
    model.again.weight = model.up.weight
    return model


@on_ranks(4)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("original", [True, False], ids=["originals", "flat"])
def test_defects_3_4_5_7_on_two_dims(original: bool, strategy: str) -> None:
    """Clipping sees all ranks, frozen stays frozen, tied stays tied, and no_sync accumulates."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, plain = wide(), wide()
    if not original:  # a flat parameter is frozen as a whole or not at all
        for one in (model, plain):
            one.down.bias.requires_grad_(True)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    parallelize_module(model, mesh["tp"], {"again": ColwiseParallel(output_layouts=Replicate())})
    model.again.weight = model.up.weight
    wrapped = FSDP(
        model,
        device_mesh=mesh["dp"],
        use_orig_params=original,
        sharding_strategy=ShardingStrategy[strategy],
    )
    seen: dict[str, Any] = {}
    rank = mesh.get_local_rank("dp")
    optimizers = [optimizer_of(wrapped), optimizer_of(plain)]
    for script in ("s", "ns", "sns"):
        for number, kind in enumerate(script):
            x = [noise(4, 6, seed=10 * number + r, dtype=FP64) for r in range(2)]
            if kind == "n":
                with wrapped.no_sync():
                    wrapped(x[rank]).sum().backward()
            else:
                wrapped(x[rank]).sum().backward()
            for one in x:
                (plain(one).sum() / 2).backward()
        norm = wrapped.clip_grad_norm_(1.0)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        seen[f"norm {script}"] = (norm - expected).abs().item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with FSDP.summon_full_params(wrapped):
        seen["tied"] = model.again.weight is model.up.weight
        seen["DTensors"] = isinstance(model.up.weight, DTensor)
        seen["frozen"] = [n for n, p in model.named_parameters() if not p.requires_grad]
    full = {clean(name): value for name, value in iter_full_params(wrapped)}
    theirs = dict(plain.named_parameters())
    seen["names"] = sorted(full) == sorted(theirs)
    seen["apart"] = max((full[name] - theirs[name]).abs().max().item() for name in theirs)
    assert seen.pop("frozen") == (["down.bias"] if original else [])
    assert seen.pop("tied") and seen.pop("DTensors") and seen.pop("names")
    assert max(seen.values()) < EXACT, seen


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@on_ranks(2)
def test_defect_19_what_no_rank_used_is_not_optimized() -> None:
    model = FSDP(Unused(), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = [(clean(n), p in optimizer.state) for n, p in model.named_parameters()]
    assert found == [
        ("used.weight", True),
        ("used.bias", True),
        ("unused.weight", False),
        ("unused.bias", False),
    ]


def clips_while_unsharded(strategy: str) -> float:
    """Return the difference that a forward without gradients makes to the clipped norm."""
    model = wrap(ours, make(FP64), "nested", sharding_strategy=ShardingStrategy[strategy])
    other = copy.deepcopy(model)
    for one in (model, other):
        one(batch(0, FP64)).sum().backward()
    with torch.no_grad():
        model(batch(1, FP64))
    norms = [one.clip_grad_norm_(0.1).item() for one in (model, other)]
    assert norms[0] > 0.1
    return abs(norms[0] - norms[1])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clips_after_a_forward_without_gradients(pool: RankPool, strategy: str) -> None:
    assert max(pool.run(2, clips_while_unsharded, strategy)) == 0.0


def starts(how: str) -> dict[str, Any]:
    """Return the initial values, and the initialised modules if the model was on meta."""
    seen: dict[str, Any] = {}
    called: list[str] = []
    if how == "sync":
        model = make(FP64)
        if dist.get_rank() > 0:
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.detach().zero_()
        wrapped = FSDP(model, sync_module_states=True, use_orig_params=True)
        seen["shift"] = wrapped.shift.sum().item() > 0
        return seen | {"apart": distance(wrapped, make(FP64))}
    with torch.device("meta"):
        model = make(FP64)

    def init(module: nn.Module) -> None:
        called.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.detach().fill_(0.5)

    wrapped = wrap(ours, model, "policy", param_init_fn=init)
    seen["called"] = called
    seen["values"] = {v.unique().tolist()[0] for v in full_values(ours, wrapped).values()}
    wrapped(batch(0, FP64)).sum().backward()
    return seen


def distance(model: nn.Module, plain: nn.Module) -> float:
    theirs = dict(plain.named_parameters())
    return max((v - theirs[clean(n)]).abs().max().item() for n, v in iter_full_params(model))


def test_ranks_start_with_the_values_of_the_first(pool: RankPool) -> None:
    assert pool.run(3, starts, "sync") == [{"shift": True, "apart": 0.0}] * 3


def test_modules_on_meta_are_given_values_once(pool: RankPool) -> None:
    for seen in pool.run(2, starts, "meta"):
        assert seen["values"] == {0.5}
        assert sorted(seen["called"]) == sorted(
            ["Stack", "ModuleList", *["Block", "Linear", "Linear"] * 2, "Linear", "Linear"]
        )


@on_ranks(2)
def test_units_may_have_strategies_of_their_own() -> None:
    kinds = (ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    model, plain = make(FP64), make(FP64)
    with quiet():
        for i, kind in enumerate(kinds):
            model.blocks[i] = FSDP(model.blocks[i], sharding_strategy=kind, use_orig_params=True)
        wrapped = FSDP(model, use_orig_params=True)
    optimizers = [optimizer_of(wrapped), optimizer_of(plain)]
    x = noise(4, 6, seed=1, dtype=FP64)
    for _ in range(2):
        for one, optimizer in zip((wrapped, plain), optimizers, strict=True):
            one(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert distance(wrapped, plain) < EXACT


def steps_in_backward(original: bool) -> float:
    """Step one optimizer per parameter in backward; return the distance to the plain model."""
    model, plain = wrap(ours, make(FP64), "nested", use_orig_params=original), make(FP64)
    x = noise(4, 6, seed=1, dtype=FP64)
    for one in (model, plain):
        for param in one.parameters():
            optimizer = torch.optim.SGD([param], lr=0.1)

            def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                p.grad = None

            param.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            one(x).sum().backward()
        assert all(param.grad is None for param in one.parameters())
    return distance(model, plain)


def test_optimizers_step_in_backward(pool: RankPool) -> None:
    for original in (True, False):
        assert max(pool.run(2, steps_in_backward, original)) < EXACT


@on_ranks(2)
def test_freed_parts_of_a_flat_parameter_keep_their_dtype() -> None:
    """Freed parts of a flat parameter are placeholders that keep dtype, shape and device."""
    model = FSDP(nn.Sequential(FSDP(nn.Linear(6, 4)), nn.Linear(4, 2)))
    inner = model.module[0].module
    for _ in range(2):
        weight = inner.weight
        assert (weight.dtype, tuple(weight.shape), weight.device.type) == (
            torch.float32,
            (4, 6),
            "cpu",
        )
        assert weight.requires_grad and not isinstance(weight, nn.Parameter)
        assert all("weight" not in name for name, _ in model.named_parameters())
        with pytest.raises(ProtocolError, match="of weight: it is part of a flat"):
            weight + 1
        copied = copy.deepcopy(model).module[0].module
        assert copied.weight.shape == pickle.loads(pickle.dumps(weight)).shape == (4, 6)
        with FSDP.summon_full_params(model):
            assert isinstance(inner.weight, nn.Parameter) and inner.weight.isfinite().all()
        model(torch.ones(3, 6)).sum().backward()

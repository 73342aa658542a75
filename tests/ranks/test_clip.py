"""Norms of sharded gradients equal the unsharded model's, with one all-reduce for all."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fullshard.errors import ConfigError, UnsupportedError
from fullshard.optim import clip_grad_norm_, grad_norm
from tests.ranks.models import Counted, noise
from tests.ranks.net import batch, make, shard
from tests.ranks.pool import RankPool, on_ranks
from tests.ranks.ragged import CASES, CUT, placed, strided, whole_of

NORMS = [1.0, 2.0, 3.5, float("inf")]


def pair() -> tuple[Any, Any]:
    """Return an unsharded and a sharded model with the same gradients, some of them missing."""
    plain = make()
    model = shard(copy.deepcopy(plain))
    for one in (plain, model):
        one.blocks[1].bias.requires_grad_(False)
        (one(batch()).square().sum() * 3).backward()
    return plain, model


@pytest.mark.parametrize("factor", [0.3, 5.0], ids=["clipped", "left_alone"])
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", NORMS)
@on_ranks(1, 2, 3, 4)
def test_clipping_equals_the_unsharded_model(
    norm_type: float, foreach: bool | None, factor: float
) -> None:
    plain, model = pair()
    limit = factor * float(grad_norm(plain.parameters(), norm_type))
    want = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit, norm_type)
    with Counted() as counted:
        got = clip_grad_norm_(model.parameters(), limit, norm_type, foreach=foreach)
    assert counted.total == (dist.get_world_size() > 1)
    assert type(got) is Tensor and got.dim() == 0
    assert torch.allclose(got, want, rtol=1e-12, atol=0)
    for name, param in model.named_parameters():
        expected = plain.get_parameter(name).grad
        assert (param.grad is None) == (expected is None)
        if expected is not None:
            assert torch.allclose(param.grad.full_tensor(), expected, rtol=1e-12, atol=1e-15)


def param_with(grad: Tensor) -> nn.Parameter:
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad
    return param


MANY: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
    *((case.mesh_shape, case.placements) for case in CASES.values()),
    ((2, 2), (strided(0, 2), Shard(0))),
    ((2, 2), (strided(0, 2), Shard(1))),
    ((2, 2), (strided(0, 3), Replicate())),
    ((1, 2, 2), (Replicate(), strided(0, 2), Shard(0))),
    ((2, 2), (Shard(0), Replicate())),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 2), (Shard(1), Shard(0))),
    ((2, 2), (Replicate(), Replicate())),
    ((4,), (Shard(0),)),
]


def every_mesh(norm_type: float, foreach: bool | None) -> tuple[float, float]:
    """Clip gradients on many meshes together; return the norm before and after."""
    meshes = {shape: init_device_mesh("cpu", shape) for shape, _ in MANY}
    values, params = [], []
    for seed, ((shape, placements), size) in enumerate(
        itertools.product(MANY, [(5, 3), (1, 7), (0, 2)])
    ):
        value = noise(*size, seed=seed)
        values.append(value.flatten())
        params.append(param_with(placed(value.clone(), meshes[shape], placements, seed)))
    params.append(param_with(noise(4, seed=99)))
    values.append(noise(4, seed=99))
    want = torch.linalg.vector_norm(torch.cat(values), norm_type)
    got = clip_grad_norm_(params, 0.7, norm_type, foreach=foreach)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for param, value in zip(params, values, strict=True):
        whole = whole_of(param.grad)
        scaled = value * (0.7 / (want + 1e-6)).clamp(max=1.0)
        torch.testing.assert_close(whole.flatten(), scaled, rtol=1e-12, atol=1e-15)
    return got.item(), grad_norm(params, norm_type).item()


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("norm_type", NORMS)
def test_any_meshes_together(pool: RankPool, norm_type: float, foreach: bool | None) -> None:
    norms = pool.run(4, every_mesh, norm_type, foreach)
    assert len(set(norms)) == 1  # equal bit for bit on all ranks
    assert abs(norms[0][1] - min(norms[0][0], 0.7)) < 1e-5


@on_ranks(4)
def test_there_is_one_all_reduce_for_each_mesh_dim_at_most() -> None:
    """A norm takes at most one all-reduce for each mesh dim."""
    counts = []
    for shape, kinds in {
        (2, 2): [(CUT, Shard(0)), (CUT, Replicate()), (strided(0, 2), Shard(0)), (CUT, Shard(1))],
        (4, 1): [(Replicate(), CUT), (Replicate(), Shard(0))],
        (1, 2, 2): [(Replicate(), CUT, Shard(0)), (Replicate(), Shard(0), Shard(1))],
    }.items():
        mesh = init_device_mesh("cpu", shape)
        params = [param_with(placed(noise(5, 3), mesh, at)) for at in kinds]
        with Counted() as counted:
            grad_norm(params)
        counts.append(counted.total)
    assert counts == [2, 0, 2]


@on_ranks(4)
def test_what_is_not_finite_on_one_rank_is_seen_on_all() -> None:
    for name in ("hsdp", "columns", "copies"):
        case = CASES[name]
        for bad in (float("inf"), float("nan")):
            value = noise(5, 3)
            value[4, 2] = bad
            param = param_with(placed(value, case.mesh(), case.placements))
            for norm_type in (2.0, float("inf")):
                norm = grad_norm(param, norm_type)
                assert norm.isnan() if bad != bad else norm.isinf()


@on_ranks(2)
def test_corners() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert grad_norm([]).item() == 0 and grad_norm([nn.Parameter(torch.ones(2))]).item() == 0
    one_row = distribute_tensor(noise(1, 3), mesh, [Shard(0)])  # the other rank has no elements
    assert torch.allclose(grad_norm(param_with(one_row)), noise(1, 3).norm())
    low = distribute_tensor(torch.full((4096,), 0.1).bfloat16(), mesh, [Shard(0)])
    norm = grad_norm(param_with(low))
    assert norm.dtype == torch.float32 and abs(norm.item() - 6.4) < 0.01
    named: Any = "inf"  # as PyTorch takes it
    assert grad_norm(param_with(low), named) == grad_norm(param_with(low), float("inf"))
    clip_grad_norm_(clipped := param_with(low), 0.5)
    assert abs(grad_norm(clipped).item() - 0.5) < 0.01
    bad = distribute_tensor(torch.tensor([1.0, float("nan")]), mesh, [Shard(0)])
    assert grad_norm(param_with(bad)).isnan()
    for inf in (2.0, float("inf")):
        with pytest.raises(RuntimeError, match="error_if_nonfinite"):
            clip_grad_norm_(param_with(bad), 1.0, inf, error_if_nonfinite=True)
    assert bad.full_tensor()[0] == 1
    with pytest.raises(ConfigError, match="norm_type is -1"):
        grad_norm(param_with(low), -1)
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(UnsupportedError, match="redistribute"):
        grad_norm(param_with(partial))


@on_ranks(2)
def test_the_order_of_sums_is_that_of_parameters() -> None:
    """An equal copy of a mesh, as DTensor's cache may return, does not change the order of sums."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    twin = copy.copy(mesh)
    assert twin == mesh and twin is not mesh
    values = [1.0, 2.0**53, 1.0]  # 2 more if the largest is added last
    grads = [
        DTensor.from_local(torch.tensor([value]).double(), mesh, [Shard(0)]) for value in values
    ]
    params = [param_with(grad) for grad in grads]
    norm = grad_norm(params, 1.0)
    for param, grad in zip(params, grads, strict=True):
        param.grad = DTensor.from_local(grad.to_local(), twin, [Shard(0)])
        assert param.grad.device_mesh is twin
        assert torch.equal(grad_norm(params, 1.0), norm)
        param.grad = grad


@on_ranks(2)
def test_dtypes_may_be_mixed_in_any_order() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    single, double = noise(5, 3).float(), noise(4, 2, seed=1)
    parts = [single, double, torch.complex(double, double * 2)]
    wants = [
        torch.cat([p.abs().double().flatten() for p in order]) for order in (parts, parts[::-1])
    ]
    for order, want in zip((parts, parts[::-1]), wants, strict=True):
        params = [param_with(distribute_tensor(part.clone(), mesh, [Shard(0)])) for part in order]
        assert torch.allclose(grad_norm(params), want.norm(), rtol=1e-6)
        clip_grad_norm_(params, 1.0)
        assert abs(grad_norm(params).item() - 1) < 1e-5


@on_ranks(4)
def test_ranks_of_other_experts_may_lack_gradients() -> None:
    """Ranks with different experts may have gradients for different experts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    is_second = mesh["experts"].get_local_rank() == 1

    def expert(seed: int) -> nn.Parameter:
        return param_with(distribute_tensor(noise(4, 4, seed=seed), mesh, [Shard(1), Shard(0)]))

    dense = param_with(distribute_tensor(noise(4, 4, seed=7), mesh["data"], [Shard(0)]))
    for lacking in ((0,), (0, 1), (1,), ()):
        experts = [expert(0), expert(1)]
        parts = [dense.grad.full_tensor()]  # type: ignore[union-attr]
        for number, one in enumerate(experts):
            whole = one.grad.full_tensor()  # type: ignore[union-attr]
            parts.append(whole[:2] if number in lacking else whole)
            if is_second and number in lacking:
                one.grad = None
        want = torch.cat([part.flatten() for part in parts])
        params = [experts[0], dense, experts[1]]
        assert torch.allclose(grad_norm(params), want.norm(), rtol=1e-12)
        assert torch.equal(grad_norm(params, float("inf")), want.abs().amax())

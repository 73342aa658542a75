"""Gradients of tensor-parallel parameters: from autograd's DTensors to plain local tensors."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as distribute

from fullshard.errors import ProtocolError
from fullshard.tensors import (
    ParallelSpec,
    SpmdMesh,
    local_gradients,
)
from fullshard.tensors.parallel_mesh import joint_mesh
from tests.kit.parallel import mesh_of, rows, spec_of
from tests.ranks.models import Counted
from tests.ranks.pool import on_ranks


def same(got: Tensor | None, want: Tensor) -> None:
    assert got is not None and type(got) is Tensor
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def pending(mesh: DeviceMesh, *placements: Placement, base: Tensor) -> DTensor:
    """Return a DTensor whose local tensor is ``base`` plus the rank."""
    return DTensor.from_local(
        base + dist.get_rank(), mesh, placements, run_check=False, shape=None, stride=None
    )


@on_ranks(4)
def test_gradients_are_placed_as_their_parameters() -> None:
    """Gradients of any placement are redistributed as DTensor does it, also with uneven shards."""
    tp = mesh_of()["tp"]
    whole = rows(5)
    placements = [Replicate(), Shard(0), Shard(1), Partial(), Partial("avg"), Partial("max")]
    for target in placements[:3]:
        spec = spec_of(distribute(whole, tp, [target]))
        for source in placements:
            if source.is_partial():
                grad = DTensor.from_local(
                    whole * (tp.get_local_rank() + 1), tp, [source], run_check=False
                )
            else:
                grad = distribute(whole, tp, [source])
            want = grad.redistribute(placements=[target]).to_local()
            kept = grad.to_local().clone()
            with Counted() as comm:
                (got,) = local_gradients([grad], [spec])
            same(got, want)
            assert torch.equal(grad.to_local(), kept)
            if source == target or source == Replicate():
                assert comm.total == 0
            else:
                assert comm.total == 1


@on_ranks(4)
def test_pending_sums_are_made_in_one_batch() -> None:
    """Pending sums take one all-reduce for each group and dtype, for any number of parameters."""
    mesh = mesh_of("ep tp", 2, 2)
    rank = dist.get_rank()
    grads: list[Tensor | None] = []
    specs: list[ParallelSpec | None] = []
    want: list[Tensor | None] = []
    for size in (1, 3, 5):
        # Sums and means over both dims, and sums over one of them.
        for dtype in (torch.float64, torch.float32):
            base = rows(size).to(dtype)
            whole = [Replicate(), Replicate()]
            spec = spec_of(distribute(base, mesh, whole))
            grads.append(pending(mesh, Partial(), Partial("avg"), base=base))
            want.append(2 * base + 0.5 * (0 + 1 + 2 + 3))
            specs.append(spec)
            grads.append(pending(mesh, Replicate(), Partial(), base=base))
            want.append(2 * base + (0 + 1 if rank < 2 else 2 + 3))
            specs.append(spec)
        grads += [None, rows(size)]
        want += [None, rows(size)]
        specs += [spec, None]
    with Counted() as comm:
        got = local_gradients(grads, specs)
    assert comm.total == 4
    for one, other in zip(got, want, strict=True):
        if other is None:
            assert one is None
        else:
            same(one, other.to(one.dtype))  # type: ignore[union-attr]
    assert got[5] is grads[5]
    empty = rows(0)
    spec = spec_of(distribute(empty, mesh, [Replicate(), Replicate()]))
    with Counted() as comm:
        assert local_gradients([], []) == []
        (none,) = local_gradients([pending(mesh, Replicate(), Partial(), base=empty)], [spec])
        same(none, empty)
    assert comm.total == 0


@on_ranks(4)
def test_results_of_collectives_are_awaited() -> None:
    """Unfinished results of collectives are awaited, around a DTensor and inside it."""
    mesh = mesh_of()
    tp, group = mesh["tp"], mesh.get_group("tp")
    spec = spec_of(distribute(rows(3), tp, [Replicate()]))
    want = 2 * rows(3)

    def late() -> Tensor:
        result = funcol.all_reduce(rows(3), "sum", group)
        assert isinstance(result, funcol.AsyncCollectiveTensor)
        return result

    inside = DTensor.from_local(late(), tp, [Replicate()], run_check=False)
    same(local_gradients([inside], [spec])[0], want)
    inside = DTensor.from_local(late(), tp, [Partial()], run_check=False)
    same(local_gradients([inside], [spec])[0], 2 * want)
    summed = DTensor.from_local(rows(3), tp, [Partial()], run_check=False)
    same(local_gradients([summed.redistribute(placements=[Replicate()])], [spec])[0], want)


@on_ranks(4)
def test_sums_over_data_parallel_dims_are_left_pending() -> None:
    """Sums over data-parallel dims are left to the engine; the other sums are computed."""
    mesh = mesh_of()
    spmd = SpmdMesh.of(mesh, shard="dp")
    base = rows(3)
    spec = spec_of(distribute(base, mesh, [Replicate(), Replicate()]), spmd=spmd)
    rank = dist.get_rank()
    for on_dp in (Partial(), Partial("avg"), Replicate()):
        with Counted() as comm:
            (got,) = local_gradients([pending(mesh, on_dp, Partial(), base=base)], [spec])
        same(got, 2 * base + (1 if rank < 2 else 5))
        assert comm.total == 1
        with Counted() as comm:
            (got,) = local_gradients([pending(mesh, on_dp, Replicate(), base=base)], [spec])
        same(got, base + rank)
        assert comm.total == 0
    # A mean over ranks does not complete a shard or a maximum over data-parallel dims.
    cut = distribute(base, mesh, [Shard(0), Replicate()])
    same(local_gradients([cut], [spec])[0], base)
    most = pending(mesh, Partial("max"), Replicate(), base=base)
    same(local_gradients([most], [spec])[0], base + 2 + rank % 2)


@on_ranks(4)
def test_the_mean_over_data_parallel_ranks() -> None:
    """[Note: pending sums over data-parallel dims] With sharded inputs, it is half the gradient."""
    mesh = mesh_of()
    spmd = SpmdMesh.of(mesh, shard="dp")
    torch.manual_seed(0)
    plain = nn.Linear(4, 6).double()
    x = torch.randn(4, 4, dtype=torch.float64)
    (plain(x) ** 2).sum().backward()
    placements = [Replicate(), Shard(0)]
    params = [
        nn.Parameter(distribute(param.detach(), mesh, placements)) for param in plain.parameters()
    ]
    specs = [spec_of(param, spmd=spmd) for param in params]
    for on_dp, factor in ((Shard(0), 2), (Replicate(), 1)):
        inputs = distribute(x, mesh, [on_dp, Replicate()])
        loss = (torch.nn.functional.linear(inputs, *params) ** 2).sum()
        grads = torch.autograd.grad(loss, params)
        for got, param in zip(local_gradients(grads, specs), plain.parameters(), strict=True):
            assert got is not None and param.grad is not None
            mean = got.clone()
            dist.all_reduce(mean, group=mesh.get_group("dp"))
            whole = distribute(param.grad, mesh, placements, src_data_rank=None)
            same(mean / 2 * factor, whole.to_local())


@on_ranks(4)
def test_a_gradient_that_is_no_dtensor_is_refused() -> None:
    mesh = mesh_of()
    spec = spec_of(distribute(rows(3), mesh["tp"], [Shard(0)]))
    other = distribute(rows(3), mesh["dp"], [Shard(0)])
    for grad, text in ((rows(3), "plain tensor"), (other, "lies on")):
        for kind in (ProtocolError, AssertionError):
            with pytest.raises(kind, match=text):
                local_gradients([None, grad], [None, spec])
    assert joint_mesh(mesh["dp"], mesh["tp"]) == mesh

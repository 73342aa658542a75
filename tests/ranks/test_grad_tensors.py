"""Gradients on sharded parameters, as tensors: compiled, copied, kept."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fullshard import PerParameter, Ragged, fully_shard
from fullshard.tensors import flat_part_of, local_part
from tests.ranks.models import fill
from tests.ranks.net import apart, batch, make, shard, step
from tests.ranks.pool import RankPool, on_ranks

layouts = pytest.mark.parametrize("layout", [PerParameter(), Ragged()], ids=["dims", "ragged"])


def with_gradients(layout: Any) -> Any:
    model: Any = shard(make(), layout=layout)
    model(batch()).square().mean().backward()
    return model


@on_ranks(1, 2, 3)
@layouts
def test_begins_where_local_does(layout: Any) -> None:
    """A gradient begins where its local tensor does, as compilers expect."""
    model = with_gradients(layout)
    for param in model.parameters():
        for shown in (param, param.grad):
            assert isinstance(shown, DTensor)
            local = local_part(shown)
            assert shown.storage_offset() == local.storage_offset() == 0
            assert local.untyped_storage().nbytes() == local.nbytes


@on_ranks(1, 3)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_steps(kind: str, backend: str) -> None:
    """Compiled optimizer steps equal the unsharded model's, for each position in a unit."""
    layout = PerParameter()
    models = [make(), shard(make(), layout=layout)]
    classes: Any = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    torch._dynamo.reset()
    for model in models:
        optimizer = classes[kind](model.parameters(), lr=1e-2, foreach=True)
        optimizer.step = torch.compile(optimizer.step, backend=backend)
        for number in range(3):
            step(model, optimizer, number)
    assert apart(models[1], models[0]) < 1e-12


def _descend(param: Tensor, grad: Tensor) -> None:
    param.copy_(param - 0.1 * grad)


@on_ranks(1, 2, 3)
def test_compiled_by_parameter() -> None:
    """One graph steps each parameter, as optimizers of torchao do."""
    layout = PerParameter()
    models = [make(), shard(make(), layout=layout)]
    torch._dynamo.reset()
    compiled = torch.compile(_descend, backend="aot_eager", fullgraph=True, dynamic=False)
    for model in models:
        for number in range(2):
            model(batch(number)).square().mean().backward()
            for param in model.parameters():
                assert param.grad is not None
                (compiled if model is models[1] else _descend)(param.detach(), param.grad)
                param.grad = None
    assert apart(models[1], models[0]) < 1e-12


@on_ranks(1, 2, 3)
@layouts
def test_copies_and_pickles(layout: Any) -> None:
    model = with_gradients(layout)
    for param in model.parameters():
        local = local_part(param.grad)
        file = io.BytesIO()
        torch.save(param.grad, file)
        assert len(file.getvalue()) < 6000 + local.nbytes
        file.seek(0)
        for other in (torch.load(file, weights_only=False), copy.deepcopy(param.grad)):
            assert local_part(other).equal(local)
            assert local_part(other).data_ptr() != local.data_ptr() or not local.numel()


@on_ranks(2)
@pytest.mark.parametrize("how", ["local", "local, no grad", "detached", "view", "numpy"])
def test_stays_while_it_is_kept(how: str) -> None:
    """A small gradient's memory is reused in the next step, unless the user keeps the gradient."""
    model = with_gradients(PerParameter())
    take: Any = {
        "local": lambda grad: grad.to_local(),
        "local, no grad": torch.no_grad()(lambda grad: grad.to_local()),
        "detached": lambda grad: grad.detach(),
        "view": torch.no_grad()(lambda grad: grad.to_local().view(-1)),
        "numpy": lambda grad: local_part(grad).numpy(),
    }[how]
    kept = [take(param.grad) for param in model.parameters()]
    before = copy.deepcopy(kept)
    for number in (1, 2):
        model.zero_grad()
        model(batch(number)).square().mean().backward()
    for one, other in zip(kept, before, strict=True):
        if isinstance(one, Tensor):
            assert local_part(one).equal(local_part(other))
        else:
            assert list(one.tolist()) == list(other.tolist())


@on_ranks(2)
@layouts
def test_neighbours_are_found(layout: Any) -> None:
    """Neighbours in memory are found from one gradient, even if no other one is alive."""
    model = fully_shard(nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 64)), layout=layout)
    model(torch.randn(2, 256)).sum().backward()
    gc.collect()
    params = list(model.parameters())
    for param in params[1:]:
        param.grad = None
    grad = local_part(params[0].grad)  # type: ignore[arg-type]
    place = flat_part_of(grad)
    assert place is not None and place.flat.numel() > place.start + grad.numel()


def tensor_parallel() -> float:
    """Step a compiled optimizer under tensor parallelism; return the distance to plain."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plain = fill(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)).double(), scale=0.4)
    model = copy.deepcopy(plain)
    plan: Any = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    torch._dynamo.reset()
    compiled = torch.compile(optimizers[1].step, backend="eager")
    for _ in range(2):
        for one, update in ((plain, optimizers[0].step), (model, compiled)):
            one(x).square().mean().backward()
            for param in one.parameters():
                if isinstance(param.grad, DTensor):
                    local = local_part(param.grad)
                    assert param.grad.storage_offset() == local.storage_offset() == 0
            update()
            one.zero_grad()
    with torch.no_grad():
        return (model(x) - plain(x)).abs().max().item()


def test_tensor_parallel(pool: RankPool) -> None:
    assert max(pool.run(4, tensor_parallel)) < 1e-12

"""Models under Muon, sharded and unsharded."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import Ragged, ShardingStrategy, unshard_params
from fullshard.optim import clip_grad_norm_
from fullshard.tensors.form import clean_name
from tests.ranks.models import fill, shard_units
from tests.ranks.muon import Model, backward

LR, ADAMW = 0.02, {"lr": 0.01, "weight_decay": 0.125}


EXACT = 1e-12


def made() -> Any:
    return fill(Model(tied=True).double())


def mesh_of(kind: str) -> DeviceMesh | None:
    if kind.startswith("hsdp"):
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if kind.startswith("tp"):
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return None


def sharded(kind: str) -> tuple[Any, int, int]:
    """Return the model, this rank's data-parallel index, and the number of such ranks."""
    model, mesh = made(), mesh_of(kind)
    rank, world = dist.get_rank(), dist.get_world_size()
    if kind.endswith("flat"):
        flat: dict[str, Any] = {"use_orig_params": True}
        if mesh is not None:
            flat |= {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        for number, layer in enumerate(model.layers):
            model.layers[number] = FSDP(layer, **flat)
        return FSDP(model, **flat), rank, world
    options: dict[str, Any] = {"layout": Ragged()} if kind.endswith("ragged") else {}
    if kind.startswith("tp"):
        assert mesh is not None
        plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["dp"]
        rank, world = mesh.get_local_rank(), mesh.size()
    shard_units(model, model.layers, mesh=mesh, **options)
    return model, rank, world


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full(model: nn.Module) -> dict[str, Tensor]:
    with unshard_params(model, writeback=False):
        return {clean_name(name): whole(param) for name, param in model.named_parameters()}


def accumulated(model: Any, number: int, rank: int = 0, world: int = 1) -> None:
    """Accumulate gradients of two microbatches, and clip them."""
    for micro in range(2):
        backward(model, 2 * number + micro, rank, world)
    if rank == 0 and world == 1 and isinstance(model, Model) and not hasattr(model, "unshard"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    else:
        clip_grad_norm_(model.parameters(), 0.1)


def gaps(model: nn.Module, plain: nn.Module) -> dict[str, float]:
    expected = dict(plain.named_parameters())
    found = full(model)
    assert found.keys() == expected.keys()
    return {name: (found[name] - expected[name]).abs().max().item() for name in expected}


def in_fp64(
    grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Orthogonalize in fp64, as ``torch.optim.Muon`` does in bf16."""
    a, b, c = coefficients
    x = grad if grad.shape[0] <= grad.shape[1] else grad.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if grad.shape[0] <= grad.shape[1] else x.T

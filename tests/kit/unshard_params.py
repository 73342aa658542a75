"""Models whose full parameters are gathered, and comparisons with plain models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fullshard
from fullshard import errors
from fullshard.device import BufferKind
from fullshard.frontend.ownership import units_below
from tests.kit.tensor_parallel import VOCAB, Net, parallelize
from tests.ranks.models import fill, ids, shard_units
from tests.ranks.net import apart, step

LAYOUTS = {
    "per_param": fullshard.PerParameter(),
    "row": fullshard.Ragged("row"),
    "tensor": fullshard.Ragged("tensor"),
    "element": fullshard.Ragged(),
}


WORLDS = {"1d": 3, "hsdp": 4, "copies": 2, "2d": 4}


def plain_net() -> Net:
    return fill(Net(tied=True).double())


def sharded_net(mesh: str, layout: str, *, model: Net | None = None, **options: Any) -> Any:
    model = model or plain_net()
    options |= {"layout": LAYOUTS[layout]}
    if mesh == "2d":
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        is_frozen = not model.blocks[1].up.weight.requires_grad
        parallelize(model, grid["tp"])
        model.blocks[1].requires_grad_(not is_frozen)
        options |= {"mesh": grid["dp"]}
    elif mesh == "hsdp":
        options |= {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "dp"))}
    elif mesh == "copies":
        options |= {
            "mesh": init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)),
            "dp_mesh_dims": fullshard.DataParallelMeshDims(replicate="dp"),
        }
    return shard_units(model, model.blocks, **options)


def loss_of(model: nn.Module) -> Tensor:
    tokens = ids(4, 4, vocab=VOCAB)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def full(value: Any) -> Any:
    """Return a full copy, or None."""
    if value is None:
        return None
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def state_of(model: Any) -> list[Any]:
    """Return the state that must stay: shown parameters, residencies, holds, counts."""
    shown = [id(p) for m in model.modules() for p in m._parameters.values() if p is not None]
    units = units_below([model])
    states = [unit.engine.scheduler.residents.units[unit.key] for unit in units]  # type: ignore[union-attr]
    held = units[0].engine.meter.held_nbytes[BufferKind.FULL]  # type: ignore[union-attr]
    flags = [param.requires_grad for param in model.parameters()]
    loans = [unit.is_lent for unit in units]
    return [shown, [(state.residency, state.holds) for state in states], held, flags, loans]


def usable(model: Any, plain: nn.Module) -> None:
    """Check that a step of both models gives equal parameters."""
    for one in (model, plain):
        step(one, torch.optim.SGD(one.parameters(), lr=0.1))
    assert apart(model, plain) < 1e-12
    assert not any(unit.is_lent for unit in units_below([model]))


def refuses(model: Any, call: Callable[[], Any], match: str) -> None:
    before = state_of(model)
    with pytest.raises(errors.FullshardError, match=match) as raised:
        call()
    assert [type(part) for part in raised.value.args] == [str]  # FSDP1 raises a tuple of two texts
    assert state_of(model) == before

"""Optimizers on parameters of several meshes step as they do on plain tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.optim import AdamW, Optimizer

from fullshard.errors import ConfigError
from fullshard.optim import ShardedOptimizer
from tests.kit.optimizer_mesh import KINDS, Model, check_same, exchanges_state, steps_alike
from tests.ranks.models import noise, shared_folder
from tests.ranks.pool import RankPool, on_ranks
from tests.ranks.ragged import CUT, placed, ragged


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_plain_tensors(pool: RankPool, kind: str) -> None:
    pool.run(4, steps_alike, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_are_loaded(pool: RankPool, kind: str) -> None:
    pool.run(4, exchanges_state, kind)


def all_stepped(form: str, *, shift: int) -> tuple[Model, Optimizer]:
    """Return a model and its optimizer with state for every parameter, as DCP requires."""
    model = Model([form])
    optimizer = ShardedOptimizer(model.params, AdamW, lr=0.01)
    for step in range(2):
        for number, param in enumerate(model.params):
            param.grad = model.put(number, noise(*param.shape, seed=number + 10 * step + shift))
        optimizer.step()
    return model, optimizer


@on_ranks(4, timeout_s=120)
@pytest.mark.parametrize(
    "source", ["hsdp", "rows", "copies", "two_tp", "dtensor_hsdp", "dtensor_tp"]
)
def test_checkpoints_go_from_any_mesh_to_any_other(source: str) -> None:
    folder = shared_folder()
    model, optimizer = all_stepped(source, shift=0)
    states = dcp_state.get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    for target in ("1d", "hsdp", "columns", "copies", "dtensor_hsdp", "dtensor_tp", "dtensor_1d"):
        fresh, its = all_stepped(target, shift=50)
        names = ("model", "optimizer")
        into = dict(zip(names, dcp_state.get_state_dict(fresh, its), strict=True))
        dcp.load(into, checkpoint_id=folder)
        dcp_state.set_state_dict(
            fresh, its, model_state_dict=into["model"], optim_state_dict=into["optimizer"]
        )
        check_same(fresh, model, its, optimizer)


@on_ranks(4)
def test_gradients_may_lie_otherwise() -> None:
    """Gradients are redistributed to the placements of their parameters, on the same mesh."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole, grad = noise(5, 3), noise(5, 3, seed=1)
    plain = nn.Parameter(whole.clone())
    plain.grad = grad.clone()
    AdamW([plain], lr=0.1).step()
    for placements in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=2):
        param = nn.Parameter(placed(whole, mesh, [Shard(0), Shard(1)]))
        param.grad = placed(grad, mesh, placements)
        ShardedOptimizer([param], AdamW, lr=0.1).step()
        assert torch.equal(param.full_tensor(), plain)
        param = nn.Parameter(ragged(whole, mesh, [CUT, Shard(1)]))
        param.grad = placed(grad, mesh, placements)
        ShardedOptimizer([param], AdamW, lr=0.1).step()
        assert torch.equal(param.full_tensor(), plain)
    param = nn.Parameter(placed(whole, mesh, [Shard(0), Replicate()]))
    param.grad = ragged(grad, mesh, [CUT, Shard(0)])
    ShardedOptimizer([param], AdamW, lr=0.1).step()
    assert torch.equal(param.full_tensor(), plain)
    other = init_device_mesh("cpu", (4, 1))
    elsewhere = nn.Parameter(placed(whole, mesh, [Shard(0), Shard(1)]))
    there = ShardedOptimizer([elsewhere], AdamW, lr=0.1)
    elsewhere.grad = placed(grad, mesh, [Shard(0), Shard(1)])
    there.step()
    there.state[elsewhere]["exp_avg"] = placed(grad, other, [Shard(0), Shard(1)])
    elsewhere.grad = placed(grad, mesh, [Shard(0), Shard(1)])
    with pytest.raises(ConfigError, match=r"mesh of shape \(4, 1\)"):
        there.step()

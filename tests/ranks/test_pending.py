"""Pending gradients: kept by backwards that do not reduce, until a backward that does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import errors
from tests.ranks.models import full_parameters
from tests.ranks.net import batch, make, shard
from tests.ranks.pool import on_ranks

LAYOUTS = [fullshard.PerParameter(), fullshard.Ragged()]


def by_name(model: Any) -> dict[str, Any]:
    pending = model.get_pending_gradients()
    return {name: pending[p] for name, p in model.named_parameters() if p in pending}


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_gradients_of_passes_without_sync_are_shown(layout: Any, reshard: bool) -> None:
    rank = dist.get_rank()
    plain, model = make(), shard(make(), layout=layout, reshard_after_forward=reshard)
    assert model.get_pending_gradients() == {}
    model.set_requires_gradient_sync(False)
    for number in range(2):
        for one in (plain, model):
            one(batch(number + 10 * rank)).square().sum().backward()
    found = by_name(model)
    assert len(found) == 9
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name].unreduced, param.grad, rtol=1e-12, atol=1e-12)
        assert found[name].partial is None
    assert set(model.blocks[0].get_pending_gradients()) == set(model.blocks[0].parameters())
    model.to(torch.float32)  # pending gradients stay
    assert len(by_name(model)) == len(found)
    model.blocks[0].clear_pending_gradients()
    assert by_name(model).keys() == {name for name in found if "blocks.0" not in name}
    model.clear_pending_gradients()
    assert model.get_pending_gradients() == {}
    model.set_requires_gradient_sync(True)
    model(batch(0, torch.float32)).sum().backward()
    assert model.get_pending_gradients() == {}


@on_ranks(4)
def test_gradients_reduced_over_shards_only_are_shown() -> None:
    """Each rank has its shard of the mean over two ranks, only for parameters with gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    model: Any = nn.Linear(3, 5, bias=False)
    model.spare = nn.Parameter(torch.ones(2))
    fullshard.fully_shard(model, mesh=mesh)
    copy, piece = mesh.get_coordinate() or (0, 0)
    model.set_requires_all_reduce(False)
    model(torch.full((1, 3), 1.0 + dist.get_rank())).sum().backward()
    found = by_name(model)
    mean = (2 * copy + 1 + 2 * copy + 2) / 2
    rows = (3, 2)[piece]
    assert list(found) == ["weight"]
    assert torch.equal(found["weight"].partial, torch.full((rows, 3), mean))
    assert found["weight"].unreduced is None
    assert model.weight.grad is None
    model.clear_pending_gradients()
    model.set_requires_all_reduce(True)
    model(torch.ones(1, 3)).sum().backward()
    assert isinstance(model.weight.grad, DTensor)
    assert torch.equal(model.weight.grad.full_tensor(), torch.ones(5, 3))
    assert model.get_pending_gradients() == {}


@on_ranks(2)
def test_what_is_written_into_them_counts() -> None:
    model = shard(make())
    model.set_requires_gradient_sync(False)
    model(batch()).sum().backward()
    for gradient in model.get_pending_gradients().values():
        assert gradient.unreduced is not None
        gradient.unreduced.zero_()
    model.set_requires_gradient_sync(True)
    model(batch()).sum().backward()
    once = make()
    once(batch()).sum().backward()
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    assert all(torch.allclose(found[n], p.grad) for n, p in once.named_parameters())


@on_ranks(2)
def test_they_are_dropped_between_steps_only() -> None:
    model = shard(make())
    model.set_requires_gradient_sync(False)
    model(batch()).sum().backward()
    handle = model.head.register_forward_hook(lambda *_: model.clear_pending_gradients())
    with pytest.raises(errors.ProtocolError, match="clear_pending_gradients"):
        model(batch())
    handle.remove()
    assert len(model.get_pending_gradients()) == len(full_parameters(model))


class Skippable(nn.Sequential):
    """A stack of layers that returns its input unchanged while the layers are skipped."""

    skips = False

    def forward(self, x: Tensor) -> Tensor:
        return x if self.skips else super().forward(x)


@on_ranks(2)
@pytest.mark.parametrize("is_leaf", [True, False])
def test_they_are_reduced_by_a_backward_that_skips_all_layers(is_leaf: bool) -> None:
    """A backward through no layer reduces pending gradients, as PyTorch does."""
    found = []
    for sharded in (fullshard.fully_shard, torch.distributed.fsdp.fully_shard):
        model: Any = sharded(Skippable(nn.Linear(4, 4)))
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 4)).sum().backward()
        model.set_requires_gradient_sync(True)
        model.skips = True
        x = torch.ones(2, 4, requires_grad=True)
        with warnings.catch_warnings(action="ignore"):  # PyTorch warns of outputs that are views
            model(x if is_leaf else 2 * x).sum().backward()
        found.append(sum(param.grad is not None for param in model.parameters()))
    assert found == [2, 2]

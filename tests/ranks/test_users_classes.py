"""Sharded classes leave names and signatures to the user's classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.errors import UnsupportedError
from tests.ranks.models import message_of
from tests.ranks.pool import on_ranks

NAMES = ("_units", "_buckets", "_set", "_set_machine", "_rewire", "_keys_of", "_single_bucket")


class Named(nn.Module):
    """A module whose attributes have names that the library might use."""

    def __init__(self) -> None:
        super().__init__()
        self._units = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("_buckets", torch.ones(4))
        for name in NAMES[2:]:
            setattr(self, name, 3)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self._units:
            x = unit(x) * self._buckets
        return x * self._set


class _Keyed(nn.Module):
    def __init_subclass__(cls, *, key: str) -> None:
        cls.key = key

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class NeedsAKey(_Keyed, key="mine"):
    """A class that has no subclass without an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


@on_ranks(2)
def test_a_class_that_refuses_a_subclass_is_left_as_it_is() -> None:
    model = NeedsAKey()
    before = list(model.parameters())
    with pytest.raises(UnsupportedError, match="NeedsAKey cannot have a subclass"):
        fully_shard(model)
    assert type(model) is NeedsAKey and not model._forward_hooks and not model._forward_pre_hooks
    assert all(one is was for one, was in zip(model.parameters(), before, strict=True))
    fully_shard(nn.Sequential(model))(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_attributes_of_the_user_have_any_name() -> None:
    torch.manual_seed(0)
    plain, model = Named(), Named()
    model.load_state_dict(plain.state_dict())
    sharded: Any = fully_shard(model)
    sharded.set_requires_gradient_sync(True)
    sharded.set_modules_to_forward_prefetch([])
    x = torch.ones(2, 4)
    assert torch.equal(sharded(x), plain(x))


class Overrides(nn.Linear):
    """A module with signatures of its own."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.given: list[Any] = []

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> Any:  # type: ignore[override]
        self.given.append("_apply")
        return super()._apply(fn)

    def load_state_dict(self, state_dict: Any, strict: bool = True, more: Any = None) -> Any:  # type: ignore[override]
        self.given.append(("load", strict, more))
        return super().load_state_dict(state_dict, strict)

    def zero_grad(self) -> None:  # type: ignore[override]
        self.given.append("zero_grad")
        super().zero_grad()


@on_ranks(2)
def test_overrides_have_signatures_of_their_own() -> None:
    model: Any = fully_shard(Overrides())
    model.to(torch.float64)
    model.load_state_dict(model.state_dict(), more=3)
    model.load_state_dict(model.state_dict(), False)
    model.zero_grad()
    expected = ["_apply", ("load", True, 3), ("load", False, None), "zero_grad"]
    assert model.given == expected and model.weight.dtype == torch.float64


def emptied(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


@on_ranks(2)
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("init", [None, emptied])
def test_tied_parameters_stay_tied_when_they_leave_the_meta_device(
    use_orig_params: bool, init: Any
) -> None:
    def made() -> nn.Module:
        model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
        model[1].weight = model[0].weight
        return model

    with torch.device("meta"):
        model = made()
    rank0_has_values = init is not None and torch.distributed.get_rank() == 0
    wrapped = FullyShardedDataParallel(
        made() if rank0_has_values else model,
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        param_init_fn=None if rank0_has_values else init,
        sync_module_states=init is not None,
    )
    with FullyShardedDataParallel.summon_full_params(wrapped):
        assert wrapped.module[0].weight is wrapped.module[1].weight
    assert sum(p.numel() for p in wrapped.parameters()) <= 24


class Mixes(nn.Linear):
    """Adds a plain tensor to a DTensor in a method that its forward calls."""

    def forward(self, x: Tensor) -> Tensor:
        return self.add(super().forward(x))

    def add(self, x: Tensor) -> Tensor:
        return x + torch.ones(4)


@on_ranks(2)
def test_a_mixture_of_the_users_own_tensors_keeps_its_message() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model: Any = Mixes(4, 4, bias=False)
    weight = distribute_tensor(model.weight.detach(), mesh["tp"], [Shard(0)])
    model.weight = nn.Parameter(weight)
    fully_shard(model, mesh=mesh["dp"])
    x = DTensor.from_local(torch.ones(2, 4), mesh["tp"])
    said = message_of(RuntimeError, model, x)
    assert "mixed torch.Tensor and DTensor" in said and "sharded" not in said


@on_ranks(2)
def test_sparse_gradients_are_checked() -> None:
    model: Any = fully_shard(nn.Embedding(5, 3, sparse=True))
    model.set_gradient_check(True)
    for factor in (1.0, float("nan")):
        (model(torch.tensor([1, 1])).sum() * factor).backward()
        assert len(model.nonfinite_gradients()) == (factor != factor)
        model.zero_grad()

"""``set_keep_unsharded_storage``: resharding keeps the memory and changes nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fullshard as ours
from fullshard import MixedPrecisionPolicy
from fullshard.frontend.ownership import unit_of
from tests.ranks.models import shard_units
from tests.ranks.net import apart, batch, make, optimizer_of, shard, step
from tests.ranks.pool import RankPool, on_ranks
from tests.ranks.strict import size_in_use

EXACT = 1e-12
worlds = pytest.mark.parametrize("world", [1, 2, 3])


def held_nbytes(model: nn.Module) -> int:
    return sum(unit_of(model).engine.meter.held_nbytes.values())


def all_nbytes(model: nn.Module) -> int:
    """Return the bytes of unsharded parameters that are not the shards themselves."""
    return sum(
        bucket.unsharded_nbytes
        for unit in unit_of(model).engine.units
        for bucket in unit.buckets
        if not bucket.materialized.borrows
    )


class Addresses:
    """Recorded addresses of parameters in the forwards and backwards of each step."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[dict[str, int]] = []
        self._wholes: dict[str, nn.Parameter] = {}
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            if list(module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_pre_hook(self._before_forward(name)))
                self._hooks.append(module.register_forward_hook(self._after_forward))

    def _before_forward(self, module_name: str) -> Any:
        def look(module: nn.Module, _: object) -> None:
            for name, param in module.named_parameters(recurse=False):
                assert not isinstance(param, DTensor)
                self._wholes[f"{module_name}.{name}"] = param
                self.seen[-1].setdefault(f"{module_name}.{name}", param.data_ptr())

        return look

    def _after_forward(self, module: nn.Module, _: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self._in_backward)

    def _in_backward(self, _: Tensor) -> None:
        for name, param in self._wholes.items():
            assert param.untyped_storage().nbytes() >= param.nbytes
            assert param.data_ptr() == self.seen[-1][name]

    def next_step(self) -> None:
        self.seen.append({})

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()


def disturb() -> list[Tensor]:
    """Take the blocks that the allocator would hand out next."""
    return [torch.empty(n) for n in (6, 30, 36, 40, 42, 72, 84) for _ in range(20)]


def train(reshard: bool | int, dtype: torch.dtype | None) -> list[Any]:
    plain = make(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model = shard(copy.deepcopy(plain), reshard_after_forward=reshard, mp_policy=policy)
    other = shard(copy.deepcopy(plain), reshard_after_forward=reshard, mp_policy=policy)
    model.set_keep_unsharded_storage(True)
    addresses, taken = Addresses(model), []
    pairs = [(one, optimizer_of(one)) for one in (model, other)]
    for number in range(4):
        addresses.next_step()
        for one, optimizer in pairs:
            step(one, optimizer, number)
        taken.append(disturb())
        assert all(isinstance(param, DTensor) for param in model.parameters())
        with torch.no_grad():
            model(batch(9, torch.float32))
        assert held_nbytes(model) == all_nbytes(model)
    assert len(addresses.seen[0]) == 9
    same = all(seen == addresses.seen[0] for seen in addresses.seen)
    addresses.stop()
    model.set_keep_unsharded_storage(False)
    held = held_nbytes(model)
    step(*pairs[0])
    step(*pairs[1])
    return [same, held, held_nbytes(model), apart(model, other)]


@worlds
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("reshard", [True, False])
def test_addresses_stay_and_values_do_not(
    pool: RankPool, world: int, reshard: bool, dtype: torch.dtype | None
) -> None:
    assert pool.run(world, train, reshard, dtype) == [[True, 0, 0, 0.0]] * world


def test_addresses_stay_with_secondary_shards(pool: RankPool) -> None:
    assert pool.run(4, train, 2, None) == [[True, 0, 0, 0.0]] * 4


@on_ranks(2, 3)
def test_single_units_keep_their_memory() -> None:
    """A single unit may keep its memory; a cast gives it up until the next step."""
    model = shard(make())
    model.blocks[0].set_keep_unsharded_storage(True, recurse=False)
    step(model, optimizer_of(model))
    unit = unit_of(model.blocks[0])
    found = [held_nbytes(model) == unit.nbytes]
    model.float()
    found.append(held_nbytes(model) == 0)
    step(model, optimizer_of(model))
    found.append(held_nbytes(model) == unit.nbytes)
    twin = copy.deepcopy(model)
    found.append(held_nbytes(twin) == 0 and held_nbytes(model) == unit.nbytes)
    step(twin, optimizer_of(twin))
    found.append(held_nbytes(twin) == unit.nbytes)
    assert found == [True] * 5


def sizes(kit: Any) -> list[int]:
    """Return for each block's weight, after a step, whether its memory is kept."""
    model = make()
    shard_units(model, model.blocks, by=kit.fully_shard)
    wholes: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, _: wholes.append(module.weight))
    model.blocks[0].set_keep_unsharded_storage(True)
    step(model, optimizer_of(model))
    return [int(size_in_use(whole.untyped_storage()) > 0) for whole in wholes]


@on_ranks(2)
@pytest.mark.skipif(
    not hasattr(theirs.FSDPModule, "set_keep_unsharded_storage"),
    reason="PyTorch has it from 2.15 on",
)
def test_pytorch_keeps_the_same() -> None:
    assert [sizes(ours), sizes(theirs)] == [[1, 0], [1, 0]]

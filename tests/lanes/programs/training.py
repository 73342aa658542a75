"""Ways to train with ``fully_shard``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fullshard import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    WirePolicy,
    fully_shard,
)
from fullshard.optim import ShardedOptimizer, clip_grad_norm_
from fullshard.tensors import local_part
from tests.kit.extensions import Halves, wrapped
from tests.lanes.programs.base import LAYOUTS, backward, both_layouts, program, script, step, steps
from tests.ranks.models import Experts
from tests.ranks.net import Net, apart, batch, make, optimizer_of, shard

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@program()
def plain_steps() -> float:
    return both_layouts(steps)


@program()
def kept_after_forward() -> float:
    return both_layouts(steps, reshard_after_forward=False)


@program(tolerance=1.0)
def mixed_precision() -> float:
    return both_layouts(steps, mp_policy=LOW)


@script
def memory_that_is_kept(model: Any) -> None:
    if isinstance(model, FSDPModule):
        model.set_keep_unsharded_storage(True)
    steps(model)
    if isinstance(model, FSDPModule):
        model.set_keep_unsharded_storage(False)
        model.set_reshard_after_backward(False)
    steps(model)


@script
def written_while_unsharded(model: Any) -> None:
    """Accumulated with and without reductions, clipped; the shards are written while gathered."""
    is_ours = isinstance(model, FSDPModule)
    if is_ours:
        optimizer: Any = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    else:
        optimizer = optimizer_of(model)
    for number in range(2):
        backward(model, number)
        if is_ours:
            model.set_requires_gradient_sync(False)
        backward(model, number + 1)
        if is_ours:
            model.set_requires_gradient_sync(True)
        backward(model, number + 2)
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        with unsharded(model) as params, torch.no_grad():
            for param in params:
                param.mul_(1.01)


@contextmanager
def unsharded(model: Any) -> Iterator[list[Tensor]]:
    params = [local_part(param) for param in model.parameters()]
    if isinstance(model, FSDPModule):
        model.unshard()
        assert not isinstance(model.scale, DTensor), "nobody has waited"
    yield params
    if isinstance(model, FSDPModule):
        model.reshard()


@program()
def checkpoints() -> float:
    def script(reentrant: bool, model: Any) -> None:
        for block in model.blocks:
            forward = block.forward
            block.forward = partial(checkpoint, forward, use_reentrant=reentrant)
        optimizer = optimizer_of(model)
        for number in range(2):
            x = batch(number).requires_grad_()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return max(both_layouts(partial(script, reentrant)) for reentrant in (True, False))


@program(world=4)
def replicas() -> float:
    """Reduced over shards at once, over replicas later."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))

    def script(model: Any) -> None:
        optimizer = optimizer_of(model)
        for number in range(3):
            for last in (False, True):
                if isinstance(model, FSDPModule):
                    model.set_requires_all_reduce(last)
                backward(model, number + last)
            optimizer.step()
            optimizer.zero_grad()

    return both_layouts(script, mesh=mesh) + both_layouts(steps, mesh=mesh)


@program(world=4, tolerance=1.0)
def encoded_over_replicas() -> float:
    """Means that travel in two hops; they lose digits."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    wire = WirePolicy.parse("gather=int8,reduce=int8")
    return both_layouts(steps, mesh=mesh, wire=wire, mp_policy=LOW)


@program(world=4)
def secondary_shards() -> float:
    return both_layouts(steps, reshard_after_forward=2)


@program()
def offload() -> float:
    policies = [CPUOffloadPolicy(pin_memory=pinned) for pinned in (True, False)]
    return max(both_layouts(steps, offload_policy=policy) for policy in policies)


@program(tolerance=1.0)
def offload_in_mixed_precision() -> float:
    return both_layouts(steps, offload_policy=CPUOffloadPolicy(), mp_policy=LOW)


@program(world=1, tolerance=1.0)
def alone() -> float:
    """Nobody to gather from, and so no collective that others wait for."""
    options: list[dict[str, Any]] = [
        {},
        {"mp_policy": LOW},
        {"offload_policy": CPUOffloadPolicy()},
        {"offload_policy": CPUOffloadPolicy(), "mp_policy": LOW},
    ]
    return max(both_layouts(steps, **more) for more in options)


@program()
def extensions() -> float:
    """Tensors that decide themselves what travels."""

    def run(**options: Any) -> float:
        plain, model = make(), shard(wrapped(Halves), **options)
        steps(plain)
        steps(model)
        return apart(model, plain)

    return max(run(), run(reshard_after_forward=False), run(offload_policy=CPUOffloadPolicy()))


def extended_alone(num: int, policy: OffloadPolicy) -> float:
    """A chain of units that have nothing but an extended parameter each."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4, bias=False).double() for _ in range(num)))
    model = copy.deepcopy(plain)
    for layer in model:
        layer.weight = nn.Parameter(Halves(layer.weight.detach()))
        fully_shard(layer, offload_policy=policy)
    fully_shard(model)
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for number in range(3):
            one(batch(number)[:, :4]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return apart(model, plain)


@program()
def extensions_alone() -> float:
    """Nothing but the joins of extended parameters themselves, the first gather's among them."""
    policies = (OffloadPolicy(), CPUOffloadPolicy())
    return max(extended_alone(num, policy) for num in (1, 4) for policy in policies)


class Refusing(Halves):
    """A tensor whose hook raises after the gather."""

    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse."""
        raise ValueError("refused")


@program()
def an_extension_that_refuses() -> float:
    """The memory of a gather without a wait is freed."""
    for _ in range(40):
        layer = nn.Linear(8, 8, bias=False, dtype=torch.float64)
        layer.weight = nn.Parameter(Refusing(layer.weight.detach()))
        fully_shard(layer)
        with suppress(ValueError):
            layer(torch.ones(2, 8, dtype=torch.float64))
        torch.ones(8, 8).add_(1)
    return 0.0


@program()
def absent_gradients() -> float:
    """Gradients are accumulated while some are absent; ranks compare presence at the end."""
    plain = nn.ModuleList(Experts() for _ in range(3)).double()
    model: Any = copy.deepcopy(plain)
    for unit in model:
        fully_shard(unit)
    for one in (plain, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for number in range(2):
            for which in (0, 1, 0):
                x = batch(number)
                for unit in one:
                    x = unit(x, which)
                x.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return apart(model, plain)


@script
def finalized_by_hand(model: Any) -> None:
    """Reductions that are under way when backward has ended."""
    optimizer = optimizer_of(model)
    for number in range(3):
        if isinstance(model, FSDPModule):
            model.set_manual_backward_finalization(True)
        backward(model, number)
        if isinstance(model, FSDPModule):
            model.finalize_backward(async_op=True).wait()
        optimizer.step()
        optimizer.zero_grad()


class Switching(Net):
    """Another order in each forward, a module used twice, a parameter without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        self.turn = not getattr(self, "turn", False)
        blocks = list(self.blocks)
        for block in blocks if self.turn else reversed([*blocks, blocks[0]]):
            x = torch.tanh(block(x) if self.turn else block(x * self.scale))
        return self.head(self.plain(x))


@program()
def orders_that_change() -> float:
    def run(**options: Any) -> float:
        plain = make()
        plain.__class__ = Switching
        model = shard(copy.deepcopy(plain), **options)
        model.set_prefetch_budget(None)
        steps(plain, 6)
        steps(model, 6)
        return apart(model, plain)

    return max(run(layout=layout) for layout in LAYOUTS)


@script
def frozen_later(model: Any) -> None:
    optimizer = optimizer_of(model)
    for number in range(4):
        model.blocks[0].weight.requires_grad_(number % 2 == 0)
        model.scale.requires_grad_(number != 1)
        step(model, optimizer, number)

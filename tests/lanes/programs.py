"""Small programs that between them use every join, wait, mark and event of the engine.

Each trains a model sharded and unsharded, on batches that are the same on all ranks, and returns
how far apart the parameters end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fullshard import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    PerParameter,
    Ragged,
    ShardingStrategy,
    fully_shard,
    share_comm_ctx,
    unshard_params,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.optim import ShardedOptimizer, clip_grad_norm_
from fullshard.tensors import local_part
from tests.lanes.checker import current_checker
from tests.ranks.net import Net, apart, batch, make, optimizer_of, shard, step, train_both
from tests.ranks.test_extensions import Halves, wrapped

__all__ = ["PROGRAMS", "Program"]

LAYOUTS = (PerParameter(), Ragged())
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Program(NamedTuple):
    """A program, on how many ranks, and how far apart it may end."""

    name: str
    run: Callable[[], float]
    world: int = 2
    tolerance: float = 1e-10


PROGRAMS: list[Program] = []


def program(world: int = 2, tolerance: float = 1e-10) -> Callable[[Callable[[], float]], Any]:
    def add(run: Callable[[], float]) -> Callable[[], float]:
        PROGRAMS.append(Program(run.__name__, run, world, tolerance))
        return run

    return add


def steps(model: nn.Module, num: int = 3) -> None:
    optimizer = optimizer_of(model)
    for number in range(num):
        step(model, optimizer, number)


def both_layouts(script: Callable[[nn.Module], None], **options: Any) -> float:
    return max(train_both(script, layout=layout, **options) for layout in LAYOUTS)


def units_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@program()
def plain_steps() -> float:
    return both_layouts(steps)


@program()
def kept_after_forward() -> float:
    return both_layouts(steps, reshard_after_forward=False)


@program(tolerance=1.0)
def mixed_precision() -> float:
    return both_layouts(steps, mp_policy=LOW)


@program()
def memory_that_is_kept() -> float:
    def script(model: Any) -> None:
        if isinstance(model, FSDPModule):
            model.set_keep_unsharded_storage(True)
        steps(model)
        if isinstance(model, FSDPModule):
            model.set_keep_unsharded_storage(False)
            model.set_reshard_after_backward(False)
        steps(model)

    return both_layouts(script)


@program()
def written_while_unsharded() -> float:
    """Accumulated with and without reductions, clipped; the shards are written while gathered."""

    def script(model: Any) -> None:
        is_ours = isinstance(model, FSDPModule)
        if is_ours:
            optimizer: Any = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
        else:
            optimizer = optimizer_of(model)
        for number in range(2):
            model(batch(number)).square().mean().backward()
            if is_ours:
                model.set_requires_gradient_sync(False)
            model(batch(number + 1)).square().mean().backward()
            if is_ours:
                model.set_requires_gradient_sync(True)
            model(batch(number + 2)).square().mean().backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            with unsharded(model) as params, torch.no_grad():
                for param in params:
                    param.mul_(1.01)

    return both_layouts(script)


@contextmanager
def unsharded(model: Any) -> Iterator[list[Tensor]]:
    params = [local_part(param) for param in model.parameters()]
    handle = model.unshard(async_op=True) if isinstance(model, FSDPModule) else None
    if handle is not None:
        handle.wait()
    yield params
    if handle is not None:
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
                model(batch(number + last)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return both_layouts(script, mesh=mesh) + both_layouts(steps, mesh=mesh)


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


@program()
def extensions() -> float:
    """Tensors that decide themselves what travels."""

    def run(**options: Any) -> float:
        plain, model = make(), shard(wrapped(Halves), **options)
        steps(plain)
        steps(model)
        return apart(model, plain)

    return max(run(), run(reshard_after_forward=False), run(offload_policy=CPUOffloadPolicy()))


@program()
def hooks_on_streams() -> float:
    """The user's streams and events."""

    def script(model: Any) -> None:
        accelerator = current_checker().accelerator
        theirs = accelerator.Stream()

        def doubled(row: Tensor) -> None:
            with accelerator.stream(accelerator.current_stream()):
                row.mul_(2)

        units = units_of(model)
        for unit in units:
            unit.set_all_reduce_hook(doubled, stream=theirs)
            unit.set_gradient_divide_factor(4)  # of 2 ranks, so 1/2 of the mean
        optimizer = optimizer_of(model)
        for number in range(3):
            step(model, optimizer, number)
            if units:
                event = accelerator.Event()
                event.record(accelerator.current_stream())
                model.set_post_optim_event(event)

    return both_layouts(script)


@program()
def loans() -> float:
    """Full parameters, written and read between steps."""

    def script(model: Any) -> None:
        optimizer = optimizer_of(model)
        for number in range(3):
            step(model, optimizer, number)
            lent = isinstance(model, FSDPModule)
            with unshard_params(model) if lent else nullcontext(), torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.01)

    return both_layouts(script) + both_layouts(script, offload_policy=CPUOffloadPolicy())


@program()
def finalized_by_hand() -> float:
    """Reductions that are under way when backward has ended."""

    def script(model: Any) -> None:
        optimizer = optimizer_of(model)
        for number in range(3):
            if isinstance(model, FSDPModule):
                model.set_manual_backward_finalization(True)
            model(batch(number)).square().mean().backward()
            if isinstance(model, FSDPModule):
                model.finalize_backward(async_op=True).wait()
            optimizer.step()
            optimizer.zero_grad()

    return both_layouts(script)


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


@program()
def separate_groups_and_shared_lanes() -> float:
    def script(model: Any) -> None:
        if isinstance(model, FSDPModule):
            model.set_separate_reduce_scatter_group()
            model.set_reduce_scatter_max_input_buffers(4)
            other = fully_shard(make())
            share_comm_ctx([model, other])
            optimizer = optimizer_of(other)
            for number in range(2):
                step(other, optimizer, number)
        steps(model)

    return both_layouts(script)


@program()
def frozen_later() -> float:
    def script(model: Any) -> None:
        optimizer = optimizer_of(model)
        for number in range(4):
            model.blocks[0].weight.requires_grad_(number % 2 == 0)
            model.scale.requires_grad_(number != 1)
            model(batch(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return both_layouts(script)


@program(world=4)
def flat_parameters() -> float:
    """The other face."""
    strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
    return max(
        flat(strategy, use_orig_params=original, **more)
        for strategy in strategies
        for original, more in ((True, {}), (False, {}), (False, {"cpu_offload": True}))
    )


def flat(strategy: ShardingStrategy, **options: Any) -> float:
    from fullshard import CPUOffload

    if options.pop("cpu_offload", False):
        options["cpu_offload"] = CPUOffload(offload_params=True)
    if strategy is ShardingStrategy.HYBRID_SHARD:
        options["device_mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    plain = make()
    inner = copy.deepcopy(plain)
    for number, block in enumerate(inner.blocks):
        inner.blocks[number] = FSDP(block, sharding_strategy=strategy, **options)
    model = FSDP(inner, sharding_strategy=strategy, **options)
    optimizers = [optimizer_of(plain), optimizer_of(model)]
    for number in range(3):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            with model.no_sync() if one is model else nullcontext():
                one(batch(number)).square().mean().backward()
            one(batch(number + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with FSDP.summon_full_params(model):
        ours = [value.detach().clone() for value in model.parameters()]
    return max((a - b).abs().max().item() for a, b in zip(ours, plain.parameters(), strict=True))

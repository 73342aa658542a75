"""The user's streams and collectives, full parameters, and the other face."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard import (
    AllGather,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    ReduceScatter,
    ShardingStrategy,
    fully_shard,
    iter_full_params,
    share_comm_ctx,
    unshard_params,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard._torch import collectives as _collectives
from fullshard._torch import dtensor as _dtensor
from fullshard.checkpoint import full_state_dict, load_full_state_dict
from fullshard.comm.blocking import all_reduce, all_to_all
from fullshard.comm.bucketed_gather import BucketedGather
from fullshard.device import HostReader, host_tensor
from tests.lanes.checker import current_checker
from tests.lanes.fake import Stream
from tests.lanes.programs.base import backward, both_layouts, program, script, step, steps, units_of
from tests.ranks.net import batch, make, optimizer_of


@script
def read_by_the_host(model: Any) -> None:
    """Weights of a step are copied to the host, as in an asynchronous save, and read there."""
    checker = current_checker()
    optimizer = optimizer_of(model)
    own = [
        _dtensor.local_of(param).detach() if units_of(model) else param.detach()
        for param in model.parameters()
    ]
    copies = [host_tensor(one.numel(), one.dtype, pinned=False) for one in own]
    for copied in copies:
        checker.on_host(copied)
    for number in range(2):
        step(model, optimizer, number)
        with patch.object(torch, "get_device_module", return_value=checker.accelerator):
            reader = HostReader(torch.device("cuda"))
        for local, copied in zip(own, copies, strict=True):
            reader.read(local.reshape(-1), copied)
            copied.tolist()


@script
def hooks_on_streams(model: Any) -> None:
    """The user's streams and events."""
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


@script
def separate_groups_and_shared_lanes(model: Any) -> None:
    if isinstance(model, FSDPModule):
        model.set_separate_reduce_scatter_group()
        model.set_reduce_scatter_max_input_buffers(4)
        other = fully_shard(make())
        share_comm_ctx([model, other])
        optimizer = optimizer_of(other)
        for number in range(2):
            step(other, optimizer, number)
    steps(model)


@program()
def loans() -> float:
    """Full parameters, written and read between steps."""

    def script(model: Any) -> None:
        optimizer = optimizer_of(model)
        for terms in ({}, {"rank0_only": True}, {"check": True}, {"with_grads": True}):
            model(batch()).square().mean().backward()
            lent = isinstance(model, FSDPModule)
            with unshard_params(model, **terms) if lent else nullcontext(), torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.01)
            if lent:
                sum(value.sum() for _, value in iter_full_params(model))
            optimizer.step()
            optimizer.zero_grad()

    return both_layouts(script) + both_layouts(script, offload_policy=CPUOffloadPolicy())


@program(world=4)
def loans_of_replicas() -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))

    def script(model: Any) -> None:
        optimizer = optimizer_of(model)
        for number in range(2):
            step(model, optimizer, number)
            lent = unshard_params(model, rank0_only=True)
            with lent if isinstance(model, FSDPModule) else nullcontext(), torch.no_grad():
                for param in model.parameters():
                    param.mul_(1.01)

    return both_layouts(script, mesh=mesh)


class Work:
    """Pending work on a stream of the user."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def wait(self) -> None:
        """Let the current stream wait."""
        current_checker().accelerator.current_stream().wait_stream(self._stream)


class OwnComm:
    """A collective on a stream of its own."""

    def __init__(self) -> None:
        self._stream = current_checker().accelerator.Stream()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of the stream that is current."""
        return torch.empty(*size, dtype=dtype, device=device)

    def run(self, start: Any) -> Work:
        """Start the collective there."""
        accelerator = current_checker().accelerator
        self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream):
            start()
        return Work(self._stream)


class OwnGather(OwnComm, AllGather):
    def __call__(self, output: Any, source: Any, group: Any, async_op: bool = False) -> Any:
        return self.run(lambda: _collectives.all_gather(group, [output], [source]).wait())


class OwnReduce(OwnComm, ReduceScatter):
    def __call__(
        self, output: Any, source: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        return self.run(lambda: _collectives.reduce_scatter(group, output, source, op).wait())


@script
def custom_collectives(model: Any) -> None:
    for unit in units_of(model):
        unit.set_custom_all_gather(OwnGather())
        unit.set_custom_reduce_scatter(OwnReduce())
    steps(model)


@script
def times_waited(model: Any) -> None:
    optimizer = optimizer_of(model)
    for number in range(3):
        step(model, optimizer, number)
        if isinstance(model, FSDPModule):
            model.waited_s()


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
                backward(one, number)
            backward(one, number + 1)
            optimizer.step()
            optimizer.zero_grad()
    return flat_apart(model, plain)


@script
def broadcast_states(model: Any) -> None:
    """A state dict that rank 0 has alone."""
    steps(model)
    if isinstance(model, FSDPModule):
        whole = full_state_dict(model, rank0_only=False)
        load_full_state_dict(model, whole, broadcast_from_rank0=True)
    steps(model)


@program()
def copied_from_the_first_rank() -> float:
    """``sync_module_states``."""
    plain = make()
    model = FSDP(copy.deepcopy(plain), sync_module_states=True)
    for one in (plain, model):
        steps(one)
    return flat_apart(model, plain)


@script
def sent_beside_training(model: Any) -> None:
    """Sums of many numbers, exchanges, and messages to all ranks, as streams of weights send."""
    group = torch.distributed.group.WORLD
    assert group is not None
    gather = BucketedGather([[32, 32]] * 2, [0, 1], torch.device("cpu"))
    optimizer = optimizer_of(model)
    for number in range(2):
        step(model, optimizer, number)
        values = torch.ones(2000)
        all_reduce(values, group, is_max=False)
        values.add_(1)
        all_to_all(torch.ones(8).view(torch.uint8), [16, 16], [16, 16], group).add_(1)
        gather.begin(number).fill_(1)
        gather.start()
        for message in gather.wait():
            message + 0


@program(world=4)
def hooks_that_reduce() -> float:
    """``register_comm_hook``, where all ranks have the same batch."""
    strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD)
    return max(map(hooked, strategies))


def hooked(strategy: ShardingStrategy) -> float:
    plain = make()
    model = FSDP(copy.deepcopy(plain), sharding_strategy=strategy)

    def cut(state: object, grads: Tensor, own: Tensor) -> None:
        own.copy_(grads.view(4, -1)[torch.distributed.get_rank()])

    def keep(state: object, grads: Tensor) -> None:
        grads.mul_(1)

    model.register_comm_hook(None, keep if strategy is ShardingStrategy.NO_SHARD else cut)
    for one in (plain, model):
        steps(one)
    return flat_apart(model, plain)


def flat_apart(model: FSDP, plain: nn.Module) -> float:
    """Return the largest difference between full parameters."""
    with FSDP.summon_full_params(model):
        ours = [value.detach().clone() for value in model.parameters()]
    return max((a - b).abs().max().item() for a, b in zip(ours, plain.parameters(), strict=True))

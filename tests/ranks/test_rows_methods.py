"""Methods of ``FSDPModule`` and related functions compared with PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.kit.communication import Gather, Reduce
from tests.ranks.models import fill, full_parameters, ids, noise
from tests.ranks.net import batch, make, optimizer_of, step
from tests.ranks.pool import RankPool
from tests.ranks.rows import check_alike, each, grads, outcomes, raised, shard, shown, whole
from tests.versions import new_in_fsdp2


def run(model: nn.Module, number: int = 0) -> None:
    """Run a forward and a backward with data of this rank."""
    model(batch(number + 10 * dist.get_rank())).square().sum().backward()


def replicas_of_shards() -> Any:
    shape = (dist.get_world_size() // 2, 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))


def unshard(fsdp: Any) -> Any:
    model = shard(fsdp, make())
    block = model.blocks[0]
    seen: list[Any] = [block.unshard(), shown(block), block.unshard(), shown(block)]
    block.reshard()
    handle = block.unshard(async_op=True)
    seen += [isinstance(handle, fsdp.UnshardHandle), shown(block)]
    handle.wait()
    handle.wait()
    seen += [shown(block), whole(block.weight)]
    empty = fsdp.fully_shard(nn.Sequential(fsdp.fully_shard(nn.Linear(2, 2))))
    empty.unshard(async_op=True).wait()
    on_meta = fsdp.fully_shard(nn.Linear(2, 2, device="meta"))
    return [*seen, shown(empty), raised(on_meta.unshard), fsdp.UnshardHandle().wait()]


def reshard(fsdp: Any) -> Any:
    model = shard(fsdp, make(), reshard_after_forward=False)
    before = full_parameters(model)
    model(batch())
    with torch.no_grad():
        model.scale.fill_(9.0)
    seen = [shown(model)]
    for module in (model, *model.blocks):
        module.reshard()
    return [*seen, shown(model), torch.equal(full_parameters(model)["scale"], before["scale"])]


def set_requires_gradient_sync(fsdp: Any) -> Any:
    model, seen = shard(fsdp, make()), []
    for number, (sync, recurse) in enumerate([(False, True), (True, True), (False, False)]):
        model.set_requires_gradient_sync(sync, recurse=recurse)
        run(model, number)
        seen.append(grads(model))
    model.set_requires_gradient_sync(True)
    run(model, 4)
    return [*seen, grads(model)]


def set_requires_all_reduce(fsdp: Any) -> Any:
    model, seen = shard(fsdp, make(), mesh=replicas_of_shards()), []
    for number, reduces in enumerate([False, False, True]):
        model.set_requires_all_reduce(reduces)
        run(model, number)
        seen.append(grads(model))
    model.set_requires_all_reduce(False)
    model.set_requires_gradient_sync(True)  # also sets requires_all_reduce
    run(model, 3)
    flat = shard(fsdp, make())
    flat.set_requires_all_reduce(False)
    run(flat)
    return [*seen, grads(model), grads(flat)]


def set_reshard_after_forward(fsdp: Any) -> Any:
    seen: list[Any] = []
    for value, recurse in [(True, True), (False, True), (True, False), (False, False)]:
        model = shard(fsdp, make())
        model.set_reshard_after_forward(value, recurse)
        model(batch())
        seen.append(shown(model))
    return [*seen, raised(lambda: model.set_reshard_after_forward(2))]


def set_reshard_after_backward(fsdp: Any) -> Any:
    seen: list[Any] = []
    for value, recurse in [(False, True), (False, False), (True, True)]:
        model = shard(fsdp, make())
        model.set_reshard_after_backward(value, recurse=recurse)
        run(model)
        seen.append(shown(model))
        for module in (model, *model.blocks):
            module.reshard()
        seen.append(grads(model))
    return seen


def set_is_last_backward(fsdp: Any) -> Any:
    model = shard(fsdp, make())
    for number, is_last in enumerate([False, False, True]):
        model.set_is_last_backward(is_last)
        run(model, number)
    return grads(model)


def set_modules_to_prefetch(fsdp: Any) -> Any:
    model = shard(fsdp, make())
    first, second = model.blocks
    model.set_modules_to_forward_prefetch([second, first])  # not the order of use
    first.set_modules_to_backward_prefetch([second])
    run(model)
    first.set_modules_to_backward_prefetch([])
    run(model, 1)
    return [
        grads(model),
        raised(lambda: model.set_modules_to_forward_prefetch([nn.Linear(1, 1)])),
        raised(lambda: model.set_modules_to_backward_prefetch([nn.Linear(1, 1)])),
    ]


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


def set_unshard_in_backward(fsdp: Any) -> Any:
    model: Any = fill(Embeds().double())
    fsdp.fully_shard(model.embed)
    fsdp.fully_shard(model)
    model.embed.set_unshard_in_backward(False)
    model(ids(3, 5, vocab=7, seed=dist.get_rank())).square().sum().backward()
    return grads(model)


def divided(fsdp: Any, change: Any) -> Any:
    model = shard(fsdp, make())
    change(model)
    run(model)
    return grads(model)


def set_gradient_divide_factor(fsdp: Any) -> Any:
    return [
        divided(fsdp, lambda model: model.set_gradient_divide_factor(4.0)),
        divided(fsdp, lambda model: model.blocks[0].set_gradient_divide_factor(1.0)),
        divided(fsdp, lambda model: model.set_reduce_scatter_divide_factor(4.0)),
    ]


def set_force_sum_reduction_for_comms(fsdp: Any) -> Any:
    return divided(fsdp, lambda model: model.set_force_sum_reduction_for_comms(True))


def set_reduce_scatter_max_input_buffers(fsdp: Any) -> Any:
    model = shard(fsdp, make())
    call = model.set_reduce_scatter_max_input_buffers
    return [
        divided(fsdp, lambda model: model.set_reduce_scatter_max_input_buffers(2)),
        divided(
            fsdp,
            lambda model: model.set_reduce_scatter_max_input_buffers(
                max_input_buffers=3, recurse=False
            ),
        ),
        *(raised(lambda value=value: call(value)) for value in (True, 2.0, "2", 0, -1)),
    ]


def set_separate_reduce_scatter_group(fsdp: Any) -> Any:
    return divided(fsdp, lambda model: model.set_separate_reduce_scatter_group())


def set_reduce_scatter_unused_params(fsdp: Any) -> Any:
    seen = []
    for fills in (False, True):
        model: Any = fill(Embeds().double())
        model.extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
        fsdp.fully_shard(model)
        model.set_reduce_scatter_unused_params(fills)
        model(ids(3, 5, vocab=7)).sum().backward()
        seen.append(grads(model))
    return seen


def set_custom_collectives(fsdp: Any) -> Any:
    gather, reduce = Gather(asynchronous=False), Reduce(asynchronous=False)

    def change(model: Any) -> None:
        model.blocks[0].set_custom_all_gather(gather)
        model.blocks[0].set_custom_reduce_scatter(reduce)

    found = divided(fsdp, change)
    return [found, gather.called, reduce.called, gather.allocated > 0, reduce.allocated > 0]


def set_all_reduce_hook(fsdp: Any) -> Any:
    seen: list[Any] = []

    def double(flat: Tensor) -> None:
        seen.append((flat.dim(), flat.dtype, round(flat.sum().item(), 3)))
        flat.mul_(2)

    for options in ({}, {"mesh": replicas_of_shards()}):
        model = shard(fsdp, make(torch.float32), **options)
        model.set_all_reduce_hook(double)
        model(batch(0, torch.float32)).square().sum().backward()
        seen.append({name: round(g.sum().item(), 3) for name, g in grads(model).items()})
    return [*seen, raised(lambda: model.set_all_reduce_hook(double, stream=object()))]


def set_allocate_memory_from_process_group_for_comm(fsdp: Any) -> Any:
    model = shard(fsdp, make())
    model.set_allocate_memory_from_process_group_for_comm(True)
    run(model)
    other = fsdp.fully_shard(nn.Linear(2, 2))
    other.set_custom_all_gather(Gather(asynchronous=False))
    call = other.set_allocate_memory_from_process_group_for_comm
    return [grads(model), raised(lambda: call(True))]


def set_symm_mem_for_comm(fsdp: Any) -> Any:
    plain, custom = fsdp.fully_shard(nn.Linear(2, 2)), fsdp.fully_shard(nn.Linear(2, 2))
    custom.set_custom_all_gather(Gather(asynchronous=False))
    refused = [raised(custom.set_symm_mem_for_comm)]
    if not torch.backends.cuda.is_built():  # a CUDA build of PyTorch accepts it on any machine
        refused.append(raised(plain.set_symm_mem_for_comm))
    return refused


def reset_iter_state(fsdp: Any) -> Any:
    model = shard(fsdp, make())
    run(model)
    model.zero_grad()

    def fail(*_: object) -> None:
        raise ArithmeticError

    handle = model.head.register_forward_pre_hook(fail)
    failed = raised(lambda: model(batch()))
    handle.remove()
    model.reset_iter_state()
    after = shown(model)
    run(model)
    return [failed, after, grads(model)]


def private_async_op(fsdp: Any) -> Any:
    return divided(fsdp, lambda model: model._set_unshard_async_op(True))


def casts_of_modules(fsdp: Any) -> Any:
    model = shard(fsdp, make(torch.float32))
    params = list(model.parameters())
    optimizer = optimizer_of(model)
    model.to(torch.float64)
    same = [a is b for a, b in zip(params, model.parameters(), strict=True)]
    losses = [step(model, optimizer, number) for number in range(2)]
    return [same, losses, full_parameters(model), shown(model)]


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 1


def register_forward_method(fsdp: Any) -> Any:
    model: Any = fill(Encodes())
    policy = fsdp.MixedPrecisionPolicy(output_dtype=torch.float64)
    fsdp.fully_shard(model, mp_policy=policy, reshard_after_forward=True)
    fsdp.register_fsdp_forward_method(model, "encode")
    out = model.encode(noise(2, 3, dtype=torch.float32))
    after = shown(model)
    out.sum().backward()
    plain = Encodes()
    fsdp.register_fsdp_forward_method(plain, "encode")
    fsdp.register_fsdp_forward_method(plain, "missing")
    return {
        "dtype": out.dtype,
        "shown": after,
        "gradients": grads(model),
        "missing": raised(lambda: fsdp.register_fsdp_forward_method(model, "missing")),
        "plain": "encode" in vars(plain),
    }


def share_comm_ctx(fsdp: Any) -> Any:
    one, other = shard(fsdp, make()), shard(fsdp, make())
    run(one)
    run(other)  # PyTorch fails if the first forward comes later
    fsdp.share_comm_ctx([])
    fsdp.share_comm_ctx([one, other])
    run(one, 1)
    run(other, 1)
    return [grads(one), grads(other), raised(lambda: fsdp.share_comm_ctx([nn.Linear(1, 1)]))]


@each(
    unshard,
    reshard,
    set_requires_gradient_sync,
    set_reshard_after_forward,
    set_reshard_after_backward,
    set_is_last_backward,
    set_modules_to_prefetch,
    set_unshard_in_backward,
    set_gradient_divide_factor,
    set_force_sum_reduction_for_comms,
    pytest.param(set_reduce_scatter_unused_params, marks=new_in_fsdp2),
    pytest.param(set_reduce_scatter_max_input_buffers, marks=new_in_fsdp2),
    pytest.param(set_separate_reduce_scatter_group, marks=new_in_fsdp2),
    set_custom_collectives,
    set_allocate_memory_from_process_group_for_comm,
    pytest.param(set_symm_mem_for_comm, marks=new_in_fsdp2),
    pytest.param(reset_iter_state, marks=new_in_fsdp2),
    private_async_op,
    casts_of_modules,
    register_forward_method,
    share_comm_ctx,
)
def test_as_in_pytorch(pool: RankPool, program: Any) -> None:
    check_alike(pool, program)


@each(set_requires_all_reduce, set_all_reduce_hook)
def test_as_in_pytorch_on_four_ranks(pool: RankPool, program: Any) -> None:
    check_alike(pool, program, world=4)


def freezing_what_is_unsharded(fsdp: Any) -> Any:
    linear = fsdp.fully_shard(nn.Linear(2, 2))
    linear.unshard()
    linear.weight.requires_grad_(False)
    linear.reshard()
    return linear.weight.requires_grad


def test_freezing_what_is_unsharded_lasts(pool: RankPool) -> None:
    assert pool.run(2, outcomes, freezing_what_is_unsharded) == [(True, False)] * 2


def resetting_a_child(fsdp: Any) -> Any:
    model = shard(fsdp, make())
    run(model)
    return raised(model.blocks[0].reset_iter_state)


@new_in_fsdp2
def test_any_module_of_the_tree_resets_it(pool: RankPool) -> None:
    for theirs, ours in pool.run(2, outcomes, resetting_a_child):
        assert theirs.kinds == ("RuntimeError",) and ours == "nothing raised"

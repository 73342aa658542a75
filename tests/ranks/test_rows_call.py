"""``fully_shard`` compared with PyTorch's: arguments, side effects, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import func, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fullshard
from tests.ranks.models import fill, full_parameters, noise
from tests.ranks.net import batch, make
from tests.ranks.pool import RankPool, on_ranks
from tests.ranks.rows import check_alike, each, grads, outcomes, raised, shard, shown, whole
from tests.ranks.strict import left
from tests.versions import TORCH, new_in_fsdp2


def return_value(fsdp: Any) -> Any:
    one, many, pair = nn.Linear(2, 2), [nn.Linear(2, 2), nn.Linear(2, 2)], (nn.Linear(2, 2),)
    return {
        "module": fsdp.fully_shard(one) is one,
        "list": fsdp.fully_shard(many) is many,
        "tuple": fsdp.fully_shard(pair) is pair,
    }


def side_effects(fsdp: Any) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    old = list(model.parameters())
    calls: list[str] = []
    model.register_forward_pre_hook(lambda m, _: calls.append(shown(m)[0]))
    fsdp.fully_shard(model)
    new = list(model.parameters())
    model.register_forward_hook(lambda m, *_: calls.append(shown(m)[0]))
    model(torch.ones(2, 3))
    return {
        "replaced": [a is b for a, b in zip(old, new, strict=True)],
        "kinds": [(isinstance(p, nn.Parameter), isinstance(p, DTensor)) for p in new],
        "placements": [str(p.placements) for p in new],  # type: ignore[attr-defined]
        "pre_hooks": len(model._forward_pre_hooks),
        "hooks": len(model._forward_hooks),
        "seen": calls,
        "marks": [
            (m._is_fsdp_managed_module, m._fsdp_use_orig_params)  # type: ignore[union-attr]
            for m in model.modules()
        ],
        "buffers": [(str(b.device), type(b).__name__) for b in model.buffers()],
    }


def class_swap(fsdp: Any) -> Any:
    model = fsdp.fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    other = fsdp.fully_shard(nn.Sequential(nn.Linear(2, 2)))
    return {
        "name": type(model).__name__,
        "bases": [base.__name__ for base in type(model).__bases__],
        "instance": (isinstance(model, fsdp.FSDPModule), isinstance(model, nn.Sequential)),
        "cached": type(model) is type(other),
        "children": [type(child).__name__ for child in model],
        "slice": type(model[:1]).__name__,
        "call": type(type(model)(nn.Linear(1, 1))).__name__,
    }


def names_and_order(fsdp: Any) -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2)))
    fsdp.fully_shard(model[2])
    fsdp.fully_shard(model)
    return {
        "parameters": [name for name, _ in model.named_parameters()],
        "buffers": [name for name, _ in model.named_buffers()],
        "modules": [name for name, _ in model.named_modules()],
        "state": list(model.state_dict()),
    }


def refused_modules(fsdp: Any) -> Any:
    twice = fsdp.fully_shard(nn.Linear(2, 2))
    inner = nn.ModuleList([nn.Linear(2, 2)])
    return {
        "list": raised(lambda: fsdp.fully_shard(inner)),
        "dict": raised(lambda: fsdp.fully_shard(nn.ModuleDict({"a": nn.Linear(2, 2)}))),
        "twice": raised(lambda: fsdp.fully_shard(twice)),
        "scalar": raised(lambda: fsdp.fully_shard(nn.ParameterDict({"a": torch.tensor(1.0)}))),
        "strided": raised(
            lambda: fsdp.fully_shard(nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last))
        ),
    }


def list_of_modules(fsdp: Any) -> Any:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2), nn.Linear(2, 2))
    given = (model[0], model[0][0], model[1])
    result = fsdp.fully_shard(given)
    fsdp.fully_shard(model)
    kinds = [type(m).__name__ for m in (*result, model)]
    model[1].unshard()
    together = [shown(child) for child in model]
    model[0].reshard()
    return {"kinds": kinds, "together": together, "after": [shown(child) for child in model]}


def meshes(fsdp: Any) -> Any:
    plain = fsdp.fully_shard(nn.Linear(2, 3))
    one = fsdp.fully_shard(nn.Linear(2, 3), mesh=init_device_mesh("cpu", (2,)))
    names = ("copies", "shards")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
    two = fsdp.fully_shard(nn.Linear(2, 3), mesh=mesh)

    def refused(*shape: int) -> Any:
        mesh = init_device_mesh("cpu", shape)
        return raised(lambda: fsdp.fully_shard(nn.Linear(2, 2), mesh=mesh))

    return {
        "placements": [str(m.weight.placements) for m in (plain, one, two)],
        "meshes": [m.weight.device_mesh.mesh.tolist() for m in (plain, one, two)],
        "names": [m.weight.device_mesh.mesh_dim_names for m in (plain, one, two)],
        "types": [m.weight.device_mesh.device_type for m in (plain, one, two)],
        "three_dims": refused(2, 1, 1),
        "unnamed": refused(1, 2),
    }


def resharding(fsdp: Any) -> Any:
    seen = {}
    for value in (None, True, False):
        model = shard(fsdp, make(), reshard_after_forward=value)
        out = model(batch())
        after = shown(model)
        out.square().sum().backward()
        seen[str(value)] = (after, shown(model), grads(model))
    return seen


def resharding_to_an_int(fsdp: Any) -> Any:
    seen: dict[str, Any] = {}
    for value in (1, 2, 4):
        model = shard(fsdp, make(), reshard_after_forward=value)
        out = model(batch())
        after = shown(model)
        out.square().sum().backward()
        seen[str(value)] = (after, shown(model), grads(model))
    for wrong in (0, -1, 3, 5, 2.0, "2"):
        seen[repr(wrong)] = raised(
            lambda wrong=wrong: fsdp.fully_shard(nn.Linear(4, 4), reshard_after_forward=wrong)
        )
    return seen


def placements(fsdp: Any) -> Any:
    def sharded(answer: Any) -> Any:
        return fsdp.fully_shard(nn.Linear(6, 4, bias=False), shard_placement_fn=lambda p: answer)

    seen = {
        "local": [
            list(sharded(answer).weight.to_local().shape)
            for answer in (None, Shard(0), Shard(1), Shard(-1))
        ],
        "placements": [str(sharded(a).weight.placements) for a in (None, Shard(1), Shard(-1))],
        "contiguous": sharded(Shard(1)).weight.to_local().is_contiguous(),
        "no_such_dim": raised(lambda: sharded(Shard(2))),
    }
    if TORCH >= (2, 13):  # before, PyTorch reads attributes of any value
        seen |= {
            "other": raised(lambda: sharded(Replicate())),
            "number": raised(lambda: sharded(1)),
        }
    return seen


def ignored(fsdp: Any) -> Any:
    model = fill(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double())
    kept = model[0].weight
    fsdp.fully_shard(model, ignored_params={kept})
    rank = dist.get_rank()
    model(torch.full((2, 3), rank + 1.0, dtype=torch.float64)).sum().backward()
    inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fsdp.fully_shard(inner[0], ignored_params={inner[0].weight})
    fsdp.fully_shard(inner)
    return {
        "same_object": model[0].weight is kept,
        "shown": shown(model),
        "own_gradient": isinstance(kept.grad, DTensor),
        "gradients": grads(model),
        "of_an_inner_call": shown(inner),
    }


def full_mesh(fsdp: Any) -> Any:
    def model(mesh: Any, placed: Any) -> nn.Module:
        linear = nn.Linear(4, 4, bias=False).double()
        weight = noise(4, 4)
        linear.weight = nn.Parameter(distribute_tensor(weight, mesh, [placed] * mesh.ndim))
        return linear

    def call(mesh: Any, module: nn.Module, **dims: Any) -> Any:
        return fsdp.fully_shard(module, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(**dims))

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    seen: dict[str, Any] = {}
    for dims in ({"shard": "dp"}, {"replicate": "dp"}):
        module = call(mesh, model(mesh, Replicate()), **dims)
        x = DTensor.from_local(noise(2, 4, seed=dist.get_rank()), mesh, [Replicate()])
        module(x).sum().backward()
        seen[str(dims)] = (str(module.weight.placements), grads(module))
    unnamed = init_device_mesh("cpu", (2,))
    seen["neither"] = raised(fsdp.DataParallelMeshDims)
    seen["unnamed"] = raised(lambda: call(unnamed, model(unnamed, Replicate()), shard="dp"))
    seen["unknown"] = raised(lambda: call(mesh, model(mesh, Replicate()), shard="else"))
    seen["cut"] = raised(lambda: call(mesh, model(mesh, Shard(0)), shard="dp"))
    seen["names"] = [
        (dims.shard_names, dims.replicate_names)
        for dims in (
            fsdp.DataParallelMeshDims("a"),
            fsdp.DataParallelMeshDims(("a", "b"), "c"),
            fsdp.DataParallelMeshDims(replicate=("c",)),
        )
    ]
    return seen


def parameters_are_new(fsdp: Any) -> Any:
    linear = nn.Linear(2, 2)
    linear.weight.note = "lost"  # type: ignore[attr-defined]
    linear.weight.grad = torch.ones(2, 2)
    linear.bias.requires_grad_(False)
    norm = nn.BatchNorm1d(2)
    buffer = norm.running_mean
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    fsdp.fully_shard(nn.Sequential(linear, norm))
    return {
        "note": hasattr(linear.weight, "note"),
        "grad": linear.weight.grad,
        "requires_grad": [p.requires_grad for p in linear.parameters()],
        "buffer": norm.running_mean is buffer,
        "in_optimizer": linear.weight is optimizer.param_groups[0]["params"][0],
    }


def replicated_inside(fsdp: Any) -> Any:
    """Shard a module inside of a replicated one, and the reverse: each keeps its own parameters."""
    from torch.distributed._composable import replicate

    def of(inner_first: bool) -> Any:
        model: Any = fill(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double())
        if inner_first:
            fsdp.fully_shard(model[0])
            replicate(model)
        else:
            replicate(model[0])
            fsdp.fully_shard(model)
        model(noise(2, 3, seed=7 + dist.get_rank())).square().sum().backward()
        return shown(model), grads(model)

    return {"inside": of(False), "around": of(True)}


def small(fsdp: Any) -> Any:
    model = fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double())
    fsdp.fully_shard(model[0])
    return fsdp.fully_shard(model)


def transforms_of_inputs(fsdp: Any) -> Any:
    """Transform the inputs of a model with ``torch.func``, each followed by a backward."""
    x = noise(2, 3)
    transforms: list[Any] = [
        lambda model: func.grad(lambda a: model(a).sum())(x),
        lambda model: func.vjp(model, x)[1](torch.ones(2, 2).double())[0],
        lambda model: func.jacrev(model)(x),
        lambda model: func.vmap(func.grad(lambda a: model(a).sum()))(x),
        lambda model: func.hessian(lambda a: model(a).sum())(x),
        lambda model: torch.autograd.grad(model(x.requires_grad_()).sum(), x),
    ]
    found = []
    for transform in transforms:
        model = small(fsdp)
        with left():  # the strict mode, which torch.func cannot run under
            value = transform(model)
        model(x.detach()).sum().backward()
        found.append([value, grads(model)])
    return found


def functional_calls(fsdp: Any) -> Any:
    """Train with ``functional_call``, which leaves the values of its forward in its dict."""
    model = small(fsdp)
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for given in (params, params, {"2.weight": params["2.weight"]}, {}):
        loss = func.functional_call(model, given, (noise(2, 3),)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, full_parameters(model)]


@each(
    return_value,
    transforms_of_inputs,
    functional_calls,
    side_effects,
    class_swap,
    names_and_order,
    refused_modules,
    list_of_modules,
    meshes,
    resharding,
    placements,
    ignored,
    pytest.param(full_mesh, marks=new_in_fsdp2),
    parameters_are_new,
    replicated_inside,
)
def test_as_in_pytorch(pool: RankPool, program: Any) -> None:
    check_alike(pool, program)


@each(resharding_to_an_int)
def test_as_in_pytorch_on_four_ranks(pool: RankPool, program: Any) -> None:
    check_alike(pool, program, world=4)


# Better than PyTorch


def functional_calls_again(fsdp: Any) -> Any:
    """Call a module twice with its sharded parameters, while the first call's root is unsharded."""
    model = small(fsdp)
    params, x = dict(model.named_parameters()), noise(2, 3)
    values = [func.functional_call(model, dict(params), (x,)) for _ in range(2)]
    return [raised(lambda: model(x).sum().backward()), torch.equal(values[0], values[1])]


@on_ranks(2)
def test_functional_calls_may_follow_each_other() -> None:
    ours = functional_calls_again(fullshard)
    assert ours == ["nothing raised", True]


def derived_class(fsdp: Any) -> Any:
    cls: Any = type(fsdp.fully_shard(nn.Linear(2, 2)))
    return type(cls(2, 2)).__name__, raised(lambda: type("Derived", (cls,), {})(2, 2))


def test_a_class_derived_from_that_of_a_sharded_module_says_why_it_cannot_be_built(
    pool: RankPool,
) -> None:
    for theirs, ours in pool.run(2, outcomes, derived_class):
        assert theirs[0] == ours[0] == "Linear"
        assert theirs[1].kinds[0] == "IndexError"
        assert {"UnsupportedError", "IndexError"} < set(ours[1].kinds)


def several_modules_as_root(fsdp: Any) -> Any:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    fsdp.fully_shard([model[0], model[1]])
    return raised(lambda: model(noise(2, 3)).sum().backward())


def uneven_on_another_dim(fsdp: Any) -> Any:
    linear = fill(nn.Linear(5, 3, bias=False).double())
    before = linear.weight.detach().clone()
    try:
        fsdp.fully_shard(linear, shard_placement_fn=lambda p: Shard(1))
    except NotImplementedError:
        return "refused"
    linear(noise(2, 5)).sum().backward()
    return torch.equal(whole(linear.weight), before), list(whole(linear.weight.grad).shape)


def test_several_modules_may_be_the_root(pool: RankPool) -> None:
    for theirs, ours in pool.run(2, outcomes, several_modules_as_root):
        assert theirs.kinds == ("RuntimeError",) and ours == "nothing raised"


def test_other_dims_need_not_divide_evenly(pool: RankPool) -> None:
    for theirs, ours in pool.run(2, outcomes, uneven_on_another_dim):
        assert theirs == "refused" and ours == (True, [3, 5])


def deep_copies(fsdp: Any) -> Any:
    model = shard(fsdp, make())
    try:
        twin = copy.deepcopy(model)
    except AssertionError:
        return "refused"
    mine, other = full_parameters(model), full_parameters(twin)
    return all(torch.equal(mine[name], other[name]) for name in mine)


def test_sharded_modules_are_copied(pool: RankPool) -> None:
    for theirs, ours in pool.run(2, outcomes, deep_copies):
        assert theirs == "refused" and ours is True


def int_on_a_full_mesh(fsdp: Any) -> Any:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model: Any = fill(nn.Linear(6, 5, bias=False).double())
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    dims = fsdp.DataParallelMeshDims(shard="dp")
    try:
        fsdp.fully_shard(model, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=2)
    except NotImplementedError:
        return "refused"
    x = DTensor.from_local(noise(2, 6), mesh, [Replicate()])
    model(x).sum().backward()
    return torch.allclose(whole(model.weight.grad), noise(2, 6).sum(0).expand(5, 6))


@new_in_fsdp2
def test_a_smaller_group_on_a_full_mesh(pool: RankPool) -> None:
    assert pool.run(4, outcomes, int_on_a_full_mesh) == [("refused", True)] * 4

"""Cases that are easy to get wrong, compared with PyTorch: roots, ties, sums, graphs, hooks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.kit.rows_semantics import Partly, linears
from tests.ranks.models import Tied, Weighs, fill, full_parameters, ids, noise, shard_units
from tests.ranks.net import batch, make, optimizer_of
from tests.ranks.pool import RankPool
from tests.ranks.rows import check_alike, each, grads, outcomes, raised, shard, shown, whole
from tests.versions import INTEGER_PARAMETERS, mended_in_fsdp2, new_in_fsdp2


def mine(number: int = 0) -> Tensor:
    """Return a batch of this rank."""
    return batch(number + 10 * dist.get_rank())


def roots(fsdp: Any) -> Any:
    """Run a child alone after its root, and children without a root, each of which is a root."""
    model = shard(fsdp, make())
    model(mine()).square().sum().backward()
    model.zero_grad()
    model.blocks[0](mine(1)).square().sum().backward()
    alone = linears(2)
    for child in alone:
        fsdp.fully_shard(child)
    out = alone(noise(2, 3))
    after = shown(alone)
    out.sum().backward()
    return [shown(model), grads(model), after, shown(alone), grads(alone)]


def who_owns_what(fsdp: Any) -> Any:
    model = linears(3)
    fsdp.fully_shard(model[1])
    fsdp.fully_shard(model)
    model.unshard()
    seen = [shown(model)]
    model.reshard()
    model[1].unshard()
    bare = nn.Sequential(fsdp.fully_shard(nn.Linear(2, 2)))
    fsdp.fully_shard(bare)
    bare.unshard()
    return [*seen, shown(model), shown(bare)]


def tied(fsdp: Any) -> Any:
    model: Any = fill(Tied().double())
    fsdp.fully_shard([model.embed, model.head])
    fsdp.fully_shard(model)
    same = [model.embed.weight is model.head.weight]
    model.embed.unshard()
    same.append(model.embed.weight is model.head.weight)
    model.embed.reshard()
    model(ids(2, 3, vocab=5, seed=dist.get_rank())).square().sum().backward()
    return [same, len(list(model.parameters())), grads(model)]


def uneven_pieces(fsdp: Any) -> Any:
    seen: list[Any] = []
    for rows in (1, 2, 3, 5, 8):
        linear: Any = fsdp.fully_shard(fill(nn.Linear(3, rows).double()))
        linear(noise(2, 3)).square().sum().backward()
        for param in linear.parameters():
            local, grad = param.to_local(), param.grad.to_local()
            seen.append([list(local.shape), local.detach().clone(), grad.is_contiguous()])
            seen.append([list(param.shape), param.stride(), str(param.placements)])
            seen.append([list(grad.shape), grad, str(param.grad.placements)])
    return seen


def sums(fsdp: Any) -> Any:
    """Accumulate 256 + 1 + 1 in the dtypes in which PyTorch and fullshard round alike."""
    seen = []
    dtypes = [None, torch.float32, torch.bfloat16]
    for param_dtype in dtypes:
        for reduce_dtype in dtypes:
            if (param_dtype, reduce_dtype) in ((None, torch.bfloat16), tuple(dtypes[1:])):
                continue  # PyTorch loses bits: see test_pending_gradients_add_up_in_the_wider_dtype
            policy = fsdp.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
            model = fsdp.fully_shard(Weighs(), mp_policy=policy)
            model(torch.full((5,), 0.0)).backward()  # PyTorch fails without an earlier forward
            for value, sync in ((256.0, False), (1.0, False), (1.0, True)):
                model.set_requires_gradient_sync(sync)
                model(torch.full((5,), value)).backward()
            seen.append(whole(model.weight.grad))
    return seen


def scales(fsdp: Any) -> Any:
    """Average over ranks in each dtype of reduction, with the divide factors that gloo supports."""
    seen = {}
    wide = (torch.float16, torch.float64)
    for reduce_dtype in (None, torch.bfloat16, *wide):
        for factor in (None, 2.0, *((4.0,) if reduce_dtype in wide else ())):
            policy = fsdp.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
            model = fsdp.fully_shard(Weighs(), mp_policy=policy)
            if factor:
                model.set_gradient_divide_factor(factor)
            model(torch.full((5,), 8.0 * (1 + dist.get_rank()))).backward()
            seen[f"{reduce_dtype} {factor}"] = whole(model.weight.grad)
    return seen


def replicas(fsdp: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    model = shard(fsdp, make(), mesh=mesh)
    for number in range(2):
        model(mine(number)).square().sum().backward()
    places = [str(p.grad.placements) for p in model.parameters()]
    return [places, grads(model)]


def unused(fsdp: Any) -> Any:
    model = Partly()
    shard_units(model, model.layers, by=fsdp.fully_shard)
    seen = []
    for which in (0, 1, 0):
        model(noise(2, 3, seed=dist.get_rank()), which).square().sum().backward()
        seen.append(grads(model))
    return seen


def frozen(fsdp: Any) -> Any:
    model: Any = make()
    if INTEGER_PARAMETERS:
        model.counts = nn.Parameter(torch.arange(4), requires_grad=False)
    model.blocks[0].weight.requires_grad_(False)
    shard(fsdp, model)
    seen = []
    for number in range(3):
        model(mine(number)).square().sum().backward()
        seen.append(grads(model))
        model.zero_grad()
        model.blocks[1].requires_grad_(number == 1)
        model.blocks[0].weight.requires_grad_(number == 0)
    return seen


def hooks_of_users(fsdp: Any) -> Any:
    layer = linears(1)
    seen: list[Any] = []
    layer.register_forward_pre_hook(lambda m, _: seen.append(("before", shown(m))))
    layer.register_forward_hook(lambda m, *_: seen.append(("after, old", shown(m))))
    fsdp.fully_shard(layer, reshard_after_forward=True)
    layer.register_forward_pre_hook(lambda m, _: seen.append(("before, new", shown(m))))
    layer.register_forward_hook(lambda m, *_: seen.append(("after, new", shown(m))))
    layer.register_full_backward_hook(lambda m, *_: seen.append("backward"))
    layer(noise(2, 3).requires_grad_()).sum().backward()
    return seen


class Outputs(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = linears(1)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        shapes = {"dict": {"a": [y]}, "tuple": (None, y), "view": y.view(-1), "tensor": y}
        return shapes[self.kind]


def outputs(fsdp: Any) -> Any:
    seen = {}
    for kind in ("dict", "tuple", "view", "tensor"):
        model = fsdp.fully_shard(Outputs(kind), reshard_after_forward=True)
        out = model(noise(2, 3, seed=dist.get_rank()))
        tensor = {"dict": lambda o: o["a"][0], "tuple": lambda o: o[1]}.get(kind, lambda o: o)(out)
        if kind == "tensor":
            tensor.mul_(2)
        tensor.square().sum().backward()
        seen[kind] = (grads(model), shown(model))
    return seen


def several_graphs(fsdp: Any) -> Any:
    seen: dict[str, Any] = {}
    for reshard in (True, False):
        twice = linears(2)
        fsdp.fully_shard(twice[0], reshard_after_forward=reshard)
        fsdp.fully_shard(twice, reshard_after_forward=reshard)
        x = noise(2, 3, seed=dist.get_rank())
        twice(twice(x)).square().sum().backward()
        seen[f"used twice {reshard}"] = grads(twice)
        (twice(x).sum() + twice(2 * x).square().sum()).backward()
        seen[f"two forwards {reshard}"] = grads(twice)
        loss = twice(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        seen[f"two backwards {reshard}"] = grads(twice)
        twice.zero_grad()
        given = x.clone().requires_grad_()
        (of_input,) = torch.autograd.grad(twice(given).square().sum(), given)
        seen[f"of the input {reshard}"] = (of_input, grads(twice), shown(twice))
    return seen


def forward_mode(fsdp: Any) -> Any:
    """Run the first forward inside a transform, and a transform after an ordinary forward."""
    layer = fsdp.fully_shard(linears(1), reshard_after_forward=False)
    x, tangent = noise(2, 3, seed=dist.get_rank()), noise(2, 3, seed=5)
    first = torch.func.jvp(layer, (x,), (tangent,))
    layer(x).square().sum().backward()
    return [first, torch.func.jvp(layer, (x,), (tangent,)), grads(layer)]


def objects_stay(fsdp: Any) -> Any:
    """Compare the parameter objects, sharded and unsharded, after each reshard."""
    layer = fsdp.fully_shard(linears(1))
    sharded = list(layer.parameters())
    layer.unshard()
    unsharded = list(layer.parameters())
    seen = []
    for _ in range(2):
        layer.reshard()
        seen += [a is b for a, b in zip(sharded, layer.parameters(), strict=True)]
        layer.unshard()
        seen += [a is b for a, b in zip(unsharded, layer.parameters(), strict=True)]
    return seen


def changes_before_the_first_forward(fsdp: Any) -> Any:
    model = shard(fsdp, make(torch.float32))
    model.plain.to(torch.float64)
    model.to(torch.float64)
    placed = DTensor.from_local(
        torch.full_like(model.head.weight.to_local(), 0.5),
        model.head.weight.device_mesh,
        model.head.weight.placements,
        shape=model.head.weight.shape,
        stride=model.head.weight.stride(),
    )
    model.head.weight = nn.Parameter(placed)
    model(mine()).square().sum().backward()
    return [full_parameters(model), grads(model)]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = linears(3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant).tanh()
        return x


def checkpoints(fsdp: Any) -> Any:
    seen = []
    for reentrant in (True, False):
        for reshard in (True, False):
            model = Checkpointed(reentrant)
            shard_units(model, model.layers, by=fsdp.fully_shard, reshard_after_forward=reshard)
            x = noise(2, 3, seed=dist.get_rank()).requires_grad_()
            model(x).square().sum().backward()
            seen += [grads(model), x.grad]
    return seen


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 5)

    def forward(self, x: Tensor, *, skip_head: bool) -> Tensor:
        h = self.norm(self.body(x))
        return h if skip_head else self.head(h)


def lists_of_modules(fsdp: Any) -> Any:
    """Call a head in pieces of its input after a forward that left out the head."""
    seen: list[Any] = []
    for reshard in (True, False):
        model: Any = fill(Headed().double())
        fsdp.fully_shard([model.norm, model.head], reshard_after_forward=reshard)
        fsdp.fully_shard(model)
        x = noise(4, 4, seed=dist.get_rank())
        model(x, skip_head=False).square().sum().backward()
        seen.append(grads(model))
        h = model(x, skip_head=True)
        parts = []
        for piece in h.detach().chunk(2):
            piece.requires_grad_()
            model.head(piece).square().sum().backward()
            parts.append(piece.grad)
        h.backward(torch.cat(parts))
        seen += [grads(model), shown(model)]
    return seen


def tensor_parallel(fsdp: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = fill(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double())
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fsdp.fully_shard(model, mesh=mesh["dp"])
    model(noise(2, 4, seed=mesh["dp"].get_local_rank())).square().sum().backward()
    places = [(str(p.placements), p.device_mesh.mesh_dim_names) for p in model.parameters()]
    model.unshard()
    return [places, [type(p.data).__name__ for p in model.parameters()], grads(model)]


def hooks_on_parameters(fsdp: Any) -> Any:
    model = shard(fsdp, make())
    calls: list[str] = []
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: calls.append(f"hook {name}"))
        param.register_post_accumulate_grad_hook(
            lambda p, name=name: calls.append(f"{name} {p.grad is not None}")
        )
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    counts = []
    for number, sync in enumerate([True, False, True]):
        model.set_requires_gradient_sync(sync)
        model(mine(number)).square().sum().backward()
        counts.append(sorted(calls))
        calls.clear()
    for param, optimizer in optimizers.items():
        param.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    model(mine(5)).square().sum().backward()
    return [counts, full_parameters(model)]


def one_rank(fsdp: Any) -> Any:
    model = fsdp.fully_shard(linears(2))
    optimizer = optimizer_of(model)
    losses = []
    for number in range(2):
        with CommDebugMode() as mode:
            loss = model(noise(2, 3, seed=number).requires_grad_()).square().sum()
            loss.backward()
        optimizer.step()
        losses.append((loss.item(), mode.get_total_counts()))
    return [losses, full_parameters(model)]


def compiled(fsdp: Any) -> Any:
    torch._dynamo.reset()
    model = make()
    for block in model.blocks:
        block.compile(backend="eager")
    shard(fsdp, model)
    whole_model = torch.compile(shard(fsdp, make()), backend="eager")
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the compiler
        for one in (model, whole_model):
            one(mine()).square().sum().backward()
            found.append(list(grads(one).values()))
    torch._dynamo.reset()
    return found


def several_meshes_in_a_unit(fsdp: Any) -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        ShardPlacementResult,
    )
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    infos = [FSDPMeshInfo(mesh[name], 0) for name in ("a", "b")]
    model: Any = fill(nn.Linear(2, 2).double())
    fsdp.fully_shard(
        model,
        mesh=mesh["b"],
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), infos[p.dim() - 1]),
    )
    places = [p.device_mesh.mesh.tolist() for p in model.parameters()]
    model(noise(2, 2, seed=dist.get_rank())).sum().backward()
    return [
        places,
        raised(lambda: model.set_custom_all_gather(print)),
        raised(lambda: model.set_custom_reduce_scatter(print)),
        raised(lambda: model.set_all_reduce_hook(print)),
        {name: tuple(grad.shape) for name, grad in grads(model).items()},
    ]


@each(
    roots,
    who_owns_what,
    tied,
    sums,
    scales,
    unused,
    frozen,
    hooks_of_users,
    outputs,
    several_graphs,
    pytest.param(forward_mode, marks=mended_in_fsdp2),
    objects_stay,
    changes_before_the_first_forward,
    checkpoints,
    pytest.param(lists_of_modules, marks=mended_in_fsdp2),
    hooks_on_parameters,
    compiled,
    pytest.param(several_meshes_in_a_unit, marks=new_in_fsdp2),
)
def test_as_in_pytorch(pool: RankPool, program: Any) -> None:
    check_alike(pool, program)


@each(one_rank)
def test_as_in_pytorch_on_one_rank(pool: RankPool, program: Any) -> None:
    check_alike(pool, program, world=1)


@each(uneven_pieces, replicas, tensor_parallel)
def test_as_in_pytorch_on_four_ranks(pool: RankPool, program: Any) -> None:
    check_alike(pool, program, world=4)


# Better than PyTorch


def child_before_root(fsdp: Any) -> Any:
    model = shard(fsdp, make())
    model.blocks[0](batch()).sum().backward()
    return raised(lambda: model(batch()))


def several_trainable_dtypes(fsdp: Any) -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    fsdp.fully_shard(model)
    model.forward = lambda x: model[1](model[0](x).double())  # type: ignore[assignment]
    return raised(lambda: model(torch.ones(1, 2)).sum().backward())


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.relu_())


def inputs_in_place(fsdp: Any) -> Any:
    model = fsdp.fully_shard(InPlace())
    return raised(lambda: model(torch.ones(1, 2, requires_grad=True) * 2).sum().backward())


class Box:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linears(1)

    def forward(self, x: Tensor) -> Box:
        return Box(self.layer(x).tanh())


def hidden_outputs(fsdp: Any) -> Any:
    model = fsdp.fully_shard(Hides())
    error = raised(lambda: model(noise(2, 3)).tensor.square().sum().backward())
    return error, [isinstance(p.grad, DTensor) for p in model.layer.parameters()]


def second_derivatives(fsdp: Any) -> Any:
    layer = fsdp.fully_shard(linears(1), reshard_after_forward=True)

    def penalty() -> None:
        x = noise(2, 3).requires_grad_()
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()

    return raised(penalty)


def after_no_grad(fsdp: Any) -> Any:
    model = shard(fsdp, make())
    with torch.no_grad():
        model(batch())
    return "whole" in shown(model)


def check_better(pool: RankPool, program: Any, *errors: str) -> None:
    for theirs, ours in pool.run(2, outcomes, program):
        assert theirs.kinds[0] in errors and ours == "nothing raised"


def test_a_child_may_run_before_the_root(pool: RankPool) -> None:
    check_better(pool, child_before_root, "RuntimeError")


def test_trainable_parameters_may_have_several_dtypes(pool: RankPool) -> None:
    check_better(pool, several_trainable_dtypes, "AssertionError")


def test_inputs_may_be_changed_in_place(pool: RankPool) -> None:
    check_better(pool, inputs_in_place, "RuntimeError")


def test_second_derivatives_after_a_reshard(pool: RankPool) -> None:
    # PyTorch raises either, depending on earlier programs of the process.
    check_better(pool, second_derivatives, "AssertionError", "RuntimeError")


def test_outputs_may_be_hidden(pool: RankPool) -> None:
    """Parameters behind a hidden output get gradients; PyTorch's root silently reduces none."""
    for theirs, ours in pool.run(2, outcomes, hidden_outputs):
        assert theirs == ("nothing raised", [False, False])
        assert ours == ("nothing raised", [True, True])


def test_a_forward_without_gradients_leaves_nothing_whole(pool: RankPool) -> None:
    assert pool.run(2, outcomes, after_no_grad) == [(True, False)] * 2

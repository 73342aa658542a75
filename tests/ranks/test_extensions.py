"""Tensors with their own gather hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from fullshard import FSDPModule, MixedPrecisionPolicy, Ragged, fully_shard
from fullshard.errors import ExtensionError, UnsupportedError
from fullshard.tensors import local_part
from tests.kit.extensions import EXACT, Halves, held, join, put_on, split, worst, wrapped
from tests.ranks.models import noise
from tests.ranks.net import Net, batch, make, optimizer_of, shard, step
from tests.ranks.pool import RankPool, on_ranks

OLD, NEW = 1, 5  # number of arguments of the first hook

# Net's weights have 6, 6, 7 and 5 rows, so most are uneven, and one of four ranks may have none.
WEIGHTS = ("blocks.0.weight", "blocks.1.weight", "plain.0.weight", "head.weight")


class OldHalves(Halves):
    """``Halves`` with the older signature."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return split(self.data_inside)


def train(model: nn.Module, plain: nn.Module) -> float:
    optimizers = [optimizer_of(plain), optimizer_of(model)]
    for number in range(3):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            step(one, optimizer, number)
    with torch.no_grad():  # weights of the last step, resharded afterwards
        assert (model(batch()) - plain(batch())).abs().max() < EXACT
    return worst(model, plain)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("signature", [OLD, NEW])
@pytest.mark.parametrize("reshard", [True, False])
def test_trains_as_the_unsharded_model(signature: int, reshard: bool) -> None:
    plain = make()
    model = shard(wrapped(Halves if signature == NEW else OldHalves), reshard_after_forward=reshard)
    assert train(model, plain) < EXACT


@on_ranks(4)
def test_what_hooks_are_told() -> None:
    Halves.calls.clear()
    policy = MixedPrecisionPolicy(output_dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    model = shard(wrapped(Halves), mesh=mesh, mp_policy=policy)
    model(batch())
    head = model.head
    told, outer_size, outer_stride, module, mp_policy, shape = Halves.calls[0]
    assert {id(call[3]) for call in Halves.calls} >= {id(head), id(model.blocks[0])}
    for told, outer_size, outer_stride, module, mp_policy, shape in Halves.calls:
        assert told.ndim == 1 and told.size() == 2 and told.mesh_dim_names == ("parts",)
        assert mp_policy == policy
        rows, columns = outer_size
        assert outer_size == module.weight.shape and outer_stride == (columns, 1)
        assert shape == (-(-rows // 2), columns)  # equal on all ranks, padding included


def pre_of_plain(self: Tensor, mesh: Any) -> Any:
    return split(self)


def post_of_plain(
    self: Tensor, outputs: Any, metadata: Any, dtype: Any, *, out: Tensor | None = None
) -> Any:
    return join(outputs, metadata, dtype, out)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("when", ["after fully_shard", "after to_empty"])
def test_put_on_plain_tensors(world: int, when: str) -> None:
    """Hooks may be set between fully_shard and the first forward, on some tensors of a bucket."""
    plain = make()
    if when == "after to_empty":
        with torch.device("meta"):
            model = shard(Net().double())
        model.to_empty(device="cpu")
        values = dict(plain.named_parameters())
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        with torch.no_grad():
            for name, param in model.named_parameters():
                chunks = values[name].chunk(world)
                if rank < len(chunks):
                    local_part(param).copy_(chunks[rank])
    else:
        model = shard(make())
    for name, param in model.named_parameters():
        if name in WEIGHTS:
            put_on(param, pre_of_plain, post_of_plain)
    assert train(model, plain) < EXACT


@on_ranks(2)
def test_a_reduction_that_gathers_keeps_no_old_weights() -> None:
    """Gradients wait while wires change; then a reduction makes the unsharded side anew."""
    plain = make()
    model: Any = shard(wrapped(Halves))
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    optimizers = [optimizer_of(plain), optimizer_of(model)]
    for one in (plain, model):
        one(batch()).square().mean().backward()
    model.set_separate_reduce_scatter_group()
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        assert (model(batch(1)) - plain(batch(1))).abs().max() < EXACT


class Both(TwoTensor):
    """Two tensors in one, which are gathered as two, in the memory of the outputs."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.a, self.b), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None
    ) -> Any:
        a, b = outputs
        if out is not None:
            assert a.untyped_storage().data_ptr() == out.a.untyped_storage().data_ptr()
            assert b.untyped_storage().data_ptr() == out.b.untyped_storage().data_ptr()
            return None
        return Both(a, b), (a, b)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("reshard", [True, False])
def test_the_whole_parameter_is_a_wrapper(world: int, reshard: bool) -> None:
    """Both tensors of a wrapper are passed on; FSDP2 passes on the first only at shard size 1."""
    plain = nn.Sequential(nn.Linear(6, 7, bias=False), nn.Tanh(), nn.Linear(7, 6, bias=False))
    with torch.no_grad():
        for seed, param in enumerate(plain.parameters()):
            param.copy_(noise(*param.shape, seed=seed) * 0.4)
    plain.double()
    model = copy.deepcopy(plain)
    for layer in (model[0], model[2]):
        weight = layer.weight.detach()
        layer.weight = nn.Parameter(Both(weight.clone(), weight.clone()))
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model)
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-2) for one in (plain, model)]
    worst_found = 0.0
    for number in range(3):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            loss: Any = one(batch(number)).square().mean()
            loss.backward()
            if one is model:
                assert not model[0].weight.is_meta
                grad = local_part(model[0].weight.grad)
                assert type(grad) is Tensor and grad.dtype is torch.float64
            optimizer.step()
            optimizer.zero_grad()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        local: Any = local_part(ours)
        assert isinstance(local, Both)
        chunks = theirs.chunk(world)
        if rank < len(chunks):
            for inner in (local.a, local.b):
                worst_found = max(worst_found, (inner - chunks[rank]).abs().max().item())
    assert worst_found < EXACT


@on_ranks(3)
def test_a_wrapper_without_hooks() -> None:
    """A wrapper whose class has no hooks is gathered by value."""
    model = make()
    model.head.weight = nn.Parameter(TwoTensor(model.head.weight.data, model.head.weight.data))
    plain = make()
    shard(model)
    assert isinstance(local_part(model.head.weight), TwoTensor)
    assert (model(batch()) - plain(batch())).abs().max() < EXACT
    for one in (model, plain):
        one(batch()).square().mean().backward()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    expected = plain.head.weight.grad.chunk(world)
    mine = local_part(model.head.weight.grad)
    assert ((mine - expected[rank]).abs().max().item() if rank < len(expected) else 0.0) < EXACT


@on_ranks(1, 3)
def test_memory_is_freed(world: int) -> None:
    model: Any = shard(wrapped(Halves))
    before = held(model)
    model(batch()).sum().backward()
    assert held(model) == before == 0
    model.blocks[0].unshard()
    # two halves of the bits, the unsharded fp64 tensor, and the bias
    padded = -(-6 // world) * world
    bias = 6 if world == 1 else padded
    assert held(model) >= padded * 6 * 8 + 6 * 6 * 8 + (0 if world == 1 else bias * 8)
    model.blocks[0].reshard()
    assert held(model) == 0


@on_ranks(4)
def test_refusals() -> None:
    class OneHook(Halves):
        fsdp_post_all_gather: Any = property()

    class ThreeArguments(Halves):
        def fsdp_pre_all_gather(self, mesh: Any, a: Any, b: Any) -> Any:  # type: ignore[override]
            return split(self.data_inside)

    class NoTensors(Halves):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
            return (), None

    class NoWhole(OldHalves):
        def fsdp_post_all_gather(self, *_: Any, out: Any = None) -> Any:
            return None

    class WrongShape(OldHalves):
        def fsdp_post_all_gather(self, *args: Any, out: Any = None) -> Any:
            return torch.zeros(3, 3), ()

    class ByRank(Halves):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
            return (torch.zeros(4 + torch.distributed.get_rank()),), None

    for cls, said in (
        (ThreeArguments, "head.weight: fsdp_pre_all_gather takes 3 arguments"),
        (NoTensors, "head.weight: fsdp_pre_all_gather returned (tuple, NoneType)"),
        (NoWhole, "head.weight: fsdp_post_all_gather returned NoneType"),
        (WrongShape, "made a tensor of shape (3, 3), expected (5, 7)"),
        (ByRank, "differ between ranks"),
    ):
        model: Any = make()
        model.head.weight = nn.Parameter(cls(model.head.weight.detach()))
        fully_shard(model)
        with pytest.raises(ExtensionError) as caught:
            model(batch())
        assert said in str(caught.value), caught.value
        assert isinstance(caught.value, AssertionError)

    for options in ({"layout": Ragged()}, {"reshard_after_forward": 2}):
        model = wrapped(Halves)
        with pytest.raises(UnsupportedError, match="weight"):
            fully_shard(model, **options)
        assert not isinstance(model, FSDPModule)


@on_ranks(4)
def test_late_refusals() -> None:
    """Invalid hooks set after fully_shard are refused before any gather."""
    for options, said in (
        ({"layout": Ragged()}, "cut on dim 0"),
        ({"reshard_after_forward": 2}, "reshard_after_forward=int"),
    ):
        model: Any = shard(make(), **options)
        put_on(model.head.weight, pre_of_plain, post_of_plain)
        with pytest.raises(UnsupportedError, match=said):
            model(batch())
        local = local_part(model.head.weight)
        del local.fsdp_pre_all_gather
        with pytest.raises(ExtensionError, match="has fsdp_post_all_gather only"):
            model(batch())
        del local.fsdp_post_all_gather
        plain = make()
        assert (model(batch()) - plain(batch())).abs().max() < EXACT  # nothing was lost


def mixed_precision() -> float:
    """Return the distance of a wrapped and a plain model's outputs in mixed precision."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    outputs = []
    for model in (wrapped(Halves), make()):
        shard(model, mp_policy=policy)
        outputs.append(model(batch()))
        outputs[-1].square().mean().backward()
    assert outputs[0].dtype is torch.float32
    return (outputs[0] - outputs[1]).abs().max().item()


def test_mixed_precision(pool: RankPool) -> None:
    assert max(pool.run(2, mixed_precision)) == 0.0


@on_ranks(3)
def test_accumulates() -> None:
    """Gradients accumulate without synchronisation, then with it, twice in one graph."""
    plain, model = make(), shard(wrapped(Halves))
    for one in (plain, model):
        if one is model:
            model.set_requires_gradient_sync(False)  # type: ignore[operator]
        one(batch(0)).square().mean().backward()
        if one is model:
            model.set_requires_gradient_sync(True)  # type: ignore[operator]
        (one(batch(1)).square().mean() + one(batch(2)).square().mean()).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        theirs.data = theirs.grad
        ours_local = local_part(ours)
        grad = local_part(ours.grad)  # type: ignore[arg-type]
        getattr(ours_local, "data_inside", ours_local).detach().copy_(grad)
    assert worst(model, plain) < EXACT


@on_ranks(2)
def test_a_copy_has_shards_of_its_own() -> None:
    model = shard(wrapped(Halves))
    model(batch())
    twin = copy.deepcopy(model)
    optimizer = optimizer_of(twin)
    Halves.calls.clear()
    step(twin, optimizer)
    assert {id(call[3]) for call in Halves.calls} <= {id(m) for m in twin.modules()}
    plain = make()
    assert (model(batch()) - plain(batch())).abs().max() < EXACT
    step(plain, optimizer_of(plain))
    assert worst(twin, plain) < EXACT

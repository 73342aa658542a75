"""State and memory of tensors with their own gather hooks."""

from __future__ import annotations

import copy
import gc
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fullshard._torch import autograd as _autograd
from fullshard.errors import ExtensionError
from fullshard.tensors import local_part
from tests.kit.extensions import EXACT, held, put_on, worst, wrapped
from tests.ranks.net import Net, batch, make, optimizer_of, shard, step
from tests.ranks.pool import RankPool, on_ranks

worlds = pytest.mark.parametrize("world", [1, 2, 3, 4])
RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


class Scaled(Tensor):
    """A tensor of value ``inside * scale``; most operations return plain tensors."""

    kept: ClassVar[set[Any]] = set()

    @staticmethod
    def __new__(cls, inside: Tensor, scale: Tensor | None = None) -> Any:
        return Tensor._make_wrapper_subclass(
            cls, inside.shape, inside.stride(), dtype=inside.dtype, device=inside.device
        )

    def __init__(self, inside: Tensor, scale: Tensor | None = None) -> None:
        self.inside = inside
        self.scale = scale

    @property
    def values(self) -> Tensor:
        return self.inside if self.scale is None else self.inside * self.scale

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return type(args[0])(args[0].inside, args[0].scale)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].inside.copy_(args[1].values if isinstance(args[1], Scaled) else args[1])
            return args[0]
        args, kwargs = pytree.tree_map_only(Scaled, lambda x: x.values, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, cls, out) if func in cls.kept else out


class Weight(Scaled):
    """A tensor that is gathered divided by its largest element, or by ``given``, if that is set."""

    kept: ClassVar[set[Any]] = {
        torch.ops.aten.new_zeros.default,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten._to_copy.default,
        torch.ops.aten.clone.default,
    }
    given: Tensor | None = None
    used: ClassVar[list[float]] = []
    outs: ClassVar[list[Tensor]] = []

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        scale = self.given
        if scale is None:
            scale = self.inside.abs().max().clamp(1e-9)
            dist.all_reduce(scale, dist.ReduceOp.MAX, group=mesh.get_group())
        Weight.used.append(scale.item())
        return (self.inside / scale,), scale

    def fsdp_post_all_gather(self, outputs: Any, scale: Any, dtype: Any, *, out: Any = None) -> Any:
        (data,) = outputs
        if out is None:
            return Scaled(data, scale), (data,)
        assert isinstance(out, Scaled)
        assert out.inside.data_ptr() == data.data_ptr()
        out.scale = scale
        Weight.outs.append(out)
        return None


def weights_of(model: Net) -> list[Tensor]:
    return [m.weight for m in (*model.blocks, model.plain[0], model.head)]


def double(model: Net) -> None:
    with torch.no_grad():
        for weight in weights_of(model):
            local: Any = local_part(weight)
            local.copy_(local.values * 2 if isinstance(local, Scaled) else local * 2)


def sees_new_scales(how: str) -> float:
    plain, model = make(), wrapped(Weight)
    options: dict[str, Any] = {
        "kept unsharded": {"reshard_after_forward": False},
        "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }.get(how, {})
    if how == "replicas":
        shape = (2, dist.get_world_size() // 2)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "parts"))
    shard(model, **options)
    if how == "recomputed":
        for one in (plain, model):
            for block in one.blocks:
                block.forward = _checkpointed(block.forward)
    found = 0.0
    Weight.outs.clear()
    optimizers = [optimizer_of(plain), optimizer_of(model)]
    for number in range(4):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            step(one, optimizer, number)
            double(one)
        with torch.no_grad():
            x = batch(number)
            found = max(found, (plain(x) - model(x)).abs().max().item())
    assert Weight.outs  # gathers after the first one wrote into ``out``
    return found


def _checkpointed(forward: Any) -> Any:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


class Unread(Scaled):
    @property
    def values(self) -> Tensor:
        raise AssertionError("its memory was read, which may be in flight")


def test_the_node_of_a_gradient_is_found_without_reading() -> None:
    param = nn.Parameter(Unread(torch.ones(2)))
    node: Any = _autograd.gradient_node(param)
    assert node.variable is param


@worlds
@pytest.mark.parametrize(
    "how", ["resharded", "kept unsharded", "offloaded", "recomputed", "replicas"]
)
def test_what_hooks_write_on_out_is_seen(pool: RankPool, world: int, how: str) -> None:
    if how == "replicas" and world % 2:
        pytest.skip("two copies of equal size")
    assert max(pool.run(world, sees_new_scales, how)) < EXACT


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("how", ["sharded", "offloaded", "copied", "a neighbour was replaced"])
def test_what_is_put_on_a_piece(how: str) -> None:
    """Attributes set on a local shard reach its hooks, on ranks with padding or no rows too."""
    model: Any = wrapped(Weight)
    offloaded = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    shard(model, **(offloaded if how == "offloaded" else {}))
    given = [0.5, 2.0, 4.0, 8.0]
    for weight, scale in zip(weights_of(model), given, strict=True):
        local: Any = local_part(weight)
        local.given = torch.tensor(scale, dtype=torch.float64)
    if how == "copied":
        model = copy.deepcopy(model)
    if how == "a neighbour was replaced":
        for block in (*model.blocks, model):
            assert isinstance(block, nn.Module)
        state = {"head.bias": model.head.bias.detach().clone()}
        model.load_state_dict(state, strict=False, assign=True)
    Weight.used.clear()
    plain = make()
    with torch.no_grad():
        assert (model(batch()) - plain(batch())).abs().max() < EXACT
    assert sorted(Weight.used) == given


class Replacing(Weight):
    """A tensor that replaces its inner tensor in ``copy_``."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            values = args[1].values if isinstance(args[1], Scaled) else args[1]
            args[0].inside = values.clone().expand(args[0].shape)
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


@on_ranks(1, 2, 3, 4)
def test_replaces_what_is_inside(world: int) -> None:
    plain, model = make(), shard(wrapped(Replacing))
    values = dict(plain.named_parameters())
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        for name, param in model.named_parameters():
            chunks = values[name].mul_(2).chunk(world)
            if rank < len(chunks):
                local_part(param).copy_(chunks[rank])
    assert (model(batch()) - plain(batch())).abs().max().item() < EXACT


class Counting(Weight):
    """A tensor whose two hooks share state on the tensor."""

    kept: ClassVar[set[Any]] = Weight.kept
    calls = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        self.calls += 1
        return (self.inside + self.calls,), None

    def fsdp_post_all_gather(self, outputs: Any, told: Any, dtype: Any, *, out: Any = None) -> Any:
        (data,) = outputs
        data -= self.calls
        return (data, (data,)) if out is None else None


@on_ranks(1, 2, 3, 4)
def test_what_hooks_put_on_themselves() -> None:
    plain, model = make(), shard(wrapped(Counting))
    for _ in range(3):
        with torch.no_grad():
            assert (model(batch()) - plain(batch())).abs().max() < EXACT
    assert [local_part(weight).calls for weight in weights_of(model)] == [3] * 4


@on_ranks(1, 2, 3, 4)
def test_hooks_of_a_copy() -> None:
    """Hooks set on a plain tensor work in a copy, and after a neighbour was replaced."""
    asked: list[Tensor] = []

    def pre(self: Tensor, mesh: Any) -> Any:
        asked.append(self)
        return (self * 1,), None

    def post(self: Tensor, outputs: Any, told: Any, dtype: Any, *, out: Any = None) -> Any:
        return (outputs[0], ()) if out is None else None

    model: Any = shard(make())
    put_on(model.head.weight, pre, post)
    plain = make()
    for one in (copy.deepcopy(model), model):
        if one is model:
            bias = {"head.bias": model.head.bias.detach().clone()}
            model.load_state_dict(bias, strict=False, assign=True)
        asked.clear()
        with torch.no_grad():
            assert (one(batch()) - plain(batch())).abs().max() < EXACT
        assert len(asked) == 1
        padded = local_part(one.head.weight)
        if len(padded) == -(-5 // dist.get_world_size()):
            assert asked[0] is padded


class Keeping(Weight):
    """A tensor that records weak references to the tensors that it sent."""

    sent: ClassVar[list[Any]] = []

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        tensors, scale = super().fsdp_pre_all_gather(mesh)
        Keeping.sent += [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        return tensors, scale


def _cast_and_kept(self: Tensor, mesh: Any) -> Any:
    tensor = self.float()
    Keeping.sent.append(StorageWeakRef(tensor.untyped_storage()))
    return (tensor,), None


def _taken(self: Tensor, outputs: Any, told: Any, dtype: Any, *, out: Any = None) -> Any:
    return (outputs[0], outputs) if out is None else None


def _live_nbytes() -> int:
    """Return the bytes of live storages; overlapping storages count twice, each time alike."""
    gc.collect()
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter) and one.device.type == "cpu":
            storage = one.untyped_storage()
            address = storage.data_ptr()
            found[address] = max(found.get(address, 0), storage.nbytes())
    return sum(found.values())


@on_ranks(1, 3)
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("put", [True, False])
def test_what_was_sent_is_dropped(offload: bool, put: bool) -> None:
    """Tensors returned by the first hook are freed, also those of a cast plain tensor."""
    Keeping.sent.clear()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    offloaded = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    model: Any = make() if put else wrapped(Keeping)
    shard(model, mp_policy=policy, **(offloaded if offload else {}))
    if put:
        put_on(model.blocks[0].weight, _cast_and_kept, _taken)
    for number in range(3):
        before = _live_nbytes()
        model.blocks[0].unshard()
        assert Keeping.sent and all(reference.expired() for reference in Keeping.sent)
        # The first gather makes the parameters; several ranks need memory to communicate.
        is_countable = number > 0 and dist.get_world_size() == 1
        assert not is_countable or _live_nbytes() == before + held(model)
        model.blocks[0].reshard()
        assert not is_countable or _live_nbytes() == before


class Released(Weight):
    """A tensor whose second hook allocates the unsharded tensor."""

    def fsdp_post_all_gather(self, outputs: Any, scale: Any, dtype: Any, *, out: Any = None) -> Any:
        (data,) = outputs
        if out is not None:
            out.copy_(data * scale)
            return None
        whole = data * scale
        return whole, whole

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return True


class Lying(Weight):
    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return True


class Unsure(Released):
    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return None


class OnlyThat(Scaled):
    kept: ClassVar[set[Any]] = Weight.kept

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return True


def worst_inside(model: nn.Module, plain: nn.Module) -> float:
    for param in model.parameters():
        local: Any = local_part(param)
        if isinstance(local, Scaled):
            local.data_inside = local.inside
    return worst(model, plain)


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("reshard", [True, False])
def test_releases_what_was_gathered(world: int, reshard: bool) -> None:
    plain = make()
    model: Any = shard(wrapped(Released), reshard_after_forward=reshard)
    optimizers = [optimizer_of(plain), optimizer_of(model)]
    for number in range(3):
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            step(one, optimizer, number)
    world = dist.get_world_size()
    model.reshard()
    model.blocks[0].reshard()
    model.blocks[1].reshard()
    assert held(model) == 0
    other: Any = shard(wrapped(Weight))  # its unsharded tensors are views of the gathered memory
    other.blocks[0].unshard()
    for _ in range(2):
        model.blocks[0].unshard()
        assert held(model) == held(other) + (6 - -(-6 // world) * world) * 6 * 8
        model.blocks[0].reshard()
        assert held(model) == 0
    with torch.no_grad():
        assert (model(batch()) - plain(batch())).abs().max() < EXACT
    assert worst_inside(model, plain) < EXACT


@on_ranks(1, 2)
def test_refusals() -> None:
    for cls, said in (
        (Lying, f"which {RELEASE} says may be freed"),
        (Unsure, f"{RELEASE} returned NoneType, expected a bool"),
        (OnlyThat, f"OnlyThat has {RELEASE} only; define both"),
    ):
        model: Any = make()
        model.head.weight = nn.Parameter(cls(model.head.weight.detach()))
        fully_shard(model)
        with pytest.raises(ExtensionError) as caught:
            model(batch())
        assert said in str(caught.value), caught.value
        assert "head.weight" in str(caught.value)
        assert isinstance(caught.value, AssertionError)
        assert held(model) == 0


class Padded(Weight):
    """A tensor gathered as one vector, so that the output contains the rows of padding."""

    num_more_rows = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inside.reshape(1, -1).expand(7, -1).contiguous(),), self.shape

    def fsdp_post_all_gather(self, outputs: Any, shape: Any, dtype: Any, *, out: Any = None) -> Any:
        rows = shape[0] * (len(outputs[0]) // 7) + self.num_more_rows
        whole = outputs[0][::7].reshape(-1, *shape[1:])[:rows]
        if out is not None:
            out.copy_(whole[: len(out)])
            return None
        return whole, whole


class TooShort(Padded):
    num_more_rows = -2


@on_ranks(2)
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_rows_of_padding(rows: int) -> None:
    """The engine removes padding by rows and refuses too few rows."""
    weight = torch.arange(rows * 3.0).view(rows, 3)
    layer: Any = nn.Linear(3, rows, bias=False)
    layer.weight = nn.Parameter(Padded(weight.clone()))
    fully_shard(layer)
    for _ in range(2):
        with torch.no_grad():
            assert layer(torch.eye(3)).equal(weight.T)
    layer = nn.Linear(3, 4, bias=False)
    layer.weight = nn.Parameter(TooShort(torch.zeros(4, 3)))
    fully_shard(layer)
    with pytest.raises(ExtensionError, match=r"shape \(2, 3\), expected \(4, 3\)"):
        layer(torch.eye(3))


def made_in_inference_mode() -> float:
    plain, model = make(), shard(wrapped(Weight), reshard_after_forward=False)
    with torch.inference_mode():
        model(batch())
    for one in (plain, model):
        step(one, optimizer_of(one))
        with torch.inference_mode():
            one(batch())
        step(one, optimizer_of(one))
    with torch.no_grad():
        return (model(batch()) - plain(batch())).abs().max().item()


def test_made_in_inference_mode(pool: RankPool) -> None:
    assert max(pool.run(2, made_in_inference_mode)) < EXACT

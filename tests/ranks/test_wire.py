"""``WirePolicy``: bytes that are sent, and values that arrive, compared with arithmetic by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fullshard
from fullshard import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    PerParameter,
    Ragged,
    ShardingStrategy,
    WirePolicy,
    fully_shard,
    unshard_params,
)
from fullshard.comm import C10d, Codec, round_trip, wrapped
from fullshard.comm.c10d import Transport, TransportRequest, way_of
from fullshard.errors import ConfigError, ProtocolError
from tests.kit.communication import Gather, on
from tests.kit.offload import a_bus
from tests.kit.parity import use_checkpoints
from tests.ranks.models import GPT, OddModel, fill, full_parameters, ids, noise, shard_units
from tests.ranks.pool import RankPool, every_world, on_ranks
from tests.recording import Recording, recordings

FP32, BF16 = torch.float32, torch.bfloat16
LAYOUTS = {"per-parameter": PerParameter(), "ragged": Ragged()}
every_layout = pytest.mark.parametrize("layout", list(LAYOUTS))
every_transport = pytest.mark.parametrize("transport", [Transport.NATIVE, Transport.SHARED])
every_codec = pytest.mark.parametrize("name", ["bf16", "int8", "fp8"])
every_reduction = pytest.mark.parametrize("name", ["bf16", "int8", "fp8", "int4"])
STEP = {"bf16": 2.0**-8, "int8": 1 / 127, "fp8": 1 / 8, "int4": 1 / 7}
"""The quantization step of each codec, relative to the largest value of a block."""


def sent(wires: Sequence[Recording]) -> dict[str, int]:
    """Return the bytes that this rank sent by kind of collective; forget the calls."""
    found: dict[str, int] = {}
    for call in (call for wire in wires for call in wire.calls):
        found[call.kind] = found.get(call.kind, 0) + call.numel * call.dtype.itemsize
    for wire in wires:
        wire.calls.clear()
    return found


def both(name: str) -> WirePolicy:
    """Return a policy with ``name`` for parameters and gradients; int4 is for gradients only."""
    return WirePolicy("int8" if name == "int4" else name, name)


def mesh_of(copies: int) -> DeviceMesh:
    shape = (copies, dist.get_world_size() // copies)
    return init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards"))


def shard(model: Any, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    return shard_units(model, getattr(model, "blocks", []), mesh=mesh, **options)


def arrived(codec: Codec, whole: Tensor, layout: str, world: int) -> Tensor:
    """Return ``whole`` as it arrives, in blocks that begin where shards begin.

    Ragged shards are cut only between blocks, which are counted from the first element, so the
    result is equal for all numbers of ranks.
    """
    pieces = whole.chunk(world) if layout == "per-parameter" else [whole]
    return torch.cat([round_trip(codec, one.reshape(1, -1)).view(-1) for one in pieces]).view(
        whole.shape
    )


# Bytes


def one_layer(wire: WirePolicy, transport: Transport, layout: str, **more: Any) -> dict[str, int]:
    with recordings(transport) as wires:
        model = shard(
            nn.Linear(128, 128, bias=False),
            reshard_after_forward=True,
            layout=LAYOUTS[layout],
            wire=wire,
            **more,
        )
    for _ in range(2):
        sent(wires)
        model(torch.ones(3, 128)).sum().backward()
    return sent(wires)


_PLAIN = {"all_gather": 2 * 8192 * 4, "reduce_scatter": 2 * (8192 + 8) * 4}
_BLOCKS = 8192 + 4 * 128  # a byte per element, and an fp32 scale per 64 elements


@every_transport
@every_layout
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("gather=bf16", {"all_gather": 2 * 8192 * 2}),
        ("gather=int8", {"all_gather": 2 * _BLOCKS}),
        ("gather=fp8", {"all_gather": 2 * _BLOCKS}),
        ("gather=int8,block=128", {"all_gather": 2 * (8192 + 4 * 64)}),
        ("reduce=bf16", {"reduce_scatter": 2 * (8192 + 8) * 2}),
        ("reduce=int8", {"all_to_all": 2 * (_BLOCKS + 8 * 4)}),
        ("reduce=fp8", {"all_to_all": 2 * (_BLOCKS + 8 * 4)}),
        ("reduce=int4", {"all_to_all": 2 * (8192 // 2 + 2 * 128 + 8 * 4)}),
        ("reduce=int4,block=32", {"all_to_all": 2 * (8192 // 2 + 2 * 256 + 8 * 4)}),
    ],
)
def test_bytes_of_a_step(
    pool: RankPool, transport: Transport, layout: str, text: str, expected: dict[str, int]
) -> None:
    """A step gathers halves of 16,384 elements twice, and sends a half and flags to each rank."""
    wire = WirePolicy.parse(text) if text else WirePolicy()
    expected = dict(expected)
    if text == "reduce=bf16" and transport is Transport.NATIVE:
        expected = {"all_to_all": expected["reduce_scatter"]}  # gloo sums in the dtype that is sent
    if text.startswith("gather") or not text:
        expected = {**_PLAIN, **expected}
    else:
        expected = {"all_gather": _PLAIN["all_gather"], **expected}
    assert pool.run(2, one_layer, wire, transport, layout) == [expected] * 2


@on_ranks(4)
@pytest.mark.parametrize(
    ("name", "slices", "half"),
    [("bf16", 2 * 4104 * 2, 4096 * 2), ("int8", 2 * 4384, 4352), ("int4", 2 * 4384, 4352)],
)
def test_bytes_over_replicas(name: str, slices: int, half: int) -> None:
    """Over replicas, a rank sends halves of 8,192 means with flags, then its half of the results.

    With int4, both hops between replicas use int8.
    """
    hop = {"bf16": 2 * 8200 * 2, "int8": 2 * (_BLOCKS + 32), "int4": 2 * 4384}[name]
    expected = {"all_gather": 2 * 8192 * 4 + half, "all_to_all": hop + slices}
    wire = WirePolicy(reduce=name)
    assert one_layer(wire, Transport.NATIVE, "per-parameter", mesh=mesh_of(2)) == expected


@on_ranks(2)
def test_bytes_over_replicas_alone() -> None:
    """With replicas only, gradients are sent in int4, as over shards, and the means in int8."""
    hops = {"all_to_all": 2 * (8192 // 2 + 2 * 128 + 8 * 4), "all_gather": _BLOCKS}
    nothing = {"reduce_scatter": (128 * 128 + 8) * 4}  # on one rank
    wire = WirePolicy(reduce="int4")
    assert one_layer(wire, Transport.NATIVE, "per-parameter", mesh=mesh_of(2)) == hops | nothing


@on_ranks(1)
def test_a_rank_alone_encodes_nothing() -> None:
    wire = WirePolicy(gather="int8", reduce="int8")
    found = one_layer(wire, Transport.SHARED, "ragged")
    assert found.get("reduce_scatter") == (128 * 128 + 8) * 4 and "all_to_all" not in found
    layer = fill(nn.Linear(128, 128, bias=False))
    model = shard(copy.deepcopy(layer), wire=wire)
    for one in (layer, model):
        one(torch.ones(3, 128)).sum().backward()
    assert torch.equal(layer.weight.grad, model.weight.grad.full_tensor())  # type: ignore[arg-type]


# Gathers


class Watched(nn.Module):
    """A module that records the parameters that it computes with."""

    def __init__(self, *sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        fill(self)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [weight.detach().clone() for weight in self.weights]
        return x + sum(weight.float().square().sum() for weight in self.weights)


SIZES = ((6, 64), (7, 20), (5,), (3, 3, 64), (1, 200))
LARGE = ((514, 515), (520, 512))
"""Two parameters whose shards are gathered in place; one does not divide into whole blocks."""


def gathered(name: str, layout: str, sizes: Any, transport: Transport, dtype: Any) -> None:
    """Check the parameters of forward against arithmetic, and that full parameters stay exact."""
    world, wire = dist.get_world_size(), WirePolicy(gather=name)
    model, codec = Watched(*sizes), wire.gathering
    whole = [weight.detach().clone() for weight in model.weights]
    with recordings(transport):
        shard(
            model,
            layout=LAYOUTS[layout],
            wire=wire,
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=FP32),
        )
    assert codec is not None
    for _ in range(2):
        model(torch.ones(1)).backward()
        for found, exact in zip(model.seen, whole, strict=True):
            computed = exact if dtype is None else exact.to(dtype)
            expected = arrived(codec, computed, layout, world).to(found.dtype)
            assert torch.equal(found, expected), (found - expected).abs().max()
    for found, exact in zip(full_parameters(model).values(), whole, strict=True):
        assert torch.equal(found, exact)
    with unshard_params(model):
        for weight, exact in zip(model.weights, whole, strict=True):
            assert torch.equal(weight, exact)


@every_world
@every_layout
@every_codec
@pytest.mark.parametrize("dtype", [None, BF16])
def test_all_ranks_compute_with_what_blocks_say_and_full_parameters_are_exact(
    pool: RankPool, world: int, layout: str, name: str, dtype: Any
) -> None:
    pool.run(world, gathered, name, layout, SIZES, Transport.SHARED, dtype)


@every_transport
@every_layout
def test_large_pieces(pool: RankPool, layout: str, transport: Transport) -> None:
    pool.run(2, gathered, "int8", layout, LARGE, transport, None)


@on_ranks(3)
@every_codec
def test_a_gather_of_ones_own(name: str) -> None:
    """A user's all-gather gets the encoded bytes."""
    model, wire = Watched(*SIZES), WirePolicy(gather=name)
    whole = [weight.detach().clone() for weight in model.weights]
    shard(model, layout=Ragged(), wire=wire)
    own = Gather(asynchronous=True)
    model.set_custom_all_gather(own)
    model(torch.ones(1))
    assert own.called == 1 and wire.gathering is not None
    for found, exact in zip(model.seen, whole, strict=True):
        assert torch.equal(found, arrived(wire.gathering, exact, "ragged", 3))


class Product(nn.Module):
    """A product with a weight of any dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(noise(9, 70).to(dtype) * 3)

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).abs().sum()


@on_ranks(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_other_dtypes_travel_as_they_are(dtype: torch.dtype) -> None:
    """fp64 and complex parameters and gradients are sent in full precision."""
    plain = Product(dtype)
    model = shard(copy.deepcopy(plain), wire=WirePolicy(gather="int8", reduce="int8"))
    outputs = [one(noise(9, 70, seed=1).to(dtype)) for one in (plain, model)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.backward()
    digits = 4 * torch.finfo(dtype).eps
    found = model.weight.grad.full_tensor()
    torch.testing.assert_close(found, plain.weight.grad, rtol=digits, atol=digits)


# Reductions


def tokens_of(rank: int, seed: int = 0) -> Tensor:
    return ids(2, 8, vocab=53, seed=10 * seed + rank)


def lossy(model: Any, rank: int, seed: int = 0) -> Tensor:
    tokens = tokens_of(rank, seed)
    return GPT.loss(model(tokens[:, :-1]), tokens[:, 1:])


def expected_means(
    plain: nn.Module, codec: Codec, layout: str, copies: int, dtype: torch.dtype = FP32
) -> dict[str, Tensor]:
    """Return the means by hand: over shards, then over replicas, and gathered once more."""
    world = dist.get_world_size()
    shards = world // copies
    by_rank = []
    for rank in range(world):
        model = copy.deepcopy(plain)
        lossy(model, rank).backward()
        by_rank.append({name: p.grad for name, p in model.named_parameters()})

    def arrives(grad: Tensor, ranks: int, codec: Codec = codec) -> Tensor:
        return grad.float() if ranks == 1 else arrived(codec, grad.to(dtype), layout, shards)

    means = {}
    for name in by_rank[0]:
        grads = [arrives(grads[name], shards) for grads in by_rank]  # type: ignore[arg-type]
        rows = [torch.stack(grads[c * shards : (c + 1) * shards]).mean(0) for c in range(copies)]
        again = codec if shards == 1 else codec.for_means
        mean = torch.stack([arrives(row, copies, again) for row in rows]).mean(0)
        means[name] = arrives(mean, copies, codec.for_means) if copies > 1 else mean
    return means


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def farthest(model: nn.Module, expected: dict[str, Tensor]) -> float:
    """Return the largest error of a gradient, relative to the largest value expected of it."""
    found: dict[str, Any] = grads_of(model)
    return max(
        ((found[name].full_tensor() - grad).abs().max() / grad.abs().max()).item()
        for name, grad in expected.items()
    )


def reduced(
    name: str, layout: str, copies: int, transport: Transport, change: Callable[[Any], None] | None
) -> float:
    """Return the largest error of two steps' gradients, relative to the largest expected value."""
    codec = WirePolicy(reduce=name).reducing
    assert codec is not None
    plain = fill(GPT().float())
    expected = expected_means(plain, codec, layout, copies)
    mesh = mesh_of(copies)
    with recordings(transport):
        model = shard(
            copy.deepcopy(plain),
            mesh=mesh if copies > 1 else mesh["shards"],
            layout=LAYOUTS[layout],
            wire=WirePolicy(reduce=name),
        )
    if change is not None:
        change(model)
    worst = 0.0
    for _ in range(2):
        lossy(model, dist.get_rank()).backward()
        worst = max(worst, farthest(model, expected))
        model.zero_grad()
    return worst


@every_transport
@every_layout
@every_reduction
@pytest.mark.parametrize(("world", "copies"), [(2, 1), (3, 1), (4, 2), (2, 2)])
def test_gradients_are_sums_in_fp32_of_what_arrives(
    pool: RankPool, world: int, copies: int, name: str, layout: str, transport: Transport
) -> None:
    """Gradients are exact up to the order of sums, which may change the rounding of a mean."""
    found = pool.run(world, reduced, name, layout, copies, transport, None)
    again = STEP["int8" if name == "int4" and world > copies else name] if copies > 1 else 0
    assert max(found) <= again + 1e-5


def over_hosts(name: str, hosts: str) -> float:
    """Return the error as ``reduced`` does, for ranks on simulated hosts."""
    group = dist.new_group()
    with on(hosts):
        wire = C10d(group, "cpu")
        way_of(group, TransportRequest(Transport.SHARED))
    codec = WirePolicy(reduce=name).reducing
    assert codec is not None
    plain = fill(GPT().float())
    expected = expected_means(plain, codec, "ragged", 1)
    with wrapped(lambda inner: wire):
        model = shard(copy.deepcopy(plain), layout=Ragged(), wire=WirePolicy(reduce=name))
    lossy(model, dist.get_rank()).backward()
    return farthest(model, expected)


@every_reduction
@pytest.mark.parametrize("hosts", ["ab", "aabb", "aba"])
def test_among_hosts(pool: RankPool, name: str, hosts: str) -> None:
    assert max(pool.run(len(hosts), over_hosts, name, hosts)) <= 1e-5


def with_separate_groups(model: Any) -> None:
    model.set_separate_reduce_scatter_group()


def by_sums(model: Any) -> None:
    for module in (*model.blocks, model):
        module.set_force_sum_reduction_for_comms(True)


def by_recomputing(model: Any) -> None:
    use_checkpoints(model, False)


def one_gather_ahead(model: Any) -> None:
    model.set_prefetch_budget(1 << 30)
    model.set_reduction_budget(1 << 30)


@every_reduction
@pytest.mark.parametrize(
    "change", [with_separate_groups, by_sums, by_recomputing, one_gather_ahead]
)
def test_other_settings_change_nothing(pool: RankPool, name: str, change: Any) -> None:
    assert max(pool.run(2, reduced, name, "ragged", 1, Transport.NATIVE, change)) <= 1e-5


@on_ranks(4)
def test_bf16_gradients_are_summed_in_fp32_where_the_backend_does_not() -> None:
    """The mean of bf16 gradients of 1 and three times 2^-8 is exact with the policy only.

    A sum in bf16 that adds one gradient after the other would be 1.
    """
    grads = torch.tensor([1.0, 2.0**-8, 2.0**-8, 2.0**-8])
    found = []
    for wire in (WirePolicy(reduce="bf16"), WirePolicy()):
        with recordings(Transport.NATIVE):
            model = shard(
                nn.Linear(64, 4, bias=False, dtype=BF16),
                wire=wire,
                mp_policy=MixedPrecisionPolicy(reduce_dtype=FP32 if wire.reduce else None),
            )
        model(torch.full((1, 64), grads[dist.get_rank()].item(), dtype=BF16)).sum().backward()
        mean = model.weight.grad.full_tensor()
        found.append((mean - grads.mean().to(BF16)).abs().max().item())
    exact, rounded = found
    assert exact == 0.0 and rounded > 1e-3


# Gradients that are absent, frozen, accumulated or not finite; several buckets; offload


@every_layout
@every_reduction
@on_ranks(2, 4)
def test_absent_gradients_stay_absent(name: str, layout: str) -> None:
    """The same parameters have no gradient with a policy as without one."""
    found = []
    for policy in (both(name), WirePolicy()):
        model = fill(OddModel())
        shard_units(model, (model.first, model.back), layout=LAYOUTS[layout], wire=policy)
        tokens = ids(2, 5, vocab=13, seed=dist.get_rank())
        model(tokens).square().mean().backward()
        found.append([name for name, p in model.named_parameters() if p.grad is None])
    absent, expected = found
    assert absent == expected
    assert {"unused.weight", "unused.bias", "frozen.weight"} <= set(absent)


@on_ranks(4)
@every_layout
@every_reduction
@pytest.mark.parametrize("deferred", [False, True])
def test_accumulation(name: str, layout: str, deferred: bool) -> None:
    """Two backwards add up, the first without a reduction, or without one over replicas.

    Each of three roundings is off by at most half a step of the largest gradient of its rank. This
    gradient may be larger than the mean, here by less than a factor of 8. With int4 the bound would
    allow any value; the largest measured error is 0.12.
    """
    most = 0.2 if name == "int4" else 3 * STEP[name] / 2 * 8
    plain = fill(GPT().float())
    model = shard(
        copy.deepcopy(plain), mesh_of(2), layout=LAYOUTS[layout], wire=WirePolicy(reduce=name)
    )
    for seed in range(2):
        if deferred:
            model.set_requires_all_reduce(seed == 1)
        else:
            model.set_requires_gradient_sync(seed == 1)
        lossy(model, dist.get_rank(), seed).backward()
        for rank in range(dist.get_world_size()):
            (lossy(plain, rank, seed) / dist.get_world_size()).backward()
    assert farthest(model, grads_of(plain)) <= most


@on_ranks(3)
@every_reduction
def test_frozen_after_sharding(name: str) -> None:
    """A unit reduces its other parameters in blocks after one of them is frozen."""
    plain = fill(nn.Sequential(nn.Linear(50, 30), nn.Linear(30, 9, bias=False)))
    model = shard(copy.deepcopy(plain), wire=WirePolicy(reduce=name))
    worst = 0.0
    for _ in range(2):
        for one in (plain, model):
            one[0].weight.requires_grad_(False)
            one(noise(4, 50, dtype=FP32)).sum().backward()
        assert model[0].weight.grad is None
        worst = max(worst, farthest(model, grads_of(plain)))
    assert worst <= STEP[name] * (1 if name == "int4" else 4)


@on_ranks(4)
@every_layout
@every_reduction
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite(name: str, layout: str, bad: float) -> None:
    """NaN and infinity reach all ranks, in their block only, and presence flags survive."""
    model = Watched((4, 64), (4, 64), (3, 64))
    shard(model, mesh_of(2), layout=LAYOUTS[layout], wire=WirePolicy(reduce=name))
    loss = model(torch.ones(1))
    scale = torch.ones(4, 64)
    if dist.get_rank() == 3:
        scale[2, 7] = bad
    (loss * 0 + (model.weights[0] * scale).sum() + model.weights[1].sum()).backward()
    first, second, last = (p.grad.full_tensor() for p in model.parameters())
    lost = bool(first[2].isfinite().all()) or bool(first[2, 7].isfinite())
    others = bool(first[[0, 1, 3]].isfinite().all() and second.isfinite().all())
    assert (not lost, others, bool((last == 0).all())) == (True, True, True)


@on_ranks(2)
@every_codec
def test_weights_that_are_not_finite(name: str) -> None:
    model = Watched((4, 64))
    with torch.no_grad():
        model.weights[0][3, 5] = float("nan")
    shard(model, wire=WirePolicy(gather=name))
    model(torch.ones(1))
    (seen,) = model.seen
    assert (bool(seen[3, 5].isfinite()), bool(seen[:3].isfinite().all())) == (False, True)


class Mixed(nn.Module):
    """A module with parameters of two dtypes, and so two buckets that are exchanged together."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(70, 70), nn.Linear(70, 70).to(BF16)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).to(BF16)).float()


@on_ranks(2)
@every_reduction
def test_several_buckets(name: str) -> None:
    """Two buckets reduce together with small errors.

    The bounds are measured: the loss is not linear in the weights, which are rounded.
    """
    model = fill(Mixed())
    plain = copy.deepcopy(model)
    shard(model, reshard_after_forward=True, wire=both(name))
    x = noise(4, 70, dtype=FP32)
    for one in (plain, model):
        one(x).square().mean().backward()
    most = {"bf16": 0.05, "int8": 0.1, "fp8": 0.5, "int4": 0.2}[name]
    assert farthest(model, grads_of(plain)) < most


@on_ranks(2)
@every_layout
@every_reduction
def test_shards_on_the_host(name: str, layout: str) -> None:
    """Training with offload gives the same bits as without."""
    found = []
    for bus in (nullcontext(), a_bus(pinned=False)):
        with bus:
            model = fill(GPT().float())
            shard(model, layout=LAYOUTS[layout], wire=both(name))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for seed in range(2):
                lossy(model, dist.get_rank(), seed).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(full_parameters(model))
    one, other = found
    assert all(torch.equal(one[key], other[key]) for key in one)


@on_ranks(4)
@every_codec
def test_secondary_shards(name: str) -> None:
    """Gradients are equal if backward gathers from secondary shards."""
    seen = []
    for after in (True, 2):
        model = fill(GPT().float())
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=after, wire=WirePolicy(gather=name))
        fully_shard(model, wire=WirePolicy(gather=name))
        lossy(model, dist.get_rank()).backward()
        seen.append([p.grad.full_tensor() for p in model.parameters()])  # type: ignore[union-attr]
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


# FullyShardedDataParallel, and refusals


def flat_training(name: str, original: bool, copies: int) -> float:
    plain = fill(GPT().float())
    model = copy.deepcopy(plain)
    options: dict[str, Any] = {"use_orig_params": original, "wire": WirePolicy(reduce=name)}
    if copies > 1:
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        options["device_mesh"] = mesh_of(copies)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FullyShardedDataParallel(block, **options)
    wrapper = FullyShardedDataParallel(model, **options)
    lossy(wrapper, dist.get_rank()).backward()
    for rank in range(dist.get_world_size()):
        (lossy(plain, rank) / dist.get_world_size()).backward()
    with FullyShardedDataParallel.summon_full_params(wrapper, with_grads=True):
        grads = {name: p.grad.clone() for name, p in wrapper.named_parameters()}  # type: ignore[union-attr]
    clean = {key.replace("_fsdp_wrapped_module.", ""): grad for key, grad in grads.items()}
    return max(
        ((clean[key] - p.grad).norm() / p.grad.norm()).item()  # type: ignore[operator,union-attr]
        for key, p in plain.named_parameters()
    )


LOST = {"bf16": 2.0**-8, "int8": 0.05, "fp8": 0.1, "int4": 0.2}
"""The largest norm of an error of FullyShardedDataParallel, relative to the gradient's norm."""


@every_reduction
@pytest.mark.parametrize(("original", "copies"), [(True, 1), (False, 1), (True, 2)])
def test_the_flat_face(pool: RankPool, name: str, original: bool, copies: int) -> None:
    """Gradients of FullyShardedDataParallel have small errors.

    In one flat parameter, a block may have elements of a neighbor, which may be much larger. With
    replicas, means are rounded twice more, but not to int4.
    """
    most = LOST if original else LOST | {"int8": 0.3, "int4": 0.4}
    assert max(pool.run(2 * copies, flat_training, name, original, copies)) <= most[name]


@on_ranks(2)
def test_refusals() -> None:
    wire = WirePolicy(reduce="int8")
    module = fully_shard(nn.Linear(4, 4), wire=wire)
    with pytest.raises(ConfigError, match="wire=reduce=int8"):
        module.set_custom_reduce_scatter(None)  # type: ignore[operator]
    wrapper = FullyShardedDataParallel(nn.Linear(4, 4), wire=wire)
    with pytest.raises(ConfigError, match="wire=reduce=int8"):
        wrapper.register_comm_hook(None, lambda *_: None)
    for shard in (fully_shard, FullyShardedDataParallel, fullshard.shard_blocks):
        with pytest.raises(ConfigError, match=r"expected a fullshard\.WirePolicy"):
            shard(nn.Linear(4, 4), wire="int8")  # type: ignore[arg-type]


@on_ranks(3)
@every_transport
@pytest.mark.parametrize("name", ["gather", "reduce"])
def test_ranks_with_different_policies(name: str, transport: Transport) -> None:
    """All ranks raise an error with the policy of the rank that has another one."""
    plain = nn.Linear(64, 64)
    policy = WirePolicy(**({name: "int8"} if dist.get_rank() == 1 else {}))
    with recordings(transport):
        model = shard(plain, wire=policy)
    with pytest.raises(ProtocolError) as raised:
        model(torch.ones(1, 64)).sum().backward()
    assert f"wire {name}=int8" in str(raised.value)


# Measured errors


def measured(name: str, layout: str, copies: int) -> tuple[Any, ...]:
    """Return the reported errors, an expected one by arithmetic, and if the check sent nothing."""
    wire = both(name)
    with recordings(Transport.NATIVE) as wires:
        model = shard(
            fill(nn.Linear(128, 128, bias=False)),
            mesh_of(copies),
            layout=LAYOUTS[layout],
            wire=wire,
        )
    x, codec = noise(4, 128, seed=dist.get_rank(), dtype=FP32), wire.gathering
    assert codec is not None
    before = model.wire_errors()
    model(x).square().mean().backward()
    usual = sent(wires)
    model.zero_grad()
    model.set_wire_check(True)
    model(x).square().mean().backward()
    watched = sent(wires)
    found = model.wire_errors()
    shard_of = model.weight.detach().to_local().reshape(1, -1)
    expected = ((round_trip(codec, shard_of) - shard_of).norm() / shard_of.norm()).item()
    model.set_wire_check(False)
    model(x).sum().backward()
    return before, found, expected, model.wire_errors(), usual == watched


@every_reduction
@every_layout
@pytest.mark.parametrize(("world", "copies"), [(2, 1), (4, 2), (2, 2)])
def test_errors_are_told(pool: RankPool, world: int, copies: int, name: str, layout: str) -> None:
    nothing = (None, None)
    size = {
        "bf16": (0.0005, 0.004),
        "int8": (0.001, 0.01),
        "fp8": (0.01, 0.05),
        "int4": (0.05, 0.2),
    }[name]
    for before, found, expected, after, same in pool.run(world, measured, name, layout, copies):
        assert before == after == nothing and same
        if copies < world:
            assert found.gathered == pytest.approx(expected, rel=1e-5)
        else:
            assert found.gathered is None  # nothing is sharded
        assert found.reduced is not None and size[0] < found.reduced < size[1]

"""RaggedTensor and random fills on meshes with replicas, tensor parallelism and up to four dims."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from fullshard import RaggedTensor
from fullshard._torch import dtensor as _dtensor
from fullshard.errors import ConfigError, RaggedOperationError
from fullshard.tensors import RaggedShard, handle_ops_on
from tests.ranks.models import noise, shared_folder
from tests.ranks.pool import on_ranks
from tests.ranks.ragged import CASES, CUT, SHAPES, dtensor, numel_of, placed, ragged, strided
from tests.versions import asks_subclasses

cases = pytest.mark.parametrize("name", CASES)


def values(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return noise(*shape, seed=seed)


@on_ranks(4)
@cases
def test_it_shows_the_whole_tensor_and_holds_an_interval_of_its_part(name: str) -> None:
    case = CASES[name]
    mesh = case.mesh()
    dim = case.placements.index(CUT)
    for seed, shape in enumerate(SHAPES):
        want = values(shape)
        x = ragged(want, mesh, case.placements, seed)
        assert (x.shape, x.stride(), x.dtype) == (want.shape, want.stride(), want.dtype)
        assert x.to_local().shape == (x.interval.length,)
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, tuple(x.interval), group=mesh.get_group(dim))
        held = [one for one in every if one is not None]
        assert held[0][0] == 0
        assert all(a[0] + a[1] == b[0] for a, b in itertools.pairwise(held))
        assert torch.equal(x.full_tensor(), want)
        text = repr(x)
        assert f"{x.interval.start} to {x.interval.stop}" in text
        assert all(repr(placement) in text for placement in x.placements)
        assert repr(tuple(shape)) in text
        meta = x.to("meta")
        assert isinstance(meta, RaggedTensor)
        assert meta.is_meta and meta.full_tensor().shape == want.shape
        filled = torch.empty_like(meta, device="cpu")
        assert filled.interval == x.interval and filled.copy_(want).equal(x)


@on_ranks(4)
@pytest.mark.parametrize("name", ["1d", "hsdp", "rows", "copies", "two_tp"])
def test_it_is_redistributed_to_placements_of_torch(name: str) -> None:
    case = CASES[name]
    mesh = case.mesh()
    targets = {
        tuple(target)
        for target in itertools.product([Replicate(), Shard(0), Shard(1)], repeat=mesh.ndim)
    }
    for shape in SHAPES[:3]:
        want = values(shape)
        x = ragged(want, mesh, case.placements)
        assert x.redistribute(placements=x.placements) is x
        for target in sorted(targets, key=str):
            got = x.redistribute(mesh, target)
            assert type(got) is DTensor and got.placements == target
            assert torch.equal(got.full_tensor(), want)
    wrong: list[dict[str, Any]] = [
        {"placements": [RaggedShard([(4, 1)])] * mesh.ndim},
        {"device_mesh": init_device_mesh("cpu", (1, 1, 1, 2, 2)), "placements": [Replicate()] * 5},
        {},
    ]
    for options in wrong:
        with pytest.raises(ConfigError, match="expected placements"):
            x.redistribute(**options)


@on_ranks(4)
def test_replicas_do_not_communicate() -> None:
    """``full_tensor`` has no collectives over replicas."""
    counts = []
    for name in ("hsdp", "rows", "copies"):
        case = CASES[name]
        x = ragged(values((8, 8)), case.mesh(), case.placements)
        with CommDebugMode() as counted:
            x.full_tensor()
        counts.append(counted.get_total_counts())
    hsdp, rows, copies = counts
    assert rows == hsdp + 1 and copies <= hsdp + 1


@on_ranks(4)
@cases
def test_it_can_be_copied_and_pickled(name: str) -> None:
    case = CASES[name]
    mesh = case.mesh()
    for shape in SHAPES:
        x = ragged(values(shape), mesh, case.placements)
        leaf = x.detach().requires_grad_()
        leaf.grad = x * 2
        assert torch.equal(copy.deepcopy(leaf).grad, leaf.grad)
        for value in (x, nn.Parameter(x), leaf):
            buffer = io.BytesIO()
            torch.save(value, buffer)
            buffer.seek(0)
            inner, spec = value.__tensor_flatten__()
            parts = {key: getattr(value, key) for key in inner}
            for one in (
                copy.deepcopy(value),
                pickle.loads(pickle.dumps(value)),
                torch.load(buffer, weights_only=True),
                RaggedTensor.__tensor_unflatten__(parts, spec, value.shape, value.stride()),
            ):
                assert isinstance(one, RaggedTensor)
                assert one.requires_grad == value.requires_grad
                assert one.placements == value.placements
                assert torch.equal(one, value)


def replicated(x: RaggedTensor) -> Tensor:
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).to_local()


@on_ranks(4)
@asks_subclasses
@cases
def test_whole_and_local_tensors_are_differentiable(name: str) -> None:
    case = CASES[name]
    mesh = case.mesh()
    for shape in SHAPES:
        plain = values(shape).requires_grad_()
        x = ragged(plain, mesh, case.placements).requires_grad_()
        weights = values(shape, seed=3)
        for whole_of in (RaggedTensor.full_tensor, replicated):
            x.grad = plain.grad = None
            (whole_of(x).square() * weights).sum().backward()
            (plain.square() * weights).sum().backward()
            assert isinstance(x.grad, RaggedTensor) and x.grad.placements == x.placements
            assert torch.equal(x.grad.full_tensor(), plain.grad)
        x.grad = None
        (x.to_local() * 3).sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full_like(plain, 3.0))
        x.grad = None
        (x * 2).full_tensor().sum().backward()
        assert torch.equal(x.grad.full_tensor(), torch.full_like(plain, 2.0))


POINTWISE: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x.add(y, alpha=3) * 2,
    lambda x, y: torch.where(x > y, x, y),
    lambda x, y: x.addcdiv(y, y + 2, value=0.5),
    lambda x, y: x.clone().mul_(y),
    lambda x, y: x.clone().copy_(y),
    lambda x, y: x.to(torch.bfloat16).float(),
    lambda x, y: x > y,
    lambda x, y: torch._foreach_add([x, y], [y, x])[1],
    lambda x, y: x.view(x.shape),
]


def over_all_elements(x: RaggedTensor, a: Tensor | None = None) -> None:
    a = x.full_tensor() if a is None else a
    close = {"rtol": 1e-12, "atol": 1e-13, "equal_nan": True}
    for order in (1, 2, 3.0, float("inf")):
        want = torch.linalg.vector_norm(a, order) if a.numel() else torch.tensor(0.0).double()
        got = [
            torch.linalg.vector_norm(x, order),
            torch._foreach_norm([x, x * 2], order)[0],
        ]
        for norm in got:
            torch.testing.assert_close(norm, want, **close)
            assert_same_on_all_ranks(norm)
    torch.testing.assert_close(x.sum(), a.sum(), **close)
    assert_same_on_all_ranks(x.sum())
    if a.numel() and not a.isnan().any():
        torch.testing.assert_close(x.mean(), a.mean(), **close)
        assert x.max() == a.max() and x.min() == a.min()
        whole = (x * 1000).to(torch.int64)
        assert whole.sum() == (a * 1000).to(torch.int64).sum()
        some = x == float(a.flatten()[-1])  # true for one element, on any rank
        assert some.any() and not some.logical_not().all() and some.sum() == 1
    assert torch.equal(x, x.clone()) != bool(a.isnan().any())


def assert_same_on_all_ranks(value: Tensor) -> None:
    """Check that a value has the same bits on all ranks."""
    every = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(every, value)
    assert all(torch.equal(one.nan_to_num(), every[0].nan_to_num()) for one in every)


@on_ranks(4)
@cases
def test_operations_are_those_of_the_whole_tensor(name: str) -> None:
    case = CASES[name]
    mesh = case.mesh()
    for shape in SHAPES:
        a, b = values(shape), values(shape, seed=5)
        x, y = (ragged(whole, mesh, case.placements) for whole in (a, b))
        for number, pointwise in enumerate(POINTWISE):
            got, want = pointwise(x, y), pointwise(a, b)
            assert isinstance(got, RaggedTensor), number
            assert torch.equal(got.full_tensor(), want), number
        over_all_elements(x, a)
    over_all_elements(ragged(torch.full((5, 3), float("nan")), mesh, case.placements))


@on_ranks(4)
def test_lists_may_mix_meshes() -> None:
    """One call takes tensors of several meshes, as in ``torch.nn.utils.clip_grad_norm_``."""
    wholes, mixed = [], []
    for seed, name in enumerate(CASES):
        case = CASES[name]
        wholes.append(values((5, 3), seed))
        mixed.append(ragged(wholes[-1], case.mesh(), case.placements))
    mesh = CASES["rows"].mesh()
    for at in ([Shard(0), Shard(1)], [strided(0, 2), Shard(0)], [Replicate(), Shard(0)]):
        wholes.append(values((5, 3), len(wholes)))
        mixed.append(dtensor(wholes[-1], mesh, at))
    for order in (2.0, float("inf")):
        got, want = torch._foreach_norm(mixed, order), torch._foreach_norm(wholes, order)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    params = [nn.Parameter(one) for one in mixed[: len(CASES)]]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for param in params:
        param.grad = param.detach() * 8
    last = params[list(CASES).index("columns")].grad
    if dist.get_rank() == 3 and last.to_local().numel():
        last.to_local()[0] = float("inf")
    scaler.scale(torch.tensor(1.0))
    scaler.unscale_(optimizer)
    is_infinite = not all(bool(param.grad.sum().isfinite()) for param in params)
    found = scaler._found_inf_per_device(optimizer).values()
    assert bool(sum(one.item() for one in found)) == is_infinite


@on_ranks(4)
@cases
def test_whole_tensors_are_copied_in_and_out(name: str) -> None:
    case = CASES[name]
    mesh = case.mesh()
    for shape in SHAPES:
        want, other = values(shape), values(shape, seed=2)
        x = ragged(other, mesh, case.placements)
        assert torch.equal(x.copy_(want).full_tensor(), want)
        row = want[:1].expand(shape) if shape[0] else want
        assert torch.equal(x.copy_(row).full_tensor(), row)
        assert torch.equal(x.copy_(want.t() if want.dim() == 1 else want), x)
        x.copy_(dtensor(other, mesh, [Shard(0)] * mesh.ndim))
        assert torch.equal(x.full_tensor(), other)
        x.copy_(ragged(want, mesh, case.placements))
        assert torch.equal(torch.zeros(shape).double().copy_(x), want)
        into = dtensor(other, mesh, [Shard(0)] + [Replicate()] * (mesh.ndim - 1))
        assert torch.equal(into.copy_(x).full_tensor(), want)


FILLS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.uniform_(-2, 3),
    lambda x: x.normal_(1.0, 2.0),
    lambda x: x.bernoulli_(0.3),
    lambda x: x.exponential_(2.0),
    lambda x: nn.init.trunc_normal_(x),
]
PLACEMENTS_2D: list[list[Any]] = [
    [Shard(0), Shard(0)],
    [Shard(1), Shard(0)],
    [Replicate(), Shard(1)],
    [Shard(0), Replicate()],
    [Replicate(), Replicate()],
    [strided(0, 2), Shard(0)],
    [strided(0, 2), Shard(1)],
    [strided(1, 2), Shard(1)],
    [Shard(0), strided(0, 3)],
    [strided(0, 5), Replicate()],
]


SIZES = [*((n, 3) for n in (0, 1, 2, 3, 5, 7, 9)), (4, 5, 2)]
DEEP_PLACEMENTS: dict[tuple[int, ...], list[Any]] = {
    (4, 1): [strided(0, 1), Shard(0)],
    (1, 4): [strided(0, 4), Shard(0)],
    (1, 2, 2): [Replicate(), strided(0, 2), Shard(0)],
    (2, 2, 1): [strided(0, 2), Shard(0), Shard(1)],
    (1, 2, 1, 2): [Replicate(), strided(0, 2), Shard(1), Shard(0)],
}


def drawn(mesh: DeviceMesh, placements: list[Any], shape: tuple[int, ...], number: int) -> None:
    handle_ops_on(mesh)
    fill = FILLS[number % len(FILLS)]
    x = placed(torch.zeros(shape), mesh, placements)
    for one in (want := torch.zeros(shape), x):
        torch.manual_seed(number)
        fill(one)
    assert torch.equal(x.full_tensor(), want), (number, shape, placements)


@on_ranks(4, timeout_s=120)
@asks_subclasses
def test_random_fills_are_those_of_the_whole_tensor() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    combinations = itertools.product(PLACEMENTS_2D, SIZES)
    for number, (placements, shape) in enumerate(combinations):
        drawn(mesh, placements, shape, number)
    for mesh_shape, placements in DEEP_PLACEMENTS.items():
        mesh = init_device_mesh("cpu", mesh_shape)
        for number, shape in enumerate(SIZES):
            drawn(mesh, placements, shape, number)
    for case in CASES.values():
        for number in range(len(FILLS)):
            drawn(case.mesh(), list(case.placements), (5, 3), number)


@on_ranks(4)
def test_a_local_tensor_of_another_shape_is_not_filled() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    handle_ops_on(mesh)
    torch.manual_seed(0)
    other = init_device_mesh("cpu", (1, 4))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DTensor random operators")  # PyTorch warns once on a CPU
        dtensor(torch.zeros(4, 2), other, [Replicate(), Shard(0)]).uniform_()
    spec = _dtensor.dtensor_spec(
        mesh, (Shard(0), Shard(0)), shape=torch.Size([8]), stride=(1,), dtype=torch.float32
    )
    wrong = _dtensor.dtensor_from_spec(torch.zeros(1), spec, requires_grad=False, cls=DTensor)
    with pytest.raises(NotImplementedError, match=r"holds \(1,\) .* say \(2,\)"):
        wrong.uniform_()


@on_ranks(4)
def test_what_lies_otherwise_is_refused() -> None:
    whole = values((6, 4))
    rows, hsdp = CASES["rows"], CASES["hsdp"]
    mesh = rows.mesh()
    x = ragged(whole, mesh, rows.placements, seed=1)
    same = x.placements
    others = [
        ragged(whole, mesh, CASES["columns"].placements, seed=1),
        ragged(whole, hsdp.mesh(), hsdp.placements),
        dtensor(whole, mesh, [Shard(0), Shard(0)]),
        whole,
    ]
    for other in others:
        for operation in (torch.add, lambda a, b: torch._foreach_mul([a], [b])):
            with pytest.raises(RaggedOperationError, match="same intervals on the same mesh"):
                operation(x, other)
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    spec = _dtensor.dtensor_spec(named, same, shape=x.shape, stride=x.stride(), dtype=x.dtype)
    elsewhere = _dtensor.dtensor_from_spec(
        x.to_local(), spec, requires_grad=False, cls=RaggedTensor
    )
    with pytest.raises(RaggedOperationError, match="same mesh"):
        x.mul_(elsewhere)
    for refused in (lambda: x[0], lambda: x @ x, lambda: x.sum(0), lambda: x.t()):
        with pytest.raises(RaggedOperationError, match="Call full_tensor"):
            refused()


@on_ranks(4)
def test_placements_that_cannot_be_are_named() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    cut = RaggedShard([(2, 2)])
    wrong: list[tuple[Any, ...]] = [
        (Shard(0), cut),
        (cut, cut),
        (cut, Partial()),
        (cut, strided(0, 2)),
        (Replicate(), Replicate()),
        (RaggedShard([(2, 3)]), Replicate()),
        (RaggedShard([(4, 1)]), Replicate()),
        (cut, Shard(0)),
    ]
    for placements in wrong:
        spec = _dtensor.dtensor_spec(
            mesh, placements, shape=torch.Size([4]), stride=(1,), dtype=torch.float32
        )
        x = _dtensor.dtensor_from_spec(torch.zeros(2), spec, requires_grad=False, cls=RaggedTensor)
        with pytest.raises(ConfigError, match=r"RaggedTensor.* expected"):
            _ = x.interval


# Checkpoints


class Noting(DefaultSavePlanner):
    """A planner that keeps this rank's plan after deduplication."""

    final: SavePlan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.final = super().finish_plan(new_plan)
        return self.final


def saved_elements(planner: Noting) -> dict[str, int]:
    """Return the number of elements of each tensor that all ranks together write."""
    own: dict[str, int] = {}
    for item in planner.final.items:
        assert item.tensor_data is not None
        name = item.index.fqn
        own[name] = own.get(name, 0) + numel_of(item.tensor_data.chunk.sizes)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return {n: sum(one.get(n, 0) for one in every) for n in {k for one in every for k in one}}


ORDINARY: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "dtensor_1d": ((4,), [Shard(0)]),
    "dtensor_hsdp": ((2, 2), [Replicate(), Shard(1)]),
    "dtensor_tp": ((2, 2), [Shard(0), Shard(1)]),
}


def tensors_of(form: str, shift: float = 0.0) -> dict[str, DTensor]:
    mesh_shape, placements = (
        ORDINARY[form] if form in ORDINARY else (CASES[form].mesh_shape, CASES[form].placements)
    )
    mesh = init_device_mesh("cpu", mesh_shape)
    return {
        str(seed): placed(values(shape, seed) + shift, mesh, placements, seed + len(form))
        for seed, shape in enumerate(SHAPES)
    }


TARGETS = ["1d", "hsdp", "rows", "copies_and_columns", "dtensor_1d", "dtensor_tp"]


@on_ranks(4, timeout_s=120)
@pytest.mark.parametrize("source", [*CASES, *ORDINARY])
def test_checkpoints_go_from_any_mesh_to_any_other(source: str) -> None:
    """A checkpoint of each form loads into the other forms, and has each element once."""
    folder = shared_folder()
    planner = Noting()
    dcp.save(dict(tensors_of(source)), checkpoint_id=folder, planner=planner)
    written = saved_elements(planner)
    assert written == {str(seed): numel_of(shape) for seed, shape in enumerate(SHAPES)}
    for target in TARGETS:
        loaded: dict[str, Any] = dict(tensors_of(target, shift=1.0))
        dcp.load(loaded, checkpoint_id=folder)
        for seed, shape in enumerate(SHAPES):
            assert torch.equal(loaded[str(seed)].full_tensor(), values(shape, seed)), target

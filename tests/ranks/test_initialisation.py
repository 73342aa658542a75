"""Sharded parameters get the unsharded model's initial values, given the same seed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fullshard import PerParameter, Ragged, fully_shard
from fullshard.errors import FullshardError
from tests.kit.initialisation import same, whole
from tests.ranks.pool import RankPool
from tests.versions import TORCH

Fill = Callable[[Tensor], object]


def sharded(shape: tuple[int, ...], dtype: torch.dtype, how: str, mesh: Any) -> nn.Parameter:
    """Return a parameter that was made on meta and has memory filled with a constant."""
    module = nn.Module()
    values: Tensor = torch.empty(shape, dtype=dtype, device="meta")
    if how.startswith("tensor parallel"):
        values = distribute_tensor(values, mesh["tp"], [Shard(int(how[-1]))])
        mesh = mesh["dp"]
    module.p = nn.Parameter(values)
    placed = (lambda p: Shard(p.dim() - 1)) if how == "last dim" else None
    layout = Ragged(how) if how in ("element", "row", "tensor") else PerParameter()
    fully_shard(module, mesh=mesh, layout=layout, shard_placement_fn=placed)
    module.to_empty(device="cpu")
    with torch.no_grad():
        module.p.to_local().fill_(-3)
    return module.p


def mesh_of(world: int, replicas: int) -> Any:
    if replicas == 1:
        return init_device_mesh("cpu", (world,))
    names = ("replicate", "shard")
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=names)


def outcome(fill: Fill, tensor: Tensor) -> Any:
    """Return the values, the generator's state and the results of ``fill``, or its error."""
    torch.manual_seed(11)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on results of distributions
            result = fill(tensor)
    except Exception as error:
        return error
    made = [whole(tensor), torch.get_rng_state()]
    # results of ``fill`` must agree as well
    return made + [whole(one) for one in (result if isinstance(result, list) else ())]


def verdicts(
    fills: Iterable[str],
    shapes: Iterable[tuple[int, ...]],
    dtype: torch.dtype,
    how: str,
    replicas: int,
) -> dict[str, str]:
    """Return the fills that differ from a plain tensor's, by name and shape."""
    import torch.distributed as dist

    if how.startswith("tensor parallel"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    else:
        mesh = mesh_of(dist.get_world_size(), replicas)
    found = {}
    for shape in shapes:
        for name in fills:
            plain = nn.Parameter(torch.full(shape, -3.0, dtype=dtype))
            expected = outcome(FILLS[name], plain)
            if isinstance(expected, Exception):
                continue  # not for this shape or dtype
            param = sharded(shape, dtype, how, mesh)
            got = outcome(FILLS[name], param)
            if isinstance(got, Exception):
                kind = "refused" if isinstance(got, FullshardError) else "ERROR"
                found[f"{name} {shape}"] = f"{kind} {type(got).__name__}: {str(got)[:200]}"
            elif not same(got, expected):
                equal = [torch.equal(a, b) for a, b in zip(got, expected, strict=False)]
                found[f"{name} {shape}"] = f"differs {equal}"
    return found


def no_grad(fill: Fill) -> Fill:
    def without(tensor: Tensor) -> object:
        with torch.no_grad():
            return fill(tensor)

    return without


def seeded(fill: Callable[..., object]) -> Fill:
    """Return a fill with a generator of its own, whose final state counts too."""

    def with_generator(tensor: Tensor) -> object:
        generator = torch.Generator().manual_seed(5)
        fill(tensor, generator=generator)
        return [generator.get_state()]

    return with_generator


def assign(*index: Any) -> Fill:
    return no_grad(lambda t: t.__setitem__(index if len(index) > 1 else index[0], 7.0))


INIT = nn.init
TORCH_NN_INIT: dict[str, Fill] = {
    "uniform_": INIT.uniform_,
    "normal_": INIT.normal_,
    "trunc_normal_": INIT.trunc_normal_,
    "trunc_normal_ rejects": lambda t: INIT.trunc_normal_(t, std=0.02, a=-0.04, b=0.04),
    "trunc_normal_ tail": lambda t: INIT.trunc_normal_(t, mean=0.0, std=1.0, a=1.5, b=3.0),
    "constant_": lambda t: INIT.constant_(t, 0.3),
    "ones_": INIT.ones_,
    "zeros_": INIT.zeros_,
    "eye_": INIT.eye_,
    "dirac_": INIT.dirac_,
    "dirac_ in groups": lambda t: INIT.dirac_(t, 2),
    "xavier_uniform_": INIT.xavier_uniform_,
    "xavier_normal_": INIT.xavier_normal_,
    "kaiming_uniform_": lambda t: INIT.kaiming_uniform_(t, a=5**0.5),
    "kaiming_normal_": INIT.kaiming_normal_,
    "orthogonal_": INIT.orthogonal_,
    "sparse_": lambda t: INIT.sparse_(t, 0.5),
    "normal_ generator": seeded(INIT.normal_),
    "trunc_normal_ generator": seeded(
        lambda t, generator: INIT.trunc_normal_(t, 0.0, 0.02, -0.04, 0.04, generator=generator)
    ),
    "orthogonal_ generator": seeded(INIT.orthogonal_),
    "kaiming_uniform_ generator": seeded(INIT.kaiming_uniform_),
}
DRAWS: dict[str, Fill] = {
    "cauchy_": no_grad(lambda t: t.cauchy_()),
    "log_normal_": no_grad(lambda t: t.log_normal_()),
    "geometric_": no_grad(lambda t: t.geometric_(0.3)),
    "exponential_": no_grad(lambda t: t.exponential_()),
    "bernoulli_": no_grad(lambda t: t.bernoulli_(0.4)),
    "bernoulli_ of tensor": no_grad(lambda t: t.bernoulli_(torch.full(t.shape, 0.4))),
    "random_": no_grad(lambda t: t.random_()),
    "random_ to": no_grad(lambda t: t.random_(9)),
    "random_ from": no_grad(lambda t: t.random_(-5, 9)),
    "rand_like": lambda t: [torch.rand_like(t)],
    "randn_like": lambda t: [torch.randn_like(t)],
    "rand_like dtype": lambda t: [torch.rand_like(t, dtype=torch.float64)],
    "randint_like": lambda t: [torch.randint_like(t, 9)],
    "randint_like low": lambda t: [torch.randint_like(t, 3, 9)],
    "bernoulli": no_grad(lambda t: [torch.bernoulli(t.zero_().add_(0.4))]),
    "multinomial": no_grad(lambda t: [torch.multinomial(t.zero_().add_(0.4), 2)]),
    "dropout": no_grad(lambda t: [nn.functional.dropout(t, 0.5)]),
    "add noise": no_grad(lambda t: t.add_(torch.randn_like(t), alpha=0.1)),
    "add drawn": no_grad(lambda t: t.normal_().add_(t.new_empty(t.shape).uniform_())),
}
VIEWS: dict[str, Fill] = {
    "last row": assign(-1),
    "first row": assign(0),
    "middle rows": assign(slice(1, 3)),
    "steps": assign(slice(None, None, 2)),
    "one": assign((2, 1)),
    "column": assign((slice(None), 1)),
    "all": assign(slice(None)),
    "dots": assign((..., 1)),
    "indices": assign(torch.tensor([0, 3])),
    "pairs": assign((torch.tensor([0, 3]), 1)),
    "mask": no_grad(lambda t: t.normal_().__setitem__(t > 0, 7.0)),
    "row of tensor": no_grad(lambda t: t.__setitem__(1, torch.arange(t[1].numel()).view_as(t[1]))),
    "fill_ row": no_grad(lambda t: t[3].fill_(0)),
    "data zero_": lambda t: t.data[3].zero_(),
    "detach zero_": lambda t: t.detach()[3].zero_(),
    "data normal_": lambda t: t.data.normal_(0.5, 0.1),
    "normal_ of rows": lambda t: INIT.normal_(t[:2]),
    "normal_ of other rows": lambda t: INIT.normal_(t[2:]),
    "normal_ of column": no_grad(lambda t: t[:, :1].normal_()),
    "xavier of halves": lambda t: [INIT.xavier_uniform_(one) for one in t.data.chunk(2)][:0],
    "normal_ of columns": lambda t: [INIT.normal_(one) for one in t.data.chunk(2, 1)][:0],
    "split": no_grad(
        lambda t: [s.fill_(n) for n, s in enumerate(t.split([1, t.shape[0] - 1]))][:0]
    ),
    "unbind": no_grad(lambda t: [s.fill_(n) for n, s in enumerate(t.unbind())][:0]),
    "diagonal": no_grad(lambda t: t.diagonal().fill_(4)),
    "scaled row": no_grad(lambda t: t.normal_()[2].mul_(0.5)),
    "scaled old view": no_grad(lambda t: (t[2], t.normal_())[0].mul_(0.5)),
    "cleared old view": no_grad(lambda t: (t[2], t.normal_())[0].zero_()),
    "nested views": no_grad(lambda t: t[1:][1][:1].fill_(4)),
    "transposed": no_grad(lambda t: t.transpose(0, 1)[1].fill_(4)),
    "transposed normal_": no_grad(lambda t: t.transpose(0, 1).normal_()),
    "column of t": no_grad(lambda t: t.transpose(0, 1)[:, 1].normal_()),
    "copy_ whole": no_grad(lambda t: t.copy_(torch.arange(t.numel()).view(t.shape))),
    "data copy_ whole": lambda t: t.data.copy_(torch.arange(t.numel()).view(t.shape)),
    "copy_ broadcast": no_grad(lambda t: t.copy_(torch.arange(t.shape[-1]))),
    "add_ rows": no_grad(lambda t: t[0].add_(t.normal_()[1])),
    "out": no_grad(lambda t: torch.add(t[0], 5, out=t[1])),
    "foreach": no_grad(lambda t: torch._foreach_mul_([t[0], t[2]], 2.0)),
    "read": no_grad(lambda t: [t.normal_()[2], t[1:3] * 2, t[0] + t[1], t[1].clone()]),
}
FILLS = TORCH_NN_INIT | DRAWS | VIEWS
SHAPES = [(5, 4), (6, 3, 3), (1, 5), (40,)]
EVEN_SHAPES = [(16, 8), (4, 4, 2, 2)]
FLATTENS_CUT_DIMS = TORCH >= (2, 12)
"""True from PyTorch 2.12: ``orthogonal_`` works if a dim after the first is sharded."""


@pytest.mark.parametrize("how", ["first dim", "last dim"])
@pytest.mark.parametrize(
    ("world", "replicas", "shapes"), [(2, 1, EVEN_SHAPES), (3, 1, SHAPES), (4, 2, SHAPES[:2])]
)
def test_fills_equal_those_of_plain_tensors(
    pool: RankPool, world: int, replicas: int, shapes: list[tuple[int, ...]], how: str
) -> None:
    for result in pool.run(world, verdicts, list(FILLS), shapes, torch.float32, how, replicas):
        if FLATTENS_CUT_DIMS:
            assert result == {}
        assert all("Attempted to flatten multiple dimensions" in one for one in result.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_fills_of_other_dtypes(pool: RankPool, dtype: torch.dtype) -> None:
    for result in pool.run(2, verdicts, list(FILLS), [(5, 4)], dtype, "last dim", 1):
        assert result == {}


@pytest.mark.parametrize("dim", [0, 1])
def test_fills_beside_tensor_parallelism(pool: RankPool, dim: int) -> None:
    how = f"tensor parallel {dim}"
    for result in pool.run(4, verdicts, list(FILLS), EVEN_SHAPES[:1], torch.float32, how, 1):
        assert result == {}


@pytest.mark.parametrize("how", ["element", "row", "tensor"])
def test_fills_of_ragged_tensors_are_equal_or_refused(pool: RankPool, how: str) -> None:
    refused = {"eye_", "dirac_", "dirac_ in groups", "orthogonal_", "orthogonal_ generator"}
    refused |= {"sparse_", "bernoulli", "multinomial", "add drawn"}
    for result in pool.run(3, verdicts, list(FILLS), SHAPES, torch.float32, how, 1):
        for name, verdict in result.items():
            assert verdict.startswith("refused RaggedOperationError"), (name, verdict)
            assert name.partition(" (")[0] in refused | set(VIEWS), (name, verdict)

"""Meshes of two dims: replicas (HSDP), and resharding to a smaller group."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fullshard
from fullshard import errors
from fullshard._torch import collectives as _collectives
from fullshard.comm.c10d import Transport
from fullshard.frontend.ownership import unit_of
from fullshard.tensors import RaggedShard
from tests.kit.parity import batches, check, compare, make, shard, train, vocab
from tests.ranks.models import GPT, fill, full_parameters, ids, refusal, shard_units
from tests.ranks.pool import RankPool, on_ranks
from tests.recording import recordings

PER_PARAM, RAGGED = fullshard.PerParameter(), fullshard.Ragged()
LAYOUTS = [PER_PARAM, RAGGED, fullshard.Ragged("row")]


def mesh_of(*shape: int) -> DeviceMesh:
    names = ("replicas", "shards")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def on_mesh(shape: tuple[int, ...], kind: str, reshard: Any, **options: Any) -> dict[str, Any]:
    """Return the largest differences of this rank's training from the unsharded model's."""
    return compare(kind, torch.float64, reshard, sync_always=True, mesh=mesh_of(*shape), **options)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("kind", ["gpt", "odd"])
def test_replicas_equal_the_unsharded_model(
    pool: RankPool, kind: str, reshard: bool | None, layout: Any
) -> None:
    check(pool.run(4, on_mesh, (2, 2), kind, reshard, layout=layout), 1e-12, 1e-12)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (3, 1), (1, 3), (4, 1)])
def test_equal_it_with_one_replica_or_one_shard(pool: RankPool, shape: tuple[int, int]) -> None:
    world = shape[0] * shape[1]
    check(pool.run(world, on_mesh, shape, "odd", True), 1e-12, 1e-12)


@on_ranks(4)
def test_parameters_are_placed_on_both_dims() -> None:
    model = nn.Linear(5, 3)
    mesh = mesh_of(2, 2)
    fullshard.fully_shard(model, mesh=mesh)
    ragged = nn.Linear(5, 3)
    fullshard.fully_shard(ragged, mesh=mesh, layout=RAGGED)
    model(torch.ones(2, 5)).sum().backward()
    shown = [model.weight, model.weight.grad, ragged.weight]
    assert all(isinstance(tensor, DTensor) and tensor.device_mesh is mesh for tensor in shown)
    param, grad, ragged = [tensor.placements for tensor in shown if isinstance(tensor, DTensor)]
    assert param == grad == (Replicate(), Shard(0))
    assert ragged[0] == Replicate()
    assert isinstance(ragged[1], RaggedShard)


class Branches(nn.Module):
    """A model that uses ``a`` and ``b``, two parameters of the same size, as the input says."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((3, 2), 2.0))
        self.b = nn.Parameter(torch.full((3, 2), 5.0))

    def forward(self, which: str) -> Tensor:
        total = torch.zeros((), requires_grad=True) * 1
        for name in which:
            total = total + getattr(self, name).sum() * (1 + dist.get_rank())
        return total


@on_ranks(4)
@pytest.mark.parametrize("layout", [PER_PARAM, RAGGED], ids=repr)
@pytest.mark.parametrize(
    ("microbatches", "expected"),
    [(["a", "b"], (1, 1)), (["a", "a"], (2, 0)), (["a", "", "ab"], (2, 1)), (["b", ""], (0, 1))],
)
def test_partial_gradients_stay_with_their_parameters(
    microbatches: list[str], expected: tuple[int, int], layout: Any
) -> None:
    """A partial gradient stays with its parameter; PyTorch adds by place in the buffer."""
    mean = sum(range(1, 5)) / 4
    model: Any = Branches()
    fullshard.fully_shard(model, mesh=mesh_of(2, 2), layout=layout)
    for number, which in enumerate(microbatches):
        model.set_requires_all_reduce(number == len(microbatches) - 1)
        model(which).backward()
        if number < len(microbatches) - 1:
            assert model.a.grad is None
            assert model.b.grad is None
    grads = [None if p.grad is None else p.grad.full_tensor() for p in (model.a, model.b)]
    for grad, times in zip(grads, expected, strict=True):
        if times == 0:
            assert grad is None
        else:
            assert grad is not None
            torch.testing.assert_close(grad, torch.full((3, 2), mean * times))


def skipped_in_the_last_pass() -> list[float]:
    """Skip a unit with a partial gradient in the last pass; return the gradients' sums."""
    model: Any = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor, names: str) -> Tensor:
            for name in names:
                x = self.parts[name](x)
            return x

    root: Any = Either()
    mesh = mesh_of(2, 2)
    shard_units(root, model.values(), mesh=mesh)
    x = torch.ones(1, 2) * (1 + dist.get_rank())
    root.set_requires_all_reduce(False)
    root(x, "ab").sum().backward()
    root.set_requires_all_reduce(True)
    root(x, "a").sum().backward()
    grads = [model[name].bias.grad for name in "ab"]
    assert all(grad is not None for grad in grads)
    return [grad.full_tensor().sum().item() for grad in grads]


def test_partial_gradients_of_a_unit_that_the_last_pass_skips(pool: RankPool) -> None:
    results = pool.run(4, skipped_in_the_last_pass)
    assert all(result == results[0] for result in results)
    assert results[0][1] == 2.0


@on_ranks(4)
def test_reset_forgets_partial_gradients() -> None:
    model: Any = Branches()
    fullshard.fully_shard(model, mesh=mesh_of(2, 2))
    model.set_requires_all_reduce(False)
    model("a").backward()
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    model("a").backward()
    grad: Any = model.a.grad
    assert grad.full_tensor().mean().item() == 2.5


@on_ranks(4)
def test_partial_gradients_add_up_in_the_dtype_of_reduction() -> None:
    """Partial gradients of 256, 1 and 1 are summed in the dtype of the reduction."""
    model: Any = nn.Linear(1, 4, bias=False)
    policy = fullshard.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    fullshard.fully_shard(model, mesh=mesh_of(2, 2), mp_policy=policy)
    for number, factor in enumerate((256.0, 1.0, 1.0)):
        model.set_requires_all_reduce(number == 2)
        model(torch.full((1, 1), factor)).sum().backward()
    assert model.weight.grad.full_tensor().max().item() == 258.0


def divided(shape: tuple[int, ...], factor: float, reduce_dtype: Any, put_off: bool) -> float:
    """Return the gradient if each rank's is 8, perhaps in two passes of 3 and 5."""
    model: Any = nn.Linear(1, 3, bias=False)
    policy = fullshard.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    fullshard.fully_shard(model, mesh=mesh_of(*shape), mp_policy=policy)
    model.set_gradient_divide_factor(factor)
    if put_off:
        model.set_requires_all_reduce(False)
        model(torch.full((1, 1), 3.0)).sum().backward()
        model.set_requires_all_reduce(True)
    model(torch.full((1, 1), 5.0 if put_off else 8.0)).sum().backward()
    grad: Tensor = model.weight.grad.full_tensor()
    assert grad.unique().numel() == 1
    return grad[0].item()


@pytest.mark.parametrize("put_off", [False, True])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (2,), (2, 1), (2, 2)])
def test_gradients_are_divided_once_by_the_factor(
    pool: RankPool, shape: tuple[int, ...], reduce_dtype: Any, put_off: bool
) -> None:
    """The factor divides once; PyTorch divides twice on one rank and in fp16."""
    world = math.prod(shape)
    results = pool.run(world, divided, shape, 2.0, reduce_dtype, put_off)
    assert results == [8.0 * world / 2] * world


# resharding to a smaller group


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("kind", ["gpt", "odd"])
def test_secondary_shards_equal_the_unsharded_model(pool: RankPool, kind: str, layout: Any) -> None:
    check(pool.run(4, on_mesh, (4,), kind, 2, layout=layout), 1e-12, 1e-12)


def last_dim(param: nn.Parameter) -> Shard:
    return Shard(param.dim() - 1)


def test_secondary_shards_of_what_is_cut_on_other_dims(pool: RankPool) -> None:
    """Secondary shards also work for other dims, where PyTorch fails in backward."""
    check(pool.run(4, on_mesh, (4,), "odd", 2, shard_placement_fn=last_dim), 1e-12, 1e-12)


@on_ranks(4)
def test_full_tensor_is_right_between_forward_and_backward() -> None:
    """The full tensor is right between forward and backward, even for uneven sizes.

    PyTorch puts uneven secondary shards together wrongly.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    expected = [param.detach().clone() for param in model.parameters()]
    for part in model:
        fullshard.fully_shard(part, mesh=mesh_of(4), reshard_after_forward=2)
    loss = model(torch.ones(1, 3)).sum()
    shown: Any = list(model.parameters())
    right = all(torch.equal(p.full_tensor(), e) for p, e in zip(shown, expected, strict=True))
    loss.backward()
    assert right and all(p.grad is not None for p in model.parameters())


@on_ranks(4)
def test_secondary_shards_are_never_stale() -> None:
    """Weights changed while secondary shards of the old ones are kept are used at once."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shard_units(model, model, mesh=mesh_of(4), reshard_after_forward=2)
    model(torch.ones(1, 4))  # no backward follows
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(1.0)
    first = model(torch.ones(1, 4)).sum().item()
    model(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    second = model(torch.ones(1, 4)).sum().item()
    assert (first == 84.0, second == 84.0) == (True, True)


def counts(shape: tuple[int, ...], reshard: Any, all_reduce: bool = True) -> list[dict[str, Any]]:
    """Return the collectives of a step by unit and kind."""
    with recordings() as made:
        model: Any = make("gpt", torch.float32)
        shard(model, reshard, partial(fullshard.fully_shard, mesh=mesh_of(*shape)))
    model.set_requires_all_reduce(all_reduce)
    tokens = ids(2, 8, vocab=vocab("gpt"), seed=dist.get_rank())
    for _ in range(2):
        for recording in made:
            recording.calls.clear()
        GPT.loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    full_parameters(model)
    return [dict(Counter(call.kind for call in recording.calls)) for recording in made]


def test_replicas_cost_one_all_reduce_a_unit_and_step(pool: RankPool) -> None:
    shards, replicas = {"all_gather": 2, "reduce_scatter": 1}, {"all_reduce": 1}
    root = {"all_gather": 1, "reduce_scatter": 1}
    for result in pool.run(4, counts, (2, 2), None):
        assert result == [shards, replicas] * 3 + [root, replicas]


def test_putting_it_off_costs_none(pool: RankPool) -> None:
    for result in pool.run(4, counts, (2, 2), True, False):
        assert result == [{"all_gather": 2, "reduce_scatter": 1}, {}] * 4


def test_backward_gathers_among_the_smaller_group(pool: RankPool) -> None:
    for result in pool.run(4, counts, (4,), 2):
        assert result == [{"all_gather": 1, "reduce_scatter": 1}, {"all_gather": 1}] * 4


@on_ranks(4)
def test_counts_agree_with_comm_debug_mode() -> None:
    """Our recordings count the collectives that PyTorch's CommDebugMode counts."""
    shape = (2, 2)
    with recordings(Transport.NATIVE) as made:
        model = make("gpt", torch.float32)
        shard(model, None, partial(fullshard.fully_shard, mesh=mesh_of(*shape)))
    tokens = ids(2, 8, vocab=vocab("gpt"), seed=dist.get_rank())
    GPT.loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()  # ranks compare units once
    for recording in made:
        recording.calls.clear()
    with CommDebugMode() as observer, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook")  # the observer's warning
        GPT.loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    ours = Counter(call.kind for recording in made for call in recording.calls)
    seen = {str(op).split(".")[-1]: times for op, times in observer.get_comm_counts().items()}
    seen = Counter(seen)
    assert ours == {"all_gather": 7, "reduce_scatter": 4, "all_reduce": 4}
    assert seen == {"_allgather_base_": 7, "_reduce_scatter_base_": 4, "allreduce_": 4}


# other ways to name a mesh


@on_ranks(4)
def test_meshes_from_groups_and_equal_but_distinct_ones() -> None:
    """A mesh may come from the user's groups, and each unit may have its own equal mesh."""
    rank = dist.get_rank()
    ranks = torch.arange(4).view(2, 2)
    columns = [dist.new_group(column.tolist()) for column in ranks.T]
    rows = [dist.new_group(row.tolist()) for row in ranks]
    groups = [columns[rank % 2], rows[rank // 2]]
    steps = batches("gpt", 4, 1)
    plain, model = make("gpt", torch.float64), make("gpt", torch.float64)
    expected = train(plain, steps, 0, 1)[1]

    def fully_shard(module: nn.Module, **options: Any) -> None:
        mesh = DeviceMesh.from_group(
            groups, "cpu", mesh=ranks, mesh_dim_names=("replicas", "shards")
        )
        fullshard.fully_shard(module, mesh=mesh, **options)

    shard(model, None, fully_shard)
    found = train(model, steps, rank, 4, sync_always=True)[1]
    tokens = ids(2, 8, vocab=vocab("gpt"))
    norms = []
    for one in (model, plain):
        GPT.loss(one(tokens[:, :-1]), tokens[:, 1:]).backward()
        norms.append(fullshard.optim.grad_norm(one.parameters()))
    assert torch.allclose(*norms, rtol=1e-12)  # norms combine gradients of all these meshes
    assert max((found[n] - expected[n]).abs().max().item() for n in expected) <= 1e-12


def replicated_only(policy: Any, reshard: Any) -> tuple[float, list[Any]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    steps = batches("odd", world, 1)
    expected = train(make("odd", torch.float64), steps, 0, 1)[1]
    model = make("odd", torch.float64)
    dims = fullshard.DataParallelMeshDims(replicate="shards")
    with recordings() as made:
        shard(
            model,
            reshard,
            partial(
                fullshard.fully_shard, mesh=mesh_of(world), dp_mesh_dims=dims, mp_policy=policy
            ),
        )
    found = train(model, steps, rank, world, sync_always=True)[1]
    placed = {placement for p in model.parameters() for placement in p.placements}  # type: ignore[union-attr]
    kinds = {call.kind for recording in made for call in recording.calls if recording.world > 1}
    difference = max((found[n] - expected[n]).abs().max().item() for n in expected)
    return difference, [placed, kinds]


@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.parametrize("world", [2, 3])
def test_replicas_alone_are_data_parallel_training(
    pool: RankPool, world: int, reshard: Any
) -> None:
    policy = fullshard.MixedPrecisionPolicy()
    for difference, (placed, kinds) in pool.run(world, replicated_only, policy, reshard):
        assert difference <= 1e-12
        assert placed == {Replicate()}
        assert kinds == {"all_reduce"}


def test_replicas_alone_with_casts(pool: RankPool) -> None:
    policy = fullshard.MixedPrecisionPolicy(torch.float32, reduce_dtype=torch.float64)
    for difference, (_, kinds) in pool.run(2, replicated_only, policy, True):
        assert 0 < difference < 1e-2
        assert kinds == {"all_reduce"}


# single parameters on other meshes


class Experts(nn.Module):
    """A mixture of experts; ``experts`` holds a matrix for each, and all are used."""

    def __init__(self, num_experts: int = 5, dim: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts)
        self.experts = nn.Parameter(torch.zeros(num_experts, dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        return torch.einsum("bd,edf,be->bf", x, self.experts.tanh(), weights) + x


class Mixture(nn.Module):
    def __init__(self, num_experts: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts(num_experts) for _ in range(2))
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train_mixture(model: nn.Module, rank: int, world: int) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(3):
        x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3).roll(step, 0)
        model(x.chunk(world)[rank]).square().mean().backward()
        norms.append(fullshard.optim.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return [*norms, *full_parameters(model).values()]


@on_ranks(4)
@pytest.mark.parametrize("torch_info", [False, True])
@pytest.mark.parametrize("layout", [PER_PARAM, RAGGED], ids=repr)
def test_experts_on_another_mesh(layout: Any, torch_info: bool) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    torch.manual_seed(0)
    reference = Mixture().double()
    model = Mixture().double()
    model.load_state_dict(reference.state_dict())
    expected = train_mixture(reference, 0, 1)
    dense, flat = mesh_of(2, 2), mesh_of(4)
    elsewhere = FSDPMeshInfo(flat, shard_mesh_dim=0) if torch_info else flat

    def place(param: nn.Parameter) -> Any:
        return fullshard.ShardPlacementResult(None, elsewhere) if param.dim() == 3 else None

    for block in model.blocks:
        fullshard.fully_shard(block, mesh=dense, shard_placement_fn=place, layout=layout)
    fullshard.fully_shard(model, mesh=dense, layout=layout)
    found = train_mixture(model, dist.get_rank(), 4)
    assert model.blocks[0].experts.device_mesh == flat
    assert model.blocks[0].router.weight.device_mesh == dense
    found = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    assert found <= 1e-12


class ParallelExperts(Experts):
    """Experts of which a rank holds some, and runs them for the tokens of all ranks in "ep"."""

    def forward(self, x: Tensor) -> Tensor:
        experts: Any = self.experts
        ep = experts.device_mesh
        weights = self.router(x).softmax(-1)
        tokens, all_weights = gathered(x, ep), gathered(weights, ep)
        mine = all_weights.chunk(ep.size(), 1)[ep.get_local_rank()]
        outputs = torch.einsum("bd,edf,be->bf", tokens, experts.to_local().tanh(), mine)
        summed = DTensor.from_local(outputs, ep, [Partial()]).redistribute(placements=[Shard(0)])
        return summed.to_local() + x


def gathered(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather the rows of all ranks; each rank's gradient is a term of the sum."""
    whole = DTensor.from_local(x, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])


@on_ranks(4)
@pytest.mark.parametrize("layout", [PER_PARAM, RAGGED], ids=repr)
def test_expert_parallel_parameters(layout: Any) -> None:
    """Experts are sharded over "ep", then "edp"; other parameters over all ranks."""
    torch.manual_seed(0)
    reference = Mixture(num_experts=4).double()
    model = Mixture(num_experts=4).double()
    model.load_state_dict(reference.state_dict())
    expected = train_mixture(reference, 0, 1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    everyone = mesh._flatten("dp")

    def place(param: nn.Parameter) -> Any:
        return fullshard.ShardPlacementResult(None, mesh["edp"]) if param.dim() == 3 else None

    for block in model.blocks:
        block.__class__ = ParallelExperts
        block.experts = nn.Parameter(
            distribute_tensor(block.experts.detach(), mesh["ep"], [Shard(0)])
        )
        fullshard.fully_shard(block, mesh=everyone, shard_placement_fn=place, layout=layout)
        block.set_gradient_divide_factor(4)  # experts are reduced over two ranks only
    fullshard.fully_shard(model, mesh=everyone, layout=layout)
    found = train_mixture(model, dist.get_rank(), 4)
    found = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    assert found <= 1e-12


# tied across units


class TiedEnds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(tokens))))


@on_ranks(2, 3)
@pytest.mark.parametrize("layout", [PER_PARAM, RAGGED], ids=repr)
@pytest.mark.parametrize("ignoring", [("head",), ("embed", "head")], ids="-".join)
def test_a_tied_parameter_that_inner_calls_ignore_is_the_outer_ones(
    layout: Any, ignoring: tuple[str, ...]
) -> None:
    """A tied weight that one or both ends ignore belongs to the root around them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    steps = batches("odd", world, 1)
    expected = train(fill(TiedEnds().double()), steps, 0, 1)[1]
    model: Any = fill(TiedEnds().double())
    for end in ignoring:
        part = model.get_submodule(end)
        fullshard.fully_shard(part, ignored_params={model.head.weight}, layout=layout)
    fullshard.fully_shard(model.body, layout=layout)
    fullshard.fully_shard(model, layout=layout)
    assert model.head.weight is model.embed.weight
    found = train(model, steps, rank, world, sync_always=True)[1]
    assert model.head.weight is model.embed.weight
    assert isinstance(model.head.weight, DTensor)
    assert max((found[n] - expected[n]).abs().max().item() for n in expected) <= 1e-12


@on_ranks(2)
def test_a_tied_parameter_that_all_calls_ignore_stays_as_it_was() -> None:
    model = TiedEnds()
    weight = model.head.weight
    for module in (model.embed, model.head, model):
        fullshard.fully_shard(module, ignored_params={weight})
    assert model.head.weight is weight is model.embed.weight


@on_ranks(4)
@pytest.mark.parametrize("kind", ["gradient_sync", "all_reduce"])
def test_gradients_that_wait_survive_a_cast(kind: str) -> None:
    """Gradients pending at a cast add up with those of the pass after it."""
    model: Any = nn.Linear(1, 3, bias=False)
    fullshard.fully_shard(model, mesh=mesh_of(2, 2))
    set_waiting = getattr(model, f"set_requires_{kind}")
    set_waiting(False)
    model(torch.full((1, 1), 1.0)).sum().backward()
    model(torch.full((1, 1), 2.0)).sum().backward()
    model.double()
    set_waiting(True)
    model(torch.full((1, 1), 4.0, dtype=torch.float64)).sum().backward()
    grad: Tensor = model.weight.grad.full_tensor()
    assert grad.dtype is torch.float64
    assert grad[0].item() == 7.0


def secondary_timeout() -> float:
    mesh = mesh_of(4)
    model: Any = nn.Linear(4, 4)
    fullshard.fully_shard(model, mesh=mesh, reshard_after_forward=2)
    unit = unit_of(model)
    assert unit is not None
    secondary = unit.buckets[0].spec.secondary
    assert secondary is not None and secondary.group is not None
    ours = _collectives.timeout_of(secondary.group, "cpu")
    assert ours == _collectives.timeout_of(mesh.get_group(), "cpu")
    return ours.total_seconds()


def test_smaller_groups_wait_as_long_as_the_mesh(pool: RankPool) -> None:
    assert len(set(pool.run(4, secondary_timeout))) == 1


def outside_of_the_mesh() -> str:
    """Shard on ranks 0 and 1; return the error on ranks outside of the mesh."""
    mesh = DeviceMesh("cpu", [0, 1])
    model = nn.Linear(4, 4)
    if dist.get_rank() < 2:
        fullshard.fully_shard(model, mesh=mesh)
        return "not in"
    return refusal(errors.ConfigError, fullshard.fully_shard, model, mesh=mesh)


def test_ranks_outside_of_the_mesh_are_told(pool: RankPool) -> None:
    assert all("not in" in message for message in pool.run(4, outside_of_the_mesh))


@on_ranks(2)
def test_a_tie_across_units_is_explained_at_the_call() -> None:
    """A tie across units is refused at the call; PyTorch notices in the first forward."""
    model = TiedEnds()
    fullshard.fully_shard(model.head)
    before = dict(model.named_parameters())
    with pytest.raises(errors.ConfigError) as caught:
        fullshard.fully_shard(model)
    assert dict(model.named_parameters()) == before
    message = str(caught.value)
    assert "embed.weight" in message
    assert "ignored_params" in message

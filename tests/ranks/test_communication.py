"""Communication options of units, changed after ``fully_shard``, before and after a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import comm, errors
from fullshard.frontend.ownership import unit_of
from tests.kit.communication import Gather, Reduce
from tests.kit.parity import batches, make, shard, train, vocab
from tests.ranks.models import ids
from tests.ranks.pool import RankPool, on_ranks

Change = Callable[[Any], object]


def with_custom_comms(model: Any) -> None:
    for block in model.blocks:
        block.set_custom_all_gather(Gather(asynchronous=True))
        block.set_custom_reduce_scatter(Reduce(asynchronous=False))
    model.set_custom_all_gather(Gather(asynchronous=False))


def by_sums(model: Any) -> None:
    for module in (*model.blocks, model):
        module.set_force_sum_reduction_for_comms(True)


def with_separate_groups(model: Any) -> None:
    model.set_separate_reduce_scatter_group()


def with_separate_groups_and_back(model: Any) -> None:
    model.set_separate_reduce_scatter_group()
    model.set_separate_reduce_scatter_group(False)


def with_custom_comms_in_separate_groups(model: Any) -> None:
    """Set custom collectives, then separate groups: collectives and reduction by sums stay."""
    with_custom_comms(model)
    by_sums(model)
    unit = unit_of(model.blocks[0])
    assert unit is not None
    (bucket,) = unit.buckets
    for enable in (True, False, True):
        model.set_separate_reduce_scatter_group(enable)
        wire: Any = bucket.spec.reducing
        assert isinstance(wire, comm.Custom) and wire.reduce is not None
        if wire.group is not None:
            assert (wire.group is bucket.spec.comm.group) is not enable
            inner = getattr(wire.inner, "inner", wire.inner)  # the lanes checker wraps it
            assert not inner._choice.averages


def with_one_reduction_at_a_time(model: Any) -> None:
    model.set_reduce_scatter_max_input_buffers(1)


def with_many_reductions_at_a_time(model: Any) -> None:
    model.set_reduce_scatter_max_input_buffers(9)


def sharing_with_another(model: Any) -> None:
    other = fullshard.fully_shard(nn.Linear(2, 2))
    fullshard.share_comm_ctx([other, model])
    engines = [unit.engine for unit in map(unit_of, (other, model)) if unit is not None]
    assert len({id(engine.lanes) for engine in engines if engine is not None}) == 1


CHANGES: list[Change] = [
    with_custom_comms,
    by_sums,
    with_separate_groups,
    with_separate_groups_and_back,
    with_custom_comms_in_separate_groups,
    with_one_reduction_at_a_time,
    with_many_reductions_at_a_time,
    sharing_with_another,
]


def compare(change: Change, late: bool, mesh: tuple[int, ...], layout: Any) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    steps = batches("gpt", world, 2)
    expected = train(make("gpt", torch.float64), steps, 0, 1)[1]
    model = make("gpt", torch.float64)
    names = ("replicas", "shards")[-len(mesh) :]
    device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)

    def fully_shard(module: nn.Module, **options: Any) -> None:
        fullshard.fully_shard(module, mesh=device_mesh, layout=layout, **options)

    shard(model, None, fully_shard)
    if late:
        tokens = ids(2, 8, vocab=vocab("gpt"))
        model(tokens[:, :-1]).sum().backward()
        model.zero_grad()
    change(model)
    found = train(model, steps, rank, world)[1]
    return max((found[n] - expected[n]).abs().max().item() for n in expected)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_result_is_the_same(pool: RankPool, change: Change, late: bool) -> None:
    """Changed communication trains the same; PyTorch ignores some changes and fails on others."""
    results = pool.run(2, compare, change, late, (2,), fullshard.PerParameter())
    assert max(results) <= 1e-12


@pytest.mark.parametrize("change", CHANGES[:3], ids=lambda change: change.__name__)
def test_the_result_is_the_same_with_replicas(pool: RankPool, change: Change) -> None:
    assert max(pool.run(4, compare, change, True, (2, 2), fullshard.Ragged())) <= 1e-12


@on_ranks(2)
def test_custom_comms_are_called() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    gathers, reduces = [], []
    for part in model:
        fullshard.fully_shard(part)
        gathers.append(Gather(asynchronous=True))
        reduces.append(Reduce(asynchronous=True))
        part.set_custom_all_gather(gathers[-1])
        part.set_custom_reduce_scatter(reduces[-1])
    fullshard.fully_shard(model)
    model(torch.ones(1, 3)).sum().backward()
    result = [(one.called, one.allocated) for one in (*gathers, *reduces)]
    assert result == [(2, 2), (2, 2), (1, 2), (1, 2)]


@on_ranks(2)
def test_one_more_group_for_all_reductions() -> None:
    model: Any = make("gpt", torch.float32)
    shard(model, None)
    model.set_separate_reduce_scatter_group()
    units = [unit for unit in map(unit_of, (*model.blocks, model)) if unit is not None]
    specs = [bucket.spec for unit in units for bucket in unit.buckets]
    gathering = {spec.comm.group for spec in specs}
    reducing = {spec.reducing.group for spec in specs}
    assert (len(reducing), bool(gathering & reducing)) == (1, False)


# all-reduce hooks


@on_ranks(4)
@pytest.mark.parametrize("layout", [fullshard.PerParameter(), fullshard.Ragged()], ids=repr)
def test_a_hook_may_reduce_over_further_ranks(layout: Any) -> None:
    """Parameters are sharded over pairs of ranks, and the hook averages over the pairs."""
    rank = dist.get_rank()
    steps = batches("odd", 4, 1)
    expected = train(make("odd", torch.float64), steps, 0, 1)[1]
    model: Any = make("odd", torch.float64)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))

    def average(flat: Tensor) -> None:
        dist.all_reduce(flat, group=mesh["replicas"].get_group())
        flat.div_(2)

    def fully_shard(module: nn.Module, **options: Any) -> None:
        fullshard.fully_shard(module, mesh=mesh["shards"], layout=layout, **options)
        module.set_all_reduce_hook(average)  # type: ignore[operator]

    shard(model, None, fully_shard)
    found = train(model, steps, rank, 4, sync_always=True)[1]
    assert max((found[n] - expected[n]).abs().max().item() for n in expected) <= 1e-12


@on_ranks(2)
@pytest.mark.parametrize("fill", [False, True])
def test_zeros_for_unused_parameters(fill: bool) -> None:
    model: Any = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            return self.parts["used"](x)

    half: Any = fullshard.fully_shard(Half())
    half.set_reduce_scatter_unused_params(fill)
    half(torch.ones(1, 2)).sum().backward()
    grad = model["unused"].weight.grad
    assert [grad is None, grad is not None and not grad.full_tensor().any()] == [not fill, fill]


# refusals


@on_ranks(2)
def test_refusals_say_what_was_given() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    whole = mesh._flatten("whole")

    def place(param: nn.Parameter) -> Any:
        return fullshard.ShardPlacementResult(None, mesh["a"] if param.dim() == 1 else whole)

    model: Any = nn.Linear(2, 2)
    fullshard.fully_shard(model, mesh=whole, shard_placement_fn=place)
    columns = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    replicated: Any = fullshard.fully_shard(nn.Linear(2, 2), mesh=columns)
    cases: list[tuple[type[Exception], Callable[[], object]]] = [
        (ValueError, lambda: model.set_custom_all_gather(Gather(asynchronous=True))),
        (ValueError, lambda: model.set_custom_reduce_scatter(Reduce(asynchronous=True))),
        (ValueError, lambda: model.set_all_reduce_hook(print)),
        (ValueError, lambda: model.set_gradient_divide_factor(0)),
        (ValueError, lambda: model.set_reduce_scatter_max_input_buffers(0)),
        (TypeError, lambda: model.set_reduce_scatter_max_input_buffers(True)),
        (ValueError, lambda: fullshard.share_comm_ctx([nn.Linear(1, 1)])),
        (ValueError, lambda: replicated.set_all_reduce_hook(print, stream=object())),
        (NotImplementedError, lambda: model.set_symm_mem_for_comm()),
    ]
    messages = []
    for builtin, call in cases:
        with pytest.raises(errors.FullshardError) as caught:
            call()
        assert isinstance(caught.value, builtin)
        messages.append(str(caught.value))
    fullshard.share_comm_ctx([])
    assert all(len(message) > 40 for message in messages)


@on_ranks(2)
def test_wires_change_between_steps_only() -> None:
    model: Any = fullshard.fully_shard(nn.Sequential(nn.Linear(2, 2)))
    model[0].register_forward_hook(lambda *_: model.set_separate_reduce_scatter_group())
    with pytest.raises(errors.ProtocolError):
        model(torch.ones(1, 2))


def test_the_custom_wire_without_a_group_is_not_asked() -> None:
    gather = Gather(asynchronous=True)
    custom = comm.Custom(comm.SingleRank(), gather=gather)
    source = torch.ones(3)
    output = torch.zeros(3)
    custom.all_gather([output], [source]).wait()
    assert torch.equal(output, source)
    assert gather.called == 0


class Kept(Gather):
    """A gather that reuses its memory."""

    def __init__(self) -> None:
        super().__init__(asynchronous=True)
        self.memory = torch.zeros(1 << 20)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert dtype == torch.float32
        return self.memory[: size[0]]


@on_ranks(2)
def test_a_custom_gather_may_keep_its_memory() -> None:
    """A custom gather may reuse its memory for two tensors at once, as large parameters need."""
    group = dist.group.WORLD
    assert group is not None
    gather = Kept()
    custom = comm.Custom(comm.C10d(group, "cpu"), gather=gather)
    sources = [torch.full((number + 2,), float(10 * dist.get_rank() + number)) for number in (0, 1)]
    outputs = [source.new_zeros(2 * source.numel()) for source in sources]
    custom.all_gather(outputs, sources).wait()
    for number, output in enumerate(outputs):
        expected = [float(10 * rank + number) for rank in (0, 1) for _ in range(number + 2)]
        assert output.tolist() == expected
    assert gather.called == 1


@on_ranks(2)
def test_a_custom_reduction_divides_before_it_rounds() -> None:
    """The sum of both ranks is more than fp16 can hold; the mean is not."""
    policy = fullshard.MixedPrecisionPolicy(reduce_dtype=torch.float32)
    model: Any = nn.Linear(1, 2, bias=False).half()
    fullshard.fully_shard(model, mp_policy=policy)
    model.set_custom_reduce_scatter(Reduce(asynchronous=False))
    model(torch.full((1, 1), 40_000.0, dtype=torch.float16)).sum().backward()
    assert (model.weight.grad.full_tensor() == 40_000.0).all()


@on_ranks(3)
def test_a_custom_reduction_divides_in_the_dtype_of_wider_gradients() -> None:
    policy = fullshard.MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model: Any = nn.Linear(1, 3, bias=False)
    fullshard.fully_shard(model, mp_policy=policy)
    model.set_custom_reduce_scatter(Reduce(asynchronous=False))
    model(torch.full((1, 1), float(dist.get_rank() == 0))).sum().backward()
    assert (model.weight.grad.full_tensor() == 1 / torch.tensor(3.0)).all()

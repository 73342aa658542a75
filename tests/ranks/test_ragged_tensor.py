"""RaggedTensor: attributes, operations, refusals, and state dicts."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import swa_utils

from fullshard import PerParameter, Ragged, RaggedTensor, fully_shard
from fullshard.errors import RaggedOperationError
from tests.ranks.models import full_parameters, shared_folder
from tests.ranks.net import apart, batch, make, optimizer_of, shard, step, train_both
from tests.ranks.pool import RankPool, on_ranks
from tests.versions import asks_subclasses

granularities = pytest.mark.parametrize("granularity", ["element", "row", 5, "tensor"])


def ragged(granularity: Any = "element", **options: Any) -> nn.Module:
    return shard(make(), layout=Ragged(granularity), **options)


@on_ranks(1, 2, 3)
@granularities
def test_it_shows_the_whole_tensor_and_holds_an_interval(world: int, granularity: Any) -> None:
    plain, model = make(), ragged(granularity)
    world, rank = dist.get_world_size(), dist.get_rank()
    for name, param in model.named_parameters():
        want = plain.get_parameter(name)
        assert isinstance(param, nn.Parameter)
        assert isinstance(param, RaggedTensor)
        assert (param.shape, param.stride(), param.dtype) == (want.shape, want.stride(), want.dtype)
        held = param.interval
        assert torch.equal(param.to_local(), want.detach().flatten()[held.start : held.stop])
        (cut,) = param.placements
        intervals = [cut.interval(r) for r in range(world)]
        assert intervals[rank] == held
        assert intervals[0].start == 0
        assert intervals[-1].stop == want.numel()
        assert all(a.stop == b.start for a, b in itertools.pairwise(intervals))
        assert torch.equal(param.full_tensor(), want)
        replicated = param.redistribute(placements=[Replicate()])
        assert type(replicated) is DTensor
        assert torch.equal(replicated.to_local(), want)
        assert torch.equal(param.redistribute(placements=[Shard(0)]).full_tensor(), want)
        assert f"{held.start} to {held.stop}" in repr(param)


def set_where(x: Any, y: Any) -> Any:
    result = x.clone()
    result[x > y] = 3.0
    return result


@on_ranks(1, 2, 3)
def test_pointwise_operations_run_on_intervals() -> None:
    """Pointwise operations give the same result as on the full tensor."""
    x = ragged().blocks[1].weight.detach()
    y = x * 2 + 1
    a, b = x.full_tensor(), y.full_tensor()
    cases: list[Callable[[Any, Any], Any]] = [
        lambda x, y: x + y,
        lambda x, y: x.add(y, alpha=3),
        lambda x, y: x * torch.tensor(3.0),
        lambda x, y: torch.where(x > y, x, y),
        lambda x, y: torch.lerp(x, y, 0.25),
        lambda x, y: x.addcdiv(y, y, value=0.5),
        lambda x, y: x.masked_fill(x > 0, 0.0),
        lambda x, y: x.masked_fill(x > y, torch.tensor(3.0)),
        lambda x, y: x.clone().masked_fill_(x > 0, 0.0),
        lambda x, y: x.clone().masked_fill_(x > y, torch.tensor(3.0)),
        set_where,
        lambda x, y: x.clone().copy_(y),
        lambda x, y: x.clone().mul_(y).sqrt_(),
        lambda x, y: x.to(torch.bfloat16).float(),
        lambda x, y: torch.zeros_like(x).fill_(3.0),
        lambda x, y: torch.full_like(x, 2.0, dtype=torch.int32),
        lambda x, y: x.isnan() | (x == y),
        lambda x, y: x.view(x.shape),
        lambda x, y: torch._foreach_add([x, y], [y, x])[1],
        lambda x, y: torch.maximum(x, y, out=torch.empty_like(x)),
    ]
    for number, case in enumerate(cases):
        got, want = case(x, y), case(a, b)
        assert isinstance(got, RaggedTensor), number
        assert got.dtype == want.dtype, number
        assert torch.equal(got.full_tensor(), want) or want.isnan().any(), number


@on_ranks(1, 2, 3)
def test_norms_and_sums_are_those_of_the_whole_tensor() -> None:
    for param in ragged().parameters():
        x, a = param.detach(), param.full_tensor().detach()
        for order in (1, 2, 3.0, float("inf")):
            for norm in (torch.linalg.vector_norm, torch.norm):
                torch.testing.assert_close(norm(x, order), norm(a, order))
            torch.testing.assert_close(
                torch._foreach_norm([x, x * 2], order)[1], torch.linalg.vector_norm(a * 2, order)
            )
        torch.testing.assert_close(x.sum(), a.sum())
        torch.testing.assert_close(x.mean(), a.mean())
        assert x.max() == a.max()
        assert x.min() == a.min()
        assert bool((x > 0).any()) == bool((a > 0).any())
        assert bool((x > 0).all()) == bool((a > 0).all())
        assert torch.equal(x, x.clone())
        other = x.clone()
        if x.interval.length and dist.get_rank() == dist.get_world_size() - 1:
            other.to_local()[-1] += 1
        differs = (
            dist.get_world_size() > 1
            and not x.placements[0].interval(dist.get_world_size() - 1).length
        )
        assert torch.equal(x, other) == differs


HALVES = (torch.float16, torch.bfloat16)


REDUCTIONS: list[Callable[[Tensor], Any]] = [
    lambda x: x.mean(),
    lambda x: x.sum(),
    lambda x: x.sum(dtype=torch.float32),
    lambda x: x.mean(dtype=torch.float32),
    lambda x: torch.linalg.vector_norm(x),
    lambda x: x.norm(1),
    lambda x: torch._foreach_norm([x])[0],
    lambda x: x.max(),
    lambda x: x.min(),
]


@on_ranks(2)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_reductions_of_half_dtypes_are_as_wide_as_those_of_torch(dtype: torch.dtype) -> None:
    """Large sums of small values overflow, or stop growing, if they are added in a half dtype."""
    plain = nn.Linear(400, 400, dtype=dtype)
    for fill in (1.0, -3.0):
        nn.init.constant_(plain.weight, fill)
        x: Any = fully_shard(copy.deepcopy(plain), layout=Ragged()).weight.detach()
        a = plain.weight.detach()
        for reduce in REDUCTIONS:
            torch.testing.assert_close(reduce(x), reduce(a), rtol=0, atol=0)


REFUSED: list[Callable[[Tensor], Any]] = [
    lambda x: x @ x,
    lambda x: x[0],
    lambda x: x[0, 1],
    lambda x: x.t(),
    lambda x: x.view(-1),
    lambda x: x.sum(dim=0),
    lambda x: x.norm(dim=1),
    lambda x: x + torch.ones(6, 6),
    lambda x: x + torch.ones(6),
    lambda x: torch.cat([x, x]),
    lambda x: torch.linalg.svd(x),
]


@on_ranks(2)
def test_what_needs_rows_or_columns_is_refused() -> None:
    x = ragged().blocks[0].weight.detach()
    messages = []
    for case in REFUSED:
        with pytest.raises(RaggedOperationError) as caught:
            case(x)
        messages.append(str(caught.value))
    with pytest.raises(RaggedOperationError, match="cut into the same intervals"):
        x + ragged("tensor").head.weight.detach()
    assert len(messages) == len(REFUSED)
    assert all("(6, 6)" in m or "Call full_tensor()" in m for m in messages)


@on_ranks(2)
@pytest.mark.parametrize("name", ["Adafactor", "Muon", "LBFGS"])
def test_optimizers_of_matrices_are_refused_and_told_what_to_use(name: str) -> None:
    model = ragged()
    params = [p for p in model.parameters() if p.dim() == 2]
    optimizer = getattr(torch.optim, name)(params, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch()).square().mean()
        loss.backward()
        return loss

    with pytest.raises(RaggedOperationError) as caught:
        optimizer.step(closure)
    message = str(caught.value)
    assert "PerParameter()" in message


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_torch_clips_and_scales_its_gradients(norm_type: float, scaler: bool) -> None:
    norms = []

    def script(model: nn.Module) -> None:
        optimizer = optimizer_of(model)
        scale = torch.amp.GradScaler("cpu", enabled=scaler, init_scale=8.0)
        for number in range(3):
            scale.scale(model(batch(number)).square().mean()).backward()
            scale.unscale_(optimizer)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-2, norm_type))
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()

    difference = train_both(script, layout=Ragged())
    norm = max(abs(a.item() - b.item()) for a, b in zip(norms[:3], norms[3:], strict=True))
    assert difference <= 1e-12
    assert norm <= 1e-12


@on_ranks(1, 2, 3)
def test_a_whole_tensor_with_the_placement_of_an_interval_is_cut() -> None:
    """A copy cuts a full tensor that a program unaware of intervals has placed as an interval."""
    model = ragged("element")
    for param in model.parameters():
        want = torch.arange(param.numel(), dtype=param.dtype).view(param.shape)
        made = DTensor.from_local(
            want, param.device_mesh, param.placements, shape=param.shape, stride=want.stride()
        )
        with torch.no_grad():
            param.copy_(made)
        assert torch.equal(param.full_tensor(), want)


@on_ranks(1, 2, 3)
def test_it_can_be_copied_pickled_and_averaged() -> None:
    model = ragged()
    model(batch()).sum().backward()
    param = model.head.weight
    for value in (param, param.detach(), param.grad):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        saved_nbytes = buffer.tell()
        assert saved_nbytes < 8 * model.blocks[0].weight.numel() + 4000
        buffer.seek(0)
        for one in (
            copy.deepcopy(value),
            pickle.loads(pickle.dumps(value)),
            torch.load(buffer, weights_only=False),
        ):
            assert isinstance(one, RaggedTensor)
            assert isinstance(one, nn.Parameter) == isinstance(value, nn.Parameter)
            assert one.requires_grad == value.requires_grad
            assert torch.equal(one, value)
            assert one.to_local().numel() == 0 or (
                one.to_local().data_ptr() != value.to_local().data_ptr()
            )
    averaged = swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    assert apart(averaged.module, model) == 0.0


@asks_subclasses
@on_ranks(1, 2, 3)
def test_whole_and_local_tensors_are_differentiable() -> None:
    model, plain = ragged(), make()
    for (_, param), want in zip(model.named_parameters(), plain.parameters(), strict=True):
        weights = torch.arange(want.numel(), dtype=want.dtype).view(want.shape)
        (param.full_tensor() * weights).sum().backward()
        (want * weights).sum().backward()
        assert isinstance(param.grad, RaggedTensor)
        assert torch.equal(param.grad.full_tensor(), want.grad)
        param.grad = None
        (param.to_local() * 3).sum().backward()
        assert torch.equal(param.grad.full_tensor(), torch.full_like(want, 3.0))


@on_ranks(1, 2, 3)
def test_a_model_made_on_the_meta_device_is_filled_loaded_and_cast() -> None:
    """A model made on meta loads a full state dict, and another takes its shards by assignment."""
    plain = make()
    with torch.device("meta"):
        model = make()
    shard(model, layout=Ragged("row"))
    model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    assert all(isinstance(p, RaggedTensor) for p in model.parameters())
    for one in (plain, model):
        step(one, optimizer_of(one))
    assert apart(model, plain) <= 1e-12
    other = ragged("row")
    state = {n: v.detach().clone() for n, v in model.state_dict().items()}
    other.load_state_dict(state, assign=True)
    other(batch())
    assert apart(other, plain) <= 1e-12
    for one in (plain, model):
        one.to(torch.float32)
        step(one, optimizer_of(one))
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert apart(model, plain) <= 1e-6


LAYOUTS = {
    "per parameter": PerParameter(),
    "element": Ragged(),
    "row": Ragged("row"),
    "tensor": Ragged("tensor"),
}


def through_a_checkpoint(source: str, target: str) -> float:
    folder = shared_folder()
    model, fresh = (shard(make(), layout=LAYOUTS[name]) for name in (source, target))
    optimizer, its_optimizer = optimizer_of(model), optimizer_of(fresh)
    for number in range(2):
        step(model, optimizer, number)
    states = dcp_state.get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=folder)
    with torch.no_grad():
        for param in fresh.parameters():
            param.zero_()
    names = ("model", "optimizer")
    into = dict(zip(names, dcp_state.get_state_dict(fresh, its_optimizer), strict=True))
    dcp.load(into, checkpoint_id=folder)
    dcp_state.set_state_dict(
        fresh, its_optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"]
    )
    for one, its in ((model, optimizer), (fresh, its_optimizer)):
        step(one, its, 7)
    return apart(fresh, model)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_checkpoints_go_from_any_layout_to_any_other(
    pool: RankPool, world: int, source: str, target: str
) -> None:
    if "per parameter" in (source, target) or source != target:
        apart = pool.run(world, through_a_checkpoint, source, target)
        assert max(apart) <= (0 if source == target else 1e-12)


@on_ranks(1, 2, 3)
def test_torch_makes_full_state_dicts_of_it() -> None:
    options = dcp_state.StateDictOptions(full_state_dict=True)
    model = ragged()
    optimizer = optimizer_of(model)
    step(model, optimizer)
    whole, moments = dcp_state.get_state_dict(model, optimizer, options=options)
    expected = full_parameters(model)
    shapes = {n: m["exp_avg"].shape for n, m in moments["state"].items()}
    assert shapes == {n: p.shape for n, p in expected.items()}
    assert all(type(v) is Tensor and torch.equal(v, expected[n]) for n, v in whole.items())

"""Parameters frozen and unfrozen after sharding: communication, and kept gradients."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fullshard
from fullshard import CPUOffloadPolicy, FullyShardedDataParallel, PerParameter, Ragged
from fullshard.engine.reduce_input import Reduced
from fullshard.errors import ProtocolError
from fullshard.optim import ShardedOptimizer
from fullshard.wrap import ModuleWrapPolicy
from tests.ranks.models import fill, noise, shard_units
from tests.ranks.pool import RankPool, on_ranks
from tests.recording import recordings

EXACT = 1e-12
WIDTH, RANK, NUM_BLOCKS = 32, 2, 2
ADAPTERS = 2 * WIDTH * RANK  # elements of a block's adapters


class Adapted(nn.Module):
    """A layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, RANK, bias=False)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(RANK, WIDTH, bias=False)
        self.narrow = nn.Linear(WIDTH, 3)  # 2 ranks shard it unevenly

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.layer(x)) + self.b(self.a(x))
        return x + self.narrow(x).sum(-1, keepdim=True)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Adapted() for _ in range(NUM_BLOCKS)))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(x))
        return out


def make() -> Tower:
    return fill(Tower().double(), scale=0.3)


def shard(model: Tower, fully_shard: Any = fullshard.fully_shard, **options: Any) -> Any:
    return shard_units(model, model.blocks, by=fully_shard, **options)


def train_only(model: nn.Module, *parts: str) -> None:
    """Freeze all parameters except those with one of ``parts`` in their names."""
    for name, param in model.named_parameters():
        param.requires_grad_(any(part in name for part in parts))


def batch(number: int = 0) -> Tensor:
    return noise(4, WIDTH, seed=70 + number, dtype=torch.float64)


def backward(model: Any, number: int = 0) -> None:
    model(batch(number)).square().sum().backward()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_grads(model: nn.Module, plain: nn.Module) -> None:
    theirs = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        expected = theirs[name].grad
        assert (param.grad is None) == (expected is None), name
        if param.grad is not None:
            assert (whole(param.grad) - expected).abs().max() <= EXACT, name


# communication


class Counts:
    """A reduce-scatter that counts its input and reduces nothing."""

    def __init__(self) -> None:
        self.sent = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: Any = None
    ) -> None:
        self.sent += input_tensor.numel()
        output_tensor.zero_()


def sent_by_pytorch(late: bool) -> int:
    model = make()
    if not late:
        train_only(model, ".a.", ".b.")
    shard(model, torch_fsdp.fully_shard)
    counts = Counts()
    for unit in (*model.blocks, model):
        unit.set_custom_reduce_scatter(counts)  # type: ignore[operator]
    backward(model)
    train_only(model, ".a.", ".b.")
    counts.sent = 0
    backward(model, 1)
    return counts.sent


def sent_by_us(late: bool, layout: Any) -> tuple[int, int]:
    """Return the gradient elements that a step sends, with and without presence flags."""
    plain, model = make(), make()
    if not late:
        train_only(model, ".a.", ".b.")
    with recordings() as made:
        shard(model, layout=layout)
    backward(model)
    model.zero_grad()
    for one in (model, plain):
        train_only(one, ".a.", ".b.")
        for number in range(3):
            one.zero_grad()
            for recording in made:
                recording.calls.clear()
            backward(one, number)
    assert_same_grads(model, plain)
    # The plain model's loop cleared the recordings, so step the sharded model once more.
    for recording in made:
        recording.calls.clear()
    backward(model)
    calls = [call for recording in made for call in recording.calls]
    sent = [call.numel for call in calls if call.kind == "reduce_scatter"]
    assert len(sent) == NUM_BLOCKS
    flags = len(sent) * dist.get_world_size() * 8
    return sum(sent), sum(sent) - flags


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("layout", [PerParameter(), Ragged()], ids=str)
def test_no_more_is_sent_than_by_pytorch(pool: RankPool, layout: Any, late: bool) -> None:
    theirs = pool.run(2, sent_by_pytorch, late)
    ours = pool.run(2, sent_by_us, late, layout)
    assert theirs == [NUM_BLOCKS * ADAPTERS] * 2
    if isinstance(layout, PerParameter) or not late:
        assert [without for _, without in ours] == theirs
    else:  # ragged shards hold unequal parts of the adapters
        assert all(without <= 2 * NUM_BLOCKS * ADAPTERS for _, without in ours)


# gradients are kept

Pass = tuple[str, tuple[str, ...]]

SCENARIOS: dict[str, list[Pass]] = {
    "frozen, unfrozen": [("sync", (".a.",)), ("sync", ("",)), ("sync", ("layer.bias", "head"))],
    "a block": [("sync", ("blocks.1", "head")), ("sync", ("blocks.0",)), ("sync", ("",))],
    "frozen while pending": [("no sync", ("",)), ("no sync", (".a.", "head")), ("sync", (".b.",))],
    "all of a block frozen while pending": [("no sync", ("",)), ("sync", ("head",))],
    "unfrozen while pending": [("no sync", (".a.",)), ("sync", ("",)), ("sync", (".b.",))],
    "never frozen": [("partial", ("",)), ("partial", ("",)), ("sync", ("",))],
    "frozen while partial": [("partial", ("",)), ("partial", (".a.",)), ("sync", ("layer",))],
    "unfrozen while partial": [("partial", (".b.",)), ("partial", ("",)), ("sync", (".a.",))],
    "others while partial": [("partial", (".b.",)), ("sync", (".a.", "narrow"))],
    "all of a block frozen while partial": [("partial", ("",)), ("sync", ("head",))],
    "partial, then pending": [("partial", (".a.",)), ("no sync", (".b.",)), ("sync", ("head",))],
    "pending, then partial": [("no sync", (".a.",)), ("partial", (".b.",)), ("sync", ("head",))],
}


def run_passes(model: Any, passes: list[Pass], *, between: bool = False) -> None:
    for number, (mode, parts) in enumerate(passes):
        train_only(model, *parts)
        if isinstance(model, fullshard.FSDPModule):
            model.set_requires_gradient_sync(mode != "no sync")
            model.set_requires_all_reduce(mode == "sync")
            if between:  # rebuild the unsharded side and take over pending gradients
                model.set_force_sum_reduction_for_comms(True)
                for block in model.blocks:
                    block.set_force_sum_reduction_for_comms(True)
        backward(model, number)


def accumulate(passes: list[Pass], layout: Any, replicas: int, between: bool) -> None:
    plain, model = make(), make()
    mesh = init_device_mesh(
        "cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("copies", "shards")
    )
    shard(model, layout=layout, mesh=mesh if replicas > 1 else mesh["shards"])
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, model)]
    for _ in range(2):
        for one in (plain, model):
            run_passes(one, passes, between=between)
        assert_same_grads(model, plain)
        assert not model.get_pending_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("layout", [PerParameter(), Ragged()], ids=str)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_gradients_are_those_of_the_unsharded_model(
    pool: RankPool, scenario: str, layout: Any, between: bool
) -> None:
    passes = SCENARIOS[scenario]
    if any(mode == "partial" for mode, _ in passes):
        pool.run(4, accumulate, passes, layout, 2, between)
    else:
        pool.run(3, accumulate, passes, layout, 1, between)


@on_ranks(4)
@pytest.mark.parametrize("layout", [PerParameter(), Ragged()], ids=str)
def test_what_waits_is_shown_by_parameter(layout: Any) -> None:
    """Pending gradients can be seen and dropped by parameter, even after a freeze."""
    model = make()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    shard(model, layout=layout, mesh=mesh)
    model.set_requires_all_reduce(False)
    train_only(model, ".a.", "head")
    backward(model)
    waiting = model.get_pending_gradients()
    expected = {p for n, p in model.named_parameters() if ".a." in n or "head" in n}
    assert set(waiting) == expected
    for param, gradient in waiting.items():
        assert gradient.partial is not None
        assert gradient.partial.shape == param.to_local().shape
    train_only(model, ".b.")
    model.clear_pending_gradients()
    model.set_requires_all_reduce(True)
    backward(model)
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        n for n, _ in model.named_parameters() if ".b." in n
    }


# readers of gradients


@on_ranks(3)
@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("layout", [PerParameter(), Ragged()], ids=str)
def test_the_sharded_optimizer_steps_what_is_left(layout: Any, offloaded: bool) -> None:
    """The sharded optimizer finds runs of neighbours among the parameters that are trainable."""
    plain, model = make(), make()
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offloaded else {}
    shard(model, layout=layout, **options)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    ours = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    for number, parts in enumerate([("",), (".a.", ".b."), ("layer", "narrow"), ("",), ("",)]):
        for one, optimizer in ((plain, theirs), (model, ours)):
            train_only(one, *parts)
            backward(one, number)
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        assert (whole(param.detach()) - expected[name]).abs().max() <= 1e-10, name


@on_ranks(2)
def test_hooks_get_what_is_reduced() -> None:
    """A user's hook gets the gradients that are reduced, without gaps for frozen parameters."""
    layout = PerParameter()
    model = make()
    shard(model, layout=layout)
    seen: list[int] = []
    for block in model.blocks:
        block.set_all_reduce_hook(lambda grads: seen.append(grads.numel()))
    train_only(model, ".a.")
    backward(model)
    assert seen == [ADAPTERS // 4] * NUM_BLOCKS


def flat(original: bool) -> list[int]:
    plain, model = make(), make()
    with recordings() as made:
        wrapped = FullyShardedDataParallel(
            model, use_orig_params=original, auto_wrap_policy=ModuleWrapPolicy({Adapted})
        )
    backward(wrapped)
    backward(plain)
    wrapped.zero_grad()
    plain.zero_grad()
    if original:
        train_only(plain, ".a.", ".b.")
        train_only(wrapped, ".a.", ".b.")
    else:
        for name, param in wrapped.named_parameters():
            param.requires_grad_("blocks.0" in name)
        train_only(plain, "blocks.0")
    for recording in made:
        recording.calls.clear()
    backward(wrapped, 1)
    backward(plain, 1)
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        theirs = dict(plain.named_parameters())
        for name, param in model.named_parameters():
            expected = theirs[name.replace("_fsdp_wrapped_module.", "")].grad
            assert (param.grad is None) == (expected is None), name
            if expected is not None:
                assert (param.grad - expected).abs().max() <= EXACT, name
    calls = [call for recording in made for call in recording.calls]
    return [call.numel for call in calls if call.kind == "reduce_scatter"]


def test_the_flat_face_sends_original_parameters_that_are_left(pool: RankPool) -> None:
    block = sum(param.numel() for param in Adapted().parameters())
    for sent in pool.run(2, flat, True):
        assert len(sent) == NUM_BLOCKS and all(numel <= 2 * (ADAPTERS + 8) for numel in sent)
    for (sent,) in pool.run(2, flat, False):
        assert block <= sent <= block + 2 * 9


# ranks that disagree


def disagree() -> str:
    model = make()
    shard(model)
    backward(model)
    before = [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]
    train_only(model, ".b." if dist.get_rank() else ".a.")
    with pytest.raises(ProtocolError) as caught:
        backward(model)
    for param, grad in zip(model.parameters(), before, strict=True):
        assert grad is not None and param.grad is not None
        assert torch.equal(param.grad.to_local(), grad)
    train_only(model, "")
    model.zero_grad()
    backward(model)
    for param, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.grad.to_local(), grad)
    return str(caught.value)


def test_ranks_that_freeze_different_parameters_are_told(pool: RankPool) -> None:
    """Ranks that freeze different parameters of equal size raise errors and can go on."""
    first, second = pool.run(2, disagree)
    assert "gradients of b.weight came from other ranks" in first
    assert "gradients of a.weight came from other ranks" in second


# no lasting effects


@on_ranks(2)
@pytest.mark.parametrize("layout", [PerParameter(), Ragged()], ids=str)
def test_what_was_frozen_for_a_while_leaves_nothing_behind(layout: Any) -> None:
    """A parameter frozen for some steps changes no cost of the steps after them.

    Costs are bytes copied, elements sent, and reads of presence flags.
    """
    model = make()
    with recordings() as made:
        shard(model, layout=layout)
    found = []
    present = Reduced.present
    for parts in (("",), (".a.",), ("",), (".a.",), ("",)):
        train_only(model, *parts)
        for _ in range(2):
            for recording in made:
                recording.calls.clear()
            before = model.copied_nbytes()
            with mock.patch.object(Reduced, "present", autospec=True, side_effect=present) as asked:
                backward(model)
            model.zero_grad()
        calls = [call for recording in made for call in recording.calls]
        sent = sum(call.numel for call in calls if call.kind == "reduce_scatter")
        found.append((model.copied_nbytes() - before, sent, asked.call_count))
    all_1, few_1, all_2, few_2, all_3 = found
    assert all_1 == all_2 == all_3 and few_1 == few_2
    assert few_1[1] < all_1[1] / 8 and few_1[0] < all_1[0]
    assert all_1[2] == few_1[2] == 0

"""Batches in parts: gradients of the whole batch, even if memory runs out meanwhile."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import (
    FullyShardedDataParallel,
    Microbatches,
    PerParameter,
    Ragged,
    watch,
)
from fullshard.comm import Pending, Wrapper
from fullshard.comm.fault_domain import fault_domain
from fullshard.comm.ledger import ledger_of
from fullshard.comm.mesh import wrapped
from fullshard.errors import ConfigError, LostRankError, PeerError, TornStepError
from fullshard.tensors.form import clean_name
from tests.ranks.autograd import engine_of
from tests.ranks.models import Fuse, Trouble, fill, full_parameters, noise, shard_units
from tests.ranks.pool import RankPool, on_ranks

LAYOUTS = {"rows": PerParameter(), "ragged": Ragged()}
OutOfMemory = torch.OutOfMemoryError
PLACES = ["before", "forward", "loss", "backward"]


class Tower(nn.Module):
    """Blocks that run out of memory at the place ``at`` with more than ``limit`` rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4))
        self.head = nn.Linear(6, 3, dtype=torch.float64)
        self.limit, self.at, self.error = 100, "", OutOfMemory
        self.seen: list[weakref.ref[Tensor]] = []

    def check(self, x: Tensor, at: str) -> Tensor:
        if self.at != at or len(x) <= self.limit:
            return x
        if at == "backward":
            return Fuse.apply(x, self.error)
        raise self.error("no memory")

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            self.seen.append(weakref.ref(x))
            if number == 1:
                x = self.check(self.check(x, "forward"), "backward")
        return self.head(x)


def tower(face: str) -> Any:
    model = fill(Tower(), scale=0.4)
    if face == "plain":
        return model
    if face == "flat":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = FullyShardedDataParallel(block, use_orig_params=True)
        return FullyShardedDataParallel(model, use_orig_params=True)
    mesh = None
    if face == "replicas":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    layout = LAYOUTS.get(face, PerParameter())
    return shard_units(model, model.blocks, mesh=mesh, layout=layout)


def inside(model: Any) -> Tower:
    return model.module if isinstance(model, FullyShardedDataParallel) else model


@dataclass
class Batch:
    """Rows of inputs and targets, and values that all rows share."""

    x: Tensor
    y: dict[str, Tensor]
    scale: Tensor
    name: str = "batch"


def batch_of(number: int, rank: int, sizes: Sequence[int]) -> Batch:
    rows = sizes[rank % len(sizes)]
    seed = 100 * number + rank
    y = {"y": noise(rows, 3, seed=seed + 50)}
    return Batch(noise(rows, 6, seed=seed), y, torch.tensor(0.5, dtype=torch.float64))


def loss_of(model: Any, part: Batch) -> Tensor:
    assert part.scale.ndim == 0 and part.name == "batch"
    inner = inside(model)
    x = inner.check(part.x, "before")
    y = inner.check(model(x), "loss")
    return part.scale * (y - part.y["y"]).square().mean()


def expected(steps: int, world: int, sizes: Sequence[int]) -> dict[str, Tensor]:
    """Return the weights after training in one process with whole batches."""
    model = tower("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for number in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            (loss_of(model, batch_of(number, rank, sizes)) / world).backward()
        optimizer.step()
    return full_parameters(model)


def check_weights(model: Any, steps: int, sizes: Sequence[int]) -> None:
    with fullshard.unshard_params(model):
        found = {clean_name(name): param.clone() for name, param in model.named_parameters()}
    for name, value in expected(steps, dist.get_world_size(), sizes).items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


def trained(
    face: str, places: dict[int, str], wire: str, sizes: Sequence[int], **options: Any
) -> tuple[int, int]:
    """Train while the ranks in ``places`` run out of memory at these places."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_SHARED_MEMORY", wire)
        patch.setenv("FULLSHARD_PATIENCE_S", "3")
        dist.barrier()
        model = tower(face)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        microbatches = Microbatches(model, **options)
        for number in range(4):
            if number == 1:
                inside(model).at = places.get(dist.get_rank(), "")
                inside(model).limit = 2
            optimizer.zero_grad()
            batch = batch_of(number, dist.get_rank(), sizes)
            loss = microbatches.backward(lambda part: loss_of(model, part), batch)
            with torch.no_grad():
                inside(model).limit, limit = 100, inside(model).limit
                torch.testing.assert_close(loss, loss_of(model, batch), rtol=1e-12, atol=1e-12)
                inside(model).limit = limit
            optimizer.step()
        check_weights(model, 4, sizes)
        return microbatches.parts, microbatches.repeated


@pytest.mark.parametrize("face", ["rows", "ragged", "flat", "plain"])
@pytest.mark.parametrize("reduces_each", [True, False])
def test_gradients_of_parts_are_those_of_the_batch(
    pool: RankPool, face: str, reduces_each: bool
) -> None:
    world = 1 if face == "plain" else 2
    options = {"parts": 3, "reduces_each": reduces_each}
    assert pool.run(world, trained, face, {}, "1", [5, 4], **options) == [(3, 0)] * world


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("world", "face", "wire"),
    [(2, "rows", "1"), (3, "ragged", "0"), (2, "flat", "1"), (4, "replicas", "1")],
)
def test_all_ranks_begin_again_in_smaller_parts(
    pool: RankPool, place: str, world: int, face: str, wire: str
) -> None:
    found = pool.run(world, trained, face, {1: place}, wire, [6, 5])
    assert found == [(4, 2)] * world  # of 6 rows, a part of 3 is too large, and one of 1 or 2 fits


def ends_tries_late(face: str, wire: str) -> tuple[int, int]:
    """Train while rank 0 learns late that a try ended; rank 1 may fail again before that."""
    with pytest.MonkeyPatch.context() as patch:
        decide = Microbatches._must_repeat

        def late(self: Microbatches, done: Any) -> bool:
            repeats = decide(self, done)
            time.sleep(0.0 if dist.get_rank() else 0.7)
            return repeats

        patch.setattr(Microbatches, "_must_repeat", late)
        return trained(face, {1: "before"}, wire, [6])


@pytest.mark.parametrize(
    ("world", "face", "wire"),
    [(2, "rows", "1"), (3, "ragged", "0"), (2, "flat", "1"), (4, "replicas", "1")],
)
def test_a_rank_may_end_a_try_late(pool: RankPool, world: int, face: str, wire: str) -> None:
    """A rank may still be in its last try when another rank fails in the next one."""
    assert pool.run(world, ends_tries_late, face, wire) == [(4, 2)] * world


def test_memory_may_run_out_on_all_ranks_and_in_different_places(pool: RankPool) -> None:
    everywhere = dict.fromkeys(range(4), "forward")
    assert pool.run(4, trained, "rows", everywhere, "1", [4]) == [(2, 1)] * 4
    unlike = dict(enumerate(PLACES))
    assert pool.run(4, trained, "rows", unlike, "1", [4]) == [(2, 1)] * 4


def test_a_rank_may_have_fewer_rows_than_parts(pool: RankPool) -> None:
    assert pool.run(2, trained, "rows", {0: "loss"}, "1", [8, 2]) == [(4, 2)] * 2
    assert pool.run(2, trained, "rows", {}, "1", [8, 2], parts=8) == [(8, 0)] * 2


@dataclass(frozen=True)
class Short(Wrapper):
    """Collectives of which number ``at`` runs out of memory on this rank, once."""

    count: list[int]
    at: int

    def _issued(self) -> None:
        self.count[0] += 1
        if self.count[0] == self.at:
            raise OutOfMemory("no memory")

    def all_gather(self, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Pending:
        self._issued()
        return self.inner.all_gather(outputs, sources)

    def reduce_scatter_mean(self, output: Tensor, source: Tensor) -> Pending:
        self._issued()
        return self.inner.reduce_scatter_mean(output, source)

    def all_reduce_mean(self, values: Tensor) -> Pending:
        self._issued()
        return self.inner.all_reduce_mean(values)


def short_at(face: str, at: int, late_s: float = 0.0, patience: str = "3") -> int:
    """Run out of memory in collective ``at`` on rank 1; return the number of collectives.

    The other ranks begin each step ``late_s`` seconds later.
    """
    count = [0]
    number = at if dist.get_rank() == 1 else 0
    wrapper: Callable[[Any], Any] = lambda inner: Short(inner, count, number)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_PATIENCE_S", patience)
        with wrapped(wrapper):
            model = tower(face)
        count[0] = 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        microbatches = Microbatches(model)
        for step in range(2):
            optimizer.zero_grad()
            batch = batch_of(step, dist.get_rank(), [4])
            time.sleep(0.0 if number else late_s)
            microbatches.backward(lambda part: loss_of(model, part), batch)
            optimizer.step()
        num_issued = count[0]
        assert (microbatches.parts, microbatches.repeated) == ((2, 1) if at else (1, 0))
        check_weights(model, 2, [4])
        return num_issued


@pytest.mark.parametrize("face", ["rows", "replicas"])
def test_memory_may_run_out_at_every_collective(pool: RankPool, face: str) -> None:
    world = 4 if face == "replicas" else 2
    num_issued = pool.run(world, short_at, face, 0)[0] // 2  # in one step
    assert num_issued >= 10
    for at in range(1, num_issued + 1):
        pool.run(world, short_at, face, num_issued + at)


@pytest.mark.parametrize("face", ["rows", "replicas"])
@pytest.mark.parametrize("patience", ["3", "0.5"])
def test_memory_may_run_out_before_others_begin_the_step(
    pool: RankPool, face: str, patience: str
) -> None:
    world = 4 if face == "replicas" else 2
    first = pool.run(world, short_at, face, 0)[0] // 2 + 1  # of the second step
    pool.run(world, short_at, face, first, 1.5, patience)


def cannot(error: type[Exception]) -> str:
    """Fail on rank 1 with parts of any size, then train on; return the error."""
    model = tower("rows")
    inner = inside(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    microbatches = Microbatches(model)
    said = ""
    for number in (0, 7, 1):
        inner.at = "loss" if number == 7 and dist.get_rank() == 1 else ""
        inner.limit, inner.error = 0, error
        optimizer.zero_grad()
        batch = batch_of(number, dist.get_rank(), [4])
        try:
            microbatches.backward(lambda part: loss_of(model, part), batch)
        except (PeerError, error) as raised:
            said = f"{type(raised).__name__}: {raised}"
            assert all(param.grad is None for param in model.parameters())
        else:
            optimizer.step()
    check_weights(model, 2, [4])
    return said


def test_without_memory_for_one_row_it_fails_on_all_ranks(pool: RankPool) -> None:
    first, second, third = pool.run(3, cannot, OutOfMemory)
    assert second == "OutOfMemoryError: no memory"
    for said in (first, third):
        assert said.startswith("PeerError: rank 1 failed: torch.OutOfMemoryError: no memory"), said


def test_another_exception_is_raised_and_told(pool: RankPool) -> None:
    first, second, third = pool.run(3, cannot, Trouble)
    assert second == "Trouble: no memory"
    for said in (first, third):
        assert said.startswith("PeerError: rank 1 failed: tests.ranks.models.Troub")


@on_ranks(2)
def test_what_was_computed_is_freed_before_a_step_begins_again() -> None:
    """Activations of the failed attempt are freed before the step begins again."""
    model = tower("rows")
    inner = inside(model)
    inner.at, inner.limit = ("loss", 2) if dist.get_rank() == 1 else ("", 2)
    alive = []

    def compute(part: Batch) -> Tensor:
        alive.append(sum(one() is not None for one in inner.seen))
        inner.seen.clear()
        return loss_of(model, part)

    Microbatches(model).backward(compute, batch_of(0, dist.get_rank(), [4]))
    assert alive == [0, 0, 0]


@on_ranks(2)
def test_gradients_of_before_are_added_to() -> None:
    """Gradients of earlier steps stay, whether a step is repeated or not."""
    model = tower("ragged")
    whole = tower("plain")
    microbatches = Microbatches(model)
    world, rank = dist.get_world_size(), dist.get_rank()
    for number in range(2):
        inside(model).at = "backward" if number and rank == 1 else ""
        inside(model).limit = 2
        microbatches.backward(lambda part: loss_of(model, part), batch_of(number, rank, [4]))
        for each in range(world):
            (loss_of(whole, batch_of(number, each, [4])) / world).backward()
    assert microbatches.repeated == 1
    with fullshard.unshard_params(model, with_grads=True):
        for param, other in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-12, atol=1e-12)


@on_ranks(2, timeout_s=20)
@pytest.mark.parametrize("comes", [True, False])
def test_a_rank_that_is_lost_is_raised_and_not_met_again(comes: bool) -> None:
    """If rank 1 is lost, rank 0 raises before the ranks agree on a step, or while they do."""
    model, group = tower("rows"), dist.group.WORLD
    microbatches, batch = Microbatches(model), batch_of(0, dist.get_rank(), [4])
    microbatches.backward(lambda part: loss_of(model, part), batch)
    assert group is not None
    ledger, era = ledger_of(group), fault_domain().era
    lost = partial(LostRankError, "rank 1 ended")

    def end() -> None:
        while ledger.waiting is None:
            time.sleep(0.01)
        fault_domain().end_era(lost)

    def compute(part: Batch) -> Tensor:
        if not comes:
            fault_domain().end_era(lost)  # as if found out meanwhile
        return torch.zeros((), requires_grad=True) * part.scale

    if dist.get_rank() == 1:
        fault_domain().end_era(lost)
        return
    if comes:
        threading.Thread(target=end).start()
    with pytest.raises(LostRankError, match="rank 1 ended"):
        microbatches.backward(compute, batch)
    assert era.error is not None and ledger.era is era  # nothing was issued later


def without_rows() -> str:
    """Give rank 1 an empty batch in one step; return the errors' names."""
    model = tower("rows")
    microbatches = Microbatches(model)
    said = ""
    for number in range(3):
        given = batch_of(0, dist.get_rank(), [4])
        if number == 1 and dist.get_rank() == 1:
            given.x = given.x[:0]
        try:
            microbatches.backward(lambda part: loss_of(model, part), given)
        except (ConfigError, PeerError) as error:
            said += type(error).__name__
    return said


def test_a_batch_without_rows_is_told_to_all(pool: RankPool) -> None:
    assert pool.run(3, without_rows) == ["PeerError", "ConfigError", "PeerError"]


@pytest.mark.parametrize("batch", [[], [torch.ones(())], [torch.ones(2), torch.ones(3)]])
def test_batches_without_rows_are_refused(batch: list[Tensor]) -> None:
    with pytest.raises(ConfigError, match="expected the same number in all of them, at least 1"):
        Microbatches(nn.Linear(2, 2)).backward(lambda part: part[0].sum(), batch)


@pytest.mark.parametrize("parts", [0, True, 1.5])
def test_numbers_of_parts_that_make_no_sense_are_refused(parts: Any) -> None:
    with pytest.raises(ConfigError, match="Microbatches"):
        Microbatches(nn.Linear(2, 2), parts=parts)


def late_for_its_forward() -> tuple[int, int]:
    """Make rank 0 late for its forward in a step that the others drop; return the counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FULLSHARD_PATIENCE_S", "1")
        dist.barrier()
        model = tower("rows")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        microbatches = Microbatches(model)
        for number in range(3):
            model.limit, model.at = (2, "before") if dist.get_rank() == 1 and number else (100, "")
            waits = [fault_domain().era] if dist.get_rank() == 0 and number == 1 else []

            def loss_when_others_know(part: Batch, waits: list[Any] = waits) -> Tensor:
                while waits and waits[0].error is None:
                    time.sleep(0.01)
                return loss_of(model, part)

            optimizer.zero_grad()
            microbatches.backward(loss_when_others_know, batch_of(number, dist.get_rank(), [4]))
            optimizer.step()
        model.limit = 100
        check_weights(model, 3, [4])
        return microbatches.parts, microbatches.repeated


def test_a_rank_that_comes_late_to_its_forward_begins_again_too(pool: RankPool) -> None:
    assert pool.run(3, late_for_its_forward) == [(2, 1)] * 3


def test_an_earlier_fault_is_not_told_as_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(_: object) -> None:
        raise TornStepError("rank 1 left the step of AdamW")

    model = nn.Linear(2, 2)
    told: list[object] = []
    monkeypatch.setattr(watch.Step, "begin", begin)
    monkeypatch.setattr(Microbatches, "_report", lambda _, error, __: told.append(error))
    with pytest.raises(TornStepError, match="rank 1 left"):
        Microbatches(model).backward(lambda part: model(part).sum(), torch.ones(4, 2))
    assert not told


@on_ranks(2)
def test_a_failure_leaves_the_reduction_of_gradients_on() -> None:
    model = tower("rows")

    def fail(_: Batch) -> Tensor:
        raise Trouble

    with pytest.raises(Trouble):
        Microbatches(model, parts=2, reduces_each=False).backward(
            fail, batch_of(0, dist.get_rank(), [4])
        )
    engine = engine_of(inside(model))
    assert all(engine.policy_of(unit).requires_gradient_sync for unit in engine.units)


def test_what_all_ranks_know_is_not_told_again() -> None:
    """A failure of an engine that was already reported is not reported again."""
    engine, microbatches, error = watch.Step(), Microbatches(nn.Linear(2, 2)), OutOfMemory("no")
    microbatches._step.begin()
    begun_s = time.monotonic()
    engine.begin()
    engine.end(error, failed=True)
    engine.failure = None  # reported
    microbatches._report(error, begun_s)
    assert microbatches._step.failure is None and microbatches._step.is_open
    microbatches._report(error, time.monotonic())  # of a later try
    assert microbatches._step.failure is not None
    microbatches._step.failure = None
    fault_domain().has_unreported_failure = False

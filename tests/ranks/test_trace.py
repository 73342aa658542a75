"""``fullshard.trace`` on ranks: recorded actions, the ends of steps, and written files."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard import FullyShardedDataParallel, fully_shard
from fullshard._torch import autograd as _autograd
from fullshard.comm import dry_world
from fullshard.device import DryLanes
from fullshard.errors import ArgumentTypeError, ConfigError, ProtocolError
from fullshard.frontend.hooks import engine_of
from fullshard.frontend.ownership import units_below
from fullshard.schedule import Transcript
from fullshard.trace import report, tape
from tests.ranks.models import shard_units
from tests.ranks.pool import RankPool, on_ranks

DIM, LAYERS = 16, 4


class Layers(nn.Module):
    """Layers of which a forward may skip some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, used: Any = range(LAYERS)) -> Tensor:
        for number in used:
            x = torch.tanh(self.layers[number](x))
        out: Tensor = self.head(x)
        return out


def sharded() -> Any:
    torch.manual_seed(0)
    model = Layers()
    return shard_units(model, model.layers)


def train(model: nn.Module, optimizer: Any, *, accumulate: int = 1, used: Any = None) -> None:
    for _ in range(accumulate):
        batch = torch.ones(2, DIM)
        (model(batch) if used is None else model(batch, used)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01)


def engine(model: nn.Module) -> Any:
    return engine_of(units_below([model])[0])


def recorded(folder: Path | str) -> Any:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return json.loads((Path(folder) / f"rank-{rank:05}.json").read_text())


def actions(found: Any) -> list[str]:
    return [
        op if unit < 0 else f"{op} {unit}"
        for step in found["steps"]
        for op, unit, *_ in step["actions"]
    ]


def hears_all(folder: str, flat: bool) -> None:
    """Compare recorded actions with a transcript, and recorded buffers with the meter."""
    model: Any = sharded()
    if flat:
        torch.manual_seed(0)
        inner = Layers()
        for number, layer in enumerate(inner.layers):
            inner.layers[number] = FullyShardedDataParallel(layer)
        model = FullyShardedDataParallel(inner)
    optimizer = sgd(model)
    engine(model).recorder = transcript = Transcript()
    changes: list[int] = []
    engine(model).meter.watch = lambda kind, nbytes, storage: changes.append(nbytes)
    with fullshard.trace(model, folder, keep=5):
        for _ in range(4):
            train(model, optimizer, accumulate=2)
    found = recorded(folder)
    assert found["missed"] == []  # each step equals the one before
    assert engine(model).recorder is transcript and engine(model).observer is None
    assert actions(found) == [str(action) for action in transcript.actions()]
    assert found["spent"]["step"]["count"] + 1 == len(found["steps"]) == 4
    assert found["first_s"] == pytest.approx(found["steps"][0]["duration_s"], abs=1e-6)
    about = found["about"]
    assert about["model"] == "Layers" and about["folder"] == str(Path(folder).resolve())
    assert about["num_parameters"] == sum(one.numel() for one in model.parameters())
    assert about["dtypes"] == ["float32"] and about["versions"]["torch"] == torch.__version__
    assert [row[2] for step in found["steps"] for row in step["buffers"]] == changes
    for before, after in zip(found["steps"], found["steps"][1:], strict=False):
        held = dict(before["held"])
        for _, kind, nbytes, _ in before["buffers"]:
            held[kind] = held.get(kind, 0) + nbytes
        assert {k: n for k, n in held.items() if n} == {k: n for k, n in after["held"].items() if n}
    held = found["steps"][-1]["held"]
    for _, kind, nbytes, _ in found["steps"][-1]["buffers"]:
        held[kind] += nbytes
    meter = engine(model).meter.held_nbytes
    assert {k: n for k, n in held.items() if n} == {str(k): n for k, n in meter.items() if n}


@pytest.mark.parametrize("flat", [False, True])
def test_all_actions_and_buffers_are_recorded(pool: RankPool, tmp_path: Path, flat: bool) -> None:
    pool.run(2, hears_all, str(tmp_path), flat)
    found = report.combine(tmp_path).summary
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert found["missing_ranks"] == []
    assert found["steps"]["count"] == 4
    assert len(found["units"]) == LAYERS + 1
    assert all(one["gathers"] >= 3 for one in found["units"])
    assert {lane for one in found["lanes"] for lane, row in one["lanes"].items() if row} == {
        *("model", "exposed", "gathers", "reductions")
    }


@on_ranks(2)
def test_steps_are_delimited_by_what_the_loop_does(tmp_path: Path) -> None:
    model = sharded()
    first, second = sgd(model.layers), sgd(model.head)

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(1, DIM))

    with fullshard.trace(model, str(tmp_path)):
        evaluate()
        for _ in range(3):
            for _ in range(2):
                model(torch.ones(2, DIM)).sum().backward()
            first.step()
            second.step()
            evaluate()
        model(torch.ones(2, DIM)).sum().backward()  # without a step
    found = recorded(str(tmp_path))
    counts = {kind: one["count"] for kind, one in found["spent"].items()}
    assert counts == {"step": 2, "evaluation": 4, "part": 1}  # the first step is left out
    for step in found["steps"]:
        forwards = [what for what, unit, *_ in step["work"] if unit == LAYERS and what == "forward"]
        assert len(forwards) == 2
        assert step["duration_s"] > 0


def skips(folder: str, seed: int) -> None:
    model = sharded()
    optimizer = sgd(model)
    generator = torch.Generator().manual_seed(seed)  # equal on all ranks
    with fullshard.trace(model, folder):
        for _ in range(8):
            used = [n for n in range(LAYERS) if torch.rand((), generator=generator) < 0.6]
            train(model, optimizer, used=used)


def test_guesses_that_never_came_are_named(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, skips, str(tmp_path), 1)
    found = report.combine(tmp_path).summary
    told = [one for one in found["findings"] if one["kind"] == "guess"]
    assert told and all("was gathered in vain" in one["text"] for one in told)
    assert sum(one["missed"] for one in found["units"]) > 0


@on_ranks(1, process_group=False)
def test_times_are_those_of_lanes_where_they_have_clocks(tmp_path: Path) -> None:
    """Recorded times are those of lanes with clocks, on which each gather takes a second."""
    lanes = DryLanes(duration_s=lambda exchange: 1.0, note=lambda span: None)
    with dry_world(2, 0, carry=lanes.carry, adds_wide=False):
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(*(nn.Linear(DIM, DIM, device="meta") for _ in range(3)))
        shard_units(model, model, mesh=mesh)
        engine(model).run_dry(lanes)
        optimizer = sgd(model)
        with fullshard.trace(model, str(tmp_path)):
            for _ in range(3):
                _autograd.run_backward(model(torch.ones(2, DIM, device="meta")).sum())
                optimizer.step()
                optimizer.zero_grad()
    found = recorded(str(tmp_path))
    for step in found["steps"]:
        of_lanes = {row[0] for row in step["actions"] if row[5] is not None}
        assert of_lanes == {"unshard", "wait", "reduce_scatter", "finish_reduce"}
    # Computation takes no time here, so all communication is waited for: in each step two gathers
    # of a layer, and the last reduction. Other reductions overlap with gathers.
    gathers = [one["gather"]["total_s"] for one in found["totals"]]
    assert gathers == [pytest.approx(2 * 2.0)] * 3 + [0.0]  # of two steps, without the first
    reductions = [one["reduction"]["total_s"] for one in found["totals"]]
    assert reductions == [pytest.approx(2 * 1.0), 0.0, 0.0, 0.0]


@on_ranks(2)
def test_an_exception_ends_a_trace_and_goes_on(tmp_path: Path) -> None:
    model = sharded()
    optimizer = sgd(model)
    with pytest.raises(KeyError), fullshard.trace(model, str(tmp_path)):
        train(model, optimizer)
        model(torch.ones(2, DIM))
        raise KeyError
    found = recorded(str(tmp_path))
    assert found["spent"]["part"]["count"] == 1 and found["shortage"] is None
    assert found["unfinished"]["actions"] and len(found["steps"]) == 1
    assert engine(model).observer is None and engine(model).recorder is None
    assert engine(model).meter.watch is None


class Exhausted(nn.Module):
    """A layer that raises an out-of-memory error while ``is_full``."""

    is_full = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 1.00 KiB. GPU 0 has a total capacity of "
                "79.00 GiB. Of the allocated memory 1.00 MiB is allocated by PyTorch."
            )
        return x


@on_ranks(2)
def test_out_of_memory_ends_in_a_report(tmp_path: Path) -> None:
    folder = str(tmp_path)
    model = Layers()
    full = Exhausted()
    model.layers[2] = nn.Sequential(nn.Linear(DIM, DIM), full)
    shard_units(model, model.layers)
    optimizer = sgd(model)
    folder = f"{folder}/{dist.get_rank()}"  # like hosts without a common folder
    with suppress(torch.OutOfMemoryError), fullshard.trace(model, folder):
        train(model, optimizer)
        full.is_full = True
        train(model, optimizer)
    found = json.loads((Path(folder) / "summary.json").read_text())["shortage"]
    assert (found["where"], found["tried_nbytes"]) == ("layers.2", 1024)
    assert found["allocated_nbytes"] == 1 << 20
    nbytes = (DIM + 1) * DIM * 4
    for unit in ("layers.2", "(root)"):  # the unit that ran, and the unit around it
        assert found["held"][unit] == {"parameters": nbytes // 2, "unsharded": nbytes}
    ahead = {"parameters": nbytes // 2, "gather_output": nbytes}
    assert found["held"]["layers.3"] == ahead
    assert found["held"]["layers.0"] == {"parameters": nbytes // 2}
    ways = [(way["what"].partition("(")[0], way["suffices"]) for way in found["ways"]]
    assert ways[0] == ("set_prefetch_budget", True)
    assert len(ways) == 3
    assert (Path(folder) / "report.html").exists()


@on_ranks(2)
def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    model = sharded()
    with fullshard.trace(model, str(tmp_path)) as outer:
        with pytest.raises(ProtocolError, match="another trace"):
            fullshard.trace(model, str(tmp_path)).start()
        with pytest.raises(ProtocolError, match="another trace"):
            fullshard.trace(model.layers[0], str(tmp_path)).start()
        with pytest.raises(ProtocolError, match=r"call stop\(\) first"):
            outer.start()
        train(model, sgd(model))
    with pytest.raises(ProtocolError, match=r"call start\(\) first"):
        outer.stop()
    outer.start()
    assert outer.stop() == Path(str(tmp_path)) / f"rank-{dist.get_rank():05}.json"
    with pytest.raises(ConfigError, match="Linear has no unit"):
        fullshard.trace(nn.Linear(2, 2), str(tmp_path)).start()
    for keep in (0, True, "many"):
        with pytest.raises(ConfigError, match="expected a number of steps"):
            fullshard.trace(model, str(tmp_path), keep=keep)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="expected a dict"):
        fullshard.trace(model, str(tmp_path), plan=3)


@on_ranks(2)
def test_a_tree_of_several_engines_is_one_trace(tmp_path: Path) -> None:
    """Units without a common root have one engine each."""
    model = nn.ModuleList(fully_shard(nn.Linear(DIM, DIM)) for _ in range(3))
    optimizer = sgd(model)
    with fullshard.trace(model, str(tmp_path)):
        for _ in range(3):
            out = torch.ones(1, DIM)
            for part in model:
                out = part(out)
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = recorded(str(tmp_path))
    assert found["spent"]["step"]["count"] == 2 and len(found["engines"]) == 3
    assert [one["gathers"] for one in found["totals"]] == [2, 2, 2]


class _Plan:
    def __init__(self, recorded: list[str]) -> None:
        self.recorded = recorded

    def as_json(self) -> Any:
        return {"step_s": 1.0, "memory": [], "actions": self.recorded}


def follows_plan(folder: str) -> Any:
    model = sharded()
    optimizer = sgd(model)
    with fullshard.trace(model, folder):
        for _ in range(3):
            train(model, optimizer)
    again = actions({"steps": recorded(folder)["steps"][-1:]})
    with fullshard.trace(model, folder, plan=_Plan(again)):
        train(model, optimizer)


def test_a_step_that_does_as_planned_is_told_so(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, follows_plan, str(tmp_path))
    assert report.combine(tmp_path).summary["plan"] == {
        "step_s": 1.0, "difference": None, "missed": [],
    }  # fmt: skip


def many_steps(folder: str, steps: int) -> tuple[int, int]:
    """Return the bytes of the file, and the number of steps recorded in full."""
    model = fully_shard(nn.Linear(2, 2))
    optimizer = sgd(model)
    trace = fullshard.trace(model, folder, keep=5)
    trace.start()
    batch = torch.ones(1, 2)
    for _ in range(steps):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    path = trace.stop()
    found = recorded(folder)
    assert found["spent"]["step"]["count"] == steps - 1
    assert found["totals"][0]["gather"]["count"] >= steps - 1
    return path.stat().st_size, len(found["steps"])


def test_size_does_not_grow_with_the_number_of_steps(pool: RankPool, tmp_path: Path) -> None:
    few = pool.run(1, many_steps, str(tmp_path), 50)[0]
    many = pool.run(1, many_steps, str(tmp_path), 2_000, timeout_s=120)[0]
    assert max(few[1], many[1]) <= 5 + 3  # the slowest steps may be among the last
    assert many[0] < 2 * few[0]


@on_ranks(2)
def test_a_loop_that_never_steps_fills_no_memory(tmp_path: Path) -> None:
    model = fully_shard(nn.Linear(2, 2))
    with fullshard.trace(model, str(tmp_path)) as trace, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tape, "MOST_ENTRIES", 500)
        for _ in range(200):
            model(torch.ones(1, 2)).sum().backward()
        assert trace._run is not None
        assert len(trace._run.tape.entries) <= 500
    found = recorded(str(tmp_path))
    assert found["spent"]["part"]["count"] > 3 and found["steps"] == []

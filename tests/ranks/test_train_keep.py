"""``--keep N``: the newest checkpoints and the best one survive any end of the job."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import Life, checkpoint, fully_shard
from fullshard.checkpoint.format import committing
from fullshard.errors import CheckpointError
from fullshard.train.config import TrainConfig
from fullshard.train.run.best import read_best
from fullshard.train.run.folder import RunDir
from fullshard.train.run.saves import Saves
from tests.ranks.pool import RankPool
from tests.ranks.train_shell import FROM_A_LAUNCHER

LOSSES = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 1.5, 6: 1.0}


def saved(out: str, keep: int | None, losses: dict[int, float | None]) -> list[list[str]]:
    """Save steps; return the checkpoints after each, with a star for copies of the best."""
    config = TrainConfig(out=out, keep=keep)
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    saves = Saves(config, marks_best=dist.get_rank() == 0)
    run, found = RunDir(Path(out)), []
    for step, bits in losses.items():
        saves.save(model, optimizer, {}, step=step, on_disk=True, bits_per_byte=bits)
        saves.wait()
        dist.barrier()
        apart = sorted("*" + path.name for path in run.best.glob("step-*"))
        found.append([path.name for path in sorted(run.checkpoints.glob("step-*"))] + apart)
        dist.barrier()
    return found


def names(*steps: int) -> list[str]:
    return [f"step-{step:06d}" if step > 0 else f"*step-{-step:06d}" for step in steps]


@pytest.mark.parametrize("world", [1, 3])
def test_the_newest_stay_and_the_best_one(pool: RankPool, tmp_path: Path, world: int) -> None:
    found = pool.run(world, saved, str(tmp_path), 2, LOSSES)
    steps = [(1, -1), (1, 2, -2), (2, 3, -2), (3, 4, -2), (4, 5, -2), (5, 6, -2)]
    assert found == [[names(*each) for each in steps]] * world
    best = read_best(RunDir(tmp_path))
    assert best is not None and (best.step, best.bits_per_byte) == (2, 1.0)
    assert checkpoint.verify(best.path).world == world


def test_one_is_enough_and_all_are_kept_unless_told_otherwise(
    pool: RankPool, tmp_path: Path
) -> None:
    found = pool.run(2, saved, str(tmp_path / "one"), 1, LOSSES)[0]
    assert found[-1] == names(6, -2)
    found = pool.run(2, saved, str(tmp_path / "all"), None, LOSSES)[0]
    assert found[-1] == names(*LOSSES)
    best = read_best(RunDir(tmp_path / "all"))
    assert best is not None and best.path == RunDir(tmp_path / "all").checkpoint(2)


def refused(out: str) -> list[str]:
    """Save a step, then a step that no rank can finish; return the checkpoints."""
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    saves = Saves(TrainConfig(out=out, keep=1), marks_best=dist.get_rank() == 0)
    saves.save(model, optimizer, {}, step=1, on_disk=True, bits_per_byte=2.0)
    saves.wait()
    dist.barrier()
    root = RunDir(Path(out)).checkpoints
    no_room = OSError("no room")
    with (
        mock.patch.object(committing, "publish", side_effect=no_room),
        pytest.raises(CheckpointError, match="no room"),
    ):
        saves.save(model, optimizer, {}, step=2, on_disk=True, bits_per_byte=1.0)
        saves.wait()
    dist.barrier()
    return sorted(path.name for path in root.glob("step-*"))


def test_a_save_that_fails_removes_nothing(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(2, refused, str(tmp_path)) == [names(1)] * 2
    best = read_best(RunDir(tmp_path))
    assert best is not None and best.step == 1


KILLED = """
import os
import shutil
import signal
import sys

import torch
from torch import nn

from fullshard.checkpoint.format import committing
from fullshard.checkpoint.stores import targets
from fullshard.train.config import TrainConfig
from fullshard.train.run import Saves

out, where = sys.argv[1:]
model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
saves = Saves(TrainConfig(out=out, keep=1), marks_best=True)


def save(step):
    saves.save(model, optimizer, {}, step=step, on_disk=True, bits_per_byte=1 / step)


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


save(1)
saves.wait()
if where == "sealing":
    targets.seal = die
elif where == "publishing":
    committing.publish = die
elif where == "removing":
    committing.remove = die
save(2)
saves.wait()
save(3)
saves.wait()
"""


@pytest.mark.parametrize(
    ("where", "left"),
    [("sealing", [1]), ("publishing", [1]), ("removing", [1, 2]), ("nowhere", [3])],
)
def test_a_job_that_is_killed_in_a_save_leaves_an_intact_checkpoint(
    tmp_path: Path, where: str, left: list[int]
) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in FROM_A_LAUNCHER}
    command = [sys.executable, "-c", KILLED, str(tmp_path), where]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == (0 if where == "nowhere" else -9), done.stderr
    run = RunDir(tmp_path)
    assert sorted(path.name for path in run.checkpoints.glob("step-*")) == names(*left)
    for step in left:
        assert checkpoint.verify(run.checkpoint(step)).step == step
    best = read_best(run)
    assert best is not None and best.step == (3 if where == "nowhere" else 1)
    saves = Saves(TrainConfig(out=str(tmp_path), keep=1), marks_best=True)
    model = nn.Linear(4, 4)
    saves.save(model, torch.optim.AdamW(model.parameters()), {}, step=4, on_disk=True)
    saves.wait()
    there = sorted(path.name for path in run.checkpoints.iterdir())
    assert there == ["latest", "step-000004"]  # the unfinished save is gone


def resumed(out: str) -> tuple[int, float, list[int]]:
    """Resume; return the step, the weight, and the steps of the checkpoints."""
    saves = Saves(TrainConfig(out=out, keep=1), marks_best=dist.get_rank() == 0)
    model = nn.Linear(4, 4, bias=False)
    life = Life(dist.get_rank(), dist.get_world_size())
    loaded = saves.load(model, torch.optim.AdamW(model.parameters()), life, resumes=True)
    assert loaded is not None
    return loaded.step, model.weight.flatten()[0].item(), saves.steps()


def saved_twice(out: str) -> None:
    saves = Saves(TrainConfig(out=out, keep=1), marks_best=dist.get_rank() == 0)
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for step, bits in ((1, 1.0), (2, 2.0)):
        nn.init.constant_(model.weight, step)
        saves.save(model, optimizer, {}, step=step, on_disk=True, bits_per_byte=bits)
        saves.wait()


@pytest.mark.parametrize("left", ["newest", "damaged", "none"])
def test_a_run_resumes_from_the_best_checkpoint_if_no_other_is_left(
    pool: RankPool, tmp_path: Path, left: str
) -> None:
    pool.run(2, saved_twice, str(tmp_path))
    newest = RunDir(tmp_path).checkpoint(2)
    if left == "none":
        shutil.rmtree(newest)
        assert RunDir(tmp_path).newest_checkpoint() == tmp_path / "best" / "step-000001"
    elif left == "damaged":
        data = newest / "rank-00000.safetensors"
        data.write_bytes(data.read_bytes()[:-8] + b"\xff" * 8)
    step = 2 if left == "newest" else 1
    steps = [1] if left == "none" else [1, 2]
    assert pool.run(2, resumed, str(tmp_path)) == [(step, float(step), steps)] * 2

"""``fullshard train --optimizer muon``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fullshard.train.config import LayoutName, OptimizerName, TrainConfig
from fullshard.train.data.text import load_text
from fullshard.train.loop import train
from fullshard.train.run.folder import RunDir
from fullshard.train.run.metrics import read_metrics
from fullshard.train.world import World
from tests.ranks.pool import RankPool
from tests.ranks.train_shell import Shell

CPU = torch.device("cpu")


def run(config: TrainConfig) -> None:
    Path(config.out).mkdir(exist_ok=True)
    text = load_text(config.data, vocab_size=2048)
    train(config, text, World(dist.get_rank(), dist.get_world_size(), CPU))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Shell.with_a_little_text(tmp_path)
    given = {"steps": 4, "batch": 3, "seq": 8, "save_every": 2, "eval_sequences": 2}
    return TrainConfig(
        data=str(tmp_path / "text"),
        out=str(tmp_path / "whole"),
        optimizer=OptimizerName.MUON,
        muon_lr=0.02,
        **given,
    )


def losses(config: TrainConfig) -> list[float]:
    return [record["loss"] for record in read_metrics(RunDir(Path(config.out)).metrics)]


def test_a_run_resumes_exactly_and_in_another_world(pool: RankPool, config: TrainConfig) -> None:
    """A run resumes exactly on two workers, and on three workers in another layout."""
    pool.run(2, run, config)
    whole = losses(config)
    assert len(whole) == 4 and whole[-1] < whole[0] - 0.1

    folder = str(Path(config.out).with_name("stopped"))
    stopped = replace(config, out=folder, stop_after=2)
    pool.run(2, run, stopped)
    pool.run(2, run, replace(stopped, stop_after=None, resume=True))
    assert losses(stopped) == whole

    elsewhere = replace(config, out=folder + "2", stop_after=2)
    pool.run(2, run, elsewhere)
    other = replace(elsewhere, stop_after=None, resume=True, batch=2, layout=LayoutName.RAGGED)
    pool.run(3, run, other)
    assert losses(other)[:2] == whole[:2]
    assert losses(other) == pytest.approx(whole, rel=1e-2)  # Newton-Schulz is in bf16

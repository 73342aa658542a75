"""Figures and refusals that workers exchange, in addition to training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.errors import ConfigError
from fullshard.train.config import TrainConfig
from fullshard.train.data.text import load_text
from fullshard.train.loop import Trainer, train
from fullshard.train.world import World
from tests.ranks.pool import RankPool, on_ranks
from tests.ranks.train_shell import Shell


def here() -> World:
    return World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


@on_ranks(2, 3, 4)
def test_every_worker_sees_the_figures_of_all_exactly(world: int) -> None:
    expected = [[1 / (3 + rank), 2.0**52 + rank] for rank in range(world)]
    world = here()
    loss = torch.tensor(1 / (3 + world.rank), dtype=torch.float64)
    assert world.rows(loss, 2**52 + world.rank).tolist() == expected


def refuse_on(ranks: list[int]) -> str:
    world = here()

    def refuse() -> str:
        if world.rank in ranks:
            raise ConfigError(f"worker {world.rank} cannot")
        return "agreed"

    try:
        return world.agree(refuse)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("ranks", "answer"), [([], "agreed"), ([1], "worker 1 cannot"), ([2, 1], "worker 1 cannot")]
)
def test_one_refusal_is_everybodys(pool: RankPool, ranks: list[int], answer: str) -> None:
    assert pool.run(3, refuse_on, ranks) == [answer] * 3


class Reads(TorchDispatchMode):
    """A mode that counts numbers which the host reads from tensors, waiting for a device."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op is torch.ops.aten._local_scalar_dense.default
        return op(*args, **(kwargs or {}))


class FakeRows:
    """A table of figures on a device that is a step behind the host."""

    is_here = False

    def __init__(self, table: Tensor, told: list[str]) -> None:
        self._table = table
        self._told = told
        told.append("step issued")

    def read(self) -> Tensor:
        self._told.append("step read")
        return self._table


def trained_a_step_behind(config: TrainConfig) -> tuple[list[str], int]:
    text = load_text(config.data, vocab_size=300)
    told: list[str] = []
    with patch("fullshard.train.world.HostRows", lambda table: FakeRows(table, told)):
        train(config, text, here())
    with Reads() as reads:
        Trainer(replace(config, out=f"{config.out}2"), text, here()).start(1)
    return told, reads.count


def test_the_host_reads_figures_of_a_step_when_the_next_one_is_issued(
    pool: RankPool, tmp_path: Path
) -> None:
    shell = Shell.with_a_little_text(tmp_path)
    config = TrainConfig(
        data=str(shell.folder / "text"), out=str(tmp_path / "run"), steps=5, save_every=3,
        eval_every=100, eval_sequences=2, batch=1, seq=16,
    )  # fmt: skip
    Path(config.out).mkdir()
    (told, reads), *_ = pool.run(2, trained_a_step_behind, config)
    issued, read = "step issued", "step read"
    saved = [issued, issued, read, issued, read, read]  # steps 1 to 3: a save reads all before
    # Steps 4 and 5, and the exchange of the last evaluation.
    assert told == [*saved, issued, issued, read, read, issued, read]
    assert reads == 0

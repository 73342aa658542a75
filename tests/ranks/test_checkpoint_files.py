"""Checkpoints on disk load from every layout into every other, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fullshard import checkpoint
from fullshard.checkpoint.format.datafile import DataFile
from fullshard.checkpoint.loading.read import Reader
from tests.kit.checkpoint_files import WAYS, built, everything, same, saves
from tests.ranks.pool import RankPool


def loads(way: str, paths: list[Path]) -> list[float]:
    """Load each of ``paths`` into a model; return the bytes read for each byte kept."""
    ratios = []
    with pytest.MonkeyPatch.context() as patch:
        read, read_file = Reader.read, DataFile.read
        sizes: list[int] = []

        def weighed(file: DataFile, name: str, start: int, into: Tensor) -> None:
            read_file(file, name, start, into)
            sizes.append(into.nbytes)

        def counted(reader: Reader, *args: Any) -> None:
            sizes.clear()
            read(reader, *args)
            kept = sum(wanted.memory.nbytes for wanted in reader._wanted.values())
            ratios.append(sum(sizes) / kept)

        patch.setattr(DataFile, "read", weighed)
        patch.setattr(Reader, "read", counted)
        for path in paths:
            model, optimizer = built(way, 2)
            assert checkpoint.load(path, model, optimizer) == {"rates": (1, 0.5)}
            assert same(everything(model, optimizer), torch.load(path.with_suffix(".pt"))), path
    return ratios


WORLDS = (1, 2, 3, 4)
ALL = list(itertools.product(WORLDS, WAYS))


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Save a checkpoint in each way on each number of ranks; return the paths."""
    folder = tmp_path_factory.mktemp("saved")
    for world, way in ALL:
        pool.run(world, saves, way, folder / f"{way}-{world}")
    return [folder / f"{way}-{world}" for world, way in ALL]


@pytest.mark.parametrize("every", [7, 1])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("world", WORLDS)
def test_every_way_is_loaded_by_every_other(
    pool: RankPool, saved: list[Path], world: int, way: str, every: int
) -> None:
    first = ALL.index((world, way)) % every
    for ratios in pool.run(world, loads, way, saved[first::every]):
        assert max(ratios) <= 1.05

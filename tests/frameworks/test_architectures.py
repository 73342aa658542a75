"""Sharded models of transformers give the results of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frameworks.architectures import (
    ARCHITECTURES,
    BEGIN,
    END,
    Architecture,
    Result,
    examine,
    row,
)
from tests.frameworks.matrix import parts
from tests.ranks.pool import RankPool

pytest.importorskip("transformers", reason="the extra hf is not installed")

each_architecture = pytest.mark.parametrize(
    "one",
    ARCHITECTURES,
    ids=lambda one: one.name,
)


def expected(one: Architecture) -> Result:
    return Result("equal", "equal", one.chats if one.is_causal else "")


@each_architecture
@pytest.mark.filterwarnings("ignore")  # warnings of transformers
def test_it_gives_what_one_process_gives(pool: RankPool, tmp_path: Path, one: Architecture) -> None:
    assert examine(one, pool, tmp_path) == expected(one)


def test_the_table_has_these_results() -> None:
    """To update the table, run ``python -m tests.frameworks models``."""
    rows = parts(BEGIN, END)[1].splitlines(keepends=True)[2:]
    assert rows == [row(one, expected(one)) for one in ARCHITECTURES]

"""Frameworks' own programs train, save and load with fullshard as with PyTorch's FSDP."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.frameworks.matrix import (
    PROGRAMS,
    ROOT,
    Entry,
    Result,
    Run,
    entries,
    error_in,
    key,
    parts,
    run,
    static,
)

EVERYWHERE = [entry for entry in entries() if entry.everywhere]


@pytest.mark.parametrize(
    "entry",
    EVERYWHERE,
    ids=lambda one: f"{one.program}-{one.face}",
)
def test_an_unedited_program_gives_what_it_gives_on_pytorchs_own(
    entry: Entry, tmp_path: Path
) -> None:
    if entry.missing:
        pytest.skip(f"needs {', '.join(entry.missing)}")
    result = run(entry, tmp_path)
    assert not result.ours.error, (tmp_path / "fullshard" / "stderr").read_text()
    assert result.ours.facts["engines"] == ["fullshard"]
    assert "fullshard" not in result.reference.facts["engines"]
    assert result.is_equal, (result.ours.facts, result.reference.facts)
    # Accelerate loads no optimizer state here: before a step, PyTorch has no state to load into.
    assert result.goes_on or entry.arguments[:2] == ("1", "SHARDED_STATE_DICT")


def rows() -> list[str]:
    return parts()[1].splitlines()[2:]


def test_the_table_has_a_row_for_every_program() -> None:
    """To update the table, run ``python -m tests.frameworks`` with all frameworks installed."""
    assert [key(row) for row in rows()] == [(e.framework, static(e)) for e in entries()]
    for row in rows():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        assert len(cells) == 7 and cells[4] and cells[5], row


def test_the_table_has_no_other_results_than_equal_or_a_reason() -> None:
    for row in rows():
        assert "DIFFERS" not in row, row


def test_the_table_is_of_the_pinned_versions() -> None:
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    for row in rows():
        framework, version = row.removeprefix("| ").split(" | ")[:2]
        assert version == pinned.get(framework, version) and version, row


def test_every_program_has_an_entry() -> None:
    names = {path.name for path in PROGRAMS.glob("*.py")} - {"told.py", "tiny.py"}
    assert names == {entry.program for entry in entries()}


def test_a_difference_is_seen() -> None:
    def told(loss: float, *weights: float) -> Run:
        facts = {"engines": ["fullshard"], "losses": [1.0, loss], "again": [loss]}
        return Run(facts, {"w": torch.tensor(weights)}, "")

    same, other = told(0.5, 1.0), told(0.6, 1.0)
    assert Result(same, same, same).is_equal and Result(same, same, same).goes_on
    assert not Result(other, same, other).is_equal
    assert not Result(same, same, told(0.5, 1.1)).is_equal
    failed = Run({}, {}, "ValueError: no")
    assert not Result(failed, same, failed).is_equal


def test_the_error_that_ended_a_program_is_found() -> None:
    gloo = "[rank1]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    first = "[rank0]: ValueError: no plugin"
    last = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
    died = "  exitcode  : -11 (pid: 30136)  (SIGSEGV)\n  exitcode  : -15 (pid: 7)  (SIGTERM)"
    assert error_in(f"{first}\n{gloo}\n{last}") == "ValueError: no plugin"
    assert error_in(f"{gloo}\n{last}\n{died}") == "SIGSEGV"

"""The checks for a GPU run on a CPU as a stand-in, which shows nothing about a GPU."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bench import gpu
from bench.gpu import apart as gpu_apart
from bench.gpu import tax
from bench.gpu.model import Llama
from bench.gpu.ranks import check_all
from tests.ranks.pool import RankPool

STARTED_ELSEWHERE = {"ranks", "trainer"}  # in processes of their own; ranks are tested below
NOT_JUDGED = {"graphs", "jobs"}


def judged(name: str) -> dict[str, Any]:
    return gpu.judge(name, gpu.Machine.here(stand_in=True))


@pytest.mark.parametrize("name", [name for name in gpu.PARTS if name not in STARTED_ELSEWHERE])
def test_a_part_runs(pool: RankPool, name: str) -> None:
    (found,) = pool.run(1, judged, name, process_group=False, timeout_s=240)
    assert found["passed"] is (None if name in NOT_JUDGED else True), found["notes"]
    json.dumps(found)


@pytest.mark.parametrize("world", [2, 4])
def test_the_ranks_that_share_a_gpu_train_as_one(pool: RankPool, world: int) -> None:
    for found in pool.run(world, check_all, "cpu"):
        assert not found["wrong"], found


def apart() -> str:
    with patch.object(
        sys, "argv", ["", json.dumps(["bench.gpu.costs", "offloaded", [True], True])]
    ):
        told = io.StringIO()
        with redirect_stdout(told):
            gpu_apart.main()
    return told.getvalue().splitlines()[-1]


def test_a_call_in_a_process_of_its_own_tells_its_result_last(pool: RankPool) -> None:
    (last,) = pool.run(1, apart, process_group=False)
    assert json.loads(last).keys() == {"host ms", "step ms"}


def test_every_part_ends_within_ten_minutes() -> None:
    assert all(part.limit_s <= 600 for part in gpu.PARTS.values())


def test_figures_become_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "part": "memory", "seconds": 1.0, "passed": False, "notes": ["above"],
        "machine": gpu.Machine.here(stand_in=True).describe(),
        "figures": {"ours": {"peak allocated": 5, "share": 0.12345}},
    }  # fmt: skip
    (tmp_path / "memory.json").write_text(json.dumps(found))
    assert gpu.main(["--table", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "| memory | FAILED | 1.0 s | above |" in shown
    assert "| ours | peak allocated 5, share 0.1235 |" in shown


def test_what_comes_first_is_written_with_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(gpu.FIRST) <= gpu.PARTS.keys()
    assert gpu.main(["--first", "tax-1b", "--stand-in", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "tax-1b.json").read_text())
    assert found["passed"] and set(found["figures"]) == set(tax.CONTENDERS)
    assert "| tax-1b | passed |" in (tmp_path / "log.txt").read_text()
    assert f"commit {tmp_path}" in capsys.readouterr().out


def test_flops_of_llama_are_counted() -> None:
    """Training a Llama takes six FLOPs for each weight and token, without the input embedding."""
    sizes = tax.SHAPES["1B"]
    of_weights = tax.flops(sizes, 1, 0) / 6
    with torch.device("meta"):
        model = Llama(sizes)
    own = sum(param.numel() for param in model.parameters()) - model.embed.weight.numel()
    assert of_weights == pytest.approx(own, rel=1e-3)


def test_a_wrong_part_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["race", "--stand-in"]) == 2
    assert "races" in capsys.readouterr().out

"""The output and exit codes of ``fullshard checkpoint``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import checkpoint
from fullshard.cli import main


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        with torch.no_grad():
            model.weight[0, 0] = step
        checkpoint.save(tmp_path / f"step-{step}", model, extra={"seed": 5}, step=step)
    (tmp_path / ".unfinished-step-3-12345678").mkdir()
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["checkpoint", *map(str, arguments)])
    return code, capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    code, out = run(capsys, *arguments, "--json")
    return code, json.loads(out)


def test_list(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "list", root)
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[:3] for line in lines[1:3]] == [["step-1", "1", "1"], ["step-2", "2", "1"]]
    assert lines[3] == ".unfinished-step-3-12345678: left by a job that was stopped"
    code, found = as_json(capsys, "list", root)
    assert [one["step"] for one in found["checkpoints"]] == [1, 2]
    code, found = as_json(capsys, "list", root / "step-2")
    assert [one["step"] for one in found["checkpoints"]] == [2] and found["others"] == []


def test_the_folder_of_a_run_stands_for_its_checkpoints(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / ".unfinished-step-3-12345678").rmdir()
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    for step in (1, 2):
        checkpoints = run_folder / "checkpoints"
        checkpoints.mkdir(exist_ok=True)
        (root / f"step-{step}").rename(checkpoints / f"step-{step}")
    code, out = run(capsys, "list", run_folder)
    assert code == 0 and [line.split()[0] for line in out.splitlines()[1:]] == ["step-1", "step-2"]
    assert run(capsys, "verify", run_folder)[0] == 0
    assert "best" not in as_json(capsys, "list", run_folder)[1]


def test_the_best_of_a_run_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "best" / "step-000003"
    checkpoint.save(folder, nn.Linear(3, 2), step=3)
    checkpoint.save(tmp_path / "checkpoints" / "step-000004", nn.Linear(3, 2), step=4)
    (tmp_path / "best.json").write_text('{"step": 3, "eval_bits_per_byte": 1.25}')
    code, out = run(capsys, "list", tmp_path)
    assert (code, out.splitlines()[-1]) == (0, f"best: {folder} (1.2500 held-out bits per byte)")
    _, found = as_json(capsys, "list", tmp_path)
    assert found["best"] == {"step": 3, "bits_per_byte": 1.25, "path": str(folder)}
    assert [one["step"] for one in found["checkpoints"]] == [4]


def test_list_says_what_was_put_aside(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "step-1").rename(root / "step-1.replaced-1f0e66a2")
    assert "step-1.replaced-1f0e66a2: put aside" in run(capsys, "list", root)[1]


def test_inspect(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "inspect", root / "step-2")
    assert code == 0
    assert "extra: {'seed': 5}" in out
    assert any(line.split()[:3] == ["model/weight", "float32", "2x3"] for line in out.splitlines())
    _, found = as_json(capsys, "inspect", root / "step-2")
    bias = {"dtype": "float32", "shape": [2], "mesh": [1], "placements": None}
    assert found["tensors"]["model/bias"] == bias
    assert found["versions"]["torch"] == torch.__version__


def test_verify(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / ".unfinished-step-3-12345678").rmdir()
    assert run(capsys, "verify", root)[0] == 0
    file = root / "step-2" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-20] ^= 1  # in the data, before the digests
    file.write_bytes(data)
    code, out = run(capsys, "verify", root)
    assert code == 1
    assert f"{root / 'step-1'}: intact" in out
    assert f"{root / 'step-2'}: 1 fault(s)\n  {file}: bytes " in out
    code, found = as_json(capsys, "verify", root / "step-2")
    assert (code, len(found[str(root / "step-2")])) == (1, 1)


def test_diff(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(capsys, "diff", root / "step-1", root / "step-2")
    assert (code, out) == (1, "model/weight: 1 elements differ, by 1 at most\n")
    code, out = run(capsys, "diff", root / "step-1", root / "step-1")
    assert (code, out) == (0, "all tensors are equal\n")
    checkpoint.save(root / "other", nn.Linear(3, 3, bias=False), step=0)
    code, found = as_json(capsys, "diff", root / "step-1", root / "other")
    assert found == {
        "model/weight": "float32 (2, 3) and float32 (3, 3)",
        "model/bias": f"only in {root / 'step-1'}",
    }


def test_a_wrong_path_is_told_in_a_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("list", "inspect", "verify"):
        assert main(["checkpoint", command, str(root / "nowhere")]) == 2
        assert capsys.readouterr().err.startswith("fullshard: error: ")

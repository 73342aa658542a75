"""``fullshard train --wire``: metrics contain the errors of compressed communication."""

from __future__ import annotations

from pathlib import Path

import pytest

from fullshard.train.config import TrainConfig
from tests.ranks.train_shell import Shell

OPTIONS = "--data text --steps 4 --batch 2 --seq 32 --save-every 2 --eval-every 2"


@pytest.mark.parametrize(("kind", "least", "most"), [("bf16", 0.0005, 0.004), ("int4", 0.05, 0.2)])
def test_errors_are_in_the_metrics_of_steps_with_an_evaluation(
    shell: Shell, kind: str, least: float, most: float
) -> None:
    wire = f"gather=int8,reduce={kind}"
    stopped = shell.train("--out", kind, *OPTIONS.split(), "--wire", wire, "--stop-after", "3")
    assert stopped.exitcode == 0, stopped.err
    resumed = shell.train("--out", kind, "--resume")
    assert resumed.exitcode == 0, resumed.err
    assert TrainConfig.load(Path(shell.folder, kind, "config.json")).wire == wire
    records = shell.metrics(kind)
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record in records:
        measured = {"gather_error", "reduce_error"} & record.keys()
        assert len(measured) == (2 if record["step"] % 2 == 0 else 0)
        if measured:  # about half a quantization step, relative to the largest of 64 values
            assert 0.001 < record["gather_error"] < 0.02
            assert least < record["reduce_error"] < most
    assert "gather_error=" in resumed.out

"""``--patience``: the evaluations that count, and the end of a run."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from fullshard.train.config import TrainConfig
from fullshard.train.run.patience import HeldOut


def nums_worse(losses: list[float]) -> list[int]:
    held_out, found = HeldOut(), []
    for step, bits in enumerate(losses, start=1):
        held_out = held_out.after(step, bits)
        held_out = HeldOut(**json.loads(json.dumps(asdict(held_out), allow_nan=False)))
        found.append(held_out.num_worse)
    return found


def test_an_evaluation_that_is_no_better_counts_until_one_is() -> None:
    assert nums_worse([3.0, 2.0, 2.0, 2.5, 1.9, 2.0]) == [0, 0, 1, 2, 0, 1]


def test_a_loss_that_is_not_finite_is_no_better() -> None:
    assert nums_worse([math.nan, math.inf, 3.0, math.nan, 2.0]) == [1, 2, 0, 1, 0]


@pytest.mark.parametrize("patience", [None, 1, 2])
def test_it_is_over_after_as_many(patience: int | None) -> None:
    config = TrainConfig(patience=patience)
    held_out, over = HeldOut(), []
    for step, bits in enumerate([3.0, 2.0, 2.5, 2.25], start=1):
        held_out = held_out.after(step, bits)
        over.append(held_out.why_over(config) is not None)
    assert over == [False, False, patience == 1, patience is not None]


def test_it_says_what_it_waited_for() -> None:
    lowest = HeldOut(step=20, bits_per_byte=1.5, num_worse=1)
    assert lowest.why_over(TrainConfig(patience=1)) == (
        "--patience 1: held-out loss was lowest at step 20 (1.5000 bits per byte), not in the last "
        "evaluation"
    )
    never = HeldOut(num_worse=2).why_over(TrainConfig(patience=2))
    assert never == ("--patience 2: held-out loss was never finite, not in the last 2 evaluations")

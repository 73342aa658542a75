"""Random jobs that once ended without naming the rank."""

from __future__ import annotations

import pytest

from tests.faults.at_random import drawn, saved
from tests.faults.judge import Kind
from tests.faults.table import seen


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(75, id="ranks of several hosts run different units: gloo aborted one"),
        pytest.param(269, id="a rank of another host has ended: gloo's own error"),
        pytest.param(491, id="ranks of other hosts have ended, and a norm is new to this one"),
    ],
)
def test_who_is_named(number: int) -> None:
    job = drawn(0, number)
    _, verdict = seen(job, saved(job))
    assert verdict.kind is Kind.NAMED, verdict

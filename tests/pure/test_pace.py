"""A thread that writes in the background rests for the intended time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fullshard.checkpoint.saving.write import Pace


class Rests(threading.Event):
    """Records time-outs instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.seconds.append(timeout)
        return self.is_set()


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> Iterator[float]:
    """Advance the thread's processor time by two seconds at each reading."""
    times = iter(range(0, 100, 2))
    monkeypatch.setattr("time.thread_time", lambda: float(next(times)))
    yield 2.0


def test_it_rests_nine_times_as_long_as_it_works_for_a_tenth(works: float) -> None:
    pace, rests = Pace(0.1, 1e9), Rests()
    for _ in range(3):
        pace.rest(rests)
    assert rests.seconds == pytest.approx([9 * works] * 3)


def test_its_rests_have_a_limit_together(works: float) -> None:
    pace, rests = Pace(0.1, 20.0), Rests()
    for _ in range(3):
        pace.rest(rests)
    assert rests.seconds == pytest.approx([18.0, 2.0, 0.0])


def test_it_does_not_rest_when_the_program_ends(
    works: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    pace, rests = Pace(0.1, 1e9), Rests()
    pace.rest(rests)
    assert rests.seconds == []

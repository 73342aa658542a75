"""The thread that carries exchanges among hosts: its failure is raised, not waited for."""

from __future__ import annotations

import threading
import time
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from fullshard.comm.courier import Courier
from fullshard.errors import ProtocolError


class FailingOffice:
    """An office with work that its thread cannot do."""

    def __init__(self) -> None:
        self.starting: list[Any] = []
        self.bell = SimpleNamespace(ring=lambda: None)
        self.num_closed = 0
        self.is_urgent = True
        self.is_idle = False

    def step(self, timeout_s: float) -> bool:
        if threading.current_thread().name == "fullshard-courier":
            raise MemoryError("no memory for a sum")
        time.sleep(min(timeout_s, 0.01))
        return False

    def close(self) -> None:
        self.num_closed += 1


def crossing() -> Any:
    return SimpleNamespace(
        num_finds=1, found=Queue(), number=3, subject="gather", near=set(), places={}, passed=set()
    )


def test_a_failure_of_the_thread_is_raised_and_told_to_others() -> None:
    office = FailingOffice()
    courier = Courier(office, timeout_s=60)  # type: ignore[arg-type]
    courier.start(crossing())  # leaves the rest to the thread
    for _ in range(2):  # in a wait that goes on, and in a later one
        with pytest.raises(ProtocolError, match="MemoryError: no memory for a sum") as caught:
            list(courier.finds(crossing()))
        assert isinstance(caught.value.__cause__, MemoryError)
    with pytest.raises(ProtocolError, match="connections are closed"):
        courier.start(crossing())
    courier.close()
    assert office.num_closed == 1  # other ranks see that this one is gone

"""Shared memory: ranges in use are not overwritten, and free ranges are reused."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.comm.memory import LentMemory, Memory, aligned
from tests.kit.shared import permissions_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NOT TESTED: Linux only")


def take(memory: Memory, nbytes: int) -> int:
    start = memory.take(nbytes)
    if start is None:
        memory.grow(nbytes)
        start = memory.take(nbytes)
    assert start is not None
    return start


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 200_000)), max_size=60))
def test_what_is_in_use_stays_and_what_is_free_is_one_gap(script: list[tuple[bool, int]]) -> None:
    memory = Memory()
    lent = LentMemory(memory.opened_for_reading())
    used: list[tuple[int, int, int]] = []
    for number, (gives_back, size) in enumerate(script):
        if gives_back and used:
            start, _, _ = used.pop(size % len(used))
            memory.give_back(start)
        else:
            start = take(memory, size)
            assert start % 64 == 0
            memory.bytes[start : start + size] = number + 1
            used.append((start, size, number + 1))
        for start, size, value in used:
            assert bool((lent.read(start, size) == value).all())
    for start, _, _ in used:
        memory.give_back(start)
    if script:
        assert memory._gaps == [(0, memory.bytes.numel())]


def test_the_first_gap_is_taken_so_the_end_stays_free() -> None:
    memory = Memory()
    starts = [take(memory, 10_000) for _ in range(6)]
    for start in starts[1:4]:
        memory.give_back(start)
    assert take(memory, 2 * 10_000) == starts[1]
    assert take(memory, 10_000) == starts[1] + aligned(2 * 10_000)


def test_the_default_device_is_no_matter() -> None:
    with torch.device("meta"):
        memory = Memory()
        memory.grow(100)
        read = LentMemory(memory.opened_for_reading()).read(0, 100)
    assert memory.bytes.device.type == read.device.type == "cpu"


def test_all_is_closed_in_the_end() -> None:
    before = len(os.listdir("/proc/self/fd"))
    memory = Memory()
    lent = LentMemory(memory.opened_for_reading())
    for nbytes in (10, 100_000, 1_000_000):
        memory.grow(nbytes)
        lent.read(0, nbytes)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    del memory, lent
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_of_others_is_mapped_shared_and_read_only() -> None:
    """A private writable mapping would count against the host's commit limit, once per rank."""
    memory = Memory()
    memory.grow(1_000_000)
    lent = LentMemory(memory.opened_for_reading())
    read = lent.read(0, 1_000_000)
    memory.bytes[5] = 77
    assert read[5] == 77

    assert permissions_at(read.data_ptr()) == ["r--s"]
    del lent
    assert permissions_at(read.data_ptr()) == ["r--s"]  # a tensor keeps the mapping
    assert read[5] == 77


def test_memory_of_others_is_unmapped_with_its_last_tensor() -> None:
    memory = Memory()
    memory.grow(3_000_000)

    def num_mapped() -> int:
        with open("/proc/self/maps") as file:
            return sum("memfd:fullshard" in line and "r--s" in line for line in file)

    before = num_mapped()
    read = LentMemory(memory.opened_for_reading()).read(0, 1_000_000)
    assert num_mapped() == before + 1
    del read
    assert num_mapped() == before

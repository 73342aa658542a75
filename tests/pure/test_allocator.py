"""The model of PyTorch's caching allocator that ``bench reserved`` uses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bench.allocator import MB, CachingAllocator


def test_segments_have_the_sizes_of_the_real_ones() -> None:
    cases = [(1, 2 * MB), (MB + 1, 20 * MB), (10 * MB, 10 * MB), (21 * MB, 22 * MB)]
    for nbytes, reserved in cases:
        allocator = CachingAllocator()
        allocator.allocate(0, nbytes, "compute")
        assert allocator.reserved == {"compute": reserved}


def test_no_stream_gets_what_another_one_has_freed() -> None:
    allocator = CachingAllocator()
    allocator.allocate(0, 30 * MB, "compute")
    allocator.free(0)
    allocator.allocate(1, 30 * MB, "gather")
    assert allocator.reserved == {"compute": 30 * MB, "gather": 30 * MB}
    allocator.allocate(2, 30 * MB, "compute")
    assert allocator.reserved["compute"] == 30 * MB


def test_free_neighbours_are_one_block_again() -> None:
    allocator = CachingAllocator()
    for address in range(3):
        allocator.allocate(address, 6 * MB, "compute")
    assert allocator.reserved["compute"] == 20 * MB
    for address in (0, 2, 1):
        allocator.free(address)
    allocator.allocate(3, 20 * MB, "compute")
    assert allocator.reserved["compute"] == 20 * MB


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 40 * MB)), max_size=60))
def test_what_is_reserved_is_enough_and_is_cut_into_blocks(changes: list[tuple[int, int]]) -> None:
    allocator, held = CachingAllocator(), dict[int, int]()
    for address, nbytes in changes:
        if allocator.holds(address):
            allocator.free(address)
            del held[address]
        else:
            allocator.allocate(address, nbytes, "compute")
            held[address] = nbytes
        assert sum(held.values()) <= allocator.reserved["compute"]
        blocks = [block for pool in allocator._pools.values() for block in pool]
        assert sum(block.nbytes for block in blocks) == allocator.reserved["compute"]
        assert sum(not block.is_free for block in blocks) == len(held)
        assert not any(one.is_free and one.behind and one.behind.is_free for one in blocks)

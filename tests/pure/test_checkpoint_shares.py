"""On loading, ranks divide the reading: every byte once, in proportion to their shares."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fullshard.checkpoint.format.datafile import BLOCK_NBYTES
from fullshard.checkpoint.loading import Reader
from fullshard.checkpoint.loading.read import _LARGEST, _parts_of_ranks, _Run, _shares

SIZES = st.integers(1, 9 * BLOCK_NBYTES)


@given(
    st.lists(SIZES, min_size=1, max_size=12), st.lists(st.integers(0, 9), min_size=1, max_size=9)
)
def test_shares(sizes: list[int], kept: list[int]) -> None:
    part: Any = SimpleNamespace(file=Path("one"))
    batch = [_Run(str(at), part, 0, nbytes) for at, nbytes in enumerate(sizes)]
    parts = _parts_of_ranks(kept)
    world, total = len(kept), sum(sizes)
    assert abs(sum(parts) - 1) < 1e-9
    assert max(parts) <= (_LARGEST + 1) / world + 1e-9
    shares = _shares(batch, parts)
    read = sorted((int(run.name), run.start, run.stop) for share in shares for run in share)
    for at, nbytes in enumerate(sizes):  # every byte once, in whole blocks
        own = [(start, stop) for number, start, stop in read if number == at]
        assert [start for start, _ in own] == [0, *(stop for _, stop in own[:-1])]
        assert own[-1][1] == nbytes
        assert all(start % BLOCK_NBYTES == 0 for start, _ in own)
    for share, part_of_all in zip(shares, parts, strict=True):
        nbytes = sum(run.nbytes for run in share)
        assert abs(nbytes - part_of_all * total) <= 2 * BLOCK_NBYTES


def test_a_rank_that_keeps_nothing_reads_nothing_unless_others_would_read_too_much() -> None:
    assert _parts_of_ranks([3, 1, 0, 0]) == [0.75, 0.25, 0.0, 0.0]
    parts = _parts_of_ranks([1, *[0] * 99])
    assert max(parts) < 0.05 and min(parts) > 0


def test_batches_of_uneven_ranks_begin_and_end_with_blocks() -> None:
    nbytes = 200 << 20
    region = SimpleNamespace(numel=nbytes // 4)
    part = SimpleNamespace(region=region, dtype="float32")
    manifest: Any = SimpleNamespace(entry=lambda name: part, parts=lambda name: [part])
    opened: Any = None
    reader = Reader(opened, manifest, {}, world=3)
    read = [run for batch in reader._batches(["a"], _parts_of_ranks([1, 2, 3])) for run in batch]
    assert [run.start for run in read] == [0, *(run.stop for run in read[:-1])]
    assert read[-1].stop == nbytes and len(read) > 2
    assert all(run.start % BLOCK_NBYTES == 0 for run in read)

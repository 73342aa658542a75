"""Packed rows: every sample once, none lost, and no learned tokens but answers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.train.data.rows import IGNORED, Packed, pack


def packed(lengths: list[int], learned: list[bool], seq: int) -> Packed:
    """Return packed samples of distinct tokens 1, 2, 3, ..."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint32)
    starts = np.cumsum([0, *lengths])
    return Packed(tokens, starts, np.array(learned[: len(tokens)], bool), seq, padding=0)


@given(
    sizes=st.lists(st.integers(1, 9), max_size=60),
    capacity=st.integers(9, 20),
)
def test_every_piece_is_in_one_row_and_rows_are_full(sizes: list[int], capacity: int) -> None:
    rows = pack(sizes, capacity)
    assert sorted(piece for row in rows for piece in row) == list(range(len(sizes)))
    filled = sorted(sum(sizes[piece] for piece in row) for row in rows)
    assert all(size <= capacity for size in filled)
    assert all(2 * size > capacity for size in filled[1:])  # two half-empty rows would fit in one


@given(data=st.data(), lengths=st.lists(st.integers(0, 12), max_size=20), seq=st.integers(1, 9))
def test_rows_hold_each_sample_once(data: st.DataObject, lengths: list[int], seq: int) -> None:
    marks = data.draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    rows = packed(lengths, marks, seq)
    expected: list[tuple[list[int], list[int]]] = []
    first = 1
    for length in lengths:
        tokens = list(range(first, first + length))[: seq + 1]
        learned = marks[first - 1 : first - 1 + len(tokens)]
        labels = [t if m else IGNORED for t, m in zip(tokens, learned, strict=True)][1:]
        if any(label != IGNORED for label in labels):
            expected.append((tokens[:-1], labels))
        first += length
    found = []
    for row in range(len(rows)):
        batch = rows.read(np.array([row]))
        assert batch.positions is not None
        starts = [*np.flatnonzero(batch.positions[0] == 0), seq]
        for start, stop in pairwise(starts):
            tokens, labels = batch.tokens[0, start:stop], batch.labels[0, start:stop]
            assert batch.positions[0, start:stop].tolist() == list(range(stop - start))
            if tokens[0] == 0:  # padding
                assert stop - start == 1 and labels[0] == IGNORED
            else:
                found.append((tokens.tolist(), labels.tolist()))
        assert rows.num_learned(np.array([row])) == (batch.labels != IGNORED).sum() > 0
    assert sorted(found) == sorted(expected)
    assert rows.num_cut == sum(length > seq + 1 for length in lengths)


def test_rows_are_read_together_as_one_by_one() -> None:
    rows = packed([5, 3, 9, 4, 2, 7], [True] * 30, 8)
    together = rows.read(np.arange(len(rows)))
    for row in range(len(rows)):
        alone = rows.read(np.array([row]))
        for left, right in zip(together, alone, strict=True):
            assert left is not None and right is not None
            assert left[row].tolist() == right[0].tolist()
    assert rows.num_learned(np.arange(len(rows))) == (together.labels != IGNORED).sum()
    with pytest.raises(IndexError):
        rows.read(np.array([len(rows)]))
